"""A plan against its forest, term by term: what must hold for any kernel to be right."""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.trees.forest import KVForest
from specdeft.trees.mask import ancestors_from_mask_words, num_words
from specdeft.trees.plan import AttentionPlan, ItemField


def coverage(plan: AttentionPlan) -> Tensor:
    """int64 [Q, S]: how often the plan computes each pair of query row and flattened token.

    Reads the plan as a kernel would, item by item. Quadratic: for tests.
    """
    times = torch.zeros(plan.num_queries, plan.slots.shape[0], dtype=torch.int64)
    for item in plan.items.tolist():
        queries = slice(item[ItemField.QUERY_BEGIN], item[ItemField.QUERY_END])
        begin, shared_end, end = item[:3]
        times[queries, begin:shared_end] += 1
        if shared_end < end:
            row = item[ItemField.MASK_ROW]
            words = plan.mask_words[row : row + end - shared_end]
            bits = ancestors_from_mask_words(words, plan.num_words * 64)
            times[queries, shared_end:end] += bits[:, : queries.stop - queries.start].t()
    by_row = torch.empty_like(times)
    by_row[plan.query_rows.long()] = times
    return by_row


def check_plan(plan: AttentionPlan, forest: KVForest) -> None:
    """Raise ValueError naming the first rule of `AttentionPlan` that the plan breaks.

    The main one: every pair of a query and a token it sees is computed exactly once, every other
    pair never.
    """
    _require(plan.slots is forest.slots or torch.equal(plan.slots, forest.slots), "slots differ")
    rows = plan.query_rows.sort().values
    _require(rows.tolist() == list(range(forest.num_queries)), "query_rows is not a permutation")
    _check_tiles(plan)
    _check_items(plan)
    _check_masks(plan)
    times = coverage(plan)
    wrong = (times != forest.visible().long()).nonzero()
    if len(wrong):
        query, token = wrong[0].tolist()
        sees = "sees" if forest.visible()[query, token] else "does not see"
        raise ValueError(
            f"query {query} {sees} token {token} but the plan computes the pair "
            f"{int(times[query, token])} times"
        )


def _check_tiles(plan: AttentionPlan) -> None:
    begins = plan.tile_begins
    sizes = begins.diff()
    _require(begins[0] == 0 and begins[-1] == plan.num_queries, "tiles do not cut the queries")
    _require(bool(((sizes > 0) & (sizes <= plan.tile_queries)).all()), "a tile has a wrong size")
    item_begins = plan.tile_item_begins
    _require(item_begins[0] == 0 and item_begins[-1] == plan.num_items, "tile lists miss items")
    owner = torch.repeat_interleave(item_begins.diff())
    listed = plan.tile_items.long()
    tile_of = plan.items[:, ItemField.TILE].long()
    _require(torch.equal(tile_of[listed], owner), "an item is in another tile's list")
    _require(torch.equal(listed, tile_of.argsort(stable=True)), "a tile's list is out of order")


def _check_items(plan: AttentionPlan) -> None:
    items = plan.items.long()
    begin, shared_end, end, query_begin, query_end, tile, partial_row, _ = items.unbind(1)
    tiles = plan.tile_begins.long()
    _require(bool((begin < end).all()), "an item has no tokens")
    _require(bool(((begin <= shared_end) & (shared_end <= end)).all()), "SHARED_END is outside")
    _require(bool((query_begin < query_end).all()), "an item has no queries")
    inside = (tiles[tile] <= query_begin) & (query_end <= tiles[tile + 1])
    _require(bool(inside.all()), "an item reaches beyond its tile")
    counts = query_end - query_begin
    _require(torch.equal(partial_row, counts.cumsum(0) - counts), "partial rows overlap or gap")
    _require(plan.num_partial_rows == int(counts.sum()), "num_partial_rows is wrong")


def _check_masks(plan: AttentionPlan) -> None:
    _require(plan.num_words == num_words(plan.tile_queries), "mask words have a wrong width")
    items = plan.items.long()
    num_masked = items[:, ItemField.KV_END] - items[:, ItemField.SHARED_END]
    _require(
        plan.mask_words.shape[0] == int(num_masked.sum()), "mask rows are missing or left over"
    )
    expected = torch.where(num_masked > 0, num_masked.cumsum(0) - num_masked, 0)
    _require(torch.equal(items[:, ItemField.MASK_ROW], expected), "mask rows overlap or gap")
    bits = ancestors_from_mask_words(plan.mask_words, plan.num_words * 64)
    counts = items[:, ItemField.QUERY_END] - items[:, ItemField.QUERY_BEGIN]
    limit = counts.repeat_interleave(num_masked)
    past = torch.arange(bits.shape[1]) >= limit.unsqueeze(1)
    _require(not bool((bits & past).any()), "a mask bit past the item's queries is set")


def _require(holds: bool | Tensor, rule: str) -> None:
    if not bool(holds):
        raise ValueError(f"the plan is broken: {rule}")
