"""What every attention method of a comparison is: prepared once for a forest, then run per layer.

`prepare_*(forest, shape, device)` does everything that a step does once for all layers and heads
(plans, masks, slot tables) and returns a `Prepared`, whose `run(q, k_pool, v_pool)` is one layer's
attention without a host read, fit for a CUDA graph. Methods differ in nothing else, so one
harness checks and times them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.trees.plan import KVForest


class HeadShape(NamedTuple):
    """Hq, Hkv, D, the dtype of q, K and V, and the score scale."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float

    @property
    def group(self) -> int:
        """G: query heads per KV head."""
        return self.query_heads // self.kv_heads


class Prepared(NamedTuple):
    """A method ready to run: name, and run(q [Q, Hq, D], k_pool, v_pool [S, Hkv, D]) -> out."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]


def contiguous_kv(forest: KVForest, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Pool -> the forest's tokens [S, Hkv, D] in flattened order: a view where the slots are a run.

    Methods without page tables are granted the contiguous cache that their users have; on
    scattered slots they pay for the gather, inside `run`.
    """
    slots = forest.slots.long()
    first = int(slots[0]) if slots.numel() else 0
    if torch.equal(slots, torch.arange(first, first + slots.numel())):
        stop = first + slots.numel()
        return lambda pool: pool[first:stop]
    index = slots.to(device)
    return lambda pool: pool.index_select(0, index)


def folded(q: Tensor, kv_heads: int) -> Tensor:
    """q [Q, Hq, D] -> rows [Hkv, Q * G, D]."""
    queries, _, dim = q.shape
    return q.view(queries, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)


def unfolded(rows: Tensor, query_heads: int) -> Tensor:
    """rows [Hkv, Q * G, D] -> [Q, Hq, D]."""
    kv_heads, num_rows, dim = rows.shape
    queries = num_rows * kv_heads // query_heads
    heads = rows.view(kv_heads, queries, -1, dim).transpose(0, 1)
    return heads.reshape(queries, query_heads, dim)
