"""The product of one row with a weight: x [1, K] times W [O, K] transposed.

It is bound by reading the weight. A program takes a few outputs over the whole of K on the plain
cores, so nothing is reduced across programs and no second launch follows, which is what costs the
libraries most where a weight is small. Accumulation is float32 in a fixed order. Bytes moved: the
weight once.
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


def one_row_linear(x: Tensor, weight: Tensor, tile: LinearTile) -> Tensor:
    """x [1, K] @ weight [O, K].T, [1, O] in the dtype of x.

    x and weight bfloat16 or float16, alike, with adjacent elements along K. Raises ValueError for
    other layouts, shapes or dtypes.
    """
    num_rows, dim = x.shape
    num_outputs = weight.shape[0]
    if num_rows != 1 or weight.shape[1] != dim or x.dtype != weight.dtype:
        raise ValueError(
            f"x {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)} do not "
            "fit: give x [1, K] and weight [O, K] of one dtype"
        )
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(
            f"{x.dtype} with strides {x.stride()} and {weight.stride()}: give bfloat16 or float16, "
            "adjacent along K"
        )
    out = torch.empty(1, num_outputs, dtype=x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x_ptr=x,
        w_ptr=weight,
        out_ptr=out,
        num_outputs=num_outputs,
        dim=dim,
        w_stride=weight.stride(0),
        OUTPUTS=tile.outputs,
        BLOCK=tile.block,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out
