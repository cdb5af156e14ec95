"""The walk: which drafted nodes the target confirms."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.accept import accept
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.token_tree import TokenTree

CPU = torch.device("cpu")


def walk_by_hand(tree: TokenTree, tokens: list[int], chosen: list[int]) -> list[int]:
    """The same rule, one node at a time: follow the child that holds the target's token."""
    node, emitted = 0, []
    while True:
        emitted.append(chosen[node])
        children = [i for i, parent in enumerate(tree.parents) if parent == node]
        matching = [child for child in children if tokens[child] == chosen[node]]
        if not matching:
            return emitted
        node = matching[0]


def run(tree: TokenTree, tokens: list[list[int]], chosen: list[list[int]]) -> list[list[int]]:
    outcome = accept(torch.tensor(tokens), torch.tensor(chosen), TreeTensors.build(tree, CPU))
    return [
        row[: int(count) + 1].tolist()
        for row, count in zip(outcome.emitted, outcome.num_accepted, strict=True)
    ]


def test_by_hand() -> None:
    # 0 -> 1 -> 2, 0 -> 3 -> 4
    tree = TokenTree.from_paths([(0,), (0, 0), (1,), (1, 0)])
    tokens = [[9, 5, 6, 7, 8]]
    assert run(tree, tokens, [[5, 6, 1, 1, 1]]) == [[5, 6, 1]]  # both of the first branch
    assert run(tree, tokens, [[7, 1, 1, 8, 2]]) == [[7, 8, 2]]  # both of the second
    assert run(tree, tokens, [[5, 3, 1, 1, 1]]) == [[5, 3]]
    assert run(tree, tokens, [[4, 6, 1, 8, 1]]) == [[4]]  # deeper matches below a refusal


def test_token_id_zero_is_a_token() -> None:
    """Leaves of unequal depth and an argmax of 0: fillers must never match (Medusa's defect)."""
    tree = TokenTree.from_paths([(0,), (0, 0), (1,)])
    assert run(tree, [[3, 4, 5, 0]], [[0, 0, 0, 0]]) == [[0, 0]]
    assert run(tree, [[0, 0, 0, 1]], [[0, 0, 0, 0]]) == [[0, 0, 0]]
    assert run(TokenTree.chain(0), [[0]], [[0]]) == [[0]]


def test_rows_of_a_batch_do_not_meet() -> None:
    tree = TokenTree.chain(2)
    tokens = [[1, 2, 3], [1, 9, 3], [1, 2, 9]]
    chosen = [[2, 3, 4], [2, 3, 4], [2, 3, 4]]
    assert run(tree, tokens, chosen) == [[2, 3, 4], [2], [2, 3]]


@st.composite
def trees_and_tokens(draw: st.DrawFn) -> tuple[TokenTree, list[int], list[int]]:
    num_nodes = draw(st.integers(1, 40))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
    tree = TokenTree.from_parents(parents)
    # Siblings hold distinct tokens, as a head's ranks do.
    offset = draw(st.integers(0, 3))
    tokens = [0] + [rank + offset for rank in tree.ranks[1:]]
    chosen = draw(st.lists(st.integers(0, 5), min_size=num_nodes, max_size=num_nodes))
    return tree, tokens, chosen


@settings(max_examples=150, deadline=None)
@given(trees_and_tokens())
def test_equals_the_walk_one_node_at_a_time(case: tuple[TokenTree, list[int], list[int]]) -> None:
    tree, tokens, chosen = case
    assert run(tree, [tokens], [chosen]) == [walk_by_hand(tree, tokens, chosen)]
    outcome = accept(torch.tensor([tokens]), torch.tensor([chosen]), TreeTensors.build(tree, CPU))
    count = int(outcome.num_accepted)
    path = outcome.path[0, : count + 1].tolist()
    assert path[0] == 0
    assert [tree.parents[node] for node in path[1:]] == path[:-1]
    assert path[-1] == int(outcome.last_node)
    assert int(outcome.bonus) == chosen[path[-1]]
