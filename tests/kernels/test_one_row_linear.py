"""The product of one row against float64: odd sizes, a row and a weight that are slices."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specdeft.kernels.linear_tile import MOST_ELEMENTS, LinearTile, linear_tile
from specdeft.kernels.one_row_linear import one_row_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = LinearTile(8, 64, 4, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "dim"), [(8, 64), (13, 80), (40, 16), (1, 1000)])
@pytest.mark.parametrize("tile", [TILE, LinearTile(8, 512, 4, 3)])
def test_the_exact_product_rounded(
    num_outputs: int, dim: int, dtype: torch.dtype, tile: LinearTile
) -> None:
    x = torch.randn(1, 2, dim, device=DEVICE).to(dtype)[:, 1]
    weight = torch.randn(num_outputs + 3, dim, device=DEVICE).to(dtype)[3:]
    out = one_row_linear(x, weight, tile)
    exact = x.double() @ weight.double().T
    assert torch.isfinite(out).all()
    # Sums in float32: what is left is one rounding to 16 bits.
    allowed = torch.finfo(dtype).eps * exact.abs() + 1e-5 * dim**0.5
    assert ((out.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(1, 8), torch.zeros(4, 9), "do not fit"),
        (torch.zeros(2, 8).half(), torch.zeros(4, 8).half(), "do not fit"),
        (torch.zeros(1, 8).half(), torch.zeros(4, 8).bfloat16(), "of one dtype"),
        (torch.zeros(1, 8), torch.zeros(4, 8), "give bfloat16 or float16"),
        (torch.zeros(1, 8).half(), torch.zeros(8, 4).half().T, "adjacent along K"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_row_linear(x, weight, TILE)


def test_only_one_row_and_no_huge_weight_is_taken() -> None:
    assert linear_tile(1, 4096, 14336) is not None
    assert linear_tile(2, 4096, 14336) is None
    assert linear_tile(1, MOST_ELEMENTS // 4096 + 1, 4096) is None
