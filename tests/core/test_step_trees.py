"""The trees of one generation: as asked throughout; "auto" steps plainly where drafts are wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdeft import GenerationConfig, SpecDecoder, engine, tree_choice
from specdeft import decoder as decoder_module
from specdeft.engine import Engine
from specdeft.heads.calibration import REPLAYED_SIZES
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.step_trees import StepTrees
from specdeft.tree_choice import COMPILED_FOR_TOKENS, RATIO_NOISE, Asked, TreeChoice, sizes_tried
from specdeft.trees.search import ReplayedTau, ValuedPaths
from specdeft.trees.token_tree import TokenTree
from specdeft.walk import choose_along
from tests.core.tiny import VOCAB_SIZE, ByteTokenizer, prompt_ids, tiny_model

# What these heads never achieve.
PROMISED = ValuedPaths(((0,), (0, 0), (1,)), (0.9, 0.8, 0.1))
SURE = replace(PROMISED, values=(0.99, 0.98, 0.1))
NUM_TOKENS = 120


class Charged:
    """A model whose forwards are counted by rows and cost one unit and a part for every row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_node: float) -> None:
        self.model = tiny_model()
        self.now, self.rows = 0.0, list[int]()
        forward_of = type(self.model).forward

        def charged(model: Any, *args: Any, **kwargs: Any) -> Any:
            num_rows = kwargs["input_ids"].shape[1]
            self.now += 1.0 + per_node * num_rows
            self.rows.append(num_rows)
            return forward_of(model, *args, **kwargs)

        monkeypatch.setattr(type(self.model), "forward", charged)

    def decoder(
        self, tree: Any = "auto", values: ValuedPaths = PROMISED, **settings: Any
    ) -> SpecDecoder:
        torch.manual_seed(1)
        heads = MedusaHeads(HeadsConfig(2, 1, 64, VOCAB_SIZE, output="own"))
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_()
        return SpecDecoder(
            self.model,
            ByteTokenizer(),
            heads,
            tree=tree,
            tree_values=values,
            clock=lambda: self.now,
            **settings,
        )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path))


def test_auto_steps_plainly_where_no_guess_comes_true(monkeypatch: pytest.MonkeyPatch) -> None:
    charged = Charged(monkeypatch, per_node=0.2)
    decoder = charged.decoder()
    assert decoder.tree.num_nodes > 1  # the promise pays
    config = GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=5.0, seed=3)
    assert decoder.tree_of(config, 9).num_nodes > 1  # and measures sampled steps
    began = charged.now
    plain = decoder.plain(prompt_ids(9), config=config)
    plain_time = charged.now - began
    charged.rows.clear()
    began = charged.now
    result = decoder.generate(prompt_ids(9), config=config)
    assert result.token_ids == plain.token_ids
    steps = charged.rows[1:]  # without the prompt
    drafted = sum(rows > 1 for rows in steps)
    assert 0 < drafted < 0.2 * len(steps)
    assert result.stats.num_plain_steps == len(steps) - drafted
    assert charged.now - began <= 1.014 * plain_time


def test_what_drawing_costs_is_counted_where_tokens_are_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    charged = Charged(monkeypatch, per_node=0.1)

    def dear(*inputs: Any) -> torch.Tensor:
        charged.now += 0.25 * (inputs[3].num_nodes - 1)
        return choose_along(*inputs)

    monkeypatch.setattr(engine, "choose_along", dear)
    decoder = charged.decoder(values=SURE)
    greedy, sampled = (
        GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=heat, seed=3)
        for heat in (0.0, 5.0)
    )
    assert decoder.tree_of(greedy, 9).num_nodes == 4
    assert "sampling" not in capsys.readouterr().err  # who is greedy does not wait for it
    assert "1400.0 ms against 1100.0 plain" in decoder.tree_report_of(greedy, 9)
    assert decoder.tree_of(sampled, 9).num_nodes == 4
    assert "sampling" in capsys.readouterr().err
    assert "2150.0 ms against 1100.0 plain" in decoder.tree_report_of(sampled, 9)
    began = charged.now
    decoder.plain(prompt_ids(9), config=sampled)
    plain_time = charged.now - began
    began = charged.now
    decoder.generate(prompt_ids(9), config=sampled)
    assert plain_time < charged.now - began <= 1.014 * plain_time


