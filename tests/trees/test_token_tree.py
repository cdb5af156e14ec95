"""Token trees: topology against literal matrices and plain walks, and every refusal."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.trees.mask import ancestors_from_mask_words, mask_words_from_ancestors
from specdeft.trees.token_tree import TokenTree

SMALL = TokenTree.from_paths([(0,), (0, 0), (0, 2), (1,), (1, 0), (1, 0, 3)])


def parent_lists(max_nodes: int = 90) -> st.SearchStrategy[list[int]]:
    """Topological parent lists: node i hangs below any earlier node."""
    sizes = st.integers(1, max_nodes)
    return sizes.flatmap(
        lambda n: st.tuples(*[st.integers(0, max(i - 1, 0)) for i in range(n)])
    ).map(lambda parents: [-1, *parents[1:]])


def test_paths_give_the_literal_topology() -> None:
    assert SMALL.parents == (-1, 0, 1, 1, 0, 4, 5)
    assert SMALL.ranks == (-1, 0, 0, 2, 1, 0, 3)
    assert SMALL.depths == (0, 1, 2, 2, 1, 2, 3)
    assert SMALL.paths == ((), (0,), (0, 0), (0, 2), (1,), (1, 0), (1, 0, 3))
    assert SMALL.leaves == (2, 3, 6)
    assert SMALL.nodes_per_depth == (1, 2, 3, 1)
    assert (SMALL.num_nodes, SMALL.max_depth, SMALL.top_k, SMALL.num_leaves) == (7, 3, 4, 3)


def test_ancestors_and_paths_match_the_literal_matrices() -> None:
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1, 1],
    ]
    assert torch.equal(SMALL.ancestors(), torch.tensor(expected, dtype=torch.bool))
    assert SMALL.path_nodes().tolist() == [
        [0, 0, 0, 0],
        [0, 1, 1, 1],
        [0, 1, 2, 2],
        [0, 1, 3, 3],
        [0, 4, 4, 4],
        [0, 4, 5, 5],
        [0, 4, 5, 6],
    ]
    assert SMALL.mask_words().tolist() == [[1], [3], [7], [11], [17], [49], [113]]


@given(parent_lists())
@settings(max_examples=40, deadline=None)
def test_ancestor_matrix_equals_a_walk_to_the_root(parents: list[int]) -> None:
    tree = TokenTree.from_parents(parents)
    expected = torch.zeros(tree.num_nodes, tree.num_nodes, dtype=torch.bool)
    for node in range(tree.num_nodes):
        current = node
        while current >= 0:
            expected[node, current] = True
            current = tree.parents[current]
    assert torch.equal(tree.ancestors(), expected)
    words = tree.mask_words()
    assert words.shape == (tree.num_nodes, -(-tree.num_nodes // 64))
    assert torch.equal(ancestors_from_mask_words(words, tree.num_nodes), expected)
    for node, row in enumerate(tree.path_nodes().tolist()):
        walk = [other for other in range(tree.num_nodes) if expected[node, other]]
        assert row[: tree.depths[node] + 1] == walk


@given(parent_lists(30), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_every_way_to_write_a_tree_gives_the_same_object(
    parents: list[int], rng: random.Random
) -> None:
    tree = TokenTree.from_parents(parents)
    paths = list(tree.paths[1:])
    rng.shuffle(paths)
    for other in (
        TokenTree.from_paths(paths),
        TokenTree.from_parents(tree.parents, tree.ranks),
        TokenTree.from_json(tree.to_json()),
    ):
        assert other == tree
        assert other.content_hash == tree.content_hash


@pytest.mark.parametrize("num_nodes", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_mask_words_of_chains_and_stars_at_word_borders(num_nodes: int) -> None:
    chain = TokenTree.chain(num_nodes - 1)
    star = TokenTree.full([num_nodes - 1] if num_nodes > 1 else [])
    assert chain.num_nodes == star.num_nodes == num_nodes
    full = torch.ones(num_nodes, num_nodes, dtype=torch.bool)
    assert torch.equal(ancestors_from_mask_words(chain.mask_words(), num_nodes), full.tril())
    seen_by_star = full & torch.eye(num_nodes, dtype=torch.bool)
    seen_by_star[:, 0] = True
    assert torch.equal(ancestors_from_mask_words(star.mask_words(), num_nodes), seen_by_star)


def test_bit_63_is_the_sign_bit() -> None:
    row = torch.zeros(1, 65, dtype=torch.bool)
    row[0, 63] = True
    assert mask_words_from_ancestors(row).tolist() == [[-(2**63), 0]]
    assert TokenTree.chain(63).mask_words()[63].tolist() == [-1]


def test_the_one_node_tree_is_plain_decoding() -> None:
    for tree in (TokenTree.chain(0), TokenTree.full([]), TokenTree.from_paths([])):
        assert (tree.num_nodes, tree.max_depth, tree.top_k) == (1, 0, 0)
        assert tree.leaves == (0,)
        assert tree.ancestors().tolist() == [[True]]
        assert tree.path_nodes().tolist() == [[0]]
        assert TokenTree.from_json(tree.to_json()) == tree
        tree.validate_for(num_heads=0, top_k=0)


def test_full_tree_has_the_product_of_its_widths() -> None:
    tree = TokenTree.full([3, 2])
    assert tree.nodes_per_depth == (1, 3, 6)
    assert tree.paths[1:4] == ((0,), (0, 0), (0, 1))
    assert tree.top_k == 3


def test_missing_prefixes_are_added_and_counted() -> None:
    with pytest.warns(UserWarning, match="added 3 path prefixes"):
        tree = TokenTree.from_paths([(1, 2, 0), (0, 1)])
    assert tree.paths == ((), (0,), (0, 1), (1,), (1, 2), (1, 2, 0))


def test_prune_keeps_the_upper_part() -> None:
    assert SMALL.prune(2).paths == SMALL.paths[:-1]
    assert SMALL.prune(0) == TokenTree.chain(0)
    assert SMALL.prune(9) is SMALL


def test_trees_of_different_content_stay_different() -> None:
    other = TokenTree.from_paths([*SMALL.paths[1:-1], (1, 0, 2)])
    assert other != SMALL
    assert other.content_hash != SMALL.content_hash


def test_a_tree_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.parents = (-1,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "no nodes"),
        ([0], "node 0 is the root"),
        ([-1, 2, 1], "nodes 1 -> 2 -> 1 form a cycle"),
        ([-1, 1], "nodes 1 -> 1 form a cycle"),
        ([-1, 2, 0], "node 1 stands before its parent 2"),
        ([-1, 0, -1], "node 2 is a second root"),
        ([-1, 0, 7], "parent of node 2 is 7"),
        ([-1, -2], "parent of node 1 is -2"),
    ],
)
def test_bad_parents_are_refused(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.from_parents(parents)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([-1, 0, 0], "children 1 and 2 of node 0 both have rank 0"),
        ([-1, 0, -2], "node 2 has rank -2"),
        ([-1, 0], "3 parents but 2 ranks"),
    ],
)
def test_bad_ranks_are_refused(ranks: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.from_parents([-1, 0, 0], ranks)


@pytest.mark.parametrize(
    ("parents", "ranks"),
    [((-1, 0, 0, 1), (-1, 0, 1, 0)), ((-1, 0, 0), (-1, 1, 0)), ((-1,), (0,)), ((-1, 0), (-1,))],
    ids=["breadth-first", "siblings swapped", "ranked root", "too few ranks"],
)
def test_the_constructor_takes_the_canonical_form_only(
    parents: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"depth-first|ranks"):
        TokenTree(parents, ranks)


@pytest.mark.parametrize(
    ("paths", "top_k", "message"),
    [
        ([(0,), (0,)], None, r"path \[0\] is listed twice"),
        ([(0,), ()], None, "a path is empty"),
        ([(0,), (0, -1)], None, r"path \[0, -1\] has a negative rank"),
        ([(10,)], 10, r"path \[10\] has rank 10; with top_k 10 use 0 to 9"),
        ([(11,)], 10, r"path \[11\] has rank 11"),
    ],
)
def test_bad_paths_are_refused(
    paths: list[tuple[int, ...]], top_k: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.from_paths(paths, top_k)


def test_too_large_trees_are_refused_before_they_are_built() -> None:
    with pytest.raises(ValueError, match="give 1010101 nodes"):
        TokenTree.full([100, 100, 100])
    with pytest.raises(ValueError, match="number below 1"):
        TokenTree.full([2, 0])
    with pytest.raises(ValueError, match="chain of -1"):
        TokenTree.chain(-1)
    with pytest.raises(ValueError, match="chain of 70000"):
        TokenTree.chain(70_000)


def test_a_tree_deeper_or_wider_than_the_heads_is_refused() -> None:
    SMALL.validate_for(num_heads=3, top_k=4)
    with pytest.raises(ValueError, match=r"3 deep but there are 2 heads; prune it to depth 2"):
        SMALL.validate_for(num_heads=2)
    with pytest.raises(ValueError, match=r"uses rank 3 but a head proposes 3 tokens"):
        SMALL.validate_for(num_heads=3, top_k=3)
    with pytest.raises(ValueError, match="max_depth is -1"):
        SMALL.prune(-1)


@pytest.mark.parametrize(
    "visible", [torch.zeros(2, 2), torch.zeros(2, dtype=torch.bool)], ids=["float", "vector"]
)
def test_mask_packing_refuses_other_tensors(visible: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="pass a bool matrix"):
        mask_words_from_ancestors(visible)


def test_mask_unpacking_refuses_other_tensors() -> None:
    with pytest.raises(ValueError, match="pass an int64 matrix"):
        ancestors_from_mask_words(torch.zeros(2, 1), 3)
    with pytest.raises(ValueError, match="pass 2 words a row"):
        ancestors_from_mask_words(torch.zeros(2, 1, dtype=torch.int64), 65)
