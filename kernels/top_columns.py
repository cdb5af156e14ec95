"""The k largest columns of every row, in two launches: of each chunk, then of what those found.

A library's top-k gives a row to one block of threads and walks it several times; few long rows, as
the drafts of a step are, leave a GPU idle. Here a chunk is one warp's: its columns stay in
registers as numbers that order by value first and by place second, and the largest is taken k
times. Equal values: the lower column first. Bytes moved: the rows once.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks the launcher only.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.kernels.launch_shape import can_start_early

CHUNK = 1024
MOST_COLUMNS = 32  # k; a token tree asks for few
_NOTHING = tl.constexpr(-(1 << 63))


@triton.jit
def _largest(b_key, k, LARGEST: tl.constexpr):
    """The k largest of b_key [n], distinct but for NOTHING, in [LARGEST >= k], largest first."""
    o_out = tl.arange(0, LARGEST)
    b_out = tl.full([LARGEST], _NOTHING, dtype=tl.int64)
    for i in range(k):
        largest = tl.max(b_key, 0)
        b_out = tl.where(o_out == i, largest, b_out)
        b_key = tl.where(b_key == largest, _NOTHING, b_key)
    return b_out


@triton.jit
def _chunk_kernel(
    x_ptr, key_ptr, num_columns, k, x_stride,
    CHUNK: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_chunk = tl.program_id(0)
    i_row = tl.program_id(1)
    o_column = i_chunk * CHUNK + tl.arange(0, CHUNK)
    m_column = o_column < num_columns
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_x = tl.load(
        x_ptr + i_row.to(tl.int64) * x_stride + o_column, mask=m_column, other=float("-inf")
    )
    b_x = tl.where(b_x == 0, 0.0, b_x.to(tl.float32))  # -0 is no less than 0
    b_bits = b_x.to(tl.int32, bitcast=True)
    # Negative numbers order the other way round; the sign stays on top.
    b_order = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits).to(tl.int64)
    b_key = b_order * 4294967296 + (0x7FFFFFFF - o_column).to(tl.int64)
    b_key = tl.where(m_column, b_key, _NOTHING)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    o_out = tl.arange(0, LARGEST)
    place = (i_row * tl.num_programs(0) + i_chunk).to(tl.int64) * k
    tl.store(key_ptr + place + o_out, _largest(b_key, k, LARGEST), mask=o_out < k)


@triton.jit
def _row_kernel(
    key_ptr, out_ptr, num_keys, k,
    KEYS: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_key = tl.arange(0, KEYS)
    o_out = tl.arange(0, LARGEST)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_key = tl.load(key_ptr + i_row * num_keys + o_key, mask=o_key < num_keys, other=_NOTHING)
    b_column = 0x7FFFFFFF - (_largest(b_key, k, LARGEST) & 0xFFFFFFFF)
    tl.store(out_ptr + i_row * k + o_out, b_column, mask=o_out < k)


def top_columns(x: Tensor, k: int) -> Tensor:
    """The columns int64 [..., k] of the k largest of x [..., V], largest first.

    x float32, bfloat16 or float16 without NaN. Raises ValueError for another dtype or k.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}: give float32, bfloat16 or float16")
    num_columns = x.shape[-1]
    if not 1 <= k <= min(MOST_COLUMNS, num_columns):
        raise ValueError(
            f"k is {k}: give 1 to {min(MOST_COLUMNS, num_columns)} of {num_columns} columns"
        )
    rows = x.reshape(-1, num_columns)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    num_rows, num_chunks = rows.shape[0], triton.cdiv(num_columns, CHUNK)
    keys = torch.empty(num_rows, num_chunks * k, dtype=torch.int64, device=x.device)
    out = torch.empty(*x.shape[:-1], k, dtype=torch.int64, device=x.device)
    if not num_rows:
        return out
    early = can_start_early(x)
    shared = {
        "k": k,
        "LARGEST": triton.next_power_of_2(k),
        "PDL": early,
        **({"launch_pdl": True} if early else {}),
    }
    _chunk_kernel[(num_chunks, num_rows)](
        x_ptr=rows,
        key_ptr=keys,
        num_columns=num_columns,
        x_stride=rows.stride(0),
        CHUNK=CHUNK,
        num_warps=1,
        **shared,
    )
    padded = triton.next_power_of_2(num_chunks * k)
    _row_kernel[(num_rows,)](
        key_ptr=keys,
        out_ptr=out,
        num_keys=num_chunks * k,
        KEYS=padded,
        num_warps=max(1, min(8, padded // 512)),
        **shared,
    )
    return out
