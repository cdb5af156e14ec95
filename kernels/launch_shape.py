"""Which tiles, how many splits: the fixed choices of a launch, from shapes and SM count alone.

Nothing here reads a length from the device: a grid is fixed by `max_context`, and the kernel
spreads whatever length it finds over the splits it has (`deft_flatten`). Pure Python, no triton.

On Hopper, 16-bit launches go to the Gluon kernels where their conditions hold (`hopper_tile`):
64-row programs, one on an SM while splits are short and two from `_TWO_PROGRAMS_TOKENS` on, or
128-row programs from `_WIDE_TOKENS` on. Elsewhere the Triton kernel takes the fewest of 16, 32, 64
rows that hold the R = N * G rows of a KV head, else 64. Measured, docs/tuning-attention.md.

Splits: enough programs to fill the device once, no second small wave, no split shorter than
`MIN_BLOCKS` inner steps, weighed against the partials that every further split writes and reads.
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


# Tokens that a program would read if there were one on each SM: from here on ..
_TWO_PROGRAMS_TOKENS = 768  # .. two programs on an SM overlap more than their partials cost
_LONG_BLOCKS_TOKENS = 2048  # .. D = 64 has the registers for blocks of 128 tokens
_WIDE_TOKENS = 1536  # .. counted for programs of 128 rows: these pay for their setup


class Kernel(Enum):
    """Which partials kernel runs; all take the same plan and give the same result."""

    TRITON = "triton"
    HOPPER = "hopper"
    HOPPER_WIDE = "hopper-wide"


class TileShape(NamedTuple):
    """Tile of one program: ROWS queries x heads, BLOCK tokens a step; its warps and pipeline."""

    rows: int
    block: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    kernel: Kernel = Kernel.TRITON


HOPPER_TILES = {
    64: TileShape(64, 64, 4, 3, 2, Kernel.HOPPER),
    128: TileShape(64, 64, 4, 3, 2, Kernel.HOPPER),
    256: TileShape(64, 64, 4, 2, 1, Kernel.HOPPER),
}
HOPPER_LONG_TILE = TileShape(64, 128, 4, 2, 2, Kernel.HOPPER)  # D = 64
HOPPER_WIDE_TILE = TileShape(128, 128, 4, 2, 1, Kernel.HOPPER_WIDE)  # D = 128


class LaunchShape(NamedTuple):
    """A launch for B sequences of N nodes: tiles, splits, and the sizes of the partials."""

    tile: TileShape
    num_row_tiles: int
    num_splits: int
    num_rows: int


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
) -> LaunchShape:
    """Choose for at most max_tokens = max_context + N tokens per sequence.

    page_size None: not paged. plain: neither window nor softcap, which the Hopper kernels lack.
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
    return LaunchShape(tile, num_row_tiles, choose_splits(units, blocks, slots, tile), num_rows)


def hopper_tile(
    num_rows: int, head_dim: int, page_size: int | None, units: int, max_tokens: int, sms: int
) -> TileShape:
    """Tile of the Hopper kernels for `units` = sequences * KV heads of max_tokens each."""
    tile = HOPPER_TILES[head_dim]
    holds_long = page_size is None or page_size >= 128
    wide_tokens = max_tokens / max(1, sms // (units * math.ceil(num_rows / 128)))
    if head_dim == 128 and holds_long and num_rows > 64 and wide_tokens >= _WIDE_TOKENS:
        return HOPPER_WIDE_TILE
    tokens = max_tokens / max(1, sms // (units * math.ceil(num_rows / 64)))
    if head_dim == 64 and holds_long and tokens >= _LONG_BLOCKS_TOKENS:
        return HOPPER_LONG_TILE
    if tokens < _TWO_PROGRAMS_TOKENS:
        return tile._replace(programs_per_sm=1)
    return tile


def tile_shape(num_rows: int, head_dim: int, dtype: torch.dtype) -> TileShape:
    """Tile by regime of R = N * G rows; measured on an H200 for 16-bit types."""
    if dtype == torch.float32:  # no matrix units: operands live in registers, more would spill
        return TileShape(16, 32 if head_dim <= 128 else 16, 8, 2, 2)
    rows = next((size for size in (16, 32) if num_rows <= size), 64)
    if head_dim > 128:
        return TileShape(rows, 32 if rows < 64 else 64, 4 if rows < 64 else 8, 2, 1)
    return TileShape(rows, 64, 4, 4 if rows < 64 else 3, 2)


def hopper_fits(head_dim: int, dtype: torch.dtype, page_size: int | None) -> bool:
    """Whether the Hopper kernels take it: a block is one copy, so it lies in one page."""
    return (
        head_dim in HOPPER_TILES
        and dtype != torch.float32
        and (page_size is None or page_size >= HOPPER_TILES[head_dim].block)
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
