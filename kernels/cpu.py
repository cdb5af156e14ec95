"""Tree attention of one sequence on a CPU: what real decoding without an accelerator runs.

The work is torch's own fused CPU attention, called so that nothing is copied and no dense mask of
the context exists:

- the G query heads that share a KV head are folded into rows (row r = node r // G, head r % G), so
  a KV head is read once; k and v stay strided views of the pool;
- up to `ONE_CALL_CONTEXT` committed tokens: one call, its mask a view of one persistent buffer,
  zeros on the left and the tree's own N columns at its right end;
- beyond: the committed prefix without any mask, cut so that the threads get equal work, the tree's
  columns with it, and the parts merged by their log-sum-exp.

Measured on 2 cores at 9/3/64, float32, 8 nodes, in microseconds per layer: 4,096 committed tokens
1,433 in one call and 1,105 in two cuts; 256 tokens 118 and 172. Hence the switch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ONE_CALL_CONTEXT = 1024  # committed tokens up to which one masked call is at least as fast
MIN_CUT_TOKENS = 512  # torch's CPU attention walks the keys in blocks of 512
MAX_CUTS = 8
SCORE_BUDGET = 1 << 24  # scores held at once by the generic path (64 MiB of float32)

_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class TreeBias:
    """The additive masks of one tree: 0 where visible, -inf where not, built once per topology.

    ancestors bool [N, N]; depths int [N] (needed by windows only); group = Hq / Hkv; dtype of q.
    """

    def __init__(
        self, ancestors: Tensor, *, group: int, dtype: torch.dtype, depths: Tensor | None = None
    ) -> None:
        if ancestors.dtype != torch.bool or ancestors.ndim != 2 or len(set(ancestors.shape)) != 1:
            raise ValueError(
                f"ancestors must be a bool matrix [N, N], got {ancestors.dtype} "
                f"{tuple(ancestors.shape)}: pass TokenTree.ancestors()"
            )
        self.num_nodes = ancestors.shape[0]
        self._ancestors = ancestors
        self._depths = depths
        self._group = group
        self._dtype = dtype
        self._buffers: dict[int | None, Tensor] = {}

    def rows(self, num_context: int, window: int | None = None) -> Tensor:
        """View [N * G, num_context + N]; num_context <= max(ONE_CALL_CONTEXT, window)."""
        if window not in self._buffers:
            self._buffers[window] = self._build(window)
        buffer = self._buffers[window]
        return buffer[:, buffer.shape[1] - num_context - self.num_nodes :]

    def _build(self, window: int | None) -> Tensor:
        """Columns are slots relative to the first tree slot, so one buffer serves every length."""
        reach = ONE_CALL_CONTEXT if window is None else max(ONE_CALL_CONTEXT, window)
        prefix = torch.ones(self.num_nodes, reach, dtype=torch.bool)
        visible = torch.cat([prefix, self._ancestors], dim=1)
        if window is not None:
            if self._depths is None:
                raise ValueError("a window needs the depth of every node: give TreeBias depths [N]")
            relative = torch.cat([torch.arange(-reach, 0), self._depths.to(torch.int64)])
            visible &= self._depths[:, None] - relative[None, :] < window
        bias = torch.zeros(visible.shape, dtype=self._dtype)
        bias.masked_fill_(~visible, float("-inf"))
        return bias.repeat_interleave(self._group, dim=0)


def tree_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_context: int,
    tree_bias: TreeBias,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a tree's N nodes over `num_context` committed tokens and their own ancestors.

    q [N, Hq, D]; k, v [num_context + N, Hkv, D], views of the pool with the tree's own rows last;
    sinks [Hq] or None. Returns [N, Hq, D] in the dtype of q.
    """
    _check(q, k, num_context, tree_bias)
    if window is not None and num_context > window:  # slots that no node reaches are not read
        k, v = k[num_context - window :], v[num_context - window :]
        num_context = window
    rows = _fold(q, k.shape[1])
    if softcap is not None:
        out, lse = _generic(rows, k, v, num_context, tree_bias, scale, softcap, window)
    elif window is not None or num_context <= ONE_CALL_CONTEXT:
        bias = tree_bias.rows(num_context, window) if q.shape[0] > 1 or window else None
        out, lse = _fused(rows, k, v, scale, bias)
    else:
        out, lse = _in_cuts(rows, k, v, num_context, tree_bias, scale)
    if sinks is not None:
        out = _with_sinks(out, lse, sinks)
    return _unfold(out, q.shape)


