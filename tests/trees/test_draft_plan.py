"""The order in which a tree is drafted: every node once, behind its parent, at its rank."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.trees.draft_plan import draft_plan
from specdeft.trees.named import named_tree
from specdeft.trees.token_tree import TokenTree


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    num_nodes = draw(st.integers(1, 40))
    return TokenTree.from_parents(
        [-1] + [draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
    )


@settings(max_examples=100, deadline=None)
@given(trees())
def test_following_the_plan_names_every_node_by_its_path(tree: TokenTree) -> None:
    """Ranks stand for tokens: drafting them level by level must give every node its rank path."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    before: list[tuple[int, ...]] = [()]
    for level in draft_plan(tree):
        assert [paths[node] for node in level.inner.tolist()] == [
            (*before[row], *paths[node][-1:])
            for row, node in zip(level.previous.tolist(), level.inner.tolist(), strict=True)
        ]
        before = [paths[node] for node in level.inner.tolist()]
        filled = zip(level.child.tolist(), level.row.tolist(), level.rank.tolist(), strict=True)
        for child, row, rank in filled:
            assert child not in paths
            assert rank < level.top_k
            paths[child] = (*before[row], rank)
    assert paths == dict(enumerate(tree.paths))


def test_a_published_tree_and_the_root_alone() -> None:
    levels = draft_plan(named_tree("deft-64"))
    assert [level.child.numel() for level in levels] == [10, 28, 23, 2]
    assert [level.inner.numel() for level in levels] == [1, 10, 10, 1]
    assert [level.top_k for level in levels] == [10, 10, 10, 2]
    assert all(tensor.dtype == torch.int64 for level in levels for tensor in level[:-1])
    assert draft_plan(TokenTree.chain(0)) == ()
