"""The commit of `kernels/commit.py` as one Triton launch over layers, sequences and columns.

A program owns a block of columns of one layer's K and V for one sequence, so programs never meet.
Depth-first numbering makes the path strictly increasing, path[d] >= d: a target row d is never the
source of a later row, so blocks of rows may follow one another; inside a block a barrier stands
between the loads and the stores, because other threads hold other rows of the same columns.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks the launcher only.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 8  # accepted nodes moved at once; four accepted of 64 is the common case
MAX_COLUMNS = 512  # 8 x 512 elements of 4 warps: 32 per thread for K and as many for V


@triton.jit
def slot_of(position, page_table_row, capacity_start, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr):
    """Pool slot (int64) of positions of one sequence; page ids are read where PAGED."""
    if PAGED:
        page = tl.load(page_table_row + position // PAGE_SIZE).to(tl.int64)
        return page * PAGE_SIZE + position % PAGE_SIZE
    return capacity_start + position


@triton.jit
def _commit_kernel(
    k_ptr,
    v_ptr,
    lengths_ptr,
    path_ptr,
    accepted_ptr,
    page_table_ptr,
    stride_layer,
    stride_slot,
    path_stride,
    table_stride,
    capacity,
    num_columns,
    PAGE_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i_column = tl.program_id(0)
    i_layer = tl.program_id(1)
    i_sequence = tl.program_id(2)
    num_accepted = tl.load(accepted_ptr + i_sequence).to(tl.int32)
    if num_accepted > 0:
        start = tl.load(lengths_ptr + i_sequence).to(tl.int64)
        table_row = page_table_ptr + i_sequence.to(tl.int64) * table_stride
        first_slot = i_sequence.to(tl.int64) * capacity
        o_column = i_column * COLUMNS + tl.arange(0, COLUMNS)
        base = i_layer.to(tl.int64) * stride_layer + o_column[None, :]
        for first in range(1, num_accepted + 1, ROWS):
            depth = first + tl.arange(0, ROWS)
            m_row = depth <= num_accepted
            node = tl.load(path_ptr + i_sequence * path_stride + depth, mask=m_row, other=0)
            # Rows past the path point at the root's slot: a legal address, never stored.
            source = slot_of(
                start + tl.where(m_row, node, 0), table_row, first_slot, PAGE_SIZE, PAGED
            )
            target = slot_of(
                start + tl.where(m_row, depth, 0), table_row, first_slot, PAGE_SIZE, PAGED
            )
            mask = m_row[:, None] & (o_column < num_columns)[None, :]
            p_source = source[:, None] * stride_slot + base
            p_target = target[:, None] * stride_slot + base
            b_k = tl.load(k_ptr + p_source, mask=mask)
            b_v = tl.load(v_ptr + p_source, mask=mask)
            tl.debug_barrier()
            tl.store(k_ptr + p_target, b_k, mask=mask)
            tl.store(v_ptr + p_target, b_v, mask=mask)


def launch(
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
    """One launch; arguments as `commit`, which checks them."""
    layers, _, kv_heads, dim = k_pools.shape
    if k_pools.stride(3) != 1 or k_pools.stride(2) != dim:
        raise ValueError(
            f"commit needs the [Hkv, D] of a slot in one piece, got strides {k_pools.stride()}: "
            "lay the pools out tokens first"
        )
    num_columns = kv_heads * dim
    columns = min(MAX_COLUMNS, triton.next_power_of_2(num_columns))
    grid = (triton.cdiv(num_columns, columns), layers, lengths.shape[0])
    _commit_kernel[grid](
        k_ptr=k_pools,
        v_ptr=v_pools,
        lengths_ptr=lengths,
        path_ptr=path_nodes,
        accepted_ptr=num_accepted,
        page_table_ptr=lengths if page_table is None else page_table,
        stride_layer=k_pools.stride(0),
        stride_slot=k_pools.stride(1),
        path_stride=path_nodes.stride(0),
        table_stride=0 if page_table is None else page_table.stride(0),
        capacity=capacity,
        num_columns=num_columns,
        PAGE_SIZE=page_size,
        PAGED=page_table is not None,
        ROWS=ROWS,
        COLUMNS=columns,
        num_warps=4,
    )
