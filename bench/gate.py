"""The identity gate: is a row's text plain decoding's text? No speed is claimed for one that fails.

In float32 the ids must be equal. In 16 bits every token must be the target's own choice or a near
tie (`specdeft.identity`); where two texts part is given with its margin in units of the last place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdeft.config import GenerationConfig
from specdeft.engine import Engine
from specdeft.identity import NEAR_TIE_ULP, distance_from_choice_ulp


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
    """

    identical: bool
    passed: bool
    first_difference: int | None = None
    margin_ulp: float | None = None
    num_far: int = 0
    worst_ulp: float = 0.0

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
            f"tokens beyond a near tie (worst {self.worst_ulp:.1f} ulp)"
        )


def judge(
    engine: Engine,
    prompt_ids: Sequence[int],
    token_ids: tuple[int, ...],
    plain_ids: tuple[int, ...],
    config: GenerationConfig,
) -> Verdict:
    """Compare a row's ids with plain decoding's; a difference is read again by the target."""
    if token_ids == plain_ids:
        return Verdict(identical=True, passed=True)
    prompt = tuple(prompt_ids)
    pairs = enumerate(zip(token_ids, plain_ids, strict=False))
    shorter = min(len(token_ids), len(plain_ids))
    first = next((index for index, (mine, its) in pairs if mine != its), shorter)
    distance = distance_from_choice_ulp(engine, prompt, token_ids, config)
    num_far = int((distance > NEAR_TIE_ULP).sum())
    return Verdict(
        identical=False,
        passed=num_far == 0 and engine.target.dtype != torch.float32,
        first_difference=first,
        margin_ulp=_margin_ulp(engine, prompt, token_ids, plain_ids, first, config),
        num_far=num_far,
        worst_ulp=float(distance.max()) if len(distance) else 0.0,
    )


def _margin_ulp(
    engine: Engine,
    prompt: tuple[int, ...],
    token_ids: tuple[int, ...],
    plain_ids: tuple[int, ...],
    index: int,
    config: GenerationConfig,
) -> float | None:
    """Between the two tokens at ``index``, after the same text and in forwards of one shape."""
    if index >= min(len(token_ids), len(plain_ids)):
        return None
    mine, its = (
        float(distance_from_choice_ulp(engine, prompt, ids[: index + 1], config)[-1])
        for ids in (token_ids, plain_ids)
    )
    return abs(mine - its)
