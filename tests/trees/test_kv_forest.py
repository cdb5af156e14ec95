"""KV forests: small ones written out, and every refusal. Random ones: test_plan."""

from __future__ import annotations

import pytest
import torch

from specdeft.trees.forest import KVForest
from specdeft.trees.token_tree import TokenTree

#  0 ── 1 ── 2        a prompt of 3 tokens, a branch with two leaves and a branch that is a leaf;
#  │    └─── 3        a second sequence of its own
#  └─── 4
#  5
FOREST = KVForest.from_nodes(
    parents=[-1, 0, 1, 1, 0, -1],
    slots=[range(10, 13), [20, 30], [21], [22], [23, 24], [7]],
    query_nodes=[4, 2, 3, 5],
)


def test_a_small_forest_means_what_the_picture_says() -> None:
    table = FOREST.path_table()
    assert table.lengths.tolist() == [5, 6, 6, 1]
    assert table.slots.tolist() == [
        [10, 11, 12, 23, 24, 0],
        [10, 11, 12, 20, 30, 21],
        [10, 11, 12, 20, 30, 22],
        [7, 0, 0, 0, 0, 0],
    ]
    assert FOREST.token_positions().tolist() == [0, 1, 2, 3, 4, 5, 5, 3, 4, 0]
    assert FOREST.query_positions().tolist() == [4, 5, 5, 0]
    assert FOREST.query_order.tolist() == [1, 2, 0, 3]
    assert FOREST.query_begins.tolist() == [0, 0, 0, 1, 2, 3]
    assert FOREST.query_ends.tolist() == [3, 2, 1, 2, 3, 4]


def test_nodes_given_breadth_first_are_renumbered() -> None:
    forest = KVForest.from_nodes([-1, -1, 0, 1, 0], [[0], [1], [2], [3], [4]], [4, 3, 2])
    assert forest.parents.tolist() == [-1, 0, 0, -1, 3]
    assert forest.slots.tolist() == [0, 2, 4, 1, 3]
    assert forest.query_nodes.tolist() == [2, 4, 1]
    assert forest.path_table().slots.tolist() == [[0, 4], [1, 3], [0, 2]]


def test_token_trees_below_shared_and_own_contexts() -> None:
    tree = TokenTree.from_paths([(0,), (0, 0), (1,)])
    forest = KVForest.with_token_trees(
        parents=[-1, 0, 0],
        slots=[range(5), range(10, 12), []],
        leaves=[1, 2],
        tree=tree,
        tree_slots=[range(20, 24), range(30, 34)],
    )
    table = forest.path_table()
    assert forest.num_queries == 8
    context = [[*range(5), 10, 11], [*range(5)]]
    for sequence, first in ((0, 20), (1, 30)):
        for node in range(4):
            seen = [first + other for other in range(4) if tree.ancestors()[node, other]]
            row = sequence * 4 + node
            expected = context[sequence] + seen
            assert table.slots[row, : table.lengths[row]].tolist() == expected
    with pytest.raises(ValueError, match="4 slots for each of 1 leaves"):
        KVForest.with_token_trees([-1], [[0]], [0], tree, [range(3)])


def test_an_empty_forest_is_allowed() -> None:
    forest = KVForest.from_nodes([], [], [])
    assert forest.visible().shape == (0, 0)
    assert forest.path_table().slots.shape == (0, 0)


LONG = torch.int64


@pytest.mark.parametrize(
    ("parents", "num_tokens", "num_slots", "query_nodes", "message"),
    [
        ([0], [1], 1, [], "parent of node 0 is 0"),
        ([-1, 1], [1, 1], 2, [], "parent of node 1 is 1"),
        ([-1, -2], [1, 1], 2, [], "parent of node 1 is -2"),
        (
            [-1, -1, 0],
            [1, 1, 1],
            3,
            [],
            "node 2 stands apart from the other nodes below its parent 0",
        ),
        (
            [-1, 0, 0, 1],
            [1, 1, 1, 1],
            4,
            [],
            "node 3 stands apart from the other nodes below its parent 1",
        ),
        ([-1], [1, 1], 2, [], "one number a node"),
        ([-1], [-1], 0, [], "negative number"),
        ([-1], [2], 1, [], "hold 2 tokens; give one slot a token"),
        ([-1], [1], 1, [1], "query_nodes holds a node outside 0 to 0"),
        ([-1], [1], 1, [-1], "query_nodes holds a node outside 0 to 0"),
    ],
)
def test_bad_forests_are_refused(
    parents: list[int], num_tokens: list[int], num_slots: int, query_nodes: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KVForest(
            torch.tensor(parents, dtype=LONG),
            torch.tensor(num_tokens, dtype=LONG),
            torch.zeros(num_slots, dtype=torch.int32),
            torch.tensor(query_nodes, dtype=LONG),
        )


def test_bad_node_lists_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="parent of node 0 is 1"):
        KVForest.from_nodes([1, -1], [[0], [1]], [])
    with pytest.raises(ValueError, match="2 parents but 1 slot lists"):
        KVForest.from_nodes([-1, 0], [[0]], [])
    for bad in (-1, 1):
        with pytest.raises(ValueError, match="query_nodes holds a node outside"):
            KVForest.from_nodes([-1], [[0]], [bad])
    one = torch.zeros(1, dtype=LONG)
    with pytest.raises(ValueError, match=r"num_tokens is torch\.int32; pass an int64"):
        KVForest(one - 1, one.int(), one.int(), one)
    with pytest.raises(ValueError, match=r"slots is torch\.int64; pass an int32"):
        KVForest(one - 1, one + 1, one, one)
