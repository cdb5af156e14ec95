"""Which tile multiplies one row with a weight, and where the library's product is left alone.

Measured on an H200 in bf16 with cold weights (docs/decisions.md): cuBLAS is as fast for several
rows, and for weights of hundreds of megabytes. Pure Python, no triton.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_ELEMENTS = 1 << 27  # of a weight


class LinearTile(NamedTuple):
    """Tile of one program: OUTPUTS at a time, steps of BLOCK along K."""

    outputs: int
    block: int
    num_warps: int
    num_stages: int


def linear_tile(num_rows: int, num_outputs: int, dim: int) -> LinearTile | None:
    """The tile of x [N, K] times W [O, K] transposed in 16 bits; None where cuBLAS is as fast."""
    if num_rows > 1 or num_outputs * dim > MOST_ELEMENTS:
        return None
    return LinearTile(8, 512, 4, 3)
