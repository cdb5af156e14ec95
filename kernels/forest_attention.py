"""Attention over a general KV forest: one kernel pair for the Node, Node-Chunk and Flatten plans.

The partition changes only the plan (`trees/plan.py` says what its tensors mean):

    partials   a program per work item and KV head: the item's queries, their G heads folded into
               rows, over its run of flattened tokens; blocks that every query sees come first,
               without mask; the slots of a block are read one block ahead
    reduction  tree-aware: a query is merged over exactly the items of its tile that hold it,
               several at a time, in the plan's order, so equal inputs give equal bits

Bytes moved: `io_cost.deft_bytes` counts them from the same plan.
Algorithm: Yao et al., "DeFT" (arXiv 2404.00242), sections 3 and 4.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks the launcher only.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.kernels.deft_flatten import Scratch, dot_precision
from specdeft.kernels.launch_shape import tile_shape
from specdeft.kernels.merge import MERGE_TILE, merge_warps, store_rows
from specdeft.kernels.tile_ops import NO_SCORE, capped, product, softmax_step
from specdeft.trees.plan import AttentionPlan

_STAGES = 2  # 3 leave the masked loop less than it needs, 4 cost a program of the SM
_MERGED_ITEMS = 8  # partials of a row merged at once


@triton.jit
def _query_bits(
    words_ptr, o_token, m_token, o_query, num_words, NUM_WORDS: tl.constexpr
):  # fmt: skip
    """bool [M, N]: bit o_query of the mask words of each token row o_token; True where unmasked."""
    visible = (o_query[:, None] < 0) & (o_token[None, :] < 0)
    for i_word in tl.static_range(NUM_WORDS):
        word = tl.load(words_ptr + o_token * num_words + i_word, mask=m_token, other=-1)
        low = word.to(tl.int32)[None, :]
        high = (word >> 32).to(tl.int32)[None, :]
        bit = o_query - i_word * 64
        half = tl.where((bit & 63)[:, None] < 32, low, high)
        seen = ((half >> (bit & 31)[:, None]) & 1) != 0
        visible = visible | (seen & ((bit >= 0) & (bit < 64))[:, None])
    return visible


@triton.jit
def _partials_kernel(
    q_ptr, k_ptr, v_ptr, part_out_ptr, part_lse_ptr,
    items_ptr, slots_ptr, query_rows_ptr, words_ptr, token_pos_ptr, query_pos_ptr,
    num_partial_rows, scale, cap, q_stride_n, q_stride_h, stride_slot, stride_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, NUM_WORDS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i_item = tl.program_id(1)
    i_head = tl.program_id(0)  # fastest: the heads of a slot are neighbours in memory
    p_item = items_ptr + i_item * 8
    kv_begin = tl.load(p_item)
    shared_end = tl.load(p_item + 1)
    kv_end = tl.load(p_item + 2)
    query_begin = tl.load(p_item + 3)
    num_queries = tl.load(p_item + 4) - query_begin
    partial_row = tl.load(p_item + 6).to(tl.int64)
    mask_row = tl.load(p_item + 7)

    o_row = tl.arange(0, ROWS)
    o_dim = tl.arange(0, DIM_PADDED)
    o_token = tl.arange(0, BLOCK)
    o_query = o_row // GROUP
    m_row = o_query < num_queries
    m_q = m_row[:, None] & (o_dim < DIM)[None, :]
    query_row = tl.load(query_rows_ptr + query_begin + o_query, mask=m_row, other=0).to(tl.int64)
    p_q = q_ptr + query_row * q_stride_n + (i_head * GROUP + o_row % GROUP) * q_stride_h
    b_q = tl.load(p_q[:, None] + o_dim[None, :], mask=m_q, other=0.0)
    b_acc = tl.zeros([ROWS, DIM_PADDED], dtype=tl.float32)
    b_max = tl.full([ROWS], NO_SCORE, dtype=tl.float32)
    b_sum = tl.zeros([ROWS], dtype=tl.float32)
    k_head = k_ptr + i_head.to(tl.int64) * stride_head + o_dim[None, :]
    v_head = v_ptr + i_head.to(tl.int64) * stride_head + o_dim[None, :]
    factor = scale
    if CAPPED:
        factor = 1.4426950408889634

    full_end = kv_begin
    if WINDOW == 0:
        full_end = kv_begin + (shared_end - kv_begin) // BLOCK * BLOCK
        slot = tl.load(slots_ptr + kv_begin + o_token, mask=kv_begin + o_token < kv_end, other=0)
        for at in range(kv_begin, full_end, BLOCK):
            p_kv = slot.to(tl.int64)[:, None] * stride_slot
            if DIM == DIM_PADDED:
                b_k = tl.load(k_head + p_kv)
                b_v = tl.load(v_head + p_kv)
            else:
                b_k = tl.load(k_head + p_kv, mask=(o_dim < DIM)[None, :], other=0.0)
                b_v = tl.load(v_head + p_kv, mask=(o_dim < DIM)[None, :], other=0.0)
            following = at + BLOCK + o_token
            slot = tl.load(slots_ptr + following, mask=following < kv_end, other=0)
            b_scores = product(b_q, tl.trans(b_k), PRECISION)
            if CAPPED:
                b_scores = capped(b_scores * scale, cap)
            b_acc, b_max, b_sum = softmax_step(
                b_acc, b_max, b_sum, b_scores, b_v, factor, PRECISION
            )
    slot = tl.load(slots_ptr + full_end + o_token, mask=full_end + o_token < kv_end, other=0)
    for at in range(full_end, kv_end, BLOCK):
        token = at + o_token
        m_token = token < kv_end
        p_kv = slot.to(tl.int64)[:, None] * stride_slot
        m_kv = m_token[:, None] & (o_dim < DIM)[None, :]
        b_k = tl.load(k_head + p_kv, mask=m_kv, other=0.0)
        b_v = tl.load(v_head + p_kv, mask=m_kv, other=0.0)
        following = at + BLOCK + o_token
        slot = tl.load(slots_ptr + following, mask=following < kv_end, other=0)
        b_scores = product(b_q, tl.trans(b_k), PRECISION)
        if CAPPED:
            b_scores = capped(b_scores * scale, cap)
        visible = _query_bits(
            words_ptr, (mask_row + token - shared_end).to(tl.int64),
            m_token & (token >= shared_end), o_query, NUM_WORDS, NUM_WORDS,
        )  # fmt: skip
        visible = visible & m_token[None, :]
        if WINDOW > 0:
            b_token_pos = tl.load(token_pos_ptr + token, mask=m_token, other=0)
            b_query_pos = tl.load(query_pos_ptr + query_row, mask=m_row, other=0)
            visible = visible & (b_query_pos[:, None] - b_token_pos[None, :] < WINDOW)
        b_scores = tl.where(visible, b_scores, float("-inf"))
        b_acc, b_max, b_sum = softmax_step(b_acc, b_max, b_sum, b_scores, b_v, factor, PRECISION)

    b_divisor = tl.where(b_sum > 0, b_sum, 1.0)
    b_lse = tl.where(b_sum > 0, b_max + tl.log2(b_divisor), float("-inf"))
    row = (i_head.to(tl.int64) * num_partial_rows + partial_row) * GROUP + o_row
    p_out = part_out_ptr + row[:, None] * DIM + o_dim[None, :]
    tl.store(p_out, b_acc / b_divisor[:, None], mask=m_q)
    tl.store(part_lse_ptr + row, b_lse, mask=m_row)


@triton.jit
def _reduce_kernel(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, items_ptr, tile_begins_ptr,
    tile_item_begins_ptr, tile_items_ptr, query_rows_ptr, sinks_ptr,
    num_partial_rows, out_stride_n, out_stride_h,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    PARTS: tl.constexpr, MERGED: tl.constexpr, ITEMS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """MERGED rows of a tile and KV head over the tile's items, ITEMS at a time."""
    i_tile = tl.program_id(0) // PARTS
    i_part = tl.program_id(0) % PARTS
    i_head = tl.program_id(1)
    tile_begin = tl.load(tile_begins_ptr + i_tile)
    tile_end = tl.load(tile_begins_ptr + i_tile + 1)
    o_row = i_part * MERGED + tl.arange(0, MERGED)
    place = tile_begin + o_row // GROUP
    m_row = place < tile_end
    o_dim = tl.arange(0, DIM_PADDED)
    o_item = tl.arange(0, ITEMS)
    first = tl.load(tile_item_begins_ptr + i_tile)
    last = tl.load(tile_item_begins_ptr + i_tile + 1)
    base = i_head.to(tl.int64) * num_partial_rows

    b_acc = tl.zeros([MERGED, DIM_PADDED], dtype=tl.float32)
    b_max = tl.full([MERGED], NO_SCORE, dtype=tl.float32)
    b_sum = tl.zeros([MERGED], dtype=tl.float32)
    for at in range(first, last, ITEMS):
        m_item = at + o_item < last
        item = tl.load(tile_items_ptr + at + o_item, mask=m_item, other=0)
        query_begin = tl.load(items_ptr + item * 8 + 3, mask=m_item, other=0)
        query_end = tl.load(items_ptr + item * 8 + 4, mask=m_item, other=0)
        partial_row = tl.load(items_ptr + item * 8 + 6, mask=m_item, other=0)
        holds = (place[None, :] >= query_begin[:, None]) & (place[None, :] < query_end[:, None])
        holds = holds & m_row[None, :]
        within = partial_row[:, None] + place[None, :] - query_begin[:, None]
        row = (base + within) * GROUP + (o_row % GROUP)[None, :]
        b_lse = tl.load(part_lse_ptr + row, mask=holds, other=float("-inf"))
        b_parts = tl.load(
            part_out_ptr + row[:, :, None] * DIM + o_dim[None, None, :],
            mask=holds[:, :, None] & (o_dim < DIM)[None, None, :],
            other=0.0,
        )
        b_new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        b_decay = tl.exp2(b_max - b_new_max)
        b_weights = tl.exp2(b_lse - b_new_max[None, :])
        b_sum = b_sum * b_decay + tl.sum(b_weights, 0)
        b_acc = b_acc * b_decay[:, None] + tl.sum(b_parts * b_weights[:, :, None], 0)
        b_max = b_new_max
    query_row = tl.load(query_rows_ptr + place, mask=m_row, other=0)
    store_rows(
        b_acc, b_max, b_sum, query_row, i_head * GROUP + o_row % GROUP, m_row, o_dim,
        out_ptr, out_stride_n, out_stride_h, lse_ptr, KV_HEADS * GROUP, sinks_ptr, HAS_SINKS, DIM,
    )  # fmt: skip


