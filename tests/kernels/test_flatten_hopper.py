"""The Hopper kernel against float64, natively; elsewhere only which launches would take it."""

import pytest
import torch

from specdeft.kernels.launch_shape import Kernel, hopper_fits, is_hopper
from tests.kernels.random_trees import chain_parents, random_parents, star_parents
from tests.kernels.speculation_case import DEVICE, Case

native = pytest.mark.gpu
BF16 = torch.bfloat16


def _check(case: Case, num_splits: int) -> None:
    if not is_hopper(DEVICE):
        pytest.skip("needs compute capability 9.0")
    assert case.shape(num_splits).tile.kernel is Kernel.HOPPER
    case.check(num_splits)


@native
@pytest.mark.parametrize("num_splits", [1, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 127, 128, 129, 1000, 4096])
def test_lengths_and_splits(length: int, num_splits: int) -> None:
    _check(
        Case([length], random_parents(40, 3), heads=(4, 1, 128), dtype=BF16, page_size=128),
        num_splits,
    )


@native
@pytest.mark.parametrize("num_nodes", [17, 33, 63, 64, 65, 127, 128, 129, 512, 1000])
def test_tree_sizes(num_nodes: int) -> None:
    _check(
        Case([777], random_parents(num_nodes, 5), heads=(8, 2, 128), dtype=BF16, page_size=256), 2
    )


@native
@pytest.mark.parametrize("page_size", [None, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (9, 3, 64), (2, 2, 128)])
def test_pages_types_and_heads(
    page_size: int | None, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    for parents in (random_parents(70, 1), chain_parents(100), star_parents(65)):
        case = Case([300, 0, 129], parents, heads=heads, dtype=dtype, page_size=page_size)
        _check(case, 2)


@native
@pytest.mark.parametrize("num_splits", [1, 4])
def test_sinks(num_splits: int) -> None:
    case = Case([900], random_parents(64, 2), heads=(8, 2, 128), dtype=BF16, sinks=torch.randn(8))
    _check(case, num_splits)


@native
def test_equal_inputs_give_equal_bits() -> None:
    case = Case([3000], random_parents(64, 2), heads=(8, 2, 128), dtype=BF16, page_size=128)
    _check(case, 4)
    first, _ = case.run(case.shape(4))
    for _ in range(20):
        again, _ = case.run(case.shape(4))
        assert torch.equal(first, again)


def test_which_launches_take_it() -> None:
    assert hopper_fits(17, 128, BF16, None)
    assert hopper_fits(256, 128, BF16, 64)
    assert hopper_fits(256, 64, torch.float16, 256)
    assert not hopper_fits(16, 128, BF16, 128)
    assert not hopper_fits(256, 80, BF16, 128)
    assert not hopper_fits(256, 128, torch.float32, 128)
    assert not hopper_fits(256, 128, BF16, 32)
