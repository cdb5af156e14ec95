"""Attention path by path: Flash-Decoding on contiguous copies, Radix attention on shared pages.

Every query reads all tokens of its own path; what paths share is read once per query. Here both are
the forest kernels on a forest of Q roots whose only node is the path, so each query is a group of
its own. They get tensor cores, the folded GQA group, balanced splits and the same merge, and differ
from DeFT in the grouping alone. (SGLang's kernel, which the paper timed, has none of the four.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.kernels.baselines.prepared import HeadShape, Prepared
from specdeft.trees.plan import AttentionPlan, KVForest


def path_forest(forest: KVForest, *, duplicate: bool) -> KVForest:
    """The forest as Q separate sequences; the caller plans it (Flatten, one query a tile).

    duplicate False: through the shared pool's slots (Radix). True: over pools made by
    `duplicated`, where each path is contiguous (Flash-Decoding).
    """
    table = forest.path_table()
    total = int(table.lengths.sum())
    columns = torch.arange(table.slots.shape[1])
    shared = table.slots[columns < table.lengths[:, None]]
    return KVForest(
        torch.full((forest.num_queries,), -1),
        table.lengths,
        torch.arange(total, dtype=torch.int32) if duplicate else shared,
        torch.arange(forest.num_queries),
    )


def duplicated(forest: KVForest, pool: Tensor) -> Tensor:
    """[sum of path lengths, Hkv, D]: every path's tokens written out, one path after the other."""
    slots = path_forest(forest, duplicate=False).slots
    return pool.index_select(0, slots.long().to(pool.device))


def prepare_plan(
    name: str, plan: AttentionPlan, shape: HeadShape, device: torch.device
) -> Prepared:
    """The forest kernels on a plan: DeFT's three partitions, and both methods above."""
    from specdeft.kernels.forest_attention import allocate_forest_scratch, forest_attention

    plan = plan.to(device)
    scratch = allocate_forest_scratch(
        plan, query_heads=shape.query_heads, head_dim=shape.head_dim, device=device
    )
    out = torch.empty(
        plan.num_queries, shape.query_heads, shape.head_dim, dtype=shape.dtype, device=device
    )

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        return forest_attention(
            q, k_pool, v_pool, plan, scale=shape.scale, scratch=scratch, out=out
        )[0]

    return Prepared(name, run)
