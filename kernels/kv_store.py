"""Store: a forward's new keys and values go to their slots after the committed ones, one launch.

A program copies one token's rows of K and of V; its slot follows from the sequence's length and
page table, which are read on the device. Bytes moved: 4 * Hkv * D * element size per token.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks the launcher only.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdeft.kernels.commit_triton import slot_of
from specdeft.kernels.launch_shape import can_start_early


@triton.jit
def _store_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    lengths_ptr,
    page_table_ptr,
    k_stride_b,
    k_stride_n,
    k_stride_h,
    v_stride_b,
    v_stride_n,
    v_stride_h,
    stride_slot,
    table_stride,
    capacity,
    num_columns,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_sequence = tl.program_id(1).to(tl.int64)
    if PDL:  # launched while the kernel before still ends: what it wrote is complete from here on
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = tl.load(lengths_ptr + i_sequence).to(tl.int64) + i_token
    table_row = page_table_ptr + i_sequence * table_stride
    slot = slot_of(position, table_row, i_sequence * capacity, PAGE_SIZE, PAGED)
    o_column = tl.arange(0, COLUMNS)
    mask = o_column < num_columns
    head, dim = o_column // DIM, o_column % DIM
    p_k = k_ptr + i_sequence * k_stride_b + i_token * k_stride_n + head * k_stride_h + dim
    p_v = v_ptr + i_sequence * v_stride_b + i_token * v_stride_n + head * v_stride_h + dim
    target = slot * stride_slot + o_column
    tl.store(k_pool_ptr + target, tl.load(p_k, mask=mask), mask=mask)
    tl.store(v_pool_ptr + target, tl.load(p_v, mask=mask), mask=mask)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    lengths: Tensor,
    page_table: Tensor | None,
    page_size: int,
    capacity: int,
) -> None:
    """Write k, v [B, N, Hkv, D] to the slots of positions lengths[b] .. lengths[b] + N - 1.

    k_pool, v_pool [S, Hkv, D], rows contiguous; lengths int32 [B]; page_table int32 [B, P], or None
    where sequence b owns the slots from b * capacity on. Elements of a head must be adjacent in k
    and v. Raises ValueError for other layouts or dtypes.
    """
    batch, num_new, kv_heads, dim = k.shape
    columns = kv_heads * dim
    if k.dtype != k_pool.dtype or v.dtype != v_pool.dtype or k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError(
            f"k {k.dtype} and v {v.dtype} must have the pools' dtype {k_pool.dtype} and adjacent "
            "head elements: convert them first"
        )
    rows_fit = k_pool.shape[1:] == (kv_heads, dim) and k_pool.stride()[1:] == (dim, 1)
    if not rows_fit or k_pool.stride() != v_pool.stride():
        raise ValueError(
            f"the pools {tuple(k_pool.shape)} must hold contiguous rows of {kv_heads} x {dim}: "
            "allocate them as [slots, heads, dim]"
        )
    if not num_new:
        return
    early = can_start_early(k)
    _store_kernel[(num_new, batch)](
        k_ptr=k,
        v_ptr=v,
        k_pool_ptr=k_pool,
        v_pool_ptr=v_pool,
        lengths_ptr=lengths,
        page_table_ptr=lengths if page_table is None else page_table,
        k_stride_b=k.stride(0),
        k_stride_n=k.stride(1),
        k_stride_h=k.stride(2),
        v_stride_b=v.stride(0),
        v_stride_n=v.stride(1),
        v_stride_h=v.stride(2),
        stride_slot=k_pool.stride(0),
        table_stride=0 if page_table is None else page_table.stride(0),
        capacity=capacity,
        num_columns=columns,
        DIM=dim,
        PAGE_SIZE=page_size,
        PAGED=page_table is not None,
        COLUMNS=triton.next_power_of_2(columns),
        PDL=early,
        num_warps=max(1, min(8, triton.next_power_of_2(columns) // 256)),
        **({"launch_pdl": True} if early else {}),
    )
