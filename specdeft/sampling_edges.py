"""Which tokens top-k and top-p keep when scores are known up to a rounding error only.

A token at the edge of the set that is drawn among can fall on either side of it, and one that falls
inside can be drawn however far its score lies from the others': what is drawn is decided by noise.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Edges(NamedTuple):
    """[T, V] bool: tokens inside whatever the rounding, and tokens inside with some rounding."""

    sure: Tensor
    possible: Tensor


def edges(scores: Tensor, slack: Tensor, top_k: int | None, top_p: float) -> Edges:
    """The sets of `sampling.restrict` when the gap of any two scores may be off by ``slack``.

    Args:
        scores: [T, V] float, logits over the temperature.
        slack: [T, 1] float, at least 0.
        top_k, top_p: as in `GenerationConfig`.
    """
    ordered = scores.sort(dim=-1, descending=True).values
    sure = possible = torch.ones_like(scores, dtype=torch.bool)
    if top_k is not None and top_k < scores.shape[-1]:
        last, first_out = ordered[:, top_k - 1, None], ordered[:, top_k, None]
        possible, sure = scores >= last - slack, scores > first_out + slack
        ordered = ordered.masked_fill(ordered < last, float("-inf"))
    if top_p < 1.0:
        log_total = ordered.logsumexp(dim=-1, keepdim=True)
        mass = torch.nn.functional.pad((ordered - log_total).exp().cumsum(dim=-1), (1, 0))
        # A token is inside while the tokens before it do not hold top_p: before it stand those
        # that are surely higher at least, and those that are not surely lower at most.
        higher = torch.searchsorted(-ordered, -(scores + slack))
        near = torch.searchsorted(-ordered, -(scores - slack), right=True)
        least = mass.gather(1, higher) * (-slack).exp()
        most = (mass.gather(1, near) - (scores - log_total).exp()) * slack.exp()
        possible, sure = possible & (least < top_p), sure & (most < top_p)
    return Edges(sure, possible)
