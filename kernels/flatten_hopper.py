"""DeFT-Flatten partials written for Hopper: what `deft_flatten` runs on sm_90 in 16 bits.

Same plan, arguments and result as the Triton kernel there, written in Gluon, Triton's lower level,
for what Triton cannot be told:

- overlap: the product of block i's scores is issued first, then the value product of block i - 1;
  the softmax of block i runs while the latter does (FlashAttention-3's order, arXiv 2407.08608);
- K and V blocks arrive through the bulk copy engine into rings of STAGES buffers, with no address
  arithmetic in the loop; the page id of a block is read an iteration before its copy starts.

A program is one warpgroup of 64 rows that copies for itself. Two of them on an SM overlap each
other's softmax and products, and each starts as soon as its own first block is there, which decides
while splits are short; `flatten_hopper_wide` is for long ones. Slots past the end of a sequence may
hold anything: their scores are masked, and their value rows zeroed in shared memory.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdeft.kernels.hopper_ops import (
    arrived,
    clear_past_end,
    copy_block,
    masked,
    page_of,
    queries,
    slot_of,
    softmax,
    start_product,
    store_result,
)
from specdeft.kernels.merge import (
    TAIL_WEIGHT,
    UNSPECIALIZED,
    blocks_of_tile,
    extent_of_part,
    place_of_program,
    split_begin,
    splits_used,
)


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
        turn = i_block - first
        following = page_of(i_block + 1 + STAGES, last, table_row, BLOCK, PAGE_SIZE, PAGED)
        k_stage = arrived(k_bars, turn, STAGES)
        b_scores = start_product(s_q, k_bufs.index(k_stage), ROWS, BLOCK, SCORES)
        v_stage = arrived(v_bars, turn - 1, STAGES)
        b_acc = warpgroup_mma(b_weights, v_bufs.index(v_stage), b_acc, is_async=True)
        b_scores = warpgroup_mma_wait(num_outstanding=1, deps=[b_scores])
        if MASKED:
            b_scores = masked(b_scores, i_block, length, p_words, num_words, m_row, BLOCK, SCORES)
        b_max, b_sum, b_new_weights, b_decay = softmax(b_scores, b_max, b_sum, factor)
        b_new_weights = gl.convert_layout(b_new_weights.to(s_q.dtype), OPERAND)
        b_acc, b_weights = warpgroup_mma_wait(num_outstanding=0, deps=[b_acc, b_weights])
        next_k = i_block + STAGES
        slot_k = slot_of(next_k, page_k, first_slot, BLOCK, PAGE_SIZE, PAGED)
        slot_v = slot_of(next_k - 1, page_v, first_slot, BLOCK, PAGE_SIZE, PAGED)
        copy_block(k_desc, k_bars, k_bufs, turn + STAGES, slot_k, column, next_k < last, STAGES)
        copy_block(
            v_desc, v_bars, v_bufs, turn - 1 + STAGES, slot_v, column, next_k <= last, STAGES
        )
        b_acc = b_acc * gl.convert_layout(b_decay, gl.SliceLayout(1, OUTPUT))[:, None]
        b_weights = b_new_weights
        page_v = page_k
        page_k = following
    return b_acc, b_weights, b_max, b_sum, page_v, page_k


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def hopper_attention_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
    lengths_ptr, words_ptr, table_ptr, prefix_tokens_ptr, prefix_pages_ptr, sinks_ptr,
    num_nodes, num_rows, num_words, num_splits, prefix_splits, prefix_rows, capacity, factor,
    q_stride_b, q_stride_n, q_stride_h, out_stride_b, out_stride_n, out_stride_h,
    words_stride_b, table_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr, PAGED: gl.constexpr, ONE_SPLIT: gl.constexpr,
    MIN_BLOCKS: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_PREFIX: gl.constexpr,
):  # fmt: skip
    gl.static_assert(ROWS == 64)  # of one warpgroup
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = k_desc.dtype

    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], v_desc.layout)
    k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_stage in gl.static_range(STAGES):
        mbarrier.init(k_bars.index(i_stage), count=1)
        mbarrier.init(v_bars.index(i_stage), count=1)
    fence_async_shared()
    i_tile, i_head, i_split, i_sequence, in_prefix = place_of_program(
        gl.program_id(0), gl.program_id(1), gl.program_id(2),
        num_splits, num_rows, prefix_splits, prefix_rows, ROWS, KV_HEADS, HAS_PREFIX,
    )  # fmt: skip
    gdc_wait()  # launched while the kernel before still ends: its writes are complete from here
    length = gl.load(lengths_ptr + i_sequence).to(gl.int32)
    table_row = table_ptr + i_sequence * table_stride
    if HAS_PREFIX:
        prefix_tokens = gl.load(prefix_tokens_ptr)
        length, table_row, num_nodes, num_rows, num_splits, first_partial = extent_of_part(
            in_prefix, length, table_row, num_nodes, num_rows, num_splits,
            prefix_tokens, prefix_pages_ptr, prefix_splits, prefix_rows, KV_HEADS, PAGE_SIZE,
        )  # fmt: skip
        part_out_ptr += first_partial * DIM
        part_lse_ptr += first_partial
    begin, end = blocks_of_tile(length, num_nodes, i_tile, ROWS, GROUP, BLOCK, 0)
    used = splits_used(end - begin, num_splits, MIN_BLOCKS)
    if i_split < used:
        all_see_to = length // BLOCK
        first = split_begin(i_split, used, begin, end, all_see_to, TAIL_WEIGHT)
        last = split_begin(i_split + 1, used, begin, end, all_see_to, TAIL_WEIGHT)
        first_slot = (i_sequence * capacity).to(gl.int32)
        column = i_head * DIM

        # All page ids first: a copy does not wait for the page of the one before.
        page_0 = page_of(first, last, table_row, BLOCK, PAGE_SIZE, PAGED)
        page_1 = page_of(first + 1, last, table_row, BLOCK, PAGE_SIZE, PAGED)
        page_2 = page_of(first + 2, last, table_row, BLOCK, PAGE_SIZE, PAGED)
        page_v = page_of(first + STAGES, last, table_row, BLOCK, PAGE_SIZE, PAGED)
        page_k = page_of(first + 1 + STAGES, last, table_row, BLOCK, PAGE_SIZE, PAGED)
        q_row = q_ptr + i_sequence * q_stride_b
        b_q = queries(
            q_row, q_stride_n, q_stride_h, i_head, i_tile * ROWS, num_rows, ROWS, GROUP, DIM, LOADED
        )
        gl.static_assert(STAGES <= 3)
        for i_stage in gl.static_range(STAGES):
            page = page_0 if i_stage == 0 else page_1 if i_stage == 1 else page_2
            slot = slot_of(first + i_stage, page, first_slot, BLOCK, PAGE_SIZE, PAGED)
            wanted = first + i_stage < last
            copy_block(k_desc, k_bars, k_bufs, i_stage, slot, column, wanted, STAGES)
            copy_block(v_desc, v_bars, v_bufs, i_stage, slot, column, wanted, STAGES)
        s_q = gl.allocate_shared_memory(dtype, [ROWS, DIM], k_desc.layout, b_q)
        fence_async_shared()

        o_row = i_tile * ROWS + gl.arange(0, ROWS, ROW)
        m_row = o_row < num_rows
        p_words = words_ptr + i_sequence * words_stride_b + (o_row // GROUP) * num_words
        b_max = gl.full([ROWS], -1.0e30, gl.float32, ROW)
        b_sum = gl.full([ROWS], 0.0, gl.float32, ROW)
        b_acc = gl.zeros([ROWS, DIM], gl.float32, OUTPUT)

        # The first block has nothing to overlap with.
        k_stage = arrived(k_bars, 0, STAGES)
        b_scores = start_product(s_q, k_bufs.index(k_stage), ROWS, BLOCK, SCORES)
        b_scores = warpgroup_mma_wait(num_outstanding=0, deps=[b_scores])
        slot = slot_of(first + STAGES, page_v, first_slot, BLOCK, PAGE_SIZE, PAGED)
        copy_block(k_desc, k_bars, k_bufs, STAGES, slot, column, first + STAGES < last, STAGES)
        if first >= all_see_to:
            b_scores = masked(b_scores, first, length, p_words, num_words, m_row, BLOCK, SCORES)
        b_max, b_sum, b_weights, _ = softmax(b_scores, b_max, b_sum, factor)
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

        v_stage = arrived(v_bars, last - 1 - first, STAGES)
        if last * BLOCK > length + num_nodes:
            clear_past_end(v_bufs.index(v_stage), last - 1, length + num_nodes, BLOCK, LOADED)
            fence_async_shared()
        b_acc = warpgroup_mma(b_weights, v_bufs.index(v_stage), b_acc, is_async=True)
        b_acc, b_weights = warpgroup_mma_wait(num_outstanding=0, deps=[b_acc, b_weights])
        for i_stage in gl.static_range(STAGES):
            mbarrier.invalidate(k_bars.index(i_stage))
            mbarrier.invalidate(v_bars.index(i_stage))
        gdc_launch_dependents()
        store_result(
            b_acc, b_max, b_sum, i_tile * ROWS, i_head, i_split, i_sequence,
            num_nodes, num_rows, num_splits, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
            sinks_ptr, out_stride_b, out_stride_n, out_stride_h,
            ROWS, KV_HEADS, GROUP, DIM, ONE_SPLIT, HAS_SINKS, OUTPUT,
        )  # fmt: skip


def launch(
    grid: tuple[int, int, int],
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    scale: float,
    wide: bool,
    **arguments: Any,
) -> None:
    """Launch over two pools [S, Hkv, D]; the other arguments as in `deft_flatten`.

    wide: `flatten_hopper_wide`, whose programs take 128 rows.
    """
    if k_pool.stride(1) != arguments["DIM"]:
        raise ValueError(
            f"the Hopper kernel copies the [Hkv, D] of a slot in one piece, got strides "
            f"{k_pool.stride()}: lay the pools out tokens first"
        )
    if wide:
        from specdeft.kernels.flatten_hopper_wide import wide_attention_kernel as kernel
    else:
        kernel = hopper_attention_kernel
    kernel[grid](
        k_desc=_descriptor(k_pool, arguments["BLOCK"]),
        v_desc=_descriptor(v_pool, arguments["BLOCK"]),
        factor=scale * math.log2(math.e),
        **arguments,
    )


def _descriptor(pool: Tensor, block: int) -> TensorDescriptor:
    """Copies of [block, D] out of a pool seen as [S, Hkv * D]."""
    slots, kv_heads, dim = pool.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(
        pool, [slots, kv_heads * dim], [pool.stride(0), 1], [block, dim], layout
    )
