"""The best tokens of rows of logits: in two stages where few rows would leave a GPU idle.

torch's topk gives a row to one block of threads, which walks the whole vocabulary several times.
Cut into chunks, every chunk is a row of its own: the best k of each are found at the same time, and
the best k of those are the best of all.
"""

from __future__ import annotations

from torch import Tensor
from torch import arange as torch_arange

# Measured on an H200: below, one stage is as fast; above, torch's own spreads a row.
_COLUMNS = range(4096, 65536)
_MOST_ROWS = 24  # more rows keep it busy as they are
_MOST_CHUNKS = 64


def best_tokens(logits: Tensor, k: int) -> Tensor:
    """The columns int64 [..., k] of the k largest of logits [..., V], best first."""
    num_columns = logits.shape[-1]
    spread = logits.is_cuda and logits.numel() // num_columns <= _MOST_ROWS
    return best_in_chunks(logits, k, num_chunks(num_columns, k) if spread else 1)


def num_chunks(num_columns: int, k: int) -> int:
    """Into how many equal parts a row is cut: a power of two, 1 where it is not worth it."""
    chunks = 1
    while (
        num_columns in _COLUMNS
        and chunks < _MOST_CHUNKS
        and num_columns % (2 * chunks) == 0
        and num_columns // (2 * chunks) >= 8 * k
    ):
        chunks *= 2
    return chunks


def best_in_chunks(logits: Tensor, k: int, chunks: int) -> Tensor:
    """`best_tokens` with the rows cut into so many parts."""
    if chunks == 1:
        return logits.topk(k, dim=-1).indices
    width = logits.shape[-1] // chunks
    found = logits.unflatten(-1, (chunks, width)).topk(k, dim=-1, sorted=False)
    places = found.indices + width * torch_arange(chunks, device=logits.device)[:, None]
    best = found.values.flatten(-2).topk(k, dim=-1).indices
    columns: Tensor = places.flatten(-2).gather(-1, best)
    return columns