def prefill_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_context: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk of C prompt tokens behind `num_context` committed ones.

    q [C, Hq, D]; k, v [num_context + C, Hkv, D]. Returns [C, Hq, D]. Memory beyond the output is
    bounded: no mask is built without a window or softcap, and about `SCORE_BUDGET` scores with one.
    """
    if softcap is not None or window is not None:
        return _causal_generic(q, k, v, num_context, scale, softcap, window, sinks)
    chunk, query_heads, dim = q.shape
    kv_heads = k.shape[1]
    group = query_heads // kv_heads
    grouped = q.view(chunk, kv_heads, group, dim).permute(1, 2, 0, 3)

    def shared(t: Tensor) -> Tensor:  # one KV head under its G query heads, without a copy
        return t.transpose(0, 1)[:, None].expand(-1, group, -1, -1)

    out, lse = _fused_attention(
        grouped, shared(k[num_context:]), shared(v[num_context:]), is_causal=True, scale=scale
    )
    if num_context:
        committed = _fused_attention(
            grouped, shared(k[:num_context]), shared(v[:num_context]), scale=scale
        )
        out, lse = _merge(torch.stack([out, committed[0]]), torch.stack([lse, committed[1]]))
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.view(kv_heads, -1, 1))[..., None].to(out.dtype)
    merged: Tensor = out.permute(2, 0, 1, 3).reshape(chunk, query_heads, dim)
    return merged


def _check(q: Tensor, k: Tensor, num_context: int, tree_bias: TreeBias) -> None:
    if q.shape[0] != tree_bias.num_nodes or k.shape[0] != num_context + q.shape[0]:
        raise ValueError(
            f"{q.shape[0]} queries, {k.shape[0]} keys and {num_context} committed tokens do not "
            f"fit a tree of {tree_bias.num_nodes} nodes: pass one query per node and the views "
            "k[: num_context + N], v[: num_context + N]"
        )


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """[N, Hq, D] -> [Hkv, N * G, D], row r = node r // G, head r % G."""
    heads = q.view(q.shape[0], kv_heads, -1, q.shape[2]).transpose(0, 1)
    return heads.flatten(1, 2)


def _unfold(rows: Tensor, shape: torch.Size) -> Tensor:
    """[Hkv, N * G, D] -> [N, Hq, D]."""
    nodes = rows.view(rows.shape[0], shape[0], -1, shape[2]).transpose(0, 1)
    return nodes.reshape(shape)


