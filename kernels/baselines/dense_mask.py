"""Tree attention with a dense mask, as most code does it: fused (SDPA) and unfused (Medusa).

Both fold the GQA group into rows, so KV is not expanded. The mask of Q * G rows by S tokens is
built once, its rows padded to 8 elements, which the fused kernel's vector loads need.
Medusa: Cai et al., arXiv 2401.10774; the reference code multiplies, masks, takes a float32 softmax
and multiplies, each through memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specdeft.kernels.baselines.prepared import (
    HeadShape,
    Prepared,
    contiguous_kv,
    folded,
    unfolded,
)
from specdeft.trees.plan import KVForest


def prepare_sdpa(forest: KVForest, shape: HeadShape, device: torch.device) -> Prepared:
    """torch's scaled_dot_product_attention over rows, with an additive mask."""
    mask = _additive_mask(forest, shape, device)[None, None]
    gather = contiguous_kv(forest, device)

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        rows = folded(q, shape.kv_heads)[None]
        k, v = (gather(pool).transpose(0, 1)[None] for pool in (k_pool, v_pool))
        out = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=shape.scale)
        return unfolded(out[0], shape.query_heads)

    return Prepared("sdpa", run)


def prepare_medusa(forest: KVForest, shape: HeadShape, device: torch.device) -> Prepared:
    """Matmul, mask, float32 softmax, matmul."""
    mask = _additive_mask(forest, shape, device)
    gather = contiguous_kv(forest, device)

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        k, v = (gather(pool).transpose(0, 1) for pool in (k_pool, v_pool))
        scores = torch.matmul(folded(q, shape.kv_heads), k.transpose(1, 2)) * shape.scale + mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return unfolded(torch.matmul(weights, v), shape.query_heads)

    return Prepared("medusa", run)


def _additive_mask(forest: KVForest, shape: HeadShape, device: torch.device) -> Tensor:
    """[Q * G, S] of the dtype of q, 0 where visible, else -inf; rows 16-byte aligned."""
    visible = forest.visible(device).repeat_interleave(shape.group, dim=0)
    num_rows, num_tokens = visible.shape
    padded = torch.zeros(num_rows, -(-num_tokens // 8) * 8, dtype=shape.dtype, device=device)
    return padded[:, :num_tokens].masked_fill_(~visible, float("-inf"))
