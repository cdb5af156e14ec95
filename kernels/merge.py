"""Global reduction: the splits' partial outputs of every row into one, by their log-sum-exp.

    out = sum_s w_s out_s / sum_s w_s,  w_s = exp(lse_s - max_s lse_s)

in a fixed order, so equal inputs give equal bits. A split without tokens wrote nothing and is never
read: how many were used follows from the length, as in the partials kernel. A split whose tokens a
row cannot see holds lse -inf; a row that saw nothing at all gives 0 and -inf. A sink joins as one
more logit without a value. Bytes moved per row: S * (D + 1) * 4 read, D * element + 4 written.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks the launcher only.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from specdeft.kernels.tile_ops import LN_2, LOG2_E, NO_SCORE

TAIL_WEIGHT = tl.constexpr(3)


# What a merge program holds of partials, in floats. Few, so that many programs load at once.
MERGE_TILE = 2048
_FLOATS_OF_A_WARP = 4096  # 128 registers a thread


def merge_warps(num_floats: int) -> int:
    """Warps of a merge program: one, where its registers hold the partials.

    With more, the sum over the splits goes through shared memory and barriers: four warps took 8 us
    for 64 tree tokens where one takes 3.
    """
    return max(1, num_floats // _FLOATS_OF_A_WARP)


@triton.jit
def blocks_of_tile(
    length,
    num_nodes,
    i_tile,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """First block and one past the last block of tokens that a row tile can see.

    Depth-first order: no row sees a node after its own, so a tile ends at its last row's node. A
    window begins at the first position the root sees, and no node sees an earlier one.
    """
    last_node = tl.minimum(((i_tile + 1) * ROWS - 1) // GROUP, num_nodes - 1)
    end = tl.cdiv(length + last_node + 1, BLOCK)
    if WINDOW > 0:
        return tl.maximum(length + 1 - WINDOW, 0) // BLOCK, end
    return end * 0, end


@triton.jit
def splits_used(num_blocks, num_splits, MIN_BLOCKS: tl.constexpr):
    """Splits that get tokens: all, or fewer where each would have less than MIN_BLOCKS blocks."""
    return tl.minimum(num_splits, tl.maximum(num_blocks // MIN_BLOCKS, 1))


@triton.jit
def split_begin(i_split, used, begin, end, num_unmasked, TAIL_WEIGHT: tl.constexpr):
    """First block of split i_split <= used; blocks past num_unmasked weigh TAIL_WEIGHT each.

    Masked blocks wait for their page ids, keys and values one after the other, so a split that has
    them gets fewer of the others.
    """
    unmasked = tl.minimum(tl.maximum(num_unmasked - begin, 0), end - begin)
    weight = unmasked + (end - begin - unmasked) * TAIL_WEIGHT
    at = weight * i_split // used
    return begin + tl.minimum(at, unmasked) + tl.maximum(at - unmasked, 0) // TAIL_WEIGHT


@triton.jit(do_not_specialize=["num_nodes", "num_rows", "num_splits"])
def merge_kernel(
    part_out_ptr,  # float32 [B, Hkv, S, R, D]
    part_lse_ptr,  # float32 [B, Hkv, S, R], base 2
    out_ptr,
    lse_ptr,  # float32 [B, N, Hq], natural
    lengths_ptr,
    sinks_ptr,
    num_nodes,
    num_rows,
    num_splits,
    out_stride_b,
    out_stride_n,
    out_stride_h,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MERGED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """MERGED rows of one KV head, all splits in one tile: no load waits for another partial.

    MERGED divides ROWS, so the rows share one row tile and one count of used splits.
    """
    i_rows = tl.program_id(0)
    i_head = tl.program_id(1)
    i_sequence = tl.program_id(2)
    o_row = i_rows * MERGED + tl.arange(0, MERGED)
    o_split = tl.arange(0, SPLITS_PADDED)
    o_dim = tl.arange(0, DIM_PADDED)
    m_row = o_row < num_rows
    length = tl.load(lengths_ptr + i_sequence)
    begin, end = blocks_of_tile(
        length, num_nodes, i_rows * MERGED // ROWS, ROWS, GROUP, BLOCK, WINDOW
    )
    used = splits_used(end - begin, num_splits, MIN_BLOCKS)
    base = (i_sequence.to(tl.int64) * KV_HEADS + i_head) * num_splits
    if PDL:
        tl.extra.cuda.gdc_wait()
    o_part = (base + o_split[:, None]) * num_rows + o_row[None, :]
    m_part = (o_split < used)[:, None] & m_row[None, :]
    b_lse = tl.load(part_lse_ptr + o_part, mask=m_part, other=float("-inf"))
    b_parts = tl.load(
        part_out_ptr + o_part[:, :, None] * DIM + o_dim[None, None, :],
        mask=m_part[:, :, None] & (o_dim < DIM)[None, None, :],
        other=0.0,
    )
    b_max = tl.maximum(tl.max(b_lse, 0), NO_SCORE)
    b_weights = tl.exp2(b_lse - b_max[None, :])
    b_sum = tl.sum(b_weights, 0)
    b_out = tl.sum(b_parts * b_weights[:, :, None], 0)
    head = i_head * GROUP + o_row % GROUP
    store_rows(
        b_out, b_max, b_sum, o_row // GROUP, head, m_row, o_dim,
        out_ptr + i_sequence.to(tl.int64) * out_stride_b, out_stride_n, out_stride_h,
        lse_ptr + i_sequence.to(tl.int64) * num_nodes * KV_HEADS * GROUP, KV_HEADS * GROUP,
        sinks_ptr, HAS_SINKS, DIM,
    )  # fmt: skip


@triton.jit
def store_rows(
    b_acc,  # [M, D] unnormalised
    b_max,  # [M] base 2, NO_SCORE where nothing was seen
    b_sum,  # [M] of exp2(score - b_max)
    o_node, o_head, m_row, o_dim,
    out_ptr, out_stride_n, out_stride_h, lse_ptr, lse_stride_n,
    sinks_ptr, HAS_SINKS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Normalise, add the sinks, store out [N, Hq, D] and natural-log lse [N, Hq] of a sequence."""
    if HAS_SINKS:
        b_sink = tl.load(sinks_ptr + o_head, mask=m_row, other=0.0).to(tl.float32) * LOG2_E
        b_new_max = tl.maximum(b_max, b_sink)
        b_scale = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_scale + tl.exp2(b_sink - b_new_max)
        b_acc = b_acc * b_scale[:, None]
        b_max = b_new_max
    b_seen = b_sum > 0
    b_divisor = tl.where(b_seen, b_sum, 1.0)
    b_lse = tl.where(b_seen, (b_max + tl.log2(b_divisor)) * LN_2, float("-inf"))
    p_out = out_ptr + o_node.to(tl.int64) * out_stride_n + o_head * out_stride_h
    tl.store(
        p_out[:, None] + o_dim[None, :],
        (b_acc / b_divisor[:, None]).to(out_ptr.dtype.element_ty),
        mask=m_row[:, None] & (o_dim < DIM)[None, :],
    )
    tl.store(lse_ptr + o_node * lse_stride_n + o_head, b_lse, mask=m_row)