def _fused(
    rows: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One call: rows [Hkv, R, D] over k, v [S, Hkv, D] -> out [Hkv, R, D], lse [Hkv, R]."""
    out: Tensor
    lse: Tensor
    out, lse = _fused_attention(
        rows[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=bias, scale=scale
    )
    return out[0], lse[0]


def _in_cuts(
    rows: Tensor, k: Tensor, v: Tensor, num_context: int, tree_bias: TreeBias, scale: float
) -> tuple[Tensor, Tensor]:
    """The prefix in equal unmasked cuts (one batched call), the rest and tree masked, merged."""
    cuts = _num_cuts(rows.shape[0], num_context)
    length = num_context // cuts
    done = cuts * length
    prefix_out, prefix_lse = _fused_attention(
        rows.expand(cuts, -1, -1, -1),
        k[:done].view(cuts, length, *k.shape[1:]).transpose(1, 2),
        v[:done].view(cuts, length, *v.shape[1:]).transpose(1, 2),
        scale=scale,
    )
    tail_out, tail_lse = _fused(rows, k[done:], v[done:], scale, tree_bias.rows(num_context - done))
    return _merge(torch.cat([prefix_out, tail_out[None]]), torch.cat([prefix_lse, tail_lse[None]]))


def _num_cuts(kv_heads: int, num_context: int) -> int:
    """Fewest cuts that leave no thread idle for more than a tenth of the time, else the best."""
    threads = torch.get_num_threads()
    most = max(1, min(MAX_CUTS, num_context // MIN_CUT_TOKENS))

    def idle(cuts: int) -> float:
        rounds = math.ceil(cuts * kv_heads / threads)
        return rounds * threads / (cuts * kv_heads) - 1

    candidates = range(1, most + 1)
    return next((cuts for cuts in candidates if idle(cuts) <= 0.1), min(candidates, key=idle))


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Parts [P, ..., D] with lse [P, ...] -> the softmax over their union. No part may be empty."""
    weights = torch.softmax(lses, dim=0)
    merged = (outs * weights[..., None]).sum(dim=0)
    return merged.to(outs.dtype), torch.logsumexp(lses, dim=0)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """One more logit per query head in the denominator: exp(lse) / (exp(lse) + exp(sink))."""
    kv_heads, rows = lse.shape
    of_row = sinks.view(kv_heads, 1, -1).expand(-1, rows * kv_heads // sinks.numel(), -1)
    return out * torch.sigmoid(lse - of_row.flatten(1, 2))[..., None].to(out.dtype)


def _generic(
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    num_context: int,
    tree_bias: TreeBias,
    scale: float,
    softcap: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Capped scores cannot use the fused call: float32 products in blocks of keys, merged."""
    split = 0 if window is not None else max(0, num_context - ONE_CALL_CONTEXT)
    bias = tree_bias.rows(num_context - split, window)
    step = max(1, SCORE_BUDGET // (rows.shape[0] * rows.shape[1]))
    parts = [
        _dense(rows, k[lo : min(lo + step, split)], v[lo : min(lo + step, split)], scale, softcap)
        for lo in range(0, split, step)
    ]
    parts.append(_dense(rows, k[split:], v[split:], scale, softcap, bias))
    out, lse = _merge(torch.stack([o for o, _ in parts]), torch.stack([part for _, part in parts]))
    return out.to(rows.dtype), lse


def _dense(
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """rows [Hkv, R, D] over k, v [S, Hkv, D], in float32, with all scores at once."""
    scores = torch.bmm(rows.float(), k.float().permute(1, 2, 0)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores += bias.float()
    lse = torch.logsumexp(scores, dim=-1)
    return torch.bmm(torch.exp(scores - lse[..., None]), v.float().transpose(0, 1)), lse


def _causal_generic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_context: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal rows with a window or softcap, as many at a time as the score budget allows."""
    chunk, query_heads, _ = q.shape
    kv_heads = k.shape[1]
    step = max(1, SCORE_BUDGET // (query_heads * k.shape[0]))
    out = torch.empty_like(q)
    for first in range(0, chunk, step):
        last = min(first + step, chunk)
        end = num_context + last
        start = 0 if window is None else max(0, num_context + first - window + 1)
        distance = (
            torch.arange(num_context + first, end)[:, None] - torch.arange(start, end)[None, :]
        )
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        bias = torch.zeros(distance.shape).masked_fill_(hidden, float("-inf"))
        part, lse = _dense(
            _fold(q[first:last], kv_heads),
            k[start:end],
            v[start:end],
            scale,
            softcap,
            bias.repeat_interleave(query_heads // kv_heads, dim=0),
        )
        if sinks is not None:
            part = _with_sinks(part, lse, sinks)
        out[first:last] = _unfold(part, q[first:last].shape).to(q.dtype)
    return out
