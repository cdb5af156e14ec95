"""What both Hopper kernels share, in Gluon: copies into rings, mask windows, softmax, the epilogue.

A ring is STAGES buffers with a barrier each; turn t of a ring uses place t % STAGES, and its
barrier completes phase (t // STAGES) & 1. Turns count from a program's first block.
"""

# Jitted bodies are Gluon's language, not Python's: mypy checks nothing in them.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

# Triton 3.9 renamed both.
copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def page_of(
    i_block, last, table_row, BLOCK: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGED: gl.constexpr
):
    """Page of a block; blocks from `last` on are not copied, so any page will do."""
    if PAGED:
        return gl.load(table_row + gl.minimum(i_block, last - 1) // (PAGE_SIZE // BLOCK))
    return i_block * 0


@gluon.jit
def slot_of(
    i_block, page, first_slot, BLOCK: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGED: gl.constexpr
):
    """Pool slot of a block's first token."""
    if PAGED:
        return page * PAGE_SIZE + (i_block % (PAGE_SIZE // BLOCK)) * BLOCK
    return first_slot + i_block * BLOCK


@gluon.jit
def copy_block(desc, bars, bufs, turn, slot, column, wanted, STAGES: gl.constexpr):
    """Announce a block's bytes and start its copy into its place, if it is wanted."""
    stage = turn % STAGES
    mbarrier.expect(bars.index(stage), desc.block_type.nbytes, wanted)
    copy_to_shared(desc, [slot, column], bars.index(stage), bufs.index(stage), wanted)


@gluon.jit
def arrived(bars, turn, STAGES: gl.constexpr):
    """Wait for a turn's barrier; its place in the ring."""
    mbarrier.wait(bars.index(turn % STAGES), (turn // STAGES) & 1)
    return turn % STAGES


@gluon.jit
def queries(
    q_ptr, stride_n, stride_h, i_head, first_row, num_rows,
    ROWS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, LOADED: gl.constexpr,
):  # fmt: skip
    """Rows first_row.. of one KV head's queries, zero past the last."""
    o_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    o_dim = gl.arange(0, DIM, gl.SliceLayout(0, LOADED))
    p_q = q_ptr + (o_row // GROUP) * stride_n + (i_head * GROUP + o_row % GROUP) * stride_h
    return gl.load(p_q[:, None] + o_dim[None, :], mask=(o_row < num_rows)[:, None], other=0.0)


@gluon.jit
def start_product(s_q, s_k, ROWS: gl.constexpr, BLOCK: gl.constexpr, SCORES: gl.constexpr):
    """Issue q @ k^T of a block."""
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    return warpgroup_mma(s_q, s_k.permute((1, 0)), zeros, use_acc=False, is_async=True)


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
def masked(
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
def softmax(b_scores, b_max, b_sum, factor):
    """New maximum and sum of each row, the block's weights, and the decay of what came before."""
    b_new_max = gl.maximum(b_max, gl.max(b_scores, 1) * factor)
    b_weights = gl.exp2(b_scores * factor - b_new_max[:, None])
    b_decay = gl.exp2(b_max - b_new_max)
    return b_new_max, b_sum * b_decay + gl.sum(b_weights, 1), b_weights, b_decay


@gluon.jit
def clear_past_end(s_v, i_block, total, BLOCK: gl.constexpr, LOADED: gl.constexpr):
    """Zero the value rows of slots past the end, which may hold anything: 0 x NaN would be NaN."""
    b_v = s_v.load(LOADED)
    o_token = i_block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, LOADED))
    s_v.store(gl.where((o_token < total)[:, None], b_v, gl.zeros_like(b_v)))


@gluon.jit
def store_result(
    b_acc, b_max, b_sum, first_row, i_head, i_split, i_sequence, num_nodes, num_rows, num_splits,
    out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, sinks_ptr,
    out_stride_b, out_stride_n, out_stride_h,
    ROWS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    ONE_SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """The output itself where one split exists, else a partial for `merge`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    o_row = first_row + gl.arange(0, ROWS, LAYOUT)
    m_row = o_row < num_rows
    o_head = i_head * GROUP + o_row % GROUP
    o_dim = gl.arange(0, DIM, gl.SliceLayout(0, OUTPUT))
    b_max = gl.convert_layout(b_max, LAYOUT)
    b_sum = gl.convert_layout(b_sum, LAYOUT)
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
        p_out = out_ptr + i_sequence * out_stride_b + o_node * out_stride_n + o_head * out_stride_h
        p_out = p_out[:, None] + o_dim[None, :]
        gl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=m_row[:, None])
        at = (i_sequence * num_nodes + o_node) * (KV_HEADS * GROUP) + o_head
        gl.store(lse_ptr + at, b_lse * 0.6931471805599453, mask=m_row)
    else:
        row = ((i_sequence * KV_HEADS + i_head) * num_splits + i_split) * num_rows + o_row
        gl.store(part_out_ptr + row[:, None] * DIM + o_dim[None, :], b_acc, mask=m_row[:, None])
        gl.store(part_lse_ptr + row, b_lse, mask=m_row)
