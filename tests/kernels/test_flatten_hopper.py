"""The Hopper kernels against float64, natively; elsewhere only which launches would take them."""

from typing import Any

import pytest
import torch

from specdeft.kernels.launch_shape import (
    HOPPER_LONG_TILES,
    HOPPER_TILES,
    HOPPER_WIDE_TILES,
    Kernel,
    TileShape,
    hopper_fits,
    hopper_tile,
    is_hopper,
    sm_count,
)
from tests.kernels.accuracy import relative_error
from tests.kernels.random_trees import chain_parents, random_parents, star_parents
from tests.kernels.speculation_case import DEVICE, Case

native = pytest.mark.gpu
BF16 = torch.bfloat16
NARROW, WIDE = HOPPER_TILES[128], HOPPER_WIDE_TILES[128]
BOTH = pytest.mark.parametrize("tile", [NARROW, WIDE], ids=["narrow", "wide"])


def _check(case: Case, num_splits: int, tile: TileShape | None = None) -> None:
    if not is_hopper(DEVICE):
        pytest.skip("needs compute capability 9.0")
    assert case.shape(num_splits, tile).tile.kernel is not Kernel.TRITON
    case.check(num_splits, tile)


@native
@BOTH
@pytest.mark.parametrize("num_splits", [1, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 127, 128, 129, 1000, 4096])
def test_lengths_and_splits(length: int, num_splits: int, tile: TileShape) -> None:
    case = Case([length], random_parents(40, 3), heads=(4, 1, 128), dtype=BF16, page_size=128)
    _check(case, num_splits, tile)


@native
@BOTH
@pytest.mark.parametrize(
    "num_nodes", [1, 3, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 512, 1000]
)
def test_tree_sizes(num_nodes: int, tile: TileShape) -> None:
    parents = random_parents(num_nodes, 5)
    _check(Case([777], parents, heads=(8, 2, 128), dtype=BF16, page_size=256), 2, tile)


@native
@pytest.mark.parametrize(
    ("heads", "tile"),
    [
        ((9, 3, 64), HOPPER_TILES[64]),
        ((9, 3, 64), HOPPER_LONG_TILES[64]),
        ((8, 2, 128), HOPPER_LONG_TILES[128]),
        ((4, 2, 256), HOPPER_TILES[256]),
        ((4, 2, 256), HOPPER_WIDE_TILES[256]),
    ],
    ids=["64", "64-long", "128-long", "256", "256-wide"],
)
@pytest.mark.parametrize("length", [0, 64, 127, 128, 129, 2000])
def test_other_tiles(length: int, heads: tuple[int, int, int], tile: TileShape) -> None:
    case = Case([length], random_parents(70, 3), heads=heads, dtype=BF16, page_size=128)
    for num_splits in (1, 4):
        _check(case, num_splits, tile)


@native
@pytest.mark.parametrize("page_size", [None, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (28, 4, 128), (9, 3, 64), (2, 2, 128), (16, 8, 256)]
)
def test_pages_types_and_heads(
    page_size: int | None, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    for parents in (random_parents(70, 1), chain_parents(100), star_parents(65)):
        case = Case([300, 0, 129], parents, heads=heads, dtype=dtype, page_size=page_size)
        _check(case, 2)
        if heads[2] == 128 and page_size != 64:
            _check(case, 2, WIDE)


@native
@pytest.mark.parametrize(
    ("num_sequences", "length", "kernel", "split"),
    [
        (1, 700, Kernel.HOPPER, True),
        (34, 1600, Kernel.HOPPER_WIDE, False),
        (32, 4000, Kernel.HOPPER_WIDE, True),
    ],
    ids=["chosen-narrow", "chosen-wide", "chosen-wide-split"],
)
def test_the_launchers_own_choice(
    num_sequences: int, length: int, kernel: Kernel, split: bool
) -> None:
    """Nothing forced: small launches that take each kernel. The sanitizer runs these."""
    if not is_hopper(DEVICE) or sm_count(DEVICE) != 132:
        pytest.skip("needs compute capability 9.0 with 132 SMs")
    lengths = [length - 7 * row for row in range(num_sequences)]
    case = Case(lengths, random_parents(40, 3), heads=(4, 1, 128), dtype=BF16, page_size=128)
    chosen = case.chosen()
    assert (chosen.tile.kernel, chosen.num_splits > 1) == (kernel, split)
    case.check()


@native
@BOTH
@pytest.mark.parametrize("num_splits", [1, 4])
def test_sinks(num_splits: int, tile: TileShape) -> None:
    case = Case([900], random_parents(64, 2), heads=(8, 2, 128), dtype=BF16, sinks=torch.randn(8))
    _check(case, num_splits, None if tile is WIDE else tile)
    paged = Case(
        [900], random_parents(64, 2), heads=(8, 2, 128), dtype=BF16, page_size=128,
        sinks=torch.randn(8),
    )  # fmt: skip
    _check(paged, num_splits, tile)


@native
@pytest.mark.parametrize(
    ("heads", "tile"),
    [
        ((8, 2, 128), NARROW),
        ((8, 2, 128), WIDE),
        ((8, 2, 128), HOPPER_LONG_TILES[128]),
        ((9, 3, 64), HOPPER_TILES[64]),
        ((9, 3, 64), HOPPER_LONG_TILES[64]),
        ((4, 2, 256), HOPPER_TILES[256]),
        ((4, 2, 256), HOPPER_WIDE_TILES[256]),
    ],
    ids=["narrow", "wide", "128-long", "64", "64-long", "256", "256-wide"],
)
@pytest.mark.parametrize("num_nodes", [1, 5, 33, 70])
@pytest.mark.parametrize("pages", [1, 9])
def test_a_prefix_read_once(
    pages: int, num_nodes: int, heads: tuple[int, int, int], tile: TileShape
) -> None:
    lengths = [pages * 128 + own for own in (0, 63, 64, 200)]
    case = Case(
        [*lengths, 0], random_parents(num_nodes, 3), heads=heads, dtype=BF16, page_size=128,
        prefix_pages=pages, sinks=torch.randn(heads[0]),
    )  # fmt: skip
    if not is_hopper(DEVICE):
        pytest.skip("needs compute capability 9.0")
    for splits, prefix_splits in ((1, 1), (3, 2), (2, 7)):
        case.check(splits, tile, prefix_splits)
    shape = case.shape(3, tile, 4)
    first, first_lse = case.run(shape)
    for _ in range(5):
        again, again_lse = case.run(shape)
        assert torch.equal(first, again)
        assert torch.equal(first_lse, again_lse)
    # None at all: its programs end at once, and each sequence reads everything.
    prefix = case.prefix()
    assert prefix is not None
    prefix.num_tokens.zero_()
    out, lse = case.run(shape, prefix=prefix)
    expected, expected_lse = case.run(shape._replace(prefix_splits=0), prefix=None)
    assert relative_error(out, expected.double().cpu()) < 1e-2
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@native
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (16, 8, 256)])
@pytest.mark.parametrize(("batch", "num_nodes"), [(2, 1), (8, 1), (8, 16), (32, 3)])
def test_a_prefix_by_the_launchers_own_choice(
    batch: int, num_nodes: int, heads: tuple[int, int, int]
) -> None:
    lengths = [4 * 128 + 37 * row for row in range(batch)]
    case = Case(
        lengths, random_parents(num_nodes, 3), heads=heads, dtype=BF16, page_size=128,
        prefix_pages=4,
    )  # fmt: skip
    if not is_hopper(DEVICE):
        pytest.skip("needs compute capability 9.0")
    assert case.chosen().tile.kernel is not Kernel.TRITON
    case.check()


