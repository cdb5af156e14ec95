"""Joint rank statistics against plain counting and against replayed acceptance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.trees.named import named_tree
from specdeft.trees.search import best_tree, expected_tau, grow_from_accuracies
from specdeft.trees.statistics import PathCount, RankStatistics, accepted_depths, count_ranks
from specdeft.trees.token_tree import TokenTree

NUM_RANKS = 3


def rank_rows(num_heads: int = 3) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, NUM_RANKS), min_size=num_heads, max_size=num_heads)
    return st.lists(row, min_size=1, max_size=30)


@given(rank_rows())
@settings(max_examples=40, deadline=None)
def test_counts_equal_a_plain_count(rows: list[list[int]]) -> None:
    statistics = count_ranks(torch.tensor(rows), NUM_RANKS)
    expected: dict[tuple[int, ...], int] = {}
    for row in rows:
        for depth in range(len(row) + 1):
            if NUM_RANKS in row[:depth]:
                break
            path = tuple(row[:depth])
            expected[path] = expected.get(path, 0) + 1
    assert {path: count.hits for path, count in statistics.counts.items()} == expected
    assert statistics.num_samples == len(rows)
    for head in range(3):
        hits = [sum(row[head] == rank for row in rows) for rank in range(NUM_RANKS)]
        assert list(statistics.rank_hits[head]) == hits


@given(rank_rows())
@settings(max_examples=30, deadline=None)
def test_expected_tau_is_exact_on_the_samples_counted(rows: list[list[int]]) -> None:
    ranks = torch.tensor(rows)
    valued = count_ranks(ranks, NUM_RANKS).valued_paths(shrinkage=0.0)
    for size in (1, 2, 5, 13, 40):
        tree = best_tree(valued, size)
        realised = 1 + accepted_depths(tree, ranks).double().mean().item()
        assert expected_tau(valued, size) == pytest.approx(realised)
        statistics = count_ranks(ranks, NUM_RANKS)
        assert statistics.expected_tau(tree, shrinkage=0.0) == pytest.approx(realised)


@given(rank_rows(), st.floats(0, 50))
@settings(max_examples=20, deadline=None)
def test_shrunk_values_stay_ordered_and_possible(rows: list[list[int]], shrinkage: float) -> None:
    valued = count_ranks(torch.tensor(rows), NUM_RANKS).valued_paths(shrinkage=shrinkage)
    assert len(valued.paths) == 3 + 9 + 27
    assert 1 <= expected_tau(valued, 40) <= 4 + 1e-9


def test_deeper_heads_have_their_own_denominators() -> None:
    """A text of three positions: its last tokens have no truth for the later heads."""
    ranks = torch.tensor([[0, 0], [0, 9], [9, 9]])
    statistics = count_ranks(ranks, 3, num_known=torch.tensor([2, 1, 0]))
    assert statistics.counts[()] == PathCount(hits=3, trials=2)
    assert statistics.counts[(0,)] == PathCount(hits=2, trials=1)
    assert statistics.rank_trials == (2, 1)
    assert statistics.head_accuracies() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert expected_tau(statistics.valued_paths(shrinkage=0.0), 3) == 3.0


def test_joint_counts_see_what_marginals_miss() -> None:
    """Head 1 is right exactly where head 0 is: its share given head 0 is 1, its marginal 0.5."""
    ranks = torch.tensor([[0, 0], [1, 1]] * 50)
    statistics = count_ranks(ranks, 1)
    joint = expected_tau(statistics.valued_paths(shrinkage=0.0), 3)
    product = expected_tau(grow_from_accuracies(statistics.head_accuracies(), 2), 3)
    assert joint == pytest.approx(2.0)
    assert product == pytest.approx(1.75)


def test_rare_paths_lean_on_the_marginals_and_frequent_ones_on_themselves() -> None:
    frequent, rare = [[0, 0]] * 1600, [[1, 1]]
    statistics = count_ranks(torch.tensor(frequent + rare), 2)
    assert statistics.next_rank_shares((0,), shrinkage=16)[0] == pytest.approx(1.0, abs=1e-3)
    # One sample of 17 says rank 1; the marginal says almost surely rank 0.
    assert statistics.next_rank_shares((1,), shrinkage=16)[1] == pytest.approx(1 / 17, abs=1e-3)
    assert statistics.next_rank_shares((1, 1)) == []


def test_simulated_acceptance_of_independent_heads_agrees() -> None:
    accuracies = [[0.56, 0.09, 0.05, 0.04], [0.32, 0.10, 0.06, 0.04], [0.20, 0.09, 0.05, 0.04]]
    generator = torch.Generator().manual_seed(3)
    num_samples = 20_000
    columns = [
        torch.multinomial(
            torch.tensor([*row, 1 - sum(row)]), num_samples, replacement=True, generator=generator
        )
        for row in accuracies
    ]
    ranks = torch.stack(columns, 1)
    calibrated = count_ranks(ranks[: num_samples // 2], 4).valued_paths()
    by_product = grow_from_accuracies(accuracies, max_paths=80)
    for size in (4, 16, 64):
        depths = accepted_depths(best_tree(by_product, size), ranks).double()
        error = depths.std().item() / num_samples**0.5
        assert 1 + depths.mean().item() == pytest.approx(
            expected_tau(by_product, size), abs=3 * error
        )
        held_out = accepted_depths(best_tree(calibrated, size), ranks[num_samples // 2 :]).double()
        error = held_out.std().item() / (num_samples / 2) ** 0.5
        # Both halves are samples, so the two errors add.
        assert 1 + held_out.mean().item() == pytest.approx(
            expected_tau(calibrated, size), abs=3 * 2**0.5 * error
        )


def test_acceptance_stops_where_the_tree_lacks_the_rank() -> None:
    tree = TokenTree.from_paths([(0,), (0, 1), (2,)])
    ranks = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 1, 1], [2, 0, 0], [9, 9, 9]])
    assert accepted_depths(tree, ranks).tolist() == [2, 1, 0, 1, 0]
    assert accepted_depths(TokenTree.chain(0), ranks).tolist() == [0] * 5
    with pytest.raises(ValueError, match="4 deep but there are 3 heads"):
        accepted_depths(named_tree("chain-4"), ranks)


def test_statistics_of_two_runs_add_up_and_reload(tmp_path: Path) -> None:
    ranks = torch.randint(0, 5, (200, 3), generator=torch.Generator().manual_seed(0))
    whole = count_ranks(ranks, 4)
    assert count_ranks(ranks[:70], 4) + count_ranks(ranks[70:], 4) == whole
    whole.save(tmp_path / "statistics.json")
    reloaded = RankStatistics.load(tmp_path / "statistics.json")
    assert reloaded == whole
    assert best_tree(reloaded.valued_paths(), 16) == best_tree(whole.valued_paths(), 16)
    with pytest.raises(ValueError, match=r"3 heads x 4 ranks cannot be added to 3 x 5"):
        whole + count_ranks(ranks, 5)


def test_trees_beyond_the_statistics_gain_nothing_there() -> None:
    statistics = count_ranks(torch.tensor([[0], [0]]), 1)
    assert statistics.expected_tau(named_tree("deft-32"), shrinkage=0.0) == 2.0


def test_no_samples_are_no_evidence() -> None:
    empty = count_ranks(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert empty.num_samples == 0
    assert expected_tau(empty.valued_paths(), 5) == 1.0
    assert expected_tau(empty.valued_paths(shrinkage=0.0), 5) == 1.0


def test_bad_ranks_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass int64"):
        count_ranks(torch.zeros(3, 2), 4)
    for bad in (-1, 5):
        with pytest.raises(ValueError, match="outside 0 to 4; write 4 for a missed token"):
            count_ranks(torch.tensor([[0, bad]]), 4)
    path = tmp_path / "statistics.json"
    short = (
        count_ranks(torch.tensor([[0]]), 1)
        .to_json()
        .replace('"rank_trials": [1]', '"rank_trials": []')
    )
    for text in ("", "[]", '{"num_heads": 1}', short):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"statistics\.json cannot be used: the text is not"):
            RankStatistics.load(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, '{"num_heads": ' + "9" * 5000 + "}"]
)
def test_texts_of_something_else_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not rank statistics"):
        RankStatistics.from_json(text)
