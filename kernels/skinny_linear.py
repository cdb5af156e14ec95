"""Products of a few rows with a weight: x [N, K] times W [O, K] transposed, for N up to 64.

Such a product is bound by reading the weight, and where the weight is small, by how soon its
loads are in flight. A program takes a tile of outputs over the whole of K, so nothing is reduced
across programs and no second launch follows: what costs the libraries most at these sizes.

    one row    products and sums in float32 on the plain cores
    up to 64   tiles of rows x outputs on the matrix units

Accumulation is float32 in a fixed order. Bytes moved: the weight once per tile of rows.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks the launcher only.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.kernels.linear_tile import LinearTile


@triton.jit
def _one_row_kernel(
    x_ptr, w_ptr, out_ptr, num_outputs, dim, w_stride,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    o_dim = tl.arange(0, BLOCK)
    m_out = o_out < num_outputs
    p_w = w_ptr + o_out.to(tl.int64)[:, None] * w_stride + o_dim[None, :]
    b_acc = tl.zeros([OUTPUTS, BLOCK], dtype=tl.float32)
    for at in tl.range(0, dim, BLOCK, num_stages=STAGES):
        m_dim = at + o_dim < dim
        b_w = tl.load(p_w + at, mask=m_out[:, None] & m_dim[None, :], other=0.0)
        b_x = tl.load(x_ptr + at + o_dim, mask=m_dim, other=0.0)
        b_acc += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
    tl.store(out_ptr + o_out, tl.sum(b_acc, 1).to(out_ptr.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_ptr, w_ptr, out_ptr, num_rows, num_outputs, dim, x_stride, w_stride, out_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_dim = tl.arange(0, BLOCK)
    m_out, m_row = o_out < num_outputs, o_row < num_rows
    p_w = w_ptr + o_out.to(tl.int64)[None, :] * w_stride + o_dim[:, None]
    p_x = x_ptr + o_row.to(tl.int64)[:, None] * x_stride + o_dim[None, :]
    b_acc = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for at in tl.range(0, dim, BLOCK, num_stages=STAGES):
        m_dim = at + o_dim < dim
        b_x = tl.load(p_x + at, mask=m_row[:, None] & m_dim[None, :], other=0.0)
        b_w = tl.load(p_w + at, mask=m_out[None, :] & m_dim[:, None], other=0.0)
        b_acc = tl.dot(b_x, b_w, b_acc)
    p_out = out_ptr + o_row.to(tl.int64)[:, None] * out_stride + o_out[None, :]
    tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=m_row[:, None] & m_out[None, :])


def skinny_linear(x: Tensor, weight: Tensor, tile: LinearTile) -> Tensor:
    """x [N, K] @ weight [O, K].T in float32 accumulation, [N, O] in the dtype of x.

    x and weight bfloat16 or float16, alike, with adjacent elements along K. `tile.rows` is 1 for
    one row, else 16, 32 or 64. Raises ValueError for other layouts, shapes or dtypes.
    """
    num_rows, dim = x.shape
    num_outputs = weight.shape[0]
    if weight.shape[1] != dim or x.dtype != weight.dtype or x.stride(1) != 1:
        raise ValueError(
            f"x {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)} do not "
            "fit: give x [N, K] and weight [O, K] of one dtype, adjacent along K"
        )
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.stride(1) != 1:
        raise ValueError(
            f"{x.dtype} with weight strides {weight.stride()}: give bfloat16 or float16, adjacent "
            "along K"
        )
    if (tile.rows == 1) != (num_rows == 1):
        raise ValueError(f"a tile of {tile.rows} rows does not fit {num_rows} rows of x")
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    launch = {
        "x_ptr": x,
        "w_ptr": weight,
        "out_ptr": out,
        "num_outputs": num_outputs,
        "dim": dim,
        "w_stride": weight.stride(0),
        "OUTPUTS": tile.outputs,
        "BLOCK": tile.block,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }
    grid = (triton.cdiv(num_outputs, tile.outputs), triton.cdiv(num_rows, tile.rows))
    if tile.rows == 1:
        _one_row_kernel[grid[:1]](**launch)
    else:
        _rows_kernel[grid](
            num_rows=num_rows,
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            ROWS=tile.rows,
            **launch,
        )
    return out
