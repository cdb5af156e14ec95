"""Plans from a KV forest: DeFT-Node, DeFT-Node-Chunk and DeFT-Flatten by one routine.

Algorithms: Yao et al., "DeFT: Decoding with Flash Tree-Attention" (arXiv 2404.00242), section 3.
The three differ in where they cut the flattened KV:

    Node         at the nodes' borders
    Node-Chunk   there, and every `chunk_tokens` inside a node
    Flatten      every `chunk_tokens`, whatever the borders

Everything after the cut is shared. Cuts and node borders together give segments: tokens of one node
in one chunk, all seen by the same contiguous range of queries. A work item is a run of segments of
one chunk that a query tile sees, trimmed to the queries they have in common. Vectorised over
segments and tiles; nothing loops over tokens or queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.trees.forest import KVForest
from specdeft.trees.mask import WORD_BITS, num_words
from specdeft.trees.plan import AttentionPlan, Partition

# Tokens a tile does not see are skipped when there are this many in a row. Skipping makes one more
# partial: written and read, 16 queries x 4 heads in fp32 are the bytes of 128 tokens of bf16 KV.
MAX_GAP_TOKENS = 128


def build_plan(
    forest: KVForest, partition: Partition, *, tile_queries: int, chunk_tokens: int | None = None
) -> AttentionPlan:
    """Plan of one attention step.

    tile_queries: most queries of one work item; rows of a kernel tile / query heads per KV head.
    chunk_tokens: tokens of a chunk, see `balanced_chunk_tokens`; None for the Node partition.
    Raises ValueError for sizes below 1 and for a chunk size where there is none or none is given.
    """
    if tile_queries < 1:
        raise ValueError(f"tile_queries is {tile_queries}; a tile holds 1 query or more")
    cuts = _cuts(forest, partition, chunk_tokens)
    tile_begins = query_tiles(forest, tile_queries)
    segments = _segments(forest, cuts)
    items = _items(segments, tile_begins)
    shared_ends, mask_rows, words = _masks(segments, items, num_words(tile_queries))
    num_rows = items.query_end - items.query_begin
    partial_ends = num_rows.cumsum(0)
    columns = [
        segments.begin.take(items.first),
        shared_ends,
        segments.end.take(items.last),
        items.query_begin,
        items.query_end,
        items.tile,
        partial_ends - num_rows,
        mask_rows,
    ]
    return AttentionPlan(
        partition=partition,
        tile_queries=tile_queries,
        slots=forest.slots,
        query_rows=forest.query_order.to(torch.int32),
        items=torch.stack(columns, dim=1).to(torch.int32),
        mask_words=words,
        tile_begins=tile_begins.to(torch.int32),
        tile_item_begins=items.tile_item_begins.to(torch.int32),
        tile_items=items.tile_items.to(torch.int32),
        num_partial_rows=int(num_rows.sum()),
    )


def query_tiles(forest: KVForest, tile_queries: int) -> Tensor:
    """int64 [T + 1]: borders of the query tiles, in places of the depth-first query order.

    Each root's queries are cut into equal tiles of at most `tile_queries`: queries of different
    roots share no token, so a tile over both would only be masked work.
    """
    roots = forest.parents < 0
    borders: list[int] = []
    for begin, end in zip(
        forest.query_begins[roots].tolist(), forest.query_ends[roots].tolist(), strict=True
    ):
        count = end - begin
        num_tiles = -(-count // tile_queries)
        # Tile i of n starts at floor(i * count / n): sizes differ by one at most.
        borders += [begin + i * count // num_tiles for i in range(num_tiles)]
    return torch.tensor([*borders, forest.num_queries])


def balanced_chunk_tokens(
    forest: KVForest,
    *,
    tile_queries: int,
    num_kv_heads: int,
    num_programs: int,
    block_tokens: int,
) -> int:
    """Chunk size at which a Flatten plan fills `num_programs` programs once, with no small rest.

    num_programs: kernel programs that run at the same time (SMs x programs per SM). block_tokens:
    tokens of a kernel's inner step; the result is a multiple of it. A chunk makes an item for each
    tile that sees it; their mean number over all tokens says how many chunks fill the programs.
    """
    tile_begins = query_tiles(forest, tile_queries)
    first = torch.bucketize(forest.query_begins, tile_begins[1:], right=True)
    past = torch.bucketize(forest.query_ends, tile_begins[:-1])
    tiles = torch.where(forest.query_ends > forest.query_begins, past - first, 0)
    tile_tokens = max(int((forest.num_tokens * tiles).sum()), 1)
    items_per_head = max(num_programs // num_kv_heads, 1)
    num_chunks = max(items_per_head * forest.total_tokens // tile_tokens, 1)
    num_blocks = -(-forest.total_tokens // (num_chunks * block_tokens))
    return max(num_blocks, 1) * block_tokens


def _cuts(forest: KVForest, partition: Partition, chunk_tokens: int | None) -> Tensor:
    """int64 [C]: flattened index of the first token of each chunk, ascending; none is empty."""
    if partition is Partition.NODE:
        if chunk_tokens is not None:
            raise ValueError(
                f"chunk_tokens is {chunk_tokens} but the Node partition does not cut nodes; "
                "leave it out or choose Node-Chunk"
            )
        return forest.token_begins[forest.num_tokens > 0]
    if chunk_tokens is None or chunk_tokens < 1:
        raise ValueError(
            f"chunk_tokens is {chunk_tokens}; the {partition.value} partition needs 1 or more"
        )
    if partition is Partition.FLATTEN:
        return torch.arange(0, forest.total_tokens, chunk_tokens)
    node_of, chunk_in_node = _spread((forest.num_tokens + chunk_tokens - 1) // chunk_tokens)
    return forest.token_begins[node_of] + chunk_in_node * chunk_tokens


class _Segments(NamedTuple):
    """Tokens of one node in one chunk, in flattened order; int64 [G] each.

    begin, end: flattened tokens. chunk_begin: first token of its chunk. query_begin, query_end:
    places of the queries that see it, maybe none.
    """

    begin: Tensor
    end: Tensor
    chunk_begin: Tensor
    query_begin: Tensor
    query_end: Tensor


def _segments(forest: KVForest, cuts: Tensor) -> _Segments:
    node_begins = forest.token_begins[forest.num_tokens > 0]
    begin = torch.cat([node_begins, cuts]).unique()
    end = torch.cat([begin[1:], forest.token_ends[-1:]]) if len(begin) else begin
    node = torch.bucketize(begin, forest.token_ends, right=True)
    chunk_begin = cuts.take(torch.bucketize(begin, cuts, right=True) - 1)
    return _Segments(
        begin, end, chunk_begin, forest.query_begins.take(node), forest.query_ends.take(node)
    )


class _Items(NamedTuple):
    """Work items in the order of the plan; int64 [I] each.

    tile. first, last: segments. query_begin, query_end: what the tile and the segments have in
    common. tile_items [I], tile_item_begins [T + 1]: the items of each tile. fully_shared: bool,
    every token is seen by every query.
    """

    tile: Tensor
    first: Tensor
    last: Tensor
    query_begin: Tensor
    query_end: Tensor
    fully_shared: Tensor
    tile_items: Tensor
    tile_item_begins: Tensor


def _items(segments: _Segments, tile_begins: Tensor) -> _Items:
    """Runs of segments that a tile sees: an item for each chunk, tile and run."""
    segment, tile = _pairs(segments, tile_begins)
    low = torch.maximum(segments.query_begin.take(segment), tile_begins.take(tile))
    high = torch.minimum(segments.query_end.take(segment), tile_begins.take(tile + 1))
    starts = ~_continues(segments, segment, tile)
    start = starts.nonzero().squeeze(1)
    run = starts.cumsum(0) - 1
    num_items = len(start)
    first, item_tile, query_begin = segment.take(start), tile.take(start), low.take(start)
    last = segment.take(torch.cat([start, start.new_tensor([len(segment)])])[1:] - 1)
    query_end = high.new_zeros(num_items).scatter_reduce_(0, run, high, "amax")
    covers = (low == query_begin.take(run)) & (high == query_end.take(run))
    num_covering = run.new_zeros(num_items).index_add_(0, run, covers.long())
    # So far tile by tile; neighbours in the plan are items that read the same tokens.
    order = first.argsort(stable=True)
    tile_items = torch.empty_like(order)
    tile_items[order] = torch.arange(num_items)
    per_tile = item_tile.bincount(minlength=len(tile_begins) - 1)
    return _Items(
        item_tile.take(order),
        first.take(order),
        last.take(order),
        query_begin.take(order),
        query_end.take(order),
        (num_covering == last - first + 1).take(order),
        tile_items,
        torch.cat([per_tile.new_zeros(1), per_tile.cumsum(0)]),
    )


def _pairs(segments: _Segments, tile_begins: Tensor) -> tuple[Tensor, Tensor]:
    """Segment and tile of each pair that have queries in common, sorted by tile, then segment."""
    first = torch.bucketize(segments.query_begin, tile_begins[1:], right=True)
    past = torch.bucketize(segments.query_end, tile_begins[:-1])
    seen = segments.query_end > segments.query_begin
    segment, offset = _spread(torch.where(seen, past - first, 0))
    tile, order = (first.take(segment) + offset).sort(stable=True)
    return segment.take(order), tile


def _continues(segments: _Segments, segment: Tensor, tile: Tensor) -> Tensor:
    """bool, one a pair: it goes on with the pair before: same tile, same chunk, no wide gap."""
    nearest = torch.maximum(segments.chunk_begin, segments.begin - MAX_GAP_TOKENS)
    near = segments.end.take(segment[:-1]) > nearest.take(segment[1:])
    inner = (tile[1:] == tile[:-1]) & near
    return torch.cat([inner.new_zeros(min(len(segment), 1)), inner])


def _masks(segments: _Segments, items: _Items, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """SHARED_END [I], MASK_ROW [I] and the mask words int64 [R, width].

    Queries that see a segment are a range, so a word is a difference of two low masks, computed
    once a segment and repeated for its tokens.
    """
    kv_ends = segments.end.take(items.last)
    masked = (~items.fully_shared).nonzero().squeeze(1)
    which, offset = _spread((items.last - items.first).take(masked) + 1)
    item = masked.take(which)
    segment = items.first.take(item) + offset
    first_query = items.query_begin.take(item)
    num_queries = items.query_end.take(item) - first_query
    low = (segments.query_begin.take(segment) - first_query).clamp(min=0)
    high = torch.minimum(segments.query_end.take(segment) - first_query, num_queries)

    begin = segments.begin.take(segment)
    partly = ((low > 0) | (high < num_queries)).nonzero().squeeze(1)
    shared_ends = kv_ends.scatter_reduce(0, item.take(partly), begin.take(partly), "amin")
    num_masked = kv_ends - shared_ends
    mask_rows = torch.where(num_masked > 0, num_masked.cumsum(0) - num_masked, 0)

    behind = (begin >= shared_ends.take(item)).nonzero().squeeze(1)
    word = torch.arange(width) * WORD_BITS
    words = _low_bits(high.take(behind).unsqueeze(1) - word)
    words &= ~_low_bits(low.take(behind).unsqueeze(1) - word)
    lengths = (segments.end.take(segment) - begin).take(behind)
    return shared_ends, mask_rows, _repeat_rows(words, lengths, int(num_masked.sum()))


def _repeat_rows(rows: Tensor, times: Tensor, total: int) -> Tensor:
    """Row r of [n, W] repeated times[r] times: [total, W]."""
    # Column by column: single numbers are gathered four times faster than rows.
    row = torch.repeat_interleave(times.to(torch.int32), output_size=total)
    out = torch.empty(total, rows.shape[1], dtype=rows.dtype)
    for source, target in zip(rows.unbind(1), out.unbind(1), strict=True):
        torch.index_select(source, 0, row, out=target)
    return out


def _low_bits(count: Tensor) -> Tensor:
    """Words whose `count` lowest bits are set; counts are cut to 0 .. 64."""
    # A shift by 64 is undefined, so a full word is chosen, not computed.
    partial = (1 << count.clamp(0, WORD_BITS - 1)) - 1
    return torch.where(count >= WORD_BITS, -1, partial)


def _spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Owner and running number of each of counts[0] + counts[1] + .. things, owner by owner."""
    ends = counts.cumsum(0)
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (ends - counts).take(owner)
