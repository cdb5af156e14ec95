"""Device functions shared by the attention kernels: addresses, one softmax step, mask bits.

Scores live in base 2: the caller folds scale * log2(e) into one factor. The running maximum starts
at a finite sentinel and hidden scores are -inf, so a row that has seen nothing keeps the sentinel,
its weights are exp2(-inf) = 0, and nothing ever becomes inf - inf.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks nothing in them.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

NO_SCORE = tl.constexpr(-1.0e30)  # below every score a finite model can produce, above -inf
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def slots_of(position, table_row, first_slot, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr):
    """Pool slots (int64) of positions of one sequence, through its page table where PAGED."""
    if PAGED:
        page = tl.load(table_row + position // PAGE_SIZE).to(tl.int64)
        return page * PAGE_SIZE + position % PAGE_SIZE
    return first_slot + position


@triton.jit
def capped(score, cap):
    """cap * tanh(score / cap). tanh by exponentials, by its series where those would cancel."""
    x = score / cap
    square = x * x
    series = x * (
        1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    )
    # exp2 of a large number is inf and 2 / inf is 0: tanh is 1 there, as it should be.
    closed = 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1)
    return cap * tl.where(tl.abs(x) < 0.3, series, closed)


@triton.jit
def product(b_a, b_b, PRECISION: tl.constexpr):
    """a @ b in float32. "widened" serves Triton's interpreter, which has no bfloat16 product."""
    if PRECISION == "widened":
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision="ieee")
    return tl.dot(b_a, b_b, input_precision=PRECISION)


@triton.jit
def softmax_step(b_acc, b_max, b_sum, b_scores, b_v, factor, PRECISION: tl.constexpr):
    """Fold a tile of raw scores [M, N] (hidden ones -inf) and its values [N, D] into the state."""
    b_new_max = tl.maximum(b_max, tl.max(b_scores, 1) * factor)
    b_weights = tl.exp2(b_scores * factor - b_new_max[:, None])
    b_decay = tl.exp2(b_max - b_new_max)
    b_sum = b_sum * b_decay + tl.sum(b_weights, 1)
    b_acc = b_acc * b_decay[:, None]
    if PRECISION == "widened":
        b_acc += product(b_weights.to(b_v.dtype), b_v, PRECISION)
    else:
        b_acc = tl.dot(b_weights.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_new_max, b_sum


@triton.jit
def window_of_bits(words_ptr, o_word, first_bit, num_words, m_row):
    """The 64 mask bits of each row that begin at bit `first_bit` (may be negative), as int64.

    o_word: index of each row's first word. Bits below 0 are the committed prefix: set. Bits past
    the last word are clear.
    """
    p_words = words_ptr + o_word
    word = tl.zeros_like(o_word) + (first_bit >> 6)
    shift = (first_bit & 63).to(tl.int64)
    low = tl.load(p_words + word, mask=m_row & (word >= 0) & (word < num_words), other=0)
    low = tl.where(word < 0, -1, low)
    word += 1
    high = tl.load(p_words + word, mask=m_row & (word >= 0) & (word < num_words), other=0)
    high = tl.where(word < 0, -1, high)
    low = (low.to(tl.uint64, bitcast=True) >> shift.to(tl.uint64)).to(tl.int64, bitcast=True)
    # Two shifts, because a shift by 64 (first_bit divisible by 64) is undefined.
    return low | ((high << 1) << (63 - shift))


@triton.jit
def bit_columns(b_words, o_column):
    """bool [M, N]: bit o_column (0..63) of each row's word, by 32-bit halves."""
    low = b_words.to(tl.int32)
    high = (b_words >> 32).to(tl.int32)
    half = tl.where(o_column[None, :] < 32, low[:, None], high[:, None])
    return ((half >> (o_column[None, :] & 31)) & 1) != 0
