"""DeFT-Flatten partials for Hopper where splits are long: 128 rows share every copied block.

As `flatten_hopper`, but a program is three parts that meet only at the rings' barriers: two
warpgroups of 64 rows each and one warp that copies for both. Every block crosses L2 once for 128
rows, which is what bounds two programs of 64 rows; and as nothing but the blocks themselves ties
the warpgroups together, one's softmax runs under the other's products. Setting all this up takes
longer, so it pays from a dozen blocks a program on (docs/tuning-attention.md).
"""

# Jitted bodies are Gluon's language, not Python's: mypy checks nothing in them.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdeft.kernels.hopper_ops import (
    arrived,
    barrier,
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

_HALF = gl.constexpr(64)  # rows of a warpgroup
_COPIER_REGISTERS = gl.constexpr(24)
_SECOND_REGISTERS = gl.constexpr(232)


@gluon.jit
def _release(bars, turn, STAGES: gl.constexpr):
    """Tell the copier that this warpgroup has read a turn's buffer."""
    barrier()
    mbarrier.arrive(bars.index(turn % STAGES), count=1)


@gluon.jit
def _copy_all(
    k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, k_empty, v_empty, table_row, first_slot,
    column, first, last, num_started,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """The copier: blocks first + num_started .. last - 1, each when both halves left its place."""
    page = page_of(first + num_started, last, table_row, BLOCK, PAGE_SIZE, PAGED)
    for i_block in range(first + num_started, last):
        following = page_of(i_block + 1, last, table_row, BLOCK, PAGE_SIZE, PAGED)
        turn = i_block - first
        slot = slot_of(i_block, page, first_slot, BLOCK, PAGE_SIZE, PAGED)
        arrived(k_empty, turn - STAGES, STAGES)
        copy_block(k_desc, k_full, k_bufs, turn, slot, column, True, STAGES)
        arrived(v_empty, turn - STAGES, STAGES)
        copy_block(v_desc, v_full, v_bufs, turn, slot, column, True, STAGES)
        page = following


@gluon.jit
def _blocks(
    b_acc, b_weights, b_max, b_sum, begin, end, first, s_q, k_bufs, v_bufs,
    k_full, v_full, k_empty, v_empty, length, p_words, num_words, m_row, factor,
    MASKED: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, OUTPUT: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Blocks begin..end-1: values of block i - 1 under the softmax of block i."""
    for i_block in range(begin, end):
        turn = i_block - first
        k_stage = arrived(k_full, turn, STAGES)
        b_scores = start_product(s_q, k_bufs.index(k_stage), _HALF, BLOCK, SCORES)
        v_stage = arrived(v_full, turn - 1, STAGES)
        b_acc = warpgroup_mma(b_weights, v_bufs.index(v_stage), b_acc, is_async=True)
        b_scores = warpgroup_mma_wait(num_outstanding=1, deps=[b_scores])
        _release(k_empty, turn, STAGES)
        if MASKED:
            b_scores = masked(b_scores, i_block, length, p_words, num_words, m_row, BLOCK, SCORES)
        b_max, b_sum, b_new_weights, b_decay = softmax(b_scores, b_max, b_sum, factor)
        b_new_weights = gl.convert_layout(b_new_weights.to(s_q.dtype), OPERAND)
        b_acc, b_weights = warpgroup_mma_wait(num_outstanding=0, deps=[b_acc, b_weights])
        _release(v_empty, turn - 1, STAGES)
        b_acc = b_acc * gl.convert_layout(b_decay, gl.SliceLayout(1, OUTPUT))[:, None]
        b_weights = b_new_weights
    return b_acc, b_weights, b_max, b_sum


@gluon.jit
def _attend(
    s_q, k_bufs, v_bufs, k_full, v_full, k_empty, v_empty,
    out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, words_ptr, sinks_ptr,
    length, first, last, first_row, num_nodes, num_rows, num_words, num_splits, factor,
    i_head, i_split, i_sequence, out_stride_b, out_stride_n, out_stride_h, words_stride_b,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, ONE_SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """A half: its 64 rows over all blocks of the split."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    o_row = first_row + gl.arange(0, _HALF, ROW)
    m_row = o_row < num_rows
    p_words = words_ptr + i_sequence * words_stride_b + (o_row // GROUP) * num_words
    b_max = gl.full([_HALF], -1.0e30, gl.float32, ROW)
    b_sum = gl.full([_HALF], 0.0, gl.float32, ROW)
    b_acc = gl.zeros([_HALF, DIM], gl.float32, OUTPUT)
    all_see_to = length // BLOCK

    k_stage = arrived(k_full, 0, STAGES)
    b_scores = start_product(s_q, k_bufs.index(k_stage), _HALF, BLOCK, SCORES)
    b_scores = warpgroup_mma_wait(num_outstanding=0, deps=[b_scores])
    _release(k_empty, 0, STAGES)
    if first >= all_see_to:
        b_scores = masked(b_scores, first, length, p_words, num_words, m_row, BLOCK, SCORES)
    b_max, b_sum, b_weights, _ = softmax(b_scores, b_max, b_sum, factor)
    b_weights = gl.convert_layout(b_weights.to(s_q.dtype), OPERAND)
    unmasked_to = gl.minimum(gl.maximum(all_see_to, first + 1), last)
    b_acc, b_weights, b_max, b_sum = _blocks(
        b_acc, b_weights, b_max, b_sum, first + 1, unmasked_to, first, s_q, k_bufs, v_bufs,
        k_full, v_full, k_empty, v_empty, length, p_words, num_words, m_row, factor,
        False, BLOCK, STAGES, SCORES, OUTPUT, OPERAND,
    )  # fmt: skip
    b_acc, b_weights, b_max, b_sum = _blocks(
        b_acc, b_weights, b_max, b_sum, unmasked_to, last, first, s_q, k_bufs, v_bufs,
        k_full, v_full, k_empty, v_empty, length, p_words, num_words, m_row, factor,
        True, BLOCK, STAGES, SCORES, OUTPUT, OPERAND,
    )  # fmt: skip
    v_stage = arrived(v_full, last - 1 - first, STAGES)
    if last * BLOCK > length + num_nodes:  # both halves write the same values here
        clear_past_end(v_bufs.index(v_stage), last - 1, length + num_nodes, BLOCK, LOADED)
        fence_async_shared()
    b_acc = warpgroup_mma(b_weights, v_bufs.index(v_stage), b_acc, is_async=True)
    b_acc, b_weights = warpgroup_mma_wait(num_outstanding=0, deps=[b_acc, b_weights])
    store_result(
        b_acc, b_max, b_sum, first_row, i_head, i_split, i_sequence,
        num_nodes, num_rows, num_splits, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
        sinks_ptr, out_stride_b, out_stride_n, out_stride_h,
        _HALF, KV_HEADS, GROUP, DIM, ONE_SPLIT, HAS_SINKS, OUTPUT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def wide_attention_kernel(
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
    gl.static_assert(ROWS == 2 * _HALF)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = k_desc.dtype
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i_stage), count=1)
        mbarrier.init(v_full.index(i_stage), count=1)
        mbarrier.init(k_empty.index(i_stage), count=2)
        mbarrier.init(v_empty.index(i_stage), count=2)
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
        # The first blocks are started here, before the queries and the copier.
        for i_stage in gl.static_range(STAGES):
            page = page_of(first + i_stage, last, table_row, BLOCK, PAGE_SIZE, PAGED)
            slot = slot_of(first + i_stage, page, first_slot, BLOCK, PAGE_SIZE, PAGED)
            wanted = first + i_stage < last
            copy_block(k_desc, k_full, k_bufs, i_stage, slot, column, wanted, STAGES)
            copy_block(v_desc, v_full, v_bufs, i_stage, slot, column, wanted, STAGES)
        s_q = gl.allocate_shared_memory(dtype, [2, _HALF, DIM], k_desc.layout)
        q_row = q_ptr + i_sequence * q_stride_b
        for half in gl.static_range(2):
            first_row = i_tile * ROWS + half * _HALF
            b_q = queries(
                q_row, q_stride_n, q_stride_h, i_head, first_row, num_rows,
                _HALF, GROUP, DIM, LOADED,
            )  # fmt: skip
            s_q.index(half).store(b_q)
        fence_async_shared()
        top = i_tile * ROWS
        gl.warp_specialize(
            [
                (_attend, (
                    s_q.index(0), k_bufs, v_bufs, k_full, v_full, k_empty, v_empty,
                    out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, words_ptr, sinks_ptr,
                    length, first, last, top, num_nodes, num_rows, num_words, num_splits,
                    factor, i_head, i_split, i_sequence, out_stride_b, out_stride_n, out_stride_h,
                    words_stride_b, KV_HEADS, GROUP, DIM, BLOCK, STAGES, ONE_SPLIT, HAS_SINKS,
                )),
                (_attend, (
                    s_q.index(1), k_bufs, v_bufs, k_full, v_full, k_empty, v_empty,
                    out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, words_ptr, sinks_ptr,
                    length, first, last, top + _HALF, num_nodes, num_rows, num_words, num_splits,
                    factor, i_head, i_split, i_sequence, out_stride_b, out_stride_n, out_stride_h,
                    words_stride_b, KV_HEADS, GROUP, DIM, BLOCK, STAGES, ONE_SPLIT, HAS_SINKS,
                )),
                (_copy_all, (
                    k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, k_empty, v_empty, table_row,
                    first_slot, column, first, last, STAGES, BLOCK, STAGES, PAGE_SIZE, PAGED,
                )),
            ],
            [4, 1],
            [_SECOND_REGISTERS, _COPIER_REGISTERS],
        )  # fmt: skip
    gdc_launch_dependents()
