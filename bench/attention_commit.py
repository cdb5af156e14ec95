"""The commit of a step, timed: accepted slots of all layers moved by one launch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from specdeft.bench.cuda_timing import COLD_BYTES, time_rotated
from specdeft.kernels import io_cost
from specdeft.kernels.baselines.prepared import HeadShape
from specdeft.kernels.commit import commit

NUM_LAYERS, NUM_NODES, NUM_ACCEPTED = 32, 64, 4
_PAGE_SIZE = 128
# Depth 1 to 4 of a 64-node tree, every row to be moved.
_PATH = (0, 5, 21, 40, 63)


class CommitTime(NamedTuple):
    """Microseconds for all layers, and the bytes read and written."""

    heads: str
    median_us: float
    spread_us: float
    num_bytes: int


def time_commit(shape: HeadShape, device: torch.device) -> CommitTime:
    """Check one commit row by row, then time commits at as many places as keep the rows cold.

    Raises:
        ValueError: a row did not arrive.
    """
    num_bytes = io_cost.commit_bytes(
        NUM_LAYERS, NUM_ACCEPTED, shape.kv_heads, shape.head_dim, shape.dtype.itemsize
    )
    sets = math.ceil(COLD_BYTES / num_bytes)
    slots = sets * _PAGE_SIZE
    size = (NUM_LAYERS, slots, shape.kv_heads, shape.head_dim)
    pools = [torch.randn(size, device=device, dtype=shape.dtype) for _ in range(2)]
    table = torch.randperm(sets, generator=torch.Generator().manual_seed(sets)).int()
    tables = table[:, None].to(device)
    length = torch.tensor([3], dtype=torch.int32, device=device)
    path = torch.tensor([_PATH], device=device)
    accepted = torch.tensor([NUM_ACCEPTED], dtype=torch.int32, device=device)

    def call(index: int) -> None:
        commit(
            pools[0],
            pools[1],
            lengths=length,
            path_nodes=path,
            num_accepted=accepted,
            page_table=tables[index : index + 1],
            page_size=_PAGE_SIZE,
            capacity=slots,
        )

    first = int(table[0]) * _PAGE_SIZE + 3
    source = torch.tensor([first + node for node in _PATH], device=device)
    target = torch.arange(first, first + len(_PATH), device=device)
    expected = [pool[:, source].clone() for pool in pools]
    call(0)
    if not all(torch.equal(p[:, target], e) for p, e in zip(pools, expected, strict=True)):
        raise ValueError("the commit kernel moved a wrong row: no time for a wrong result")
    heads = f"{shape.query_heads}/{shape.kv_heads}/{shape.head_dim}"
    timing = time_rotated(call, sets)
    return CommitTime(heads, timing.median_us, timing.spread_us, num_bytes)
