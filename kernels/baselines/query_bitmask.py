"""SpecInfer's tree attention: grouped by query, every query walks the whole tree under its bits.

A program takes one query (its G heads as rows), one KV head and one split of all S tokens; the mask
of a query is one bit per token, 64 to a word. KV is read once per query: 2 D S Q elements a head.
Source of the method: Miao et al., arXiv 2305.09781; as counted in DeFT's Table 12. The 64-token
limit of the original is lifted: S / 64 words a query.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks the launcher only.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.kernels.baselines.prepared import HeadShape, Prepared
from specdeft.kernels.deft_flatten import dot_precision
from specdeft.kernels.launch_shape import choose_splits, sm_count, tile_shape
from specdeft.kernels.tile_ops import LN_2, NO_SCORE, bit_columns, product, softmax_step
from specdeft.trees.plan import KVForest


@triton.jit
def _partials_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, part_lse_ptr, slots_ptr, words_ptr,
    num_tokens, num_words, num_splits, factor, q_stride_n, q_stride_h, stride_slot, stride_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i_query = tl.program_id(0)
    i_head = tl.program_id(1)
    i_split = tl.program_id(2)
    o_row = tl.arange(0, ROWS)
    o_dim = tl.arange(0, DIM_PADDED)
    o_token = tl.arange(0, 64)
    m_row = o_row < GROUP
    m_dim = o_dim < DIM
    p_q = q_ptr + i_query * q_stride_n + (i_head * GROUP + o_row) * q_stride_h
    b_q = tl.load(p_q[:, None] + o_dim[None, :], mask=m_row[:, None] & m_dim[None, :], other=0.0)
    b_acc = tl.zeros([ROWS, DIM_PADDED], dtype=tl.float32)
    b_max = tl.full([ROWS], NO_SCORE, dtype=tl.float32)
    b_sum = tl.zeros([ROWS], dtype=tl.float32)
    for i_word in range(num_words * i_split // num_splits, num_words * (i_split + 1) // num_splits):
        token = i_word * 64 + o_token
        m_token = token < num_tokens
        slot = tl.load(slots_ptr + token, mask=m_token, other=0).to(tl.int64)
        p_kv = slot[:, None] * stride_slot + i_head * stride_head + o_dim[None, :]
        m_kv = m_token[:, None] & m_dim[None, :]
        b_k = tl.load(k_ptr + p_kv, mask=m_kv, other=0.0)
        b_v = tl.load(v_ptr + p_kv, mask=m_kv, other=0.0)
        b_words = tl.load(words_ptr + i_query * num_words + i_word) + tl.zeros([ROWS], tl.int64)
        b_scores = product(b_q, tl.trans(b_k), PRECISION)
        b_scores = tl.where(bit_columns(b_words, o_token), b_scores, float("-inf"))
        b_acc, b_max, b_sum = softmax_step(b_acc, b_max, b_sum, b_scores, b_v, factor, PRECISION)
    b_divisor = tl.where(b_sum > 0, b_sum, 1.0)
    b_lse = tl.where(b_sum > 0, (b_max + tl.log2(b_divisor)) * LN_2, float("-inf"))
    # [S, Q, Hq, D]: split by split in the shape of the output.
    row = (i_split * tl.num_programs(0) + i_query) * tl.num_programs(1) * GROUP
    row = row.to(tl.int64) + i_head * GROUP + o_row
    tl.store(
        part_ptr + row[:, None] * DIM + o_dim[None, :],
        b_acc / b_divisor[:, None],
        mask=m_row[:, None] & m_dim[None, :],
    )
    tl.store(part_lse_ptr + row, b_lse, mask=m_row)


def prepare_specinfer(
    forest: KVForest, words: Tensor, shape: HeadShape, device: torch.device
) -> Prepared:
    """words: int64 [Q, ceil(S / 64)], the packed rows of `forest.visible()`."""
    num_queries, num_words = words.shape
    if num_queries != forest.num_queries or num_words != -(-forest.total_tokens // 64):
        raise ValueError(
            f"mask words {tuple(words.shape)} do not fit {forest.num_queries} queries over "
            f"{forest.total_tokens} tokens: pack forest.visible()"
        )
    slots, words = forest.slots.to(device), words.to(device)
    rows = max(16, triton.next_power_of_2(shape.group))
    tile = tile_shape(rows, shape.head_dim, shape.dtype)._replace(block=64)
    units = num_queries * shape.kv_heads
    splits = choose_splits(units, num_words, sm_count(device) * tile.programs_per_sm, tile)
    parts = torch.empty(
        splits, num_queries, shape.query_heads, shape.head_dim, dtype=torch.float32, device=device
    )
    part_lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=device)

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        _partials_kernel[(num_queries, shape.kv_heads, splits)](
            q_ptr=q,
            k_ptr=k_pool,
            v_ptr=v_pool,
            part_ptr=parts,
            part_lse_ptr=part_lse,
            slots_ptr=slots,
            words_ptr=words,
            num_tokens=forest.total_tokens,
            num_words=num_words,
            num_splits=splits,
            factor=shape.scale * math.log2(math.e),
            q_stride_n=q.stride(0),
            q_stride_h=q.stride(1),
            stride_slot=k_pool.stride(0),
            stride_head=k_pool.stride(1),
            GROUP=shape.group,
            DIM=shape.head_dim,
            DIM_PADDED=triton.next_power_of_2(shape.head_dim),
            ROWS=rows,
            PRECISION=dot_precision(q),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        weights = torch.softmax(part_lse, dim=0)
        return (parts * weights[..., None]).sum(dim=0).to(q.dtype)

    return Prepared("specinfer", run)
