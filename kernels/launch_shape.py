"""Which tiles, how many splits: the fixed choices of a launch, from shapes and SM count alone.

Nothing here reads a length from the device: a grid is fixed by `max_context`, and the kernel
spreads whatever length it finds over the splits it has (`deft_flatten`). Pure Python, no triton.

On Hopper, 16-bit launches go to the Gluon kernels (`hopper_tile`): programs of 64 rows, one on an
SM while splits are short and two when they are longer, or of 128 rows where many rows read long
splits. Elsewhere the Triton kernel takes the fewest of 16, 32, 64 rows that hold the R = N * G rows
of a KV head, else 64. All thresholds are measured, docs/tuning-attention.md.

Splits: enough programs to fill the device once, no second small wave, no split shorter than
`MIN_BLOCKS` inner steps, weighed against the partials that every further split writes and reads.

A prefix that all sequences share may be read once, by the rows of all of them (`SharedPrefix`); it
has splits of its own, so one launch serves every length of it. Whether that pays (`prefix_pays`)
follows from row tiles: B sequences of R rows take B * ceil(R / 64) of them apart, ceil(B * R / 64)
together.
"""

from __future__ import annotations

import math
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import torch

MIN_BLOCKS = 2  # inner steps below which a split costs more than it spreads
INTERPRETED_SMS = 8  # a CPU has none: the interpreter runs programs one by one
MAX_SPLITS = 64
MIN_PREFIX_TOKENS = 512  # a shared prefix below which another part of partials costs more
MOST_PREFIX_TILES = 0.75  # of the row tiles of the sequences apart


class Kernel(Enum):
    """Which partials kernel runs; all take the same plan and give the same result."""

    TRITON = "triton"
    HOPPER = "hopper"
    HOPPER_WIDE = "hopper-wide"


class SharedPrefix(NamedTuple):
    """Committed tokens that every sequence of a call begins with, on the same pages.

    num_tokens: int32 [1], full pages of them. pages: int32 [P]; what stands behind those pages is
    not read. Both are read on the device, so that a captured launch serves every prefix.
    """

    num_tokens: torch.Tensor
    pages: torch.Tensor


class TileShape(NamedTuple):
    """Tile of one program: ROWS queries x heads, BLOCK tokens a step; its warps and pipeline."""

    rows: int
    block: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    kernel: Kernel = Kernel.TRITON


# Hopper, by head dim. Programs of 64 rows, the same with long blocks, and programs of 128 rows.
HOPPER_TILES = {
    64: TileShape(64, 64, 4, 3, 2, Kernel.HOPPER),
    128: TileShape(64, 64, 4, 3, 2, Kernel.HOPPER),
    256: TileShape(64, 64, 4, 2, 1, Kernel.HOPPER),
}
HOPPER_LONG_TILES = {
    64: TileShape(64, 128, 4, 2, 2, Kernel.HOPPER),
    128: TileShape(64, 128, 4, 2, 1, Kernel.HOPPER),
}
HOPPER_WIDE_TILES = {
    128: TileShape(128, 128, 4, 2, 1, Kernel.HOPPER_WIDE),
    256: TileShape(128, 64, 4, 2, 1, Kernel.HOPPER_WIDE),
}
# Tokens a program from which on ..
_WIDE_TOKENS = 2000  # .. 128 rows that share their copies pay for setting up three parts
_WIDE_UNSPLIT_TOKENS = 1500  # .. the same where nothing is merged
_TWO_PROGRAMS_TOKENS = {64: 400, 128: 550, 256: 550}  # .. a second one on the SM pays
_LONG_TOKENS = 500  # .. D = 64 gains by long blocks
_UNSPLIT_TOKENS = 2400  # up to here, D = 128: one program on each SM reads all, nothing to merge


class LaunchShape(NamedTuple):
    """A launch for B sequences of N nodes: tiles, splits, and the sizes of the partials.

    prefix_splits: those of a prefix that is read once, 0 where every sequence reads all it sees.
    """

    tile: TileShape
    num_row_tiles: int
    num_splits: int
    num_rows: int
    prefix_splits: int = 0


