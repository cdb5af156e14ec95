"""The speculation kernel against float64: in Triton's interpreter here, natively on a GPU."""

from typing import Any

import pytest
import torch

from specdeft.kernels.deft_flatten import allocate_scratch
from specdeft.kernels.launch_shape import MIN_BLOCKS, launch_shape
from specdeft.kernels.reference import tree_attention_reference, tree_visibility
from specdeft.trees.mask import mask_words_from_ancestors
from tests.kernels.accuracy import relative_error
from tests.kernels.random_trees import (
    ancestors_and_depths,
    chain_parents,
    random_parents,
    star_parents,
)
from tests.kernels.speculation_case import DEVICE, Case

BLOCK = 64


@pytest.mark.parametrize("num_nodes", [1, 2, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129])
def test_tree_sizes(num_nodes: int) -> None:
    Case([70], random_parents(num_nodes, seed=num_nodes)).check()


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [512, 1000])
def test_large_trees(num_nodes: int) -> None:
    parents = random_parents(num_nodes, seed=1)
    Case([30], parents, heads=(1, 1, 16), dtype=torch.float16).check()


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize(
    "length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 9, 4 * BLOCK, 5 * BLOCK + 1]
)
def test_lengths_and_splits(length: int, num_splits: int) -> None:
    Case([length], random_parents(9, seed=3)).check(num_splits)


@pytest.mark.parametrize("parents", [chain_parents(70), star_parents(70), [-1]])
def test_chain_star_and_root_alone(parents: list[int]) -> None:
    Case([200], parents).check(3)


def test_bit_63_alone_decides() -> None:
    """Node 64 hangs below node 63 only through bit 63 of its first word."""
    parents = [*star_parents(64), 63]
    case = Case([0], parents)
    word = mask_words_from_ancestors(case.ancestors)[64, 0]
    assert word < 0
    case.check()


@pytest.mark.parametrize("page_size", [None, 16, 32, 64, 128, 256])
def test_page_sizes(page_size: int | None) -> None:
    Case([333], random_parents(20, seed=2), page_size=page_size).check(2)
    Case([300, 0, 129], random_parents(5, seed=2), page_size=page_size).check(3)


@pytest.mark.parametrize("heads", [(9, 3, 64), (7, 1, 16), (4, 4, 32), (5, 1, 48), (6, 2, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_head_groups_and_dims(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    Case([150], random_parents(11, seed=4), heads=heads, dtype=dtype).check(2)


@pytest.mark.parametrize("dim", [16, 96, 128, 256])
def test_head_dims(dim: int) -> None:
    Case([90], random_parents(6, seed=4), heads=(2, 1, dim), dtype=torch.float16).check(2)


def test_many_splits_of_wide_heads_merge_row_by_row() -> None:
    Case([1100], random_parents(6, seed=4), heads=(2, 1, 128), dtype=torch.float16).check(16)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("softcap", "window", "sinks"),
    [
        (3.0, None, False),
        (None, None, True),
        (None, 1, False),
        (None, 40, True),
        (None, 150, False),
        (3.0, 90, True),
    ],
)
def test_options(softcap: float | None, window: int | None, sinks: bool, num_splits: int) -> None:
    options: dict[str, Any] = {}
    if softcap is not None:
        options["softcap"] = softcap
    if window is not None:
        options["window"] = window
    if sinks:
        options["sinks"] = torch.randn(2)
    for length in (0, 30, 280):
        Case([length], random_parents(20, seed=5), **options).check(num_splits)


@pytest.mark.parametrize("gain", [1e-3, 30.0])
def test_flat_and_peaked_scores(gain: float) -> None:
    Case([200], random_parents(9, seed=6), gain=gain).check(3)


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_lse_far_below_and_above_zero(shift: float) -> None:
    """A constant in one key dimension shifts every score alike: the output must not notice."""
    case = Case([200], random_parents(9, seed=6))
    case.q[..., 0] = shift * case.dim**0.5
    for kv in (case.pool, *case.rows):
        kv[0, ..., 0] = torch.where(kv[0, ..., 0].isnan(), kv[0, ..., 0], 1.0)
    case.check(3)


def test_a_tree_per_sequence() -> None:
    case = Case([100, 40], random_parents(12, seed=7))
    other, _ = ancestors_and_depths(random_parents(12, seed=8))
    words = torch.stack(
        [mask_words_from_ancestors(case.ancestors), mask_words_from_ancestors(other)]
    )
    out, _ = case.run(mask_words=words.to(DEVICE))
    for row, ancestors in enumerate((case.ancestors, other)):
        visible = tree_visibility(ancestors, case.lengths[row])
        k, v = case.rows[row]
        exact, _ = tree_attention_reference(case.q[row], k, v, visible, scale=case.dim**-0.5)
        assert relative_error(out[row], exact) < 1e-6


def test_equal_inputs_give_equal_bits_also_with_reused_scratch_and_output() -> None:
    case = Case([500], random_parents(16, seed=9))
    shape = case.shape(4)
    first, first_lse = case.run(shape)
    scratch = allocate_scratch(
        shape, batch=1, kv_heads=case.kv_heads, head_dim=case.dim, device=DEVICE
    )
    out = torch.full_like(first, float("nan"))
    for _ in range(2):
        again, again_lse = case.run(shape, scratch=scratch, out=out)
        assert again is out
        assert torch.equal(first, again)
        assert torch.equal(first_lse, again_lse)


def test_a_grid_for_a_longer_context_than_the_one_found() -> None:
    """One captured launch serves every length up to max_context: spare splits stay unread."""
    case = Case([5], random_parents(4, seed=1))
    expected, _ = case.run(case.shape(1))
    out, _ = case.run(case.shape(16), max_context=10_000)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_splits_fill_the_device_once() -> None:
    arguments = {"query_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    for num_nodes, tokens in [(1, 1024), (16, 8192), (64, 8192), (64, 32768), (256, 8192)]:
        shape = launch_shape(
            batch=1, num_nodes=num_nodes, max_tokens=tokens + num_nodes, device=DEVICE, **arguments
        )
        programs = shape.num_row_tiles * shape.num_splits * 8
        assert shape.num_splits <= tokens // (shape.tile.block * MIN_BLOCKS)
        assert programs <= 3 * shape.num_row_tiles * 8 or DEVICE.type == "cuda"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": 0.0}, "scale is 0.0"),
        ({"page_size": 24}, "page_size 24 must be a power of two"),
        ({"window": 5, "depths": None}, "pass depths"),
        ({"mask_words": torch.zeros(9, 2, dtype=torch.int64)}, "do not fit 9 nodes"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, "1 sequences need 1 lengths"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case([10], random_parents(9, seed=1)).run(**changed)