def allocate_forest_scratch(
    plan: AttentionPlan, *, query_heads: int, head_dim: int, device: torch.device
) -> Scratch:
    """Room for the partials of `plan`: out fp32 [num_partial_rows * Hq, D], lse [...]."""
    rows = plan.num_partial_rows * query_heads
    return Scratch(
        torch.empty(rows, head_dim, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def forest_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    token_positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the plan's Q queries, each over its own node and everything above it.

    q [Q, Hq, D]; k_pool, v_pool [S, Hkv, D], indexed by the plan's slots; the plan's tensors on the
    same device; sinks [Hq]. A window needs int32 positions: of the flattened tokens and of the
    query rows (`KVForest.token_positions`, `.query_positions`).
    Returns out [Q, Hq, D] and lse float32 [Q, Hq], natural log; a query that sees nothing: 0, -inf.
    """
    _check(q, k_pool, v_pool, plan, scale, window, token_positions, query_positions)
    num_queries, query_heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group = query_heads // kv_heads
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(num_queries, query_heads, dtype=torch.float32, device=q.device)
    scratch = scratch or allocate_forest_scratch(
        plan, query_heads=query_heads, head_dim=head_dim, device=q.device
    )
    rows = max(16, triton.next_power_of_2(plan.tile_queries * group))
    tile = tile_shape(rows, head_dim, q.dtype)
    padded = triton.next_power_of_2(head_dim)
    if plan.num_items:
        _partials_kernel[(kv_heads, plan.num_items)](
            q_ptr=q,
            k_ptr=k_pool,
            v_ptr=v_pool,
            part_out_ptr=scratch.out,
            part_lse_ptr=scratch.lse,
            items_ptr=plan.items,
            slots_ptr=plan.slots,
            query_rows_ptr=plan.query_rows,
            words_ptr=plan.mask_words,
            token_pos_ptr=plan.slots if token_positions is None else token_positions,
            query_pos_ptr=plan.slots if query_positions is None else query_positions,
            num_partial_rows=plan.num_partial_rows,
            scale=scale if softcap is not None else scale * math.log2(math.e),
            cap=softcap or 1.0,
            q_stride_n=q.stride(0),
            q_stride_h=q.stride(1),
            stride_slot=k_pool.stride(0),
            stride_head=k_pool.stride(1),
            GROUP=group,
            DIM=head_dim,
            DIM_PADDED=padded,
            ROWS=rows,
            BLOCK=tile.block,
            NUM_WORDS=plan.num_words,
            WINDOW=window or 0,
            CAPPED=softcap is not None,
            PRECISION=dot_precision(q),
            num_warps=tile.num_warps if rows <= 64 else 8,
            num_stages=_STAGES,
        )
    merged = max(1, min(rows, MERGE_TILE // (_MERGED_ITEMS * padded)))
    parts = rows // merged
    _reduce_kernel[(plan.num_tiles * parts, kv_heads)](
        part_out_ptr=scratch.out,
        part_lse_ptr=scratch.lse,
        out_ptr=out,
        lse_ptr=lse,
        items_ptr=plan.items,
        tile_begins_ptr=plan.tile_begins,
        tile_item_begins_ptr=plan.tile_item_begins,
        tile_items_ptr=plan.tile_items,
        query_rows_ptr=plan.query_rows,
        sinks_ptr=plan.slots if sinks is None else sinks,
        num_partial_rows=plan.num_partial_rows,
        out_stride_n=out.stride(0),
        out_stride_h=out.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=head_dim,
        DIM_PADDED=padded,
        PARTS=parts,
        MERGED=merged,
        ITEMS=_MERGED_ITEMS,
        HAS_SINKS=sinks is not None,
        num_warps=merge_warps(merged * _MERGED_ITEMS * padded),
    )
    return out, lse


def _check(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    token_positions: Tensor | None,
    query_positions: Tensor | None,
) -> None:
    """Everything that can be refused without reading the device."""
    num_queries, query_heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    if num_queries != plan.num_queries or plan.items.device != q.device:
        raise ValueError(
            f"{num_queries} queries on {q.device} do not fit a plan of {plan.num_queries} on "
            f"{plan.items.device}: build it for these queries and move it with plan.to(device)"
        )
    if query_heads % kv_heads or k_pool.shape[2] != head_dim or head_dim % 16 or head_dim > 256:
        raise ValueError(
            f"{query_heads} query heads of {head_dim} do not fit {kv_heads} KV heads of "
            f"{k_pool.shape[2]}: head dims are equal multiples of 16 up to 256, and Hkv divides Hq"
        )
    if not q.dtype == k_pool.dtype == v_pool.dtype or q.stride(2) != 1:
        raise ValueError(
            f"q {q.dtype}, k {k_pool.dtype}, v {v_pool.dtype} must be one of bfloat16, float16, "
            "float32, with adjacent head elements: convert them alike"
        )
    if k_pool.stride() != v_pool.stride() or k_pool.stride(2) != 1:
        raise ValueError(
            f"k_pool and v_pool must share one layout with adjacent head elements, got strides "
            f"{k_pool.stride()} and {v_pool.stride()}: allocate them alike"
        )
    if window is not None and (token_positions is None or query_positions is None):
        raise ValueError("a window needs positions: pass token_positions and query_positions")
    if not scale > 0:
        raise ValueError(f"scale is {scale}: it must be above 0, usually head_dim ** -0.5")
