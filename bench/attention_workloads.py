"""What `specdeft bench attention` measures on: token trees of speculation, forests of the paper.

A workload is a forest with queries and a head shape. Speculation is the special forest of one
sequence and a token tree below it, which our speculation kernel and FlashInfer take as a page table
and a mask; every other method takes any forest. A batch is that forest for sequences that begin
with the same tokens, each with a token tree of one shape.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdeft.kernels.baselines.prepared import HeadShape
from specdeft.trees.forest import KVForest
from specdeft.trees.token_tree import TokenTree

FEW_SHOT = "few-shot-"
_PROMPT_TOKENS, _BRANCH_TOKENS = 4000, 400  # the paper's few-shot workload, section 4


class Workload(NamedTuple):
    """One attention problem; `tree` and `num_context` where it is a token tree of speculation.

    num_own: where it is a batch, committed tokens of each sequence behind the `num_context` that
    all of them begin with; batch: how many sequences.
    """

    name: str
    shape: HeadShape
    forest: KVForest
    num_context: int | None = None
    tree: TokenTree | None = None
    batch: int = 1
    num_own: int = 0

    @property
    def heads(self) -> str:
        """Hq/Hkv/D."""
        return f"{self.shape.query_heads}/{self.shape.kv_heads}/{self.shape.head_dim}"


def parse_heads(text: str, dtype: torch.dtype) -> HeadShape:
    """ "32/8/128" as a shape; the scale is D ** -0.5.

    Raises:
        ValueError: it is no such text, or the heads do not fit each other.
    """
    try:
        query_heads, kv_heads, head_dim = (int(part) for part in text.split("/"))
    except ValueError as error:
        raise ValueError(f"--heads {text!r} is not HQ/HKV/D, as in 32/8/128") from error
    if min(query_heads, kv_heads, head_dim) < 1 or query_heads % kv_heads:
        raise ValueError(f"--heads {text!r}: HKV must divide HQ, and all be 1 or more")
    return HeadShape(query_heads, kv_heads, head_dim, dtype, head_dim**-0.5)


def speculation(shape: HeadShape, num_context: int, tree: TokenTree) -> Workload:
    """The committed tokens as one node, each tree token as a node of one below it, contiguous."""
    total = num_context + tree.num_nodes
    forest = KVForest(
        torch.tensor([-1, *(parent + 1 for parent in tree.parents)]),
        torch.tensor([num_context, *([1] * tree.num_nodes)]),
        torch.arange(total, dtype=torch.int32),
        torch.arange(1, tree.num_nodes + 1),
    )
    return Workload(str(num_context), shape, forest, num_context, tree)


def shared_prefix(
    shape: HeadShape, num_shared: int, num_own: int, batch: int, tree: TokenTree
) -> Workload:
    """Sequences behind common tokens: a node for those, then each sequence's own and its tree."""
    parents, lengths = [-1], [num_shared]
    queries: list[int] = []
    for _ in range(batch):
        own = len(parents)
        parents += [0, *(own + 1 + parent for parent in tree.parents)]
        lengths += [num_own, *([1] * tree.num_nodes)]
        queries += range(own + 1, len(parents))
    forest = _contiguous(parents, lengths, queries)
    name = f"{num_shared}+{num_own} x {batch}"
    return Workload(name, shape, forest, num_shared, tree, batch, num_own)


def random_tree(num_nodes: int) -> TokenTree:
    """A seeded depth-first tree with chains and fans, as searched trees have."""
    draw = random.Random(num_nodes)
    parents = [-1]
    for node in range(1, num_nodes):
        above = node - 1
        while above > 0 and draw.random() < 0.5:
            above = parents[above]
        parents.append(above)
    return TokenTree.from_parents(parents)


def named_forest(name: str, shape: HeadShape) -> Workload:
    """few-shot-B: B branches below one prompt; else a file of recorded trees at its widest step.

    Raises:
        ValueError: it is neither, or the file holds no complete tree.
    """
    if name.startswith(FEW_SHOT):
        branches = name.removeprefix(FEW_SHOT)
        if not branches.isdecimal() or not int(branches):
            raise ValueError(f"--forests {name!r}: few-shot-B needs a number of branches")
        return Workload(name, shape, few_shot_forest(int(branches)))
    path = Path(name)
    try:
        trees = json.loads(path.read_text(encoding="utf-8"))["trees"]
        nodes = next(tree["nodes"] for tree in trees if not tree["incomplete"])
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise ValueError(
            f"--forests {name!r} is neither few-shot-B nor a JSON file of recorded trees with a "
            "complete one"
        ) from error
    return Workload(path.stem, shape, recorded_forest(nodes))


def few_shot_forest(branches: int) -> KVForest:
    """A prompt of 4,000 tokens and branches of 400, each asked by one query."""
    return _contiguous(
        [-1] + [0] * branches,
        [_PROMPT_TOKENS] + [_BRANCH_TOKENS] * branches,
        list(range(1, branches + 1)),
    )


def recorded_forest(nodes: list[list[Any]]) -> KVForest:
    """A recorded generation [[tokens, start step, children], ..] at the step with most live leaves.

    A node grows by a token a step from its start on; when it is full its children start, or it is
    cut away if it has none. What no live leaf hangs below is not in the cache any more.
    """
    parents = [-1] * len(nodes)
    for index, (_, _, children) in enumerate(nodes):
        for child in children:
            parents[child] = index
    starts = [start for _, start, _ in nodes]
    ends = [start + tokens - 1 for tokens, start, _ in nodes]
    changes = [0] * (max(ends) + 2)
    for start, end in zip(starts[1:], ends[1:], strict=True):
        if end >= start:
            changes[start] += 1
            changes[end + 1] -= 1
    alive = torch.tensor(changes).cumsum(0)
    step = int(alive.argmax())
    live = [i for i in range(1, len(nodes)) if starts[i] <= step <= ends[i]]
    kept: set[int] = set()
    for leaf in live:
        node = leaf
        while node >= 0:
            kept.add(node)
            node = parents[node]
    order = sorted(kept, key=lambda node: (starts[node], node))
    number = {node: place for place, node in enumerate(order)}
    return _contiguous(
        [number.get(parents[node], -1) for node in order],
        [min(ends[node], step) - starts[node] + 1 for node in order],
        [number[node] for node in live],
    )


def _contiguous(parents: list[int], lengths: list[int], queries: list[int]) -> KVForest:
    """Nodes depth-first, their tokens one after the other in the pool."""
    begins = torch.tensor([0, *lengths]).cumsum(0).tolist()
    runs = [range(begins[i], begins[i + 1]) for i in range(len(lengths))]
    forest = KVForest.from_nodes(parents, runs, queries)
    slots = torch.arange(forest.total_tokens, dtype=torch.int32)
    return KVForest(forest.parents, forest.num_tokens, slots, forest.query_nodes)


def random_inputs(workload: Workload, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q [Q, Hq, D], k and v [S, Hkv, D], tokens in flattened order."""
    shape, forest = workload.shape, workload.forest
    kv = (forest.total_tokens, shape.kv_heads, shape.head_dim)
    queries = (forest.num_queries, shape.query_heads, shape.head_dim)
    q, k, v = (torch.randn(size, device=device) for size in (queries, kv, kv))
    return q.to(shape.dtype), k.to(shape.dtype), v.to(shape.dtype)
