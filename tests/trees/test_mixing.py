"""The node budget between heads and lookup: best by brute force, exact on the samples counted."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdeft.trees.mixing import best_mix, expected_mix
from specdeft.trees.search import ValuedPaths, best_tree, expected_tau
from specdeft.trees.statistics import accepted_depths, count_ranks, with_lookup
from specdeft.trees.token_tree import TokenTree

NUM_RANKS, NUM_HEADS, CHAIN = 2, 2, 3
PATHS = [path for depth in (1, 2) for path in product(range(NUM_RANKS), repeat=depth)]
SAMPLE = st.tuples(
    *[st.integers(0, NUM_RANKS)] * NUM_HEADS, st.integers(0, CHAIN), st.integers(0, NUM_HEADS)
)
SAMPLES = st.lists(SAMPLE, min_size=1, max_size=25)


def measured(samples: list[tuple[int, ...]]) -> tuple[ValuedPaths, Tensor, Tensor]:
    """Values without shrinkage, and the ranks and lookup depths they were counted from."""
    rows = torch.tensor(samples)
    ranks, lookup = rows[:, :NUM_HEADS], rows[:, NUM_HEADS]
    everything = torch.full((len(rows),), NUM_HEADS)
    valued = count_ranks(ranks, NUM_RANKS).valued_paths(shrinkage=0.0)
    known = torch.full((len(rows),), CHAIN)
    return with_lookup(valued, ranks, everything, lookup, known, shrinkage=0.0), ranks, lookup


def realised(tree: TokenTree, ranks: Tensor, lookup: Tensor) -> float:
    """Mean tokens of a step from every sample: the deeper of chain and heads, and the bonus."""
    chain = lookup.clamp(max=tree.num_lookup)
    return 1 + torch.maximum(accepted_depths(tree, ranks), chain).double().mean().item()


def closed_sets(size: int) -> list[frozenset[tuple[int, ...]]]:
    level = {frozenset[tuple[int, ...]]()}
    for _ in range(size):
        level = {
            chosen | {path}
            for chosen in level
            for path in PATHS
            if path not in chosen and (len(path) == 1 or path[:-1] in chosen)
        }
    return list(level)


@given(SAMPLES, st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_no_mix_of_the_same_size_brings_more(samples: list[tuple[int, ...]], size: int) -> None:
    valued, ranks, lookup = measured(samples)
    best = max(
        realised(TokenTree.from_paths(sorted(paths)).with_lookup(chain), ranks, lookup)
        for chain in range(min(size - 1, CHAIN) + 1)
        for paths in closed_sets(size - 1 - chain)
    )
    mix = best_mix(valued, size)
    assert mix.tree.num_nodes == size
    assert realised(mix.tree, ranks, lookup) == pytest.approx(best)
    assert mix.tau == pytest.approx(best)
    assert expected_mix(valued, mix.tree) == pytest.approx(best)


@given(SAMPLES, st.integers(0, CHAIN), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_what_any_tree_brings_is_expected(
    samples: list[tuple[int, ...]], chain: int, size: int
) -> None:
    valued, ranks, lookup = measured(samples)
    tree = best_tree(valued, size).with_lookup(chain)
    assert expected_mix(valued, tree) == pytest.approx(realised(tree, ranks, lookup))


@given(SAMPLES, st.floats(0.0, 40.0))
@settings(max_examples=30, deadline=None)
def test_shrunk_values_stay_possible_and_reload(
    samples: list[tuple[int, ...]], shrinkage: float
) -> None:
    rows = torch.tensor(samples)
    ranks, known = rows[:, :NUM_HEADS], rows[:, -1]
    valued = count_ranks(ranks, NUM_RANKS, known).valued_paths(shrinkage=shrinkage)
    both = with_lookup(valued, ranks, known, rows[:, NUM_HEADS], known + 1, shrinkage)
    assert ValuedPaths.from_json(both.to_json()).lookup == pytest.approx(both.lookup)


def test_without_lookup_it_is_the_best_tree_of_the_heads() -> None:
    valued = ValuedPaths(((0,), (0, 0), (1,)), (0.6, 0.4, 0.2))
    for size in range(1, 5):
        assert best_mix(valued, size).tree == best_tree(valued, size)
        assert best_mix(valued, size).tau == pytest.approx(expected_tau(valued, size))
    with pytest.raises(ValueError, match="give a size from 1 to 4"):
        best_mix(valued, 5)


def test_without_heads_it_is_a_chain() -> None:
    mix = best_mix(ValuedPaths((), (), (0.5, 0.25)), 3)
    assert mix.tree == TokenTree.chain(0).with_lookup(2)
    assert mix.tau == pytest.approx(1.75)


def test_a_child_worth_more_than_its_parent_takes_it_along() -> None:
    """The chain always holds one token and never two: (0,) is worth nothing, (0, 0) a lot."""
    valued = ValuedPaths(((0,), (0, 0), (1,)), (0.5, 0.5, 0.0), (1.0, 0.0), (0.0, 0.5, 0.0))
    mix = best_mix(valued, 4)
    assert mix.tree == TokenTree.from_paths([(0,), (0, 0)]).with_lookup(1)
    assert mix.tau == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("lookup", "unlooked", "message"),
    [
        ((0.5,), (), "0 values beside the lookup chain for 1 paths"),
        ((), (0.1,), "1 values beside the lookup chain"),
        ((0.5, 0.6), (0.1,), "shares of the lookup chain rise"),
        ((1.5,), (0.1,), "outside 0 to 1"),
        ((0.5,), (float("nan"),), "outside 0 to 1"),
        ((0.5,), (0.7,), "worth more beside"),
    ],
)
def test_impossible_shares_are_refused(
    lookup: tuple[float, ...], unlooked: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ValuedPaths(((0,),), (0.6,), lookup, unlooked)