@lru_cache(maxsize=512)
def launch_shape(
    *,
    batch: int,
    num_nodes: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int | None = None,
    plain: bool = True,
    has_prefix: bool = False,
) -> LaunchShape:
    """Choose for at most max_tokens = max_context + N tokens per sequence.

    page_size None: not paged. plain: neither window nor softcap, which the Hopper kernels lack.
    has_prefix: a shared prefix is read once.
    """
    num_rows = num_nodes * (query_heads // kv_heads)
    sms = sm_count(device)
    tile = tile_shape(num_rows, head_dim, dtype)
    if plain and is_hopper(device) and hopper_fits(head_dim, dtype, page_size):
        tile = hopper_tile(num_rows, head_dim, page_size, batch * kv_heads, max_tokens, sms)
    num_row_tiles = math.ceil(num_rows / tile.rows)
    blocks = max(1, math.ceil(max_tokens / tile.block))
    units = batch * kv_heads * num_row_tiles
    # One row tile is bound by memory: one program per SM keeps enough loads in flight, and a second
    # would only double the partials.
    slots = sms * (tile.programs_per_sm if num_row_tiles > 1 else 1)
    splits = choose_splits(units, blocks, slots, tile)
    prefix_splits = 0
    if has_prefix:
        # How the tokens are shared out between the prefix and the rest is known on the device only:
        # either part gets the splits of a launch of its own.
        prefix_units = kv_heads * math.ceil(batch * num_rows / tile.rows)
        prefix_splits = choose_splits(prefix_units, blocks, slots, tile)
    return LaunchShape(tile, num_row_tiles, splits, num_rows, prefix_splits)


def prefix_pays(
    *,
    batch: int,
    num_nodes: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    num_tokens: int,
) -> bool:
    """Whether a prefix of so many tokens is better read once than by each of B sequences.

    It is where the rows of all sequences fill fewer tiles together than apart.
    """
    num_rows = num_nodes * (query_heads // kv_heads)
    tile = tile_shape(num_rows, head_dim, dtype)
    if is_hopper(device) and hopper_fits(head_dim, dtype, page_size):
        tile = HOPPER_TILES[head_dim]
    apart = batch * math.ceil(num_rows / tile.rows)
    together = math.ceil(batch * num_rows / tile.rows)
    fits = num_tokens >= MIN_PREFIX_TOKENS and page_size >= tile.block
    return fits and together <= MOST_PREFIX_TILES * apart


def hopper_tile(
    num_rows: int, head_dim: int, page_size: int | None, units: int, max_tokens: int, sms: int
) -> TileShape:
    """Tile of the Hopper kernels for `units` = sequences * KV heads of max_tokens each."""
    tile = HOPPER_TILES[head_dim]
    narrow, wide = (units * math.ceil(num_rows / rows) for rows in (64, 128))
    if narrow == units:
        return tile._replace(programs_per_sm=1)
    unsplit = sms < 2 * wide
    wide_tile = HOPPER_WIDE_TILES.get(head_dim)
    if wide_tile and wide > units and _in_one_page(wide_tile, page_size):
        least = _WIDE_UNSPLIT_TOKENS if unsplit else _WIDE_TOKENS
        if max_tokens >= least * max(1, sms // wide):
            return wide_tile
    long_tile = HOPPER_LONG_TILES.get(head_dim)
    if long_tile and _in_one_page(long_tile, page_size):
        if head_dim == 64 and max_tokens >= _LONG_TOKENS * max(1, 2 * sms // narrow):
            return long_tile
        if head_dim == 128 and sms < 2 * narrow <= 2 * sms and max_tokens <= _UNSPLIT_TOKENS:
            return long_tile
    if max_tokens < _TWO_PROGRAMS_TOKENS[head_dim] * max(1, sms // narrow):
        return tile._replace(programs_per_sm=1)
    return tile


def _in_one_page(tile: TileShape, page_size: int | None) -> bool:
    """A block is one copy, so it must lie in one page."""
    return page_size is None or page_size >= tile.block


def tile_shape(num_rows: int, head_dim: int, dtype: torch.dtype) -> TileShape:
    """Tile by regime of R = N * G rows; measured on an H200 for 16-bit types."""
    if dtype == torch.float32:  # no matrix units: operands live in registers, more would spill
        return TileShape(16, 32 if head_dim <= 128 else 16, 8, 2, 2)
    rows = next((size for size in (16, 32) if num_rows <= size), 64)
    if head_dim > 128:
        return TileShape(rows, 32 if rows < 64 else 64, 4 if rows < 64 else 8, 2, 1)
    return TileShape(rows, 64, 4, 4 if rows < 64 else 3, 2)


def hopper_fits(head_dim: int, dtype: torch.dtype, page_size: int | None) -> bool:
    """Whether the Hopper kernels take such a launch."""
    return (
        head_dim in HOPPER_TILES
        and dtype != torch.float32
        and _in_one_page(HOPPER_TILES[head_dim], page_size)
    )


def choose_splits(units: int, blocks: int, slots: int, tile: TileShape) -> int:
    """Splits with the least estimated time: waves of programs, then the partials' traffic."""
    most = max(1, min(blocks // MIN_BLOCKS, MAX_SPLITS, 2 * slots // units + 1))

    def cost(splits: int) -> float:
        waves = math.ceil(units * splits / slots)
        steps = waves * (math.ceil(blocks / splits) + 2)  # 2 steps of ramp and epilogue
        if splits == 1:
            return float(steps)
        # A partial of fp32 [rows, D], written and read, against a step's [block, D] x K, V in 16
        # bits: rows * 8 / (block * 4) steps of traffic each, spread over all programs.
        partials = 2 * tile.rows / tile.block * units * splits / slots
        return steps + partials + 2

    return min(range(1, most + 1), key=cost)


@lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    """Compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """Multiprocessors of the device; a token number where kernels are interpreted."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_start_early(tensor: torch.Tensor) -> bool:
    """Whether the device has programmatic dependent launch."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9
