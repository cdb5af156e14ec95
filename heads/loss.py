"""The loss of the heads: weighted cross entropies whose logits never exist as a whole.

    loss = sum over heads k of  decay^k * mean over known labels of CE_k

Hard: CE against the token that came. Soft: CE against the target's own distribution at that
position. When the output layer is frozen (shared or reduced), only the gradient of the states is
needed: it is (softmax - target) W, computed chunk by chunk in the forward itself and scaled in the
backward. K x M x V logits would take tens of GB; a chunk takes a fixed amount.

Shapes: K heads, M rows, H hidden size, V rows of the output weight.
Source of the fused form: https://arxiv.org/abs/2410.10989 (Liger Kernel), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from specdeft.heads.features import IGNORED

_CHUNK_LOGITS = 1 << 28  # logits of one chunk: 1 GiB in fp32


class HeadLosses(NamedTuple):
    """total: scalar to differentiate; per_head: float32 [K], detached; num_known: int64 [K]."""

    total: Tensor
    per_head: Tensor
    num_known: Tensor


def head_weights(num_heads: int, decay: float, device: torch.device | str = "cpu") -> Tensor:
    """float32 [K]: decay^k."""
    return decay ** torch.arange(num_heads, dtype=torch.float32, device=device)


def frozen_output_loss(
    states: Tensor,
    labels: Tensor,
    weight: Tensor,
    weights: Tensor,
    *,
    counts: Tensor | None = None,
    bias: Tensor | None = None,
    teacher: Tensor | None = None,
    temperature: float = 1.0,
    chunk_logits: int = _CHUNK_LOGITS,
) -> HeadLosses:
    """Loss of states [K,M,H] under a frozen output weight [V,H] (bias [V]).

    labels int64 [M,K] index the rows of `weight`, IGNORED where there is nothing to learn; weights
    float32 [K]; counts int64 [K]: the known labels of the whole batch that these rows are a part of
    (None: they are all of it), so that the parts' losses add up to the whole's. With `teacher`
    [K,M,H] the target of a known label is softmax(W teacher / temperature) instead of the label.
    """
    known = labels.T != IGNORED
    counts = known.sum(dim=1) if counts is None else counts
    scale = (weights / counts.clamp(min=1)).unsqueeze(1) * known
    total, losses = _FrozenCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, labels.T, weight, bias, scale, teacher, temperature, chunk_logits
    )
    per_head = (losses * known).sum(dim=1) / counts.clamp(min=1)
    return HeadLosses(total, per_head, counts)


def own_output_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, counts: Tensor | None = None
) -> HeadLosses:
    """The same loss for logits [K,M,V] of trainable output layers, by plain autograd."""
    known = labels.T != IGNORED
    counts = known.sum(dim=1) if counts is None else counts
    losses = cross_entropy(
        logits.flatten(0, 1).float(), labels.T.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(known)
    per_head = (losses * known).sum(dim=1) / counts.clamp(min=1)
    return HeadLosses((per_head * weights).sum(), per_head.detach(), counts)


def _wide(logits: Tensor) -> Tensor:
    """In float32, or in float64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _hard(logits: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(cross entropies float32 [M], their gradient in the logits x scale, in the logits' dtype)."""
    x = _wide(logits)
    log_sum = x.logsumexp(dim=1)
    losses = log_sum - x.gather(1, targets.unsqueeze(1)).squeeze(1)
    here = torch.arange(x.shape[1], device=x.device) == targets.unsqueeze(1)
    difference = (x - log_sum.unsqueeze(1)).exp() - here.to(x.dtype)
    return losses, (difference * scale.unsqueeze(1)).to(logits.dtype)


def _soft(
    logits: Tensor, wanted: Tensor, scale: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same against the distribution softmax(wanted / temperature)."""
    x, share = _wide(logits).log_softmax(dim=1), (_wide(wanted) / temperature).softmax(dim=1)
    difference = (x.exp() - share) * scale.unsqueeze(1)
    return -(share * x).sum(dim=1), difference.to(logits.dtype)


@cache
def _rule(soft: bool, fused: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """What lies between the two products. It is bound by memory: fused, on a GPU, it reads each
    logit twice and writes it once, instead of some ten passes."""
    rule = _soft if soft else _hard
    return torch.compile(rule, dynamic=False) if fused else rule


class _FrozenCrossEntropy(torch.autograd.Function):
    """(sum of scale [K,M] x cross entropies, cross entropies [K,M]); only the first is
    differentiable, and its gradient in the states is made in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        labels: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor,
        teacher: Tensor | None,
        temperature: float,
        chunk_logits: int,
    ) -> tuple[Tensor, Tensor]:
        K, M, H = states.shape
        flat, flat_scale = states.reshape(K * M, H), scale.reshape(K * M)
        flat_teacher = None if teacher is None else teacher.reshape(K * M, H)
        # A label that does not exist points at row 0; its scale is 0 and its loss is not read.
        targets = labels.reshape(K * M).clamp(min=0)
        losses = flat.new_empty(K * M, dtype=torch.float32)
        gradient = torch.empty_like(flat)
        rows = max(1, chunk_logits // weight.shape[0])
        for start in range(0, K * M, rows):
            part = slice(start, start + rows)
            logits = linear(flat[part].to(weight.dtype), weight, bias)
            if flat_teacher is None:
                rule = _rule(soft=False, fused=logits.is_cuda)
                losses[part], difference = rule(logits, targets[part], flat_scale[part])
            else:
                wanted = linear(flat_teacher[part].to(weight.dtype), weight, bias)
                rule = _rule(soft=True, fused=logits.is_cuda)
                losses[part], difference = rule(logits, wanted, flat_scale[part], temperature)
            gradient[part] = difference @ weight
        losses = losses.view(K, M)
        ctx.save_for_backward(gradient.view(K, M, H))
        ctx.mark_non_differentiable(losses)
        return (losses * scale).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_outputs[0].to(gradient.dtype), *(None,) * 7)
