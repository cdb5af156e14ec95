"""Global reduction: the splits' partial outputs of every row into one, by their log-sum-exp.

    out = sum_s w_s out_s / sum_s w_s,  w_s = exp(lse_s - max_s lse_s)

in a fixed order, so equal inputs give equal bits. A split without tokens wrote nothing and is never
read: how many were used follows from the length, as in the partials kernel. A split whose tokens a
row cannot see holds lse -inf; a row that saw nothing at all gives 0 and -inf. A sink joins as one
more logit without a value. The splits of a prefix that was read once for all sequences join those
of each sequence in one sum. Bytes moved per row: S * (D + 1) * 4 read, D * element + 4 written.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks the launcher only.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from specdeft.kernels.tile_ops import LN_2, LOG2_E, NO_SCORE

TAIL_WEIGHT = tl.constexpr(3)
# Sizes of a launch that a kernel is not compiled anew for.
UNSPECIALIZED = ("num_nodes", "num_rows", "num_words", "num_splits", "prefix_splits", "prefix_rows")


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
def place_of_program(
    x, y, z, num_splits, num_rows, prefix_splits, prefix_rows,
    ROWS: tl.constexpr, KV_HEADS: tl.constexpr, HAS_PREFIX: tl.constexpr,
):  # fmt: skip
    """Row tile, KV head, split, sequence (int64) of a program, and whether it is the prefix's.

    Without a prefix the grid is (row tiles, heads, sequences x splits). With one it is a line: the
    prefix's tiles of each split, then those of each split of each sequence, heads fastest.
    """
    if not HAS_PREFIX:
        return x, y, z % num_splits, (z // num_splits).to(tl.int64), False
    prefix_tiles = tl.cdiv(prefix_rows, ROWS)
    num_prefix = prefix_tiles * prefix_splits
    i_item = x // KV_HEADS
    in_prefix = i_item < num_prefix
    i_item = tl.where(in_prefix, i_item, i_item - num_prefix)
    tiles = tl.where(in_prefix, prefix_tiles, tl.cdiv(num_rows, ROWS))
    i_part = i_item // tiles
    i_split = tl.where(in_prefix, i_part, i_part % num_splits)
    i_sequence = tl.where(in_prefix, 0, i_part // num_splits).to(tl.int64)
    return i_item % tiles, x % KV_HEADS, i_split, i_sequence, in_prefix


@triton.jit
def extent_of_part(
    in_prefix, length, table_row, num_nodes, num_rows, num_splits,
    prefix_tokens, prefix_pages_ptr, prefix_splits, prefix_rows,
    KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """What stands in place of a sequence's own figures where a prefix is read once.

    In the prefix: its length and pages, no nodes, the rows of all sequences. In a sequence: what
    stands behind the prefix; one that ended, of length 0, keeps its nodes only. Last the first row
    (int64) of the part's partials.
    """
    length = tl.where(in_prefix, prefix_tokens, tl.maximum(length - prefix_tokens, 0))
    table_row = tl.where(in_prefix, prefix_pages_ptr, table_row + prefix_tokens // PAGE_SIZE)
    behind = prefix_rows.to(tl.int64) * prefix_splits * KV_HEADS
    return (
        length,
        table_row,
        tl.where(in_prefix, 0, num_nodes),
        tl.where(in_prefix, prefix_rows, num_rows),
        tl.where(in_prefix, prefix_splits, num_splits),
        tl.where(in_prefix, 0, behind),
    )


@triton.jit
def splits_used(num_blocks, num_splits, MIN_BLOCKS: tl.constexpr):
    """Splits that get tokens: all, or fewer where each would have less than MIN_BLOCKS blocks; none
    of none."""
    return tl.minimum(num_splits, tl.maximum(num_blocks // MIN_BLOCKS, tl.minimum(num_blocks, 1)))


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


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_kernel(
    part_out_ptr,  # float32: of the prefix [Hkv, S', B * R, D], then [B, Hkv, S, R, D]
    part_lse_ptr,  # the same without D, base 2
    out_ptr,
    lse_ptr,  # float32 [B, N, Hq], natural
    lengths_ptr,
    prefix_tokens_ptr,
    sinks_ptr,
    num_nodes,
    num_rows,
    num_splits,
    prefix_splits,
    prefix_rows,
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
    HAS_PREFIX: tl.constexpr,
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
    prefix_tokens = 0
    if HAS_PREFIX:
        prefix_tokens = tl.load(prefix_tokens_ptr)
        length = tl.maximum(length - prefix_tokens, 0)
    begin, end = blocks_of_tile(
        length, num_nodes, i_rows * MERGED // ROWS, ROWS, GROUP, BLOCK, WINDOW
    )
    used = splits_used(end - begin, num_splits, MIN_BLOCKS)
    base = (i_sequence.to(tl.int64) * KV_HEADS + i_head) * num_splits
    o_part = (base + o_split[:, None]) * num_rows + o_row[None, :]
    m_split = o_split < used
    if HAS_PREFIX:  # its splits stand behind the sequence's own in the tile, first in memory
        i_prefix = o_split - num_splits
        in_prefix = i_prefix >= 0
        base = i_head.to(tl.int64) * prefix_splits
        o_row_of_all = i_sequence * num_rows + o_row
        o_part = tl.where(
            in_prefix[:, None],
            (base + i_prefix[:, None]) * prefix_rows + o_row_of_all[None, :],
            o_part + prefix_rows.to(tl.int64) * prefix_splits * KV_HEADS,
        )
        used = splits_used(tl.cdiv(prefix_tokens, BLOCK), prefix_splits, MIN_BLOCKS)
        m_split = tl.where(in_prefix, i_prefix < used, m_split)
    m_part = m_split[:, None] & m_row[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
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
