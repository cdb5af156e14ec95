"""FlexAttention (torch) with a mask function over the dense visibility of the forest.

Compiled with max-autotune and static shapes, its best setting; the block mask, which must be
rebuilt whenever a length or the tree changes, is made in `prepare`. Its decode kernel needs fewer
than 128 queries and G a power of two; torch picks the prefill kernel elsewhere. Where torch finds
no valid configuration, `run` raises and the comparison says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.kernels.baselines.prepared import HeadShape, Prepared, contiguous_kv
from specdeft.trees.plan import KVForest


def prepare_flex(forest: KVForest, shape: HeadShape, device: torch.device) -> Prepared:
    """FlexAttention over the contiguous KV of the forest."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Every forest is compiled anew. After eight of them torch would silently fall back to the
    # form that is not fused, without this.
    torch._dynamo.reset()

    visible = forest.visible(device)
    gather = contiguous_kv(forest, device)

    def allowed(_batch: Tensor, _head: Tensor, query: Tensor, token: Tensor) -> Tensor:
        return visible[query, token]

    mask = create_block_mask(
        allowed, None, None, visible.shape[0], visible.shape[1], device=str(device)
    )
    attend = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        k, v = (gather(pool).transpose(0, 1)[None] for pool in (k_pool, v_pool))
        out: Tensor = attend(
            q.transpose(0, 1)[None],
            k,
            v,
            block_mask=mask,
            scale=shape.scale,
            enable_gqa=shape.group > 1,
        )
        return out[0].transpose(0, 1)

    return Prepared("flex", run)