@native
@BOTH
def test_equal_inputs_give_equal_bits(tile: TileShape) -> None:
    case = Case([3000], random_parents(64, 2), heads=(8, 2, 128), dtype=BF16, page_size=128)
    _check(case, 4, tile)
    first, _ = case.run(case.shape(4, tile))
    for _ in range(20):
        again, _ = case.run(case.shape(4, tile))
        assert torch.equal(first, again)


def test_which_launches_take_them() -> None:
    assert hopper_fits(128, BF16, None)
    assert hopper_fits(128, BF16, 64)
    assert hopper_fits(64, torch.float16, 256)
    assert hopper_fits(256, BF16, 128)
    assert not hopper_fits(80, BF16, 128)
    assert not hopper_fits(128, torch.float32, 128)
    assert not hopper_fits(128, BF16, 32)


def test_tile_by_rows_and_tokens() -> None:
    """Eight KV heads on 132 SMs, G = 4."""

    def tile(num_nodes: int, tokens: int, dim: int = 128, page_size: int | None = 128) -> TileShape:
        return hopper_tile(4 * num_nodes, dim, page_size, 8, tokens, 132)

    alone = NARROW._replace(programs_per_sm=1)
    assert tile(16, 65_552) == alone
    assert tile(64, 2_112) == alone
    assert tile(64, 8_256) == NARROW
    assert tile(64, 16_448) == WIDE
    assert tile(32, 65_568) == NARROW
    assert tile(256, 1_280) == HOPPER_LONG_TILES[128]
    assert tile(256, 4_352) == WIDE
    assert tile(512, 1_536) == WIDE
    assert tile(256, 8_448, page_size=64) == NARROW
    assert tile(64, 8_256, dim=64) == HOPPER_LONG_TILES[64]
    assert tile(64, 2_112, dim=64) == HOPPER_TILES[64]
    assert tile(64, 8_256, dim=256) == HOPPER_TILES[256]._replace(programs_per_sm=1)
    assert tile(256, 8_448, dim=256) == HOPPER_WIDE_TILES[256]


@pytest.mark.parametrize("tile", [NARROW, WIDE, HOPPER_LONG_TILES[64]])
def test_launches_give_the_kernels_what_they_take(
    monkeypatch: pytest.MonkeyPatch, tile: TileShape
) -> None:
    """Names only, so that it holds without a GPU too."""
    from specdeft.kernels import flatten_hopper, flatten_hopper_wide

    if is_hopper(DEVICE):
        pytest.skip("the kernels run natively here")
    given: list[dict[str, object]] = []

    class Kernel:
        def __init__(self, kernel: Any) -> None:
            self.names = set(kernel.arg_names)

        def __getitem__(self, grid: tuple[int, int, int]) -> object:
            assert min(grid) >= 1
            return lambda **arguments: given.append(arguments)

    kernels = {
        False: Kernel(flatten_hopper.hopper_attention_kernel),
        True: Kernel(flatten_hopper_wide.wide_attention_kernel),
    }
    monkeypatch.setattr(flatten_hopper, "hopper_attention_kernel", kernels[False])
    monkeypatch.setattr(flatten_hopper_wide, "wide_attention_kernel", kernels[True])
    dim = 64 if tile.block != NARROW.block and tile is not WIDE else 128
    case = Case([300], random_parents(9, 1), heads=(4, 2, dim), dtype=torch.float16, page_size=128)
    case.run(case.shape(1, tile))
    (arguments,) = given
    assert set(arguments) - {"num_warps", "launch_pdl"} == kernels[tile is WIDE].names
    assert (arguments["ROWS"], arguments["BLOCK"]) == (tile.rows, tile.block)
