"""The attention plan: every index tensor the kernels read, and nothing else.

One kernel family serves DeFT-Node, DeFT-Node-Chunk and DeFT-Flatten: the partition changes only the
plan (`partition.build_plan`). A plan is made once a step and used by all layers and heads.

How a kernel uses it, for each KV head:
1. Partials. Work item i takes the queries [QUERY_BEGIN, QUERY_END) and the tokens
   [KV_BEGIN, KV_END) and writes one row of partial output and natural-log sum of exponentials for
   each query (times the query heads of the group), first row PARTIAL_ROW. Query place p is row
   `query_rows[p]` of the query tensor; token t is cache slot `slots[t]`. Tokens before SHARED_END
   are seen by all queries of the item: no mask. Token t from SHARED_END on is seen by query place
   QUERY_BEGIN + j iff bit j % 64 of `mask_words[MASK_ROW + t - SHARED_END, j // 64]` is set.
2. Reduction. The queries of tile t, places [tile_begins[t], tile_begins[t + 1]), are reduced over
   the items `tile_items[tile_item_begins[t] : tile_item_begins[t + 1]]`, each where its query range
   holds the query. A query without any item sees nothing: output 0, log-sum-exp -inf. A partial row
   may see nothing of its item (all its bits clear).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.trees.forest import KVForest, PathTable

__all__ = ["AttentionPlan", "ItemField", "KVForest", "Partition", "PathTable", "PlanCounts"]


class Partition(Enum):
    """How the flattened KV is cut into work."""

    NODE = "node"
    NODE_CHUNK = "node-chunk"
    FLATTEN = "flatten"


class ItemField(IntEnum):
    """Columns of `AttentionPlan.items`: 8 int32, one 32-byte load an item."""

    KV_BEGIN = 0
    SHARED_END = 1
    KV_END = 2
    QUERY_BEGIN = 3
    QUERY_END = 4
    TILE = 5
    PARTIAL_ROW = 6
    MASK_ROW = 7


class PlanCounts(NamedTuple):
    """What a plan makes a kernel move, in numbers of things, for one KV head of one layer.

    kv_tokens: tokens read by all items, repeats included. unique_tokens: tokens read at least once.
    masked_tokens: how many of kv_tokens go through mask words. scores: query-token pairs computed,
    visible or not. partial_rows: rows of partial output, per query head of the group.
    mask_words: 64-bit words stored.
    """

    items: int
    kv_tokens: int
    unique_tokens: int
    masked_tokens: int
    scores: int
    partial_rows: int
    mask_words: int


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Index tensors of one attention step over a KV forest; all on one device.

    I items, T query tiles, Q queries, S tokens, R mask rows, W words a row.

    partition: how it was cut. tile_queries: most queries an item or tile holds.
    slots: int32 [S]; cache slot of each flattened token (the forest's own tensor).
    query_rows: int32 [Q]; row of the query tensor at each place of the depth-first query order.
    items: int32 [I, 8]; columns `ItemField`, sorted by KV_BEGIN, then by tile, so that
        items that read the same tokens are neighbours. KV_BEGIN <= SHARED_END <= KV_END,
        KV_BEGIN < KV_END, QUERY_BEGIN < QUERY_END, both query numbers inside the item's tile.
        MASK_ROW is 0 and not to be read when SHARED_END == KV_END.
    mask_words: int64 [R, W], W = ceil(tile_queries / 64); R = sum of KV_END - SHARED_END. Bits at
        and past the item's query count are 0. Bit 63 is the sign bit.
    tile_begins: int32 [T + 1]; tiles cut [0, Q) and never hold queries of two roots.
    tile_item_begins: int32 [T + 1], tile_items: int32 [I]: items of each tile, ascending. A tile
        may have none.
    num_partial_rows: sum of the items' query counts; PARTIAL_ROW ranges cut [0, num_partial_rows).
    """

    partition: Partition
    tile_queries: int
    slots: Tensor
    query_rows: Tensor
    items: Tensor
    mask_words: Tensor
    tile_begins: Tensor
    tile_item_begins: Tensor
    tile_items: Tensor
    num_partial_rows: int

    @property
    def num_items(self) -> int:
        """I: the grid of the partials kernel, times KV heads."""
        return self.items.shape[0]

    @property
    def num_tiles(self) -> int:
        """T."""
        return self.tile_begins.shape[0] - 1

    @property
    def num_queries(self) -> int:
        """Q."""
        return self.query_rows.shape[0]

    @property
    def num_words(self) -> int:
        """W."""
        return self.mask_words.shape[1]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> AttentionPlan:
        """The plan with all tensors on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value.to(device, non_blocking=non_blocking)
        return AttentionPlan(**values)

    def counts(self) -> PlanCounts:
        """Totals for IO accounting; counted from the items, not by formula."""
        items = self.items.long().cpu()
        kv_begin, shared_end, kv_end = items[:, 0], items[:, 1], items[:, 2]
        tokens = kv_end - kv_begin
        queries = items[:, ItemField.QUERY_END] - items[:, ItemField.QUERY_BEGIN]
        change = torch.zeros(self.slots.shape[0] + 1, dtype=torch.int64)
        change.index_add_(0, kv_begin, torch.ones_like(kv_begin))
        change.index_add_(0, kv_end, -torch.ones_like(kv_end))
        return PlanCounts(
            items=self.num_items,
            kv_tokens=int(tokens.sum()),
            unique_tokens=int((change.cumsum(0) > 0).sum()),
            masked_tokens=int((kv_end - shared_end).sum()),
            scores=int((tokens * queries).sum()),
            partial_rows=self.num_partial_rows,
            mask_words=self.mask_words.numel(),
        )
