"""Which tile multiplies a few rows with a weight, and where the library's product is left alone.

Measured on an H200 in bf16 with cold weights (docs/decisions.md). Pure Python, no triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

MOST_ROWS = 64


class LinearTile(NamedTuple):
    """Tile of one program: ROWS of x and OUTPUTS at a time, steps of BLOCK along K."""

    rows: int
    outputs: int
    block: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=512)
def linear_tile(num_rows: int, num_outputs: int, dim: int) -> LinearTile | None:
    """The tile of x [N, K] times W [O, K] transposed in 16 bits; None where cuBLAS is as fast."""
    if num_rows == 1 and num_outputs * dim <= 1 << 26:
        return LinearTile(1, 8, 512, 4, 3)
    return None
