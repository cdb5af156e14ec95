"""DeFT-Flatten partials written for Hopper: what `deft_flatten` runs on sm_90 for many rows.

Same plan, arguments and result as the Triton kernel there, written in Gluon, Triton's lower level,
for what Triton cannot be told:

- overlap: the product of block i's scores is issued first, then the value product of block i - 1;
  the softmax of block i runs while the latter does (FlashAttention-3's order, arXiv 2407.08608);
- K and V blocks arrive through the bulk copy engine into rings of STAGES buffers, with no address
  arithmetic in the loop; the page id of a block is read an iteration before its copy starts.

A tile is 64 rows per warpgroup. Two programs of 64 rows on an SM are faster than one of 128:
nothing makes them do their softmax at the same time (docs/tuning-attention.md). Slots past the end
of a sequence may hold anything: their scores are masked, and their value rows zeroed in shared
memory before the last product.
"""

# Jitted bodies are Gluon's language, not Python's: mypy checks nothing in them.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdeft.kernels.merge import blocks_of_tile, split_begin, splits_used

# Triton 3.9 renamed the copy.
_copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _page_of(
    i_block, last, table_row, BLOCK: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGED: gl.constexpr
):
    """Page of a block; blocks from `last` on are not copied, so any page will do."""
    if PAGED:
        return gl.load(table_row + gl.minimum(i_block, last - 1) // (PAGE_SIZE // BLOCK))
    return i_block * 0


@gluon.jit
def _copy(
    desc, bars, bufs, i_block, first, last, page, first_slot, column,
    STAGES: gl.constexpr, BLOCK: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Start the expected copy of a block into its ring place, unless it is past the range."""
    if PAGED:
        slot = page * PAGE_SIZE + (i_block % (PAGE_SIZE // BLOCK)) * BLOCK
    else:
        slot = first_slot + i_block * BLOCK
    stage = (i_block - first) % STAGES
    _copy_to_shared(desc, [slot, column], bars.index(stage), bufs.index(stage), i_block < last)


@gluon.jit
def _expect(desc, bars, i_block, first, last, STAGES: gl.constexpr):
    """Announce the bytes of a block's copy."""
    stage = (i_block - first) % STAGES
    mbarrier.expect(bars.index(stage), desc.block_type.nbytes, i_block < last)


@gluon.jit
def _arrived(bars, i_block, first, STAGES: gl.constexpr):
    """Wait for a block's copy; its place in the ring."""
    turn = i_block - first
    mbarrier.wait(bars.index(turn % STAGES), (turn // STAGES) & 1)
    return turn % STAGES


@gluon.jit
def _window_of_bits(p_words, first_bit, num_words, m_row):
    """As `tile_ops.window_of_bits`."""
    word = first_bit >> 6
    shift = (first_bit & 63).to(gl.uint64)
    low = gl.load(p_words + word, mask=m_row & ((word >= 0) & (word < num_words)), other=0)
    low = gl.where(word < 0, -1, low)
    word += 1
    high = gl.load(p_words + word, mask=m_row & ((word >= 0) & (word < num_words)), other=0)
    high = gl.where(word < 0, -1, high)
    low = low.to(gl.uint64, bitcast=True) >> shift
    high = (high.to(gl.uint64, bitcast=True) << 1) << (63 - shift)
    return (low | high).to(gl.int64, bitcast=True)


@gluon.jit
def _masked(
    b_scores, i_block, length, p_words, num_words, m_row, BLOCK: gl.constexpr, LAYOUT: gl.constexpr
):
    """Scores with -inf where a row's mask bits of the block are clear."""
    first_bit = i_block * BLOCK - length
    o_column = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))[None, :]
    bits = _window_of_bits(p_words, first_bit, num_words, m_row)
    part = gl.where(o_column < 32, bits.to(gl.int32)[:, None], (bits >> 32).to(gl.int32)[:, None])
    if BLOCK > 64:
        bits = _window_of_bits(p_words, first_bit + 64, num_words, m_row)
        low, high = bits.to(gl.int32)[:, None], (bits >> 32).to(gl.int32)[:, None]
        part = gl.where(o_column < 64, part, gl.where(o_column < 96, low, high))
    return gl.where(((part >> (o_column & 31)) & 1) != 0, b_scores, float("-inf"))


@gluon.jit
def _softmax(b_scores, b_max, b_sum, factor):
    """New maximum and sum of each row, the block's weights, and the decay of what came before."""
    b_new_max = gl.maximum(b_max, gl.max(b_scores, 1) * factor)
    b_weights = gl.exp2(b_scores * factor - b_new_max[:, None])
    b_decay = gl.exp2(b_max - b_new_max)
    return b_new_max, b_sum * b_decay + gl.sum(b_weights, 1), b_weights, b_decay


@gluon.jit
def _blocks(
    b_acc, b_weights, b_max, b_sum, begin, end, first, last, page_v, page_k,
    s_q, k_desc, v_desc, k_bufs, v_bufs, k_bars, v_bars, column, table_row, first_slot,
    length, p_words, num_words, m_row, factor,
    MASKED: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, PAGE_SIZE: gl.constexpr,
    PAGED: gl.constexpr, ROWS: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """Blocks begin..end-1: scores of block i, values of block i - 1 under the softmax of block i.

    page_v, page_k: pages of the blocks whose copies this iteration starts, values of
    i - 1 + STAGES and keys of i + STAGES; both at the end, so that one barrier serves both.
    """
    for i_block in range(begin, end):
        following = _page_of(i_block + 1 + STAGES, last, table_row, BLOCK, PAGE_SIZE, PAGED)
        k_stage = _arrived(k_bars, i_block, first, STAGES)
        b_scores = warpgroup_mma(
            s_q, k_bufs.index(k_stage).permute((1, 0)),
            gl.zeros([ROWS, BLOCK], gl.float32, SCORES), use_acc=False, is_async=True,
        )  # fmt: skip
        v_stage = _arrived(v_bars, i_block - 1, first, STAGES)
        b_acc = warpgroup_mma(b_weights, v_bufs.index(v_stage), b_acc, is_async=True)
        b_scores = warpgroup_mma_wait(num_outstanding=1, deps=[b_scores])
        if MASKED:
            b_scores = _masked(b_scores, i_block, length, p_words, num_words, m_row, BLOCK, SCORES)
        b_max, b_sum, b_new_weights, b_decay = _softmax(b_scores, b_max, b_sum, factor)
        b_new_weights = gl.convert_layout(b_new_weights.to(s_q.dtype), OPERAND)
        b_acc, b_weights = warpgroup_mma_wait(num_outstanding=0, deps=[b_acc, b_weights])
        _expect(k_desc, k_bars, i_block + STAGES, first, last, STAGES)
        _expect(v_desc, v_bars, i_block - 1 + STAGES, first, last, STAGES)
        _copy(
            k_desc, k_bars, k_bufs, i_block + STAGES, first, last, page_k, first_slot, column,
            STAGES, BLOCK, PAGE_SIZE, PAGED,
        )  # fmt: skip
        _copy(
            v_desc, v_bars, v_bufs, i_block - 1 + STAGES, first, last, page_v, first_slot, column,
            STAGES, BLOCK, PAGE_SIZE, PAGED,
        )  # fmt: skip
        b_acc = b_acc * gl.convert_layout(b_decay, gl.SliceLayout(1, OUTPUT))[:, None]
        b_weights = b_new_weights
        page_v = page_k
        page_k = following
    return b_acc, b_weights, b_max, b_sum, page_v, page_k


@gluon.jit(do_not_specialize=["num_nodes", "num_rows", "num_words", "num_splits"])
def hopper_attention_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
    lengths_ptr, words_ptr, table_ptr, sinks_ptr,
    num_nodes, num_rows, num_words, num_splits, capacity, factor,
    q_stride_b, q_stride_n, q_stride_h, out_stride_b, out_stride_n, out_stride_h,
    words_stride_b, table_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr, PAGED: gl.constexpr, ONE_SPLIT: gl.constexpr,
    MIN_BLOCKS: gl.constexpr, HAS_SINKS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(WARPS * 16 == ROWS)  # a warpgroup of 4 warps holds 64 rows
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROW_OF_OUT: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    dtype: gl.constexpr = k_desc.dtype

    gdc_wait()  # launched while the kernel before still ends: its writes are complete from here
    i_tile = gl.program_id(0)
    i_head = gl.program_id(1)
    i_split = gl.program_id(2) % num_splits
    i_sequence = (gl.program_id(2) // num_splits).to(gl.int64)
    length = gl.load(lengths_ptr + i_sequence).to(gl.int32)
    begin, end = blocks_of_tile(length, num_nodes, i_tile, ROWS, GROUP, BLOCK, 0)
    used = splits_used(end - begin, num_splits, MIN_BLOCKS)
    if i_split < used:
        all_see_to = length // BLOCK
        first = split_begin(i_split, used, begin, end, all_see_to, 1)
        last = split_begin(i_split + 1, used, begin, end, all_see_to, 1)
        table_row = table_ptr + i_sequence * table_stride
        first_slot = (i_sequence * capacity).to(gl.int32)
        column = i_head * DIM

        k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], k_desc.layout)
        v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], v_desc.layout)
        k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i_stage in gl.static_range(STAGES):
            mbarrier.init(k_bars.index(i_stage), count=1)
            mbarrier.init(v_bars.index(i_stage), count=1)
        fence_async_shared()
        for i_stage in gl.static_range(STAGES):
            page = _page_of(first + i_stage, last, table_row, BLOCK, PAGE_SIZE, PAGED)
            _expect(k_desc, k_bars, first + i_stage, first, last, STAGES)
            _expect(v_desc, v_bars, first + i_stage, first, last, STAGES)
            _copy(
                k_desc, k_bars, k_bufs, first + i_stage, first, last, page, first_slot, column,
                STAGES, BLOCK, PAGE_SIZE, PAGED,
            )  # fmt: skip
            _copy(
                v_desc, v_bars, v_bufs, first + i_stage, first, last, page, first_slot, column,
                STAGES, BLOCK, PAGE_SIZE, PAGED,
            )  # fmt: skip
        page_v = _page_of(first + STAGES, last, table_row, BLOCK, PAGE_SIZE, PAGED)
        page_k = _page_of(first + 1 + STAGES, last, table_row, BLOCK, PAGE_SIZE, PAGED)

        o_loaded = i_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
        o_dim = gl.arange(0, DIM, gl.SliceLayout(0, LOADED))
        p_q = q_ptr + i_sequence * q_stride_b + (o_loaded // GROUP) * q_stride_n
        p_q += (i_head * GROUP + o_loaded % GROUP) * q_stride_h
        b_q = gl.load(p_q[:, None] + o_dim[None, :], mask=(o_loaded < num_rows)[:, None], other=0.0)
        Q_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        s_q = gl.allocate_shared_memory(dtype, [ROWS, DIM], Q_SHARED, b_q)
        fence_async_shared()

        o_row = i_tile * ROWS + gl.arange(0, ROWS, ROW)
        m_row = o_row < num_rows
        p_words = words_ptr + i_sequence * words_stride_b + (o_row // GROUP) * num_words
        b_max = gl.full([ROWS], -1.0e30, gl.float32, ROW)
        b_sum = gl.full([ROWS], 0.0, gl.float32, ROW)
        b_acc = gl.zeros([ROWS, DIM], gl.float32, OUTPUT)

        # The first block: nothing to overlap with, and masked whether it needs it or not.
        k_stage = _arrived(k_bars, first, first, STAGES)
        b_scores = warpgroup_mma(
            s_q, k_bufs.index(k_stage).permute((1, 0)),
            gl.zeros([ROWS, BLOCK], gl.float32, SCORES), use_acc=False, is_async=True,
        )  # fmt: skip
        b_scores = warpgroup_mma_wait(num_outstanding=0, deps=[b_scores])
        _expect(k_desc, k_bars, first + STAGES, first, last, STAGES)
        _copy(
            k_desc, k_bars, k_bufs, first + STAGES, first, last, page_v, first_slot, column,
            STAGES, BLOCK, PAGE_SIZE, PAGED,
        )  # fmt: skip
        b_scores = _masked(b_scores, first, length, p_words, num_words, m_row, BLOCK, SCORES)
        b_max, b_sum, b_weights, _ = _softmax(b_scores, b_max, b_sum, factor)
        b_weights = gl.convert_layout(b_weights.to(dtype), OPERAND)

        unmasked_to = gl.minimum(gl.maximum(all_see_to, first + 1), last)
        b_acc, b_weights, b_max, b_sum, page_v, page_k = _blocks(
            b_acc, b_weights, b_max, b_sum, first + 1, unmasked_to, first, last, page_v, page_k,
            s_q, k_desc, v_desc, k_bufs, v_bufs, k_bars, v_bars, column, table_row, first_slot,
            length, p_words, num_words, m_row, factor,
            False, BLOCK, STAGES, PAGE_SIZE, PAGED, ROWS, SCORES, OUTPUT, OPERAND,
        )  # fmt: skip
        b_acc, b_weights, b_max, b_sum, page_v, page_k = _blocks(
            b_acc, b_weights, b_max, b_sum, unmasked_to, last, first, last, page_v, page_k,
            s_q, k_desc, v_desc, k_bufs, v_bufs, k_bars, v_bars, column, table_row, first_slot,
            length, p_words, num_words, m_row, factor,
            True, BLOCK, STAGES, PAGE_SIZE, PAGED, ROWS, SCORES, OUTPUT, OPERAND,
        )  # fmt: skip

        v_stage = _arrived(v_bars, last - 1, first, STAGES)
        total = length + num_nodes
        if last * BLOCK > total:  # slots past the end hold anything: 0 x NaN would be NaN
            s_v = v_bufs.index(v_stage)
            b_v = s_v.load(LOADED)
            o_token = (last - 1) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, LOADED))
            s_v.store(gl.where((o_token < total)[:, None], b_v, gl.zeros_like(b_v)))
            fence_async_shared()
        b_acc = warpgroup_mma(b_weights, v_bufs.index(v_stage), b_acc, is_async=True)
        b_acc, b_weights = warpgroup_mma_wait(num_outstanding=0, deps=[b_acc, b_weights])
        for i_stage in gl.static_range(STAGES):
            mbarrier.invalidate(k_bars.index(i_stage))
            mbarrier.invalidate(v_bars.index(i_stage))
        gdc_launch_dependents()

        o_row = i_tile * ROWS + gl.arange(0, ROWS, ROW_OF_OUT)
        m_row = o_row < num_rows
        o_head = i_head * GROUP + o_row % GROUP
        o_dim = gl.arange(0, DIM, gl.SliceLayout(0, OUTPUT))
        b_max = gl.convert_layout(b_max, ROW_OF_OUT)
        b_sum = gl.convert_layout(b_sum, ROW_OF_OUT)
        if HAS_SINKS and ONE_SPLIT:
            b_sink = gl.load(sinks_ptr + o_head, mask=m_row, other=0.0).to(gl.float32)
            b_sink = b_sink * 1.4426950408889634
            b_new_max = gl.maximum(b_max, b_sink)
            b_decay = gl.exp2(b_max - b_new_max)
            b_sum = b_sum * b_decay + gl.exp2(b_sink - b_new_max)
            b_acc = b_acc * b_decay[:, None]
            b_max = b_new_max
        b_divisor = gl.where(b_sum > 0, b_sum, 1.0)
        b_lse = gl.where(b_sum > 0, b_max + gl.log2(b_divisor), float("-inf"))
        b_acc = b_acc / b_divisor[:, None]
        if ONE_SPLIT:
            o_node = o_row // GROUP
            p_out = out_ptr + i_sequence * out_stride_b + o_node * out_stride_n
            p_out += o_head * out_stride_h
            gl.store(p_out[:, None] + o_dim[None, :], b_acc.to(dtype), mask=m_row[:, None])
            at = (i_sequence * num_nodes + o_node) * (KV_HEADS * GROUP) + o_head
            gl.store(lse_ptr + at, b_lse * 0.6931471805599453, mask=m_row)
        else:
            row = ((i_sequence * KV_HEADS + i_head) * num_splits + i_split) * num_rows + o_row
            p_part = part_out_ptr + row[:, None] * DIM + o_dim[None, :]
            gl.store(p_part, b_acc, mask=m_row[:, None])
            gl.store(part_lse_ptr + row, b_lse, mask=m_row)


def launch(
    grid: tuple[int, int, int],
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    scale: float,
    num_stages: int,
    **arguments: Any,
) -> None:
    """Launch over two pools [S, Hkv, D]; the other arguments as in `deft_flatten`."""
    if k_pool.stride(1) != arguments["DIM"]:
        raise ValueError(
            f"the Hopper kernel copies the [Hkv, D] of a slot in one piece, got strides "
            f"{k_pool.stride()}: lay the pools out tokens first"
        )
    hopper_attention_kernel[grid](
        k_desc=_descriptor(k_pool, arguments["BLOCK"]),
        v_desc=_descriptor(v_pool, arguments["BLOCK"]),
        factor=scale * math.log2(math.e),
        STAGES=num_stages,
        WARPS=arguments["num_warps"],
        **arguments,
    )


def _descriptor(pool: Tensor, block: int) -> TensorDescriptor:
    """Copies of [block, D] out of a pool seen as [S, Hkv * D]."""
    slots, kv_heads, dim = pool.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(
        pool, [slots, kv_heads * dim], [pool.stride(0), 1], [block, dim], layout
    )
