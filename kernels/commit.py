"""Commit: move the accepted nodes' keys and values down to their final places, all layers at once.

The tree's N tokens stand in the slots after the committed ones, in depth-first order; the accepted
path root -> ... -> node at depth a becomes the next 1 + a tokens. The root is already in place, so
row lengths + path[d] moves to lengths + d for d = 1..a, in every layer, for keys and values.
Sources and targets overlap: every source of a block is loaded before any target is stored.

Bytes moved: 4 * a * Hkv * D * element size per layer (read and written, K and V).
"""

from __future__ import annotations

import torch
from torch import Tensor


def commit(
    k_pools: Tensor,
    v_pools: Tensor,
    *,
    lengths: Tensor,
    path_nodes: Tensor,
    num_accepted: Tensor,
    page_table: Tensor | None,
    page_size: int,
    capacity: int,
) -> None:
    """Move the accepted slots in place; on CUDA one Triton launch, without a host read.

    k_pools, v_pools [L, S, Hkv, D]; lengths int32 [B] committed tokens before this step;
    path_nodes int64 [B, A], entry d the accepted node at depth d (strictly increasing, read up to
    num_accepted); num_accepted int32 [B], root excluded; page_table int32 [B, P], or None where
    sequence b owns the slots from b * capacity on. Advancing the lengths is left to the caller.
    """
    _check(k_pools, v_pools, lengths, path_nodes, num_accepted, page_table)
    if k_pools.is_cuda:
        from specdeft.kernels import commit_triton

        commit_triton.launch(
            k_pools,
            v_pools,
            lengths=lengths,
            path_nodes=path_nodes,
            num_accepted=num_accepted,
            page_table=page_table,
            page_size=page_size,
            capacity=capacity,
        )
        return
    depth = torch.arange(1, path_nodes.shape[1], device=lengths.device)
    nodes = path_nodes[:, 1:].to(torch.int64)
    moves = (depth <= num_accepted[:, None]) & (nodes != depth)
    sequence, _ = torch.nonzero(moves, as_tuple=True)
    if not sequence.numel():
        return
    start = lengths.to(torch.int64)[sequence]
    source = _slots(sequence, start + nodes[moves], page_table, page_size, capacity)
    target = _slots(
        sequence, start + depth.expand_as(nodes)[moves], page_table, page_size, capacity
    )
    for pool in (k_pools, v_pools):
        pool[:, target] = pool[:, source]  # the right-hand side is a gathered copy


def _slots(
    sequence: Tensor, position: Tensor, page_table: Tensor | None, page_size: int, capacity: int
) -> Tensor:
    """Pool slots of (sequence, position) pairs."""
    if page_table is None:
        return sequence * capacity + position
    pages = page_table[sequence, position // page_size].to(torch.int64)
    return pages * page_size + position % page_size


def _check(
    k_pools: Tensor,
    v_pools: Tensor,
    lengths: Tensor,
    path_nodes: Tensor,
    num_accepted: Tensor,
    page_table: Tensor | None,
) -> None:
    if k_pools.ndim != 4 or k_pools.shape != v_pools.shape or k_pools.stride() != v_pools.stride():
        raise ValueError(
            f"commit needs two pools [L, S, Hkv, D] of one shape and one layout, got "
            f"{tuple(k_pools.shape)} and {tuple(v_pools.shape)}: allocate them alike"
        )
    batch = lengths.shape[0]
    if path_nodes.shape[0] != batch or num_accepted.shape[0] != batch:
        raise ValueError(
            f"{batch} lengths, {path_nodes.shape[0]} paths and {num_accepted.shape[0]} accepted "
            "counts do not belong together: pass one of each per sequence"
        )
    if page_table is not None and page_table.shape[0] != batch:
        raise ValueError(
            f"a page table of {page_table.shape[0]} rows cannot serve {batch} sequences: pass a "
            "row per sequence, or None for a contiguous pool"
        )