def test_the_tree_follows_from_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that come true in long texts and at temperature 0 alone."""
    charged = Charged(monkeypatch, per_node=0.2)
    taus = [
        ReplayedTau(heat, True, size, tau, length)
        for heat, length, by_size in (
            (0.0, 16, {2: 1.6, 4: 1.7}),
            (0.0, 64, {2: 1.7, 4: 3.0}),
            (0.7, 64, {2: 1.01, 4: 1.02}),
        )
        for size, tau in by_size.items()
    ]
    decoder = charged.decoder(values=replace(PROMISED, taus=tuple(taus)))
    for num_tokens, temperature, num_nodes in ((16, 0.0, 2), (64, 0.0, 4), (64, 0.7, 1)):
        config = GenerationConfig(max_new_tokens=num_tokens, temperature=temperature)
        assert decoder.tree_of(config, 9).num_nodes == num_nodes
        assert f"tree of {num_nodes} nodes" in decoder.tree_report_of(config, 9)
        expected = decoder.expected_tau_of(config, 9)
        known = {(row.temperature, row.num_nodes, row.num_tokens): row.tau for row in taus}
        assert expected == known.get((temperature, num_nodes, num_tokens))
        charged.rows.clear()
        decoder.generate(prompt_ids(9), config=replace(config, ignore_eos=True))
        assert charged.rows[1] == num_nodes
    with pytest.raises(ValueError, match="context"):
        decoder.tree_of(GenerationConfig(max_new_tokens=10**6), 9)


def test_compiled_steps_have_one_tree_for_requests_of_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that suits texts of a usual length; what it brings is told for the length asked."""
    taus = {16: {2: 1.6, 4: 1.7}, COMPILED_FOR_TOKENS: {2: 1.7, 4: 3.0}, 240: {2: 9.0, 4: 9.1}}
    rows = [
        ReplayedTau(0.0, True, size, tau, length)
        for length, by_size in taus.items()
        for size, tau in by_size.items()
    ]
    decoder = Charged(monkeypatch, per_node=0.2).decoder(values=replace(PROMISED, taus=tuple(rows)))
    monkeypatch.setattr(Engine, "is_compiled", True)
    monkeypatch.setattr(tree_choice, "sizes_tried", lambda *_: (1, 2, 4))
    monkeypatch.setattr(TreeChoice, "step_ms", lambda *_, **__: {1: 1.0, 2: 1.2, 4: 1.6})
    for num_tokens, by_size in taus.items():
        config = GenerationConfig(max_new_tokens=num_tokens)
        assert decoder.tree_of(config, 9).num_nodes == 4
        assert decoder.expected_tau_of(config, 9) == by_size[4]


