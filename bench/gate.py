"""The identity gate: is a row's text plain decoding's text? No speed is claimed for one that fails.

In float32 the ids must be equal. In 16 bits every token must be the target's own choice or a near
tie (`specdeft.rereading`: within the rounding noise that was measured on plain decoding's text);
where two texts part is given with its margin in units of the last place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdeft.identity import describe_limit, first_difference
from specdeft.rereading import ROUNDING_ULP, Rereader


@dataclass(frozen=True)
class Verdict:
    """Two texts of one prompt.

    Attributes:
        identical: the ids are equal.
        passed: the row may claim its speed.
        first_difference: index of the first id that differs; None where they are equal.
        margin_ulp: how far apart the target's scores of the two tokens lie there; None where one
            text only ends earlier.
        num_far: tokens of the row further than a near tie from the target's choice.
        worst_ulp: the furthest.
        limit_ulp: up to where a token is a near tie.
        noise_ulp: the rounding noise that follows from, where it was measured.
    """

    identical: bool
    passed: bool
    first_difference: int | None = None
    margin_ulp: float | None = None
    num_far: int = 0
    worst_ulp: float = 0.0
    limit_ulp: float = ROUNDING_ULP
    noise_ulp: float | None = None

    def describe(self, num_tokens: int) -> str:
        """One clause for people."""
        if self.identical:
            return "identical"
        margin = (
            "where one ends"
            if self.margin_ulp is None
            else f"the two tokens {self.margin_ulp:.1f} ulp apart"
        )
        return (
            f"token {self.first_difference} of {num_tokens} differs, {margin}; {self.num_far} "
            f"tokens beyond a near tie of {describe_limit(self.limit_ulp, self.noise_ulp)} "
            f"(worst {self.worst_ulp:.1f} ulp)"
        )


def judge(
    rereader: Rereader,
    prompt_ids: Sequence[int],
    token_ids: tuple[int, ...],
    plain_ids: tuple[int, ...],
) -> Verdict:
    """Compare a row's ids with plain decoding's; a difference is read again by the target."""
    if token_ids == plain_ids:
        return Verdict(identical=True, passed=True)
    prompt = tuple(prompt_ids)
    first = first_difference(token_ids, plain_ids)
    reading = rereader.read(prompt, token_ids, plain_ids)
    return Verdict(
        identical=False,
        passed=reading.num_far == 0 and rereader.engine.target.dtype != torch.float32,
        first_difference=first,
        margin_ulp=_margin_ulp(rereader, prompt, token_ids, plain_ids, first),
        num_far=reading.num_far,
        worst_ulp=reading.worst_ulp,
        limit_ulp=reading.limit_ulp,
        noise_ulp=reading.noise_ulp,
    )


def _margin_ulp(
    rereader: Rereader,
    prompt: tuple[int, ...],
    token_ids: tuple[int, ...],
    plain_ids: tuple[int, ...],
    index: int,
) -> float | None:
    """Between the two tokens at ``index``, after the same text and in forwards of one shape."""
    if index >= min(len(token_ids), len(plain_ids)):
        return None
    mine, its = (
        float(rereader.distance_ulp(prompt, ids[: index + 1])[-1]) for ids in (token_ids, plain_ids)
    )
    return abs(mine - its)
