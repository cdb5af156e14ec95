"""Bool visibility matrices packed into 64-bit mask words, and back.

Bit `j % 64` of word `j // 64` of a row stands for column j. A word is an int64 whose bits are read
as unsigned: a set bit 63 makes the number negative, which is two's complement and intended.
"""

import torch
from torch import Tensor

WORD_BITS = 64


def num_words(num_columns: int) -> int:
    """Words that hold `num_columns` bits: ceil(num_columns / 64)."""
    return -(-num_columns // WORD_BITS)


def mask_words_from_ancestors(visible: Tensor) -> Tensor:
    """Pack a bool matrix [Q, N] into int64 words [Q, ceil(N / 64)].

    Bits past N are 0. Raises ValueError when `visible` is not a two-dimensional bool tensor.
    """
    if visible.dtype != torch.bool or visible.dim() != 2:
        raise ValueError(
            f"visible is {visible.dtype} with {visible.dim()} dimensions; pass a bool matrix [Q, N]"
        )
    num_rows, num_columns = visible.shape
    width = num_words(num_columns) * WORD_BITS
    bits = torch.zeros(num_rows, width, dtype=torch.int64, device=visible.device)
    bits[:, :num_columns] = visible
    shifts = torch.arange(WORD_BITS, device=visible.device)
    # Every bit occurs once, so the wrapping sum is the bitwise or: also for bit 63.
    return (bits.view(num_rows, -1, WORD_BITS) << shifts).sum(-1)


def ancestors_from_mask_words(words: Tensor, num_columns: int) -> Tensor:
    """Unpack int64 words [Q, W] into a bool matrix [Q, num_columns].

    Raises ValueError when `words` is not an int64 matrix of exactly ceil(num_columns / 64) words.
    """
    if words.dtype != torch.int64 or words.dim() != 2:
        raise ValueError(
            f"words is {words.dtype} with {words.dim()} dimensions; pass an int64 matrix [Q, W]"
        )
    if words.shape[1] != num_words(num_columns):
        raise ValueError(
            f"{words.shape[1]} mask words cannot stand for {num_columns} columns; "
            f"pass {num_words(num_columns)} words a row"
        )
    shifts = torch.arange(WORD_BITS, device=words.device)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1)[:, :num_columns] != 0