def test_requests_of_other_lengths_search_no_trees_and_fill_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What every request asks before its first token."""
    charged = Charged(monkeypatch, per_node=0.2)
    choice = TreeChoice(charged.decoder().engine, "auto", PROMISED, lambda: charged.now)
    place = choice.place()
    choice.at(place)
    searched: list[Any] = []
    monkeypatch.setattr(tree_choice, "tree_of", lambda *asked: searched.append(asked))
    monkeypatch.setattr(tree_choice, "MOST_REMEMBERED", 5)
    first = choice.at(place, Asked(0.0, 100))
    for num_tokens in range(100, 120):
        choice.at(place, Asked(0.0, num_tokens))
        choice.frugal(place, Asked(0.0, num_tokens))
        assert len(choice._chosen) <= 5
    assert not searched
    assert choice.at(place, Asked(0.0, 100)) == first


def test_a_frugal_tree_is_tried_before_drafting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two misses of the best tree use up a short text's overdraft; a chain of one costs less."""
    charged = Charged(monkeypatch, per_node=0.01)
    asked = Asked(5.0, 64)
    values = replace(
        PROMISED, taus=tuple(ReplayedTau(0.7, True, n, t, 64) for n, t in ((2, 1.5), (4, 1.9)))
    )
    decoder = charged.decoder(values=values)
    step_ms = {1: 10.0, 2: 10.4, 4: 12.5}
    monkeypatch.setattr(TreeChoice, "step_ms", lambda *_, **__: step_ms)
    choice = decoder._choice
    place = choice.place(9)
    assert choice.at(place, asked).tree.num_nodes == 4
    frugal = choice.frugal(place, asked)
    assert frugal.tree.num_nodes == 2
    assert frugal.extra == pytest.approx(0.04 + RATIO_NOISE)
    trees = StepTrees(choice, [9], [64], 5.0, whole=False)
    captured = StepTrees(choice, [9], [64], 5.0, whole=True)
    sizes: dict[StepTrees, list[int]] = {trees: [], captured: []}
    for left in range(63, 0, -1):
        for one, seen in sizes.items():
            seen.append(one(left).num_nodes)
            one.observe(1.0)
    assert sizes[trees] == [4, 4, 2, 2, 2] + [1] * 58
    assert sizes[captured] == [4, 4] + [1] * 61
    # A hit of the small tree pays for the large one.
    trees = StepTrees(choice, [9], [64], 5.0, whole=False)
    for _ in range(2):
        trees(50)
        trees.observe(1.0)
    assert trees(50).num_nodes == 2
    trees.observe(2.0)
    assert trees(48).num_nodes == 4


@pytest.mark.parametrize("is_compiled", [False, True])
def test_compiled_steps_keep_their_tree_to_the_end(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    """Every smaller one would be compiled for a text's last tokens."""

    class SeenError(Exception):
        pass

    def seen(*_arguments: Any, whole: bool) -> Any:
        raise SeenError(whole)

    charged = Charged(monkeypatch, per_node=0.2)
    monkeypatch.setattr(decoder_module, "StepTrees", seen)
    monkeypatch.setattr(Engine, "is_compiled", is_compiled)
    with pytest.raises(SeenError, match=str(is_compiled)):
        charged.decoder(tree=TokenTree.chain(2)).generate(prompt_ids(9), max_new_tokens=3)


def test_a_tree_that_was_asked_for_is_used_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    charged = Charged(monkeypatch, per_node=0.2)
    decoder = charged.decoder(tree=TokenTree.chain(2))
    charged.rows.clear()
    result = decoder.generate(
        prompt_ids(9), max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=5.0, seed=3
    )
    assert result.stats.num_plain_steps == 0
    # The last steps are cut to what is still wanted.
    assert set(charged.rows[1:-2]) == {3}


def test_batches_are_paced_together_and_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    charged = Charged(monkeypatch, per_node=0.2)
    decoder = charged.decoder()
    prompts = [prompt_ids(5, seed) for seed in range(3)]
    asked = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 2.0, "seed": 3}
    together = decoder.generate(prompts, **asked)
    for row, (prompt, result) in enumerate(zip(prompts, together, strict=True)):
        alone = decoder.plain(prompt, sequence=row, **asked)
        assert result.token_ids == alone.token_ids


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_gpu_is_tried_with_every_size_that_was_replayed_at_the_top(is_compiled: bool) -> None:
    sizes = sizes_tried("cuda", is_compiled)
    assert sizes[0] == 1
    assert list(sizes) == sorted(set(sizes))
    assert max(sizes) == max(REPLAYED_SIZES)  # beyond, nothing more would be expected
    assert set(sizes[1:]) <= set(REPLAYED_SIZES)
    assert max(sizes_tried("cpu", False)) < max(sizes)
