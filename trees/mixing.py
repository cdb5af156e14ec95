"""How many nodes of a tree go to the lookup chain, and which ones to the heads.

A step emits 1 + (the deeper of what the chain and the heads' nodes hold of the continuation). With
a chain of m tokens, depth d is reached by the chain with share lookup[d]; a head's path of depth d
adds the share where the chain does not reach that depth: its `unlooked` value for d <= m, its whole
value below the chain's end. So for every m the worth of a tree is a sum over its nodes, and the
best nodes of the heads are found exactly. A child can be worth more than its parent here (the chain
fails behind the parent), so the best trees are not prefixes of one list: dynamic programming over
the depth-first order picks them, a node only with its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.trees.search import ValuedPaths
from specdeft.trees.token_tree import TokenTree
from specdeft.trees.topology import RankPath


class Mix(NamedTuple):
    """A tree and the tokens a step it is expected to bring, the bonus token included."""

    tree: TokenTree
    tau: float


def best_mix(valued: ValuedPaths, num_nodes: int) -> Mix:
    """The tree of `num_nodes` nodes, lookup chain and root included, with the largest expected tau;
    of equal ones that with the shortest chain.

    Raises ValueError when num_nodes is below 1 or more than the values known allow.
    """
    most = 1 + len(valued.paths) + len(valued.lookup)
    if not 1 <= num_nodes <= most:
        raise ValueError(
            f"a tree of {num_nodes} nodes cannot be chosen from {len(valued.paths)} valued paths "
            f"and a lookup chain of up to {len(valued.lookup)}; give a size from 1 to {most}"
        )
    shortest = max(0, num_nodes - 1 - len(valued.paths))
    lengths = range(shortest, min(len(valued.lookup), num_nodes - 1) + 1)
    taus = [_expected(valued, length, num_nodes) for length in lengths]
    best = max(range(len(taus)), key=taus.__getitem__)  # the first of equal ones
    return Mix(_tree(valued, lengths[best], num_nodes), taus[best])


def expected_mix(valued: ValuedPaths, tree: TokenTree) -> float:
    """Expected tokens a step of any tree; nodes that the values do not cover add nothing."""
    chain = tree.num_lookup
    worth = dict(zip(valued.paths, _worth_beside(valued, chain), strict=True))
    return (
        1.0
        + sum(valued.lookup[:chain])
        + sum(worth.get(path, 0.0) for path in tree.head_tree.paths[1:])
    )


def share_of_nodes(valued: ValuedPaths, tree: TokenTree) -> list[float]:
    """How often each of the N nodes' guesses come true, 1 for the root; 0 where it is not known."""
    known = dict(zip(valued.paths, valued.values, strict=True))
    lookup = [*valued.lookup, *[0.0] * tree.num_lookup][: tree.num_lookup]
    return [1.0, *lookup, *(known.get(path, 0.0) for path in tree.head_tree.paths[1:])]


def _expected(valued: ValuedPaths, chain: int, num_nodes: int) -> float:
    best = _plan(valued, chain).best
    return 1.0 + sum(valued.lookup[:chain]) + float(best[0, num_nodes - 1 - chain])


def _tree(valued: ValuedPaths, chain: int, num_nodes: int) -> TokenTree:
    plan = _plan(valued, chain)
    node, left = 0, num_nodes - 1 - chain
    taken: list[RankPath] = []
    while left:
        end = plan.ends[node]
        # The same comparison that the table was filled by.
        if plan.best[end, left] >= plan.worth[node] + plan.best[node + 1, left - 1]:
            node = end
        else:
            taken.append(plan.paths[node])
            node, left = node + 1, left - 1
    return TokenTree.from_paths(taken).with_lookup(chain)


class _Plan(NamedTuple):
    """Per node in depth-first order; best[i, k]: the worth of the best k nodes from i on, -inf
    where there are not so many."""

    paths: tuple[RankPath, ...]
    ends: Sequence[int]
    worth: Sequence[float]
    best: Tensor


@lru_cache(maxsize=64)
def _plan(valued: ValuedPaths, chain: int) -> _Plan:
    whole = TokenTree.from_paths(valued.paths)
    paths = whole.paths[1:]
    value_of = dict(zip(valued.paths, _worth_beside(valued, chain), strict=True))
    worth = [value_of[path] for path in paths]
    ends = [end - 1 for end in whole.subtree_ends[1:]]
    best = torch.full((len(paths) + 1, len(paths) + 1), float("-inf"), dtype=torch.float64)
    best[:, 0] = 0.0
    for node in reversed(range(len(paths))):
        torch.maximum(best[ends[node], 1:], worth[node] + best[node + 1, :-1], out=best[node, 1:])
    return _Plan(paths, ends, worth, best)


def _worth_beside(valued: ValuedPaths, chain: int) -> list[float]:
    """What each path is worth beside a lookup chain of so many tokens."""
    unlooked = valued.unlooked or valued.values
    return [
        beside if len(path) <= chain else value
        for path, value, beside in zip(valued.paths, valued.values, unlooked, strict=True)
    ]
