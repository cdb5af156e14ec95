"""The identity gate: is a row's text plain decoding's text? No speed is claimed for one that fails.

In float32 the ids must be equal. In 16 bits every token must be the target's own choice or a near
tie (`specdeft.identity`); where two texts part is given with its margin in units of the last place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdeft.config import GenerationConfig
from specdeft.engine import Engine
from specdeft.identity import compare, distance_from_choice_ulp


@dataclass(frozen=True)
class Verdict:
    """Two texts of one prompt.

    Attributes:
        identical: the ids are equal.
        passed: the row may claim its speed.
        first_difference: index of the first id that differs; None where they are equal.
        margin_ulp: how far the row's token there lies below the target's choice; None where the
            row's text only ends earlier.
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
            "where it ends"
            if self.margin_ulp is None
            else f"{self.margin_ulp:.1f} ulp below the target's choice"
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
    report = compare(engine, prompt, token_ids, plain_ids, config)
    first = report.first_difference
    assert first is not None
    margin = None
    if first < len(token_ids):
        upto = token_ids[: first + 1]
        margin = float(distance_from_choice_ulp(engine, prompt, upto, config)[-1])
    return Verdict(
        identical=False,
        passed=report.passed and report.dtype != "float32",
        first_difference=first,
        margin_ulp=margin,
        num_far=report.num_tokens - report.num_exact - report.num_near_ties,
        worst_ulp=report.worst_ulp,
    )
