"""Products of a few rows against float64: odd sizes, strided rows, every kind of tile."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specdeft.kernels.linear_tile import LinearTile
from specdeft.kernels.skinny_linear import skinny_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE_ROW = LinearTile(1, 8, 64, 4, 2)
TILES = [LinearTile(16, 16, 32, 2, 2), LinearTile(32, 16, 64, 4, 3), LinearTile(64, 32, 64, 4, 2)]


def inputs(num_rows: int, num_outputs: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows apart from one another in memory, a weight that is a slice of a larger one."""
    x = torch.randn(num_rows, 2, dim, device=DEVICE).to(dtype)[:, 1]
    weight = torch.randn(num_outputs + 3, dim, device=DEVICE).to(dtype)[3:]
    return x, weight


def check(x: Tensor, weight: Tensor, tile: LinearTile) -> None:
    out = skinny_linear(x, weight, tile)
    exact = x.double() @ weight.double().T
    assert torch.isfinite(out).all()
    # float32 sums of products of 16-bit numbers: one rounding to 16 bits is what is left.
    allowed = torch.finfo(x.dtype).eps * exact.abs() + 1e-4 * exact.abs().max()
    assert ((out.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "dim"), [(8, 64), (13, 80), (40, 16)])
def test_one_row(num_outputs: int, dim: int, dtype: torch.dtype) -> None:
    check(*inputs(1, num_outputs, dim, dtype), ONE_ROW)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("num_rows", [2, 16, 33, 64])
@pytest.mark.parametrize(("num_outputs", "dim"), [(32, 64), (45, 80)])
def test_several_rows(tile: LinearTile, num_rows: int, num_outputs: int, dim: int) -> None:
    check(*inputs(num_rows, num_outputs, dim, torch.float16), tile)


@pytest.mark.parametrize(
    ("x", "weight", "tile", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 9), TILES[0], "do not fit"),
        (torch.zeros(2, 8), torch.zeros(4, 8), TILES[0], "float32"),
        (torch.zeros(2, 8).half(), torch.zeros(4, 8).bfloat16(), TILES[0], "of one dtype"),
        (torch.zeros(2, 8).half(), torch.zeros(8, 4).half().T, TILES[0], "weight strides"),
        (torch.zeros(2, 8).half(), torch.zeros(4, 8).half(), ONE_ROW, "a tile of 1 rows"),
        (torch.zeros(1, 8).half(), torch.zeros(4, 8).half(), TILES[0], "a tile of 16 rows"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: Tensor, weight: Tensor, tile: LinearTile, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        skinny_linear(x, weight, tile)
