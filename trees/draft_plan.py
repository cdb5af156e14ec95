"""In which order a tree's tokens can be drafted when a guess depends on the token before it.

Level by level: the nodes of one depth that have children are read together, each gives its best
tokens, and its children take those of their ranks. The plan is index tensors only, so a device
follows it without the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.trees.token_tree import TokenTree


class DraftLevel(NamedTuple):
    """One depth of drafting: I inner nodes read, M children filled; int64 tensors.

    previous: [I], where each inner node's parent stands among the level before's inner nodes.
    inner: [I] nodes of this depth that have children.
    row: [M], which inner node each child belongs to.
    rank: [M], the child's rank among that node's best tokens.
    child: [M] nodes of the next depth.
    top_k: tokens needed of every inner node.
    """

    previous: Tensor
    inner: Tensor
    row: Tensor
    rank: Tensor
    child: Tensor
    top_k: int


def draft_plan(tree: TokenTree, device: torch.device | str = "cpu") -> tuple[DraftLevel, ...]:
    """The levels of a tree that the heads propose (`TokenTree.head_tree`), from the root; none for
    the root alone."""
    if tree.num_lookup:
        raise ValueError("the tree has a lookup chain, which no head drafts: plan its head_tree")
    has_children = set(tree.parents[1:])
    levels = []
    standing = {0: 0}
    for depth in range(tree.max_depth):
        inner = [n for n in range(tree.num_nodes) if tree.depths[n] == depth and n in has_children]
        previous = [standing[max(tree.parents[node], 0)] for node in inner]
        standing = {node: row for row, node in enumerate(inner)}
        children = [node for node in range(1, tree.num_nodes) if tree.depths[node] == depth + 1]
        ranks = [tree.ranks[node] for node in children]
        rows = [standing[tree.parents[node]] for node in children]
        previous_t, inner_t, row, rank, child = (
            torch.tensor(numbers, dtype=torch.int64, device=device)
            for numbers in (previous, inner, rows, ranks, children)
        )
        levels.append(DraftLevel(previous_t, inner_t, row, rank, child, max(ranks) + 1))
    return tuple(levels)
