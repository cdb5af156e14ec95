"""The best columns of rows against a sort: odd sizes, ties, infinities, all in one chunk."""

import pytest
import torch

pytest.importorskip("triton")

from specdeft.kernels.top_columns import CHUNK, top_columns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_sorting(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.float().sort(dim=-1, descending=True, stable=True).indices[..., :k]


@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, CHUNK), (5, 3 * CHUNK + 17), (1, 5000)])
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_a_stable_sort(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    """In 16 bits most values occur many times: the lower columns come first."""
    x = torch.randn(shape, device=DEVICE).to(dtype)
    assert torch.equal(top_columns(x, k), by_sorting(x, k))


def test_ties_signs_and_infinities() -> None:
    x = torch.full((3, 2 * CHUNK + 5), -2.5, device=DEVICE)
    x[0, [3, CHUNK + 1, 2 * CHUNK]] = torch.tensor([1.0, float("inf"), 1.0], device=DEVICE)
    x[1] = float("-inf")
    x[2, [9, CHUNK + 7, 2 * CHUNK + 1, 40]] = torch.tensor([-0.0, 0.0, -0.0, 0.0], device=DEVICE)
    found = top_columns(x, 4).tolist()
    assert found == [[CHUNK + 1, 3, 2 * CHUNK, 0], [0, 1, 2, 3], [9, 40, CHUNK + 7, 2 * CHUNK + 1]]


def test_rows_with_gaps_between_them() -> None:
    x = torch.randn(4, 3000, device=DEVICE)
    for view in (x[:, 5:2000], x.T[:100].T, x[None, ::2]):
        assert torch.equal(top_columns(view, 5), by_sorting(view, 5))
    assert top_columns(x[:0], 5).shape == (0, 5)


def test_what_it_cannot_do_is_refused() -> None:
    x = torch.zeros(2, 10, device=DEVICE)
    with pytest.raises(ValueError, match="k is 11: give 1 to 10 of 10 columns"):
        top_columns(x, 11)
    with pytest.raises(ValueError, match="k is 0: give 1 to 10"):
        top_columns(x, 0)
    with pytest.raises(ValueError, match="float64"):
        top_columns(x.double(), 1)
