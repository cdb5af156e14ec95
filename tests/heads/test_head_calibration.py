"""Ranks, replayed tau and tree values, against walks done by hand and drafts looked up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdeft.heads.calibration import (
    VALUES_NAME,
    LookupDepths,
    Samples,
    calibrate,
    head_ranks,
    lookup_depths,
    repeat_rate,
    replay,
    samples_of,
    step_values,
    top_accuracies,
    tree_values,
)
from specdeft.heads.documents import from_lists
from specdeft.heads.features import extract
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.heads.target import Target
from specdeft.trees.mixing import best_mix
from specdeft.trees.search import ValuedPaths, replayed_tau
from specdeft.trees.statistics import with_lookup
from specdeft.trees.token_tree import TokenTree


def some_heads(target: Target) -> MedusaHeads:
    heads = MedusaHeads(HeadsConfig(3, 1, target.hidden_size, target.vocab_size, token_input=True))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    return heads


def test_ranks_are_places_in_the_draft(target: Target) -> None:
    heads = some_heads(target)
    documents = from_lists([list(range(10, 24)), [5, 6, 7]], [[True] * 14, [True] * 3])
    rows = extract(target.model, documents, 3)
    ranks = head_ranks(target.model, heads, rows, num_ranks=8, batch_rows=5)
    model = target.model
    for i in range(len(rows)):
        draft = heads.draft(
            rows.hidden[i : i + 1],
            rows.root[i : i + 1],
            model.get_input_embeddings(),
            model.get_output_embeddings(),
            8,
        )[0]
        for head in range(3):
            found = draft[head].tolist()
            label = int(rows.labels[i, head])
            assert ranks[i, head] == (found.index(label) if label in found else 8)


def test_replay_by_hand() -> None:
    """Tree: rank 0, then 0 or 1 below it. Answers of 6 and 2 tokens; 9 is 'not drafted'."""
    tree = TokenTree.from_paths([(0,), (0, 0), (0, 1)])
    ranks = torch.tensor([[0, 1], [9, 0], [9, 9], [1, 0], [0, 9], [9, 9], [0, 9], [9, 9]])
    # Text 1: row 0 takes 2 + 1 tokens, row 3 takes 0 + 1, row 4 takes 1 + 1: 3 steps for 5 tokens.
    # Text 2: one step for its one token after the first, although two were on offer.
    result = replay(ranks, torch.tensor([4, 4, 4, 4, 4, 4, 7, 7]), tree)
    assert result.documents.tolist() == [4, 7]
    assert result.per_document.tolist() == pytest.approx([5 / 3, 1.0])
    assert result.tau == pytest.approx(6 / 4)


def test_one_token_answers_are_no_steps() -> None:
    result = replay(torch.tensor([[0], [0], [0]]), torch.tensor([0, 1, 1]), TokenTree.chain(1))
    assert result.documents.tolist() == [1]


def test_accuracies_count_known_labels_only() -> None:
    ranks = torch.tensor([[0, 3], [6, 0], [0, 32]])
    found = top_accuracies(ranks, torch.tensor([2, 2, 1]))
    assert found["top1"] == pytest.approx([2 / 3, 1 / 2], abs=1e-4)
    assert found["top5"] == pytest.approx([2 / 3, 1.0], abs=1e-4)
    assert found["top10"] == pytest.approx([1.0, 1.0], abs=1e-4)


def test_repeat_rate() -> None:
    loop, plain = [1, 2] * 10, list(range(20))
    rates = repeat_rate(from_lists([loop, plain, [1]], [[True] * 20, [True] * 20, [True]]), size=4)
    assert rates.tolist() == pytest.approx([1 - 2 / 17, 0.0, 0.0])


def test_calibration_writes_values_and_what_they_bring(tmp_path: Path, target: Target) -> None:
    heads = some_heads(target)
    ids = [list(range(start, start + 20)) for start in range(3, 43)]
    documents = from_lists(ids, [[True] * 20] * 40, [0.0, 0.7] * 20)
    report = calibrate(target.model, heads, documents, tmp_path)
    values = ValuedPaths.load(tmp_path / VALUES_NAME)
    assert max(map(len, values.paths)) <= 3
    assert len(values.lookup) > 0
    assert {row.temperature for row in values.taus} == {0.0, 0.7}
    for heat in (0.0, 0.7):
        taus = report[f"temperature {heat:g}"]["replayed_tau"]
        assert taus["64"] >= taus["4"] >= 1
        expected = replayed_tau(values, 64, temperature=heat, lookup=False)
        assert expected == pytest.approx(taus["64"], abs=1e-4)


def test_what_is_expected_of_short_texts_is_replayed_on_beginnings(
    tmp_path: Path, target: Target
) -> None:
    """Texts that repeat themselves from their 40th token on: only long ones gain by looking up."""
    torch.manual_seed(0)
    fresh = [torch.randperm(90)[:40].tolist() for _ in range(3)]
    ids = [[*text, *text[:20] * 4] for text in fresh]
    documents = from_lists(ids, [[False] * 2 + [True] * 118] * 3)
    calibrate(target.model, None, documents, tmp_path)
    values = ValuedPaths.load(tmp_path / VALUES_NAME)
    assert {row.num_tokens for row in values.taus} == {32, 64, 118}
    samples = samples_of(target.model, None, documents)
    for num_tokens in (32, 64, 118):
        expected = replayed_tau(values, 8, temperature=0.0, lookup=True, num_tokens=num_tokens)
        tree = best_mix(values, 8).tree
        parts = [
            from_lists([text[: 2 + num_tokens]], [[False] * 2 + [True] * num_tokens])
            for text in ids
        ]
        alone = [samples_of(target.model, None, part).replay(tree).tau for part in parts]
        rows = samples.first(num_tokens)
        assert rows.document.unique_consecutive(return_counts=True)[1].tolist() == [num_tokens] * 3
        assert expected == pytest.approx(rows.replay(tree).tau, abs=1e-4)
        assert expected is not None
        assert min(alone) - 1e-4 <= expected <= max(alone) + 1e-4
    short, long = (
        replayed_tau(values, 8, temperature=0.0, lookup=True, num_tokens=length) or 0
        for length in (32, 118)
    )
    assert short < 1.2 < 2 < long


def test_without_heads_lookup_alone_is_calibrated(tmp_path: Path, target: Target) -> None:
    documents = from_lists([[5, 6, 7, 8] * 9], [[False] * 4 + [True] * 32])
    calibrate(target.model, None, documents, tmp_path)
    values = ValuedPaths.load(tmp_path / VALUES_NAME)
    assert values.paths == ()
    assert values.lookup[0] > 0.7
    # 4 tokens a step: 3 of the chain and the bonus.
    expected = replayed_tau(values, 4, temperature=0.0, lookup=True)
    assert expected == pytest.approx(4.0, abs=0.3)


def test_values_are_counted_where_steps_start() -> None:
    """A long repetition is many places and few steps: it must not buy a long chain."""
    heads_right = torch.tensor([[0, 0]] * 50 + [[9, 9]] * 50)
    loop = torch.full((100,), 0)
    loop[50:] = torch.arange(50, 0, -1).clamp(max=24)
    known = torch.full((100,), 2)
    samples = Samples(
        heads_right,
        known,
        torch.zeros(100, dtype=torch.int64),
        LookupDepths(loop, torch.full((100,), 24)),
    )
    everywhere = with_lookup(tree_values(heads_right, known), heads_right, known, *samples.lookup)
    assert everywhere.lookup[0] == pytest.approx(0.5)
    # Steps: 17 of 3 tokens by the heads, then 2 or 3 through the repetition.
    assert step_values(samples, reference_nodes=32).lookup[0] < 0.2


def test_lookup_depths_by_hand() -> None:
    """Prompt 5 6 7; the answer says 5 6 7 5 6 9, then the text ends."""
    ids = [[5, 6, 7, 5, 6, 7, 5, 6, 9], [1, 2, 3, 3, 3]]
    learn = [[False] * 3 + [True] * 6, [False] * 2 + [True] * 3]
    found = lookup_depths(from_lists(ids, learn), torch.tensor([0] * 6 + [1] * 3), num_tokens=4)
    # Behind 5: 6 7 5 6. Behind 5 6: 7 5 6, and 9 where 7 was guessed; and so on. Behind the 3,
    # which nothing matches, 3 is guessed.
    assert found.depth.tolist() == [4, 3, 2, 1, 0, 0, 2, 1, 0]
    assert found.num_known.tolist() == [4, 4, 3, 2, 1, 0, 2, 1, 0]


def test_replay_with_a_lookup_chain_takes_the_deeper_part() -> None:
    tree = TokenTree.from_paths([(0,), (0, 0)]).with_lookup(3)
    ranks = torch.tensor([[0, 0], [9, 9], [9, 9], [0, 9], [9, 9], [9, 9], [9, 9]])
    lookup = torch.tensor([0, 0, 0, 5, 0, 0, 0])
    # 2 + 1 tokens by the heads, then 3 + 1 by the chain, of which the text holds 3: 2 steps for 6.
    assert replay(ranks, torch.zeros(7, dtype=torch.int64), tree, lookup).tau == 6 / 2
    with pytest.raises(ValueError, match="lookup depths"):
        replay(ranks, torch.zeros(7, dtype=torch.int64), tree)
