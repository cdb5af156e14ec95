"""Tree attention as a specification: dense, no blocks, any precision.

out[i, h] = sum_j softmax_j(cap(scale * q[i, h] . k[j, h // G]) over visible j) v[j, h // G]

with cap(x) = softcap * tanh(x / softcap) where a softcap is given. A sink is one more logit per
query head in the softmax's denominator: it takes weight and has no value. Kernels never import this
file; tests and benchmarks measure their error against it in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Dense attention of every query over the keys that `visible` allows, computed in `dtype`.

    q [Q, Hq, D]; k, v [S, Hkv, D]; visible bool [Q, S]; sinks [Hq] or None.
    Returns out [Q, Hq, D] and lse [Q, Hq] (natural log, sinks included), both of `dtype`. A row
    that sees nothing and has no sink: out 0, lse -inf.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,shd->qhs", q.to(dtype), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, :], float("-inf"))
    if sinks is not None:
        column = sinks.to(dtype)[None, :, None].expand(q.shape[0], -1, 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    # A row without anything to see would be exp(-inf - -inf) = NaN: its weights are defined as 0.
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    out = torch.einsum("qhs,shd->qhd", weights[..., : k.shape[0]], values)
    return out, lse


def tree_visibility(
    ancestors: Tensor,
    num_context: int,
    *,
    depths: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Visible matrix of a token tree behind `num_context` committed tokens.

    ancestors bool [N, N], True where column j is node i or an ancestor of it; returns bool
    [N, num_context + N]. With a window, node i stands at position num_context + depths[i] and sees
    the positions p with position(i) - p < window.
    """
    num_nodes = ancestors.shape[0]
    prefix = torch.ones(num_nodes, num_context, dtype=torch.bool, device=ancestors.device)
    visible = torch.cat([prefix, ancestors], dim=1)
    if window is None:
        return visible
    if depths is None:
        raise ValueError("a window needs the depth of every node: pass depths [N]")
    of_node = depths.to(ancestors.device, torch.int64) + num_context
    committed = torch.arange(num_context, device=ancestors.device)
    distance = of_node[:, None] - torch.cat([committed, of_node])[None, :]
    return visible & (distance < window)
