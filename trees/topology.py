"""Checks and walks over parent lists and rank paths: plain Python, shared by the tree classes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise, product

from specdeft.trees.whole_numbers import whole_numbers

RankPath = tuple[int, ...]

# A step never verifies this many tokens; the limit keeps a typing slip from filling the memory.
MAX_NODES = 4096


def check_parents(parents: Sequence[int]) -> None:
    """Raise ValueError unless `parents` is one tree, root first, parents before children."""
    if not parents:
        raise ValueError("the tree has no nodes; parents starts with -1 for the root")
    if len(parents) > MAX_NODES:
        raise ValueError(
            f"the tree has {len(parents)} nodes; a step verifies {MAX_NODES} at most, prune it"
        )
    if parents[0] != -1:
        raise ValueError(f"the parent of node 0 is {parents[0]}; node 0 is the root, write -1")
    for node, parent in enumerate(parents[1:], start=1):
        if parent == -1:
            raise ValueError(f"node {node} is a second root; only node 0 has parent -1")
        if not 0 <= parent < len(parents):
            raise ValueError(
                f"the parent of node {node} is {parent}; give a node from 0 to {node - 1}"
            )
        if parent >= node:
            _raise_for_backward_edge(parents, node)


def check_lookup(parents: Sequence[int], ranks: Sequence[int], num_lookup: int) -> None:
    """Raise ValueError unless nodes 1 .. `num_lookup` are a chain of their own below the root."""
    end = num_lookup + 1
    if not 0 <= num_lookup < len(parents):
        raise ValueError(
            f"a lookup chain of {num_lookup} nodes does not fit a tree of {len(parents)} nodes; "
            f"give a number from 0 to {len(parents) - 1}"
        )
    is_chain = all(parents[node] == node - 1 and ranks[node] == -1 for node in range(end))
    if not is_chain or any(1 <= parent < end for parent in parents[end:]):
        raise ValueError(
            f"nodes 1 to {num_lookup} are not a lookup chain at the root with ranks -1 and nothing "
            "else below; add one to a tree with TokenTree.with_lookup"
        )


def _raise_for_backward_edge(parents: Sequence[int], node: int) -> None:
    """Say whether the edge from `node` to a later parent closes a cycle or is only out of order."""
    seen: list[int] = []
    current = node
    while 0 <= current < len(parents) and current not in seen:
        seen.append(current)
        current = parents[current]
    if current in seen:
        cycle = [*seen[seen.index(current) :], current]
        raise ValueError(
            f"nodes {' -> '.join(map(str, cycle))} form a cycle; every node must lead to the root"
        )
    raise ValueError(
        f"node {node} stands before its parent {parents[node]}; list parents before children"
    )


def check_paths(paths: Iterable[Sequence[int]], top_k: int | None = None) -> list[RankPath]:
    """The paths as tuples, each checked alone; raise ValueError naming the first bad one."""
    checked: dict[RankPath, None] = {}
    for number, given in enumerate(paths):
        path = whole_numbers(given, f"path {number}")
        if not path:
            raise ValueError("a path is empty; the root is implied, leave it out")
        if min(path) < 0:
            raise ValueError(f"path {list(path)} has a negative rank; ranks count from 0")
        if top_k is not None and max(path) >= top_k:
            raise ValueError(
                f"path {list(path)} has rank {max(path)}; with top_k {top_k} use 0 to {top_k - 1}"
            )
        if len(path) >= MAX_NODES or len(checked) >= MAX_NODES:
            raise ValueError(
                f"the paths make more than {MAX_NODES} nodes, what a step verifies at most; list "
                "fewer or shorter ones"
            )
        if path in checked:
            raise ValueError(f"path {list(path)} is listed twice; list every path once")
        checked[path] = None
    return list(checked)


def close_prefixes(paths: Sequence[RankPath]) -> list[RankPath]:
    """The paths and all their prefixes in lexicographic order; warns when prefixes were missing."""
    closed: set[RankPath] = set()
    for path in paths:
        closed.update(path[:end] for end in range(1, len(path) + 1))
        if len(closed) >= MAX_NODES:
            raise ValueError(
                f"the paths and their prefixes make more than {MAX_NODES} nodes, what a step "
                "verifies at most; list fewer or shorter ones"
            )
    num_added = len(closed) - len(paths)
    if num_added:
        # Level 3: the warning belongs to the line that called TokenTree.from_paths.
        warnings.warn(f"added {num_added} path prefixes the list leaves out", stacklevel=3)
    return sorted(closed)


def full_paths(widths: Sequence[int]) -> list[RankPath]:
    """All rank paths of the full tree with these widths, in lexicographic order."""
    if any(width < 1 for width in widths):
        raise ValueError(f"widths {list(widths)} hold a number below 1; give 1 or more a depth")
    num_nodes, level = 1, 1
    for width in widths:
        level *= width
        num_nodes += level
    if num_nodes > MAX_NODES:
        raise ValueError(
            f"widths {list(widths)} give {num_nodes} nodes; lower them to at most {MAX_NODES} nodes"
        )
    levels = (product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1))
    return sorted(path for level_paths in levels for path in level_paths)


def depth_first(
    parents: Sequence[int], ranks: Sequence[int] | None
) -> tuple[list[int], tuple[int, ...]]:
    """Depth-first order of a checked parent list, siblings by rank, and the ranks in that order.

    Without ranks, siblings keep their order and are ranked 0, 1, ... Raises ValueError for a
    negative or repeated rank among siblings. The root's rank in the result is -1.
    """
    children: list[list[int]] = [[] for _ in parents]
    rank_of = [-1] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        rank_of[node] = len(children[parent]) if ranks is None else ranks[node]
        if rank_of[node] < 0:
            raise ValueError(f"node {node} has rank {rank_of[node]}; ranks count from 0")
        children[parent].append(node)
    for parent, siblings in enumerate(children):
        siblings.sort(key=lambda node: rank_of[node])
        for left, right in pairwise(siblings):
            if rank_of[left] == rank_of[right]:
                raise ValueError(
                    f"children {left} and {right} of node {parent} both have rank {rank_of[left]}; "
                    "give siblings different ranks"
                )
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    return order, tuple(rank_of[node] for node in order)


def depths_of(parents: Sequence[int]) -> tuple[int, ...]:
    """Depth of every node of a checked parent list."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return tuple(depths)


def subtree_ends_of(parents: Sequence[int]) -> tuple[int, ...]:
    """One past the last descendant of every node of a depth-first parent list."""
    ends = list(range(1, len(parents) + 1))
    for node in range(len(parents) - 1, 0, -1):
        ends[parents[node]] = max(ends[parents[node]], ends[node])
    return tuple(ends)
