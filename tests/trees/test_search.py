"""Tree choice: optimal by brute force, published estimates, size by tokens per millisecond."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.trees.search import (
    ReplayedTau,
    ValuedPaths,
    best_tree,
    choose_size,
    expected_tau,
    grow_from_accuracies,
    replayed_tau,
)
from specdeft.trees.token_tree import TokenTree

# Top-1 and top-5 training accuracies of the published 7B heads.
PUBLISHED_7B = [(0.560, 0.780), (0.316, 0.563), (0.201, 0.417), (0.147, 0.340), (0.118, 0.300)]


def shares(max_ranks: int) -> st.SearchStrategy[list[float]]:
    """Up to max_ranks accuracies that sum to at most 1, with exact ties and zeros likely."""
    weights = st.lists(st.integers(0, 4), min_size=1, max_size=max_ranks)
    return weights.map(lambda w: [entry / (4 * max_ranks) for entry in w])


def all_trees(num_ranks: list[int], num_nodes: int) -> Iterator[frozenset[tuple[int, ...]]]:
    """Every prefix-closed set of num_nodes - 1 paths, by adding one path at a time."""
    every = [
        path
        for depth in range(1, len(num_ranks) + 1)
        for path in product(*map(range, num_ranks[:depth]))
    ]
    level: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(num_nodes - 1):
        level = {
            tree | {path}
            for tree in level
            for path in every
            if path not in tree and (len(path) == 1 or path[:-1] in tree)
        }
    yield from level


@given(st.lists(shares(3), min_size=1, max_size=3), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_no_tree_of_the_same_size_is_worth_more(
    accuracies: list[list[float]], num_nodes: int
) -> None:
    valued = grow_from_accuracies(accuracies, max_paths=100)
    if num_nodes > len(valued.paths) + 1:
        return

    def tau(paths: frozenset[tuple[int, ...]]) -> float:
        total = 1.0
        for path in paths:
            value = 1.0
            for head, rank in enumerate(path):
                value *= accuracies[head][rank]
            total += value
        return total

    best = max(tau(paths) for paths in all_trees([len(row) for row in accuracies], num_nodes))
    chosen = best_tree(valued, num_nodes)
    assert chosen.num_nodes == num_nodes
    assert tau(frozenset(chosen.paths[1:])) == pytest.approx(best)
    assert expected_tau(valued, num_nodes) == pytest.approx(best)


@given(st.lists(shares(4), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_best_trees_are_nested_and_tau_never_falls_or_passes_the_heads(
    accuracies: list[list[float]],
) -> None:
    valued = grow_from_accuracies(accuracies, max_paths=40)
    taus = [expected_tau(valued, size) for size in range(1, len(valued.paths) + 2)]
    assert taus == sorted(taus)
    assert taus[0] == 1.0
    assert taus[-1] <= len(accuracies) + 1
    previous: set[tuple[int, ...]] = set()
    for size in range(1, len(valued.paths) + 2):
        paths = set(best_tree(valued, size).paths)
        assert previous < paths
        previous = paths


def test_published_accuracies_give_the_published_estimates() -> None:
    # The published figure comes from unrounded accuracies.
    chain = grow_from_accuracies([[top1] for top1, _ in PUBLISHED_7B], max_paths=5)
    assert expected_tau(chain, 6) == pytest.approx(1.779, abs=1e-3)
    # Ranks 1-4 share what top-5 adds to top-1 in falling parts, the further ranks go on falling:
    # not the fit behind the published figures, so they are met within 2 %.
    falling = [0.4, 0.27, 0.19, 0.14, 0.08, 0.06, 0.05, 0.04, 0.03]
    accuracies = [[top1, *((top5 - top1) * f for f in falling)] for top1, top5 in PUBLISHED_7B]
    valued = grow_from_accuracies(accuracies, max_paths=255)
    published = {5: 1.965, 10: 2.127, 15: 2.214, 31: 2.354, 63: 2.468, 127: 2.554, 255: 2.622}
    for num_paths, tau in published.items():
        assert expected_tau(valued, num_paths + 1) == pytest.approx(tau, rel=0.02)


TAUS = {1: 1.0, 4: 1.8, 16: 2.2, 64: 2.5}


@pytest.mark.parametrize(
    ("cost_ms", "size"),
    [
        ({1: 5.0, 4: 5.0, 16: 5.0, 64: 5.0}, 64),
        ({1: 5.0, 4: 6.0, 16: 9.0, 64: 20.0}, 4),
        ({1: 5.0, 4: 9.1, 16: 20.0, 64: 80.0}, 1),
        ({1: 5.0, 4: 9.0, 16: 20.0}, 1),
        ({1: 5.0, 32: 1.0}, 1),
    ],
    ids=["flat", "steep", "speculation does not pay", "tie goes to the smaller", "common sizes"],
)
def test_size_is_the_one_with_most_tokens_per_time(cost_ms: dict[int, float], size: int) -> None:
    assert choose_size(TAUS, cost_ms) == size


def test_sizes_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="no tree size has both"):
        choose_size({1: 1.0}, {2: 1.0})
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be positive numbers"):
            choose_size({1: 1.0}, {1: bad})


def test_valued_paths_reload_to_the_same_tree(tmp_path: Path) -> None:
    valued = grow_from_accuracies([[0.6, 0.2, 0.1], [0.5, 0.1]], max_paths=9)
    valued.save(tmp_path / "valued.json")
    reloaded = ValuedPaths.load(tmp_path / "valued.json")
    assert reloaded.paths == valued.paths
    assert reloaded.values == pytest.approx(valued.values)
    assert best_tree(reloaded, 6) == best_tree(valued, 6)


@pytest.mark.parametrize(
    ("paths", "values", "message"),
    [
        (((0,),), (), "1 paths but 0 values"),
        (((0,), (1,)), (0.1, 0.2), "values rise"),
        (((0,), (1, 0)), (0.3, 0.2), r"path \[1, 0\] stands before its prefix \[1\]"),
        (((0,), (0,)), (0.3, 0.2), r"path \[0\] is empty or listed twice"),
        (((),), (0.3,), r"path \[\] is empty or listed twice"),
        (((0,),), (1.5,), "value of path .* is 1.5"),
        (((0,),), (float("nan"),), "is nan"),
    ],
)
def test_bad_valued_paths_are_refused(
    paths: tuple[tuple[int, ...], ...], values: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ValuedPaths(paths, values)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"paths": 1, "values": []}'])
def test_bad_valued_files_are_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "valued.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"valued\.json cannot be used: the text is not valued"):
        ValuedPaths.load(path)
    with pytest.raises(ValueError, match="cannot be used"):
        ValuedPaths.load(tmp_path / "none.json")


def test_sizes_outside_the_known_paths_are_refused() -> None:
    valued = grow_from_accuracies([[0.5, 0.2]], max_paths=10)
    assert best_tree(valued, 1) == TokenTree.chain(0)
    for size in (0, 4):
        with pytest.raises(ValueError, match=r"give a size from 1 to 3"):
            best_tree(valued, size)
    with pytest.raises(ValueError, match="accuracies of head 1 are not shares"):
        grow_from_accuracies([[0.5], [0.7, 0.6]], max_paths=3)


@pytest.mark.parametrize("paths", ["[[0.5]]", "[[true]]", "[[-1]]", "[[99999999999]]", "[0]", "{}"])
def test_files_of_what_is_no_path_are_refused(paths: str) -> None:
    with pytest.raises(ValueError, match=r"not valued paths|negative rank|give one a path"):
        ValuedPaths.from_json(f'{{"paths": {paths}, "values": [0.5]}}')


def test_a_file_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError, match="not valued paths"):
        ValuedPaths.from_json("[" * 100_000)


TRIED = tuple(
    ReplayedTau(heat, lookup, size, tau)
    for heat, lookup, size, tau in (
        (0.0, True, 4, 2.0),
        (0.0, True, 16, 3.0),
        (0.7, True, 4, 1.5),
        (0.7, False, 4, 1.25),
    )
)


@pytest.mark.parametrize(
    ("size", "temperature", "lookup", "tau"),
    [
        (1, 0.0, True, 1.0),
        (4, 0.0, True, 2.0),
        (8, 0.2, True, 2.5),  # half-way by the logarithm, the nearer temperature
        (2, 0.0, True, 1.5),
        (64, 0.0, True, 3.0),  # no more than the largest that was tried
        (4, 1.3, True, 1.5),
        (4, 0.0, False, 1.25),
    ],
)
def test_replayed_tau(size: int, temperature: float, lookup: bool, tau: float) -> None:
    valued = ValuedPaths(((0,),), (0.5,), taus=TRIED)
    assert replayed_tau(valued, size, temperature=temperature, lookup=lookup) == pytest.approx(tau)
    assert ValuedPaths.from_json(valued.to_json()).taus == TRIED


@pytest.mark.parametrize(
    ("num_tokens", "tau"),
    [(None, 3.0), (16, 2.0), (32, 2.0), (64, 2.5), (128, 3.0), (9999, 3.0)],
)
def test_what_a_text_brings_depends_on_its_length(num_tokens: int | None, tau: float) -> None:
    rows = (ReplayedTau(0.0, True, 4, 2.0, 32), ReplayedTau(0.0, True, 4, 3.0, 128))
    valued = ValuedPaths(((0,),), (0.5,), taus=rows)
    for known in (valued, ValuedPaths.from_json(valued.to_json())):
        got = replayed_tau(known, 4, temperature=0.0, lookup=True, num_tokens=num_tokens)
        assert got == pytest.approx(tau)


@pytest.mark.parametrize("num_tokens", [None, 1, 4096])
def test_files_that_note_no_length_serve_every_length(num_tokens: int | None) -> None:
    old = '{"paths": [[0]], "values": [0.5], "taus": [[0.0, true, 4, 2.0], [0.0, true, 16, 3.0]]}'
    valued = ValuedPaths.from_json(old)
    for size, tau in ((4, 2.0), (8, 2.5)):
        got = replayed_tau(valued, size, temperature=0.0, lookup=True, num_tokens=num_tokens)
        assert got == pytest.approx(tau)


@pytest.mark.parametrize("row", ["[0, true, 4, 2.0, 0]", "[0, true, 4, 2.0, 8, 9]", "[0, true, 4]"])
def test_replays_that_make_no_sense_are_refused(row: str) -> None:
    with pytest.raises(ValueError, match=r"valued paths|no token"):
        ValuedPaths.from_json(f'{{"paths": [[0]], "values": [0.5], "taus": [{row}]}}')


def test_sizes_that_were_not_tried_have_no_replayed_tau() -> None:
    assert replayed_tau(ValuedPaths((), ()), 8, temperature=0.0, lookup=True) is None


@pytest.mark.parametrize("tau", [0.5, float("nan"), float("inf")])
def test_impossible_replays_are_refused(tau: float) -> None:
    with pytest.raises(ValueError, match="replayed tau"):
        ValuedPaths((), (), taus=(ReplayedTau(0.0, True, 4, tau),))


@pytest.mark.parametrize(
    "taus", ["3", "[3]", "[[0, true, 4]]", "[[0, true, 1e999, 2]]", '[["a", true, 4, 2.0]]']
)
def test_files_with_malformed_replays_are_refused(taus: str) -> None:
    with pytest.raises(ValueError, match="not valued paths"):
        ValuedPaths.from_json(f'{{"paths": [], "values": [], "taus": {taus}}}')
