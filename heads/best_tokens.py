"""The best tokens of rows of logits, as the library finds them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

BestTokens = Callable[[Tensor, int], Tensor]  # how drafts are chosen: `best_tokens` or another way


def best_tokens(logits: Tensor, k: int) -> Tensor:
    """The columns int64 [..., k] of the k largest of logits [..., V], best first."""
    return logits.topk(k, dim=-1).indices
