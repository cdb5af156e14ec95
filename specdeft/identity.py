"""Is the speculative text the plain text? Exact in float32; in 16 bits, explained token by token.

A forward over N rows and one over a single row round differently in 16 bits, so two tokens whose
logits lie within the rounding noise can swap. Nothing is hidden: the first difference is located,
and the whole text is read again by the target (`rereading`) to say how far each token lies from
its own choice there, in units of the last place (ulp) of the dtype, and how large the noise is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdeft.config import GenerationConfig
from specdeft.engine import Engine
from specdeft.rereading import DEVIATIONS, ROUNDING_ULP, Rereader


@dataclass(frozen=True)
class IdentityReport:
    """How a speculative text compares with the plain one.

    Attributes:
        identical: the ids are equal.
        first_difference: index of the first differing id, None where there is none.
        num_tokens: ids read again by the target.
        num_exact: of these, the target's own choice.
        num_near_ties: of the others, within ``limit_ulp`` of it, or drawn where tokens so near an
            edge of top-k or top-p fall on its other side.
        worst_ulp: the largest distance from the target's choice.
        dtype: the target's.
        limit_ulp: what counts as a near tie: one unit, or five deviations of the rounding noise.
        noise_ulp: that noise, where it was measured.
    """

    identical: bool
    first_difference: int | None
    num_tokens: int
    num_exact: int
    num_near_ties: int
    worst_ulp: float
    dtype: str
    limit_ulp: float = ROUNDING_ULP
    noise_ulp: float | None = None

    @property
    def passed(self) -> bool:
        """Tier 1 (identical), or tier 2 (every token the target's choice or a near tie)."""
        return self.identical or self.num_exact + self.num_near_ties == self.num_tokens

    @property
    def tier(self) -> str:
        """ "exact", "near-tie" or "different"."""
        if self.identical:
            return "exact"
        return "near-tie" if self.passed else "different"

    def describe(self) -> str:
        """One line for people."""
        if self.identical:
            return "identical to plain decoding: yes, token for token"
        return (
            f"identical to plain decoding: no, from token {self.first_difference} on; read again "
            f"by the target, {self.num_exact} of {self.num_tokens} tokens are its own choice and "
            f"{self.num_near_ties} within {describe_limit(self.limit_ulp, self.noise_ulp)} of "
            f"{self.dtype} of it (worst {self.worst_ulp:.1f} ulp)"
        )


def describe_limit(limit_ulp: float, noise_ulp: float | None) -> str:
    """What a near tie is, and where that follows from a measurement, from which."""
    if noise_ulp is None:
        return f"{limit_ulp:g} ulp"
    return (
        f"{limit_ulp:.1f} ulp ({DEVIATIONS:g} times the rounding noise measured, {noise_ulp:.2f})"
    )


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int:
    """Index of the first differing id of two texts that differ: the end of the shorter one where
    the other only goes on."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(ids), len(others)))


def compare(
    engine: Engine,
    prompt_ids: tuple[int, ...],
    speculative_ids: tuple[int, ...],
    plain_ids: tuple[int, ...],
    config: GenerationConfig,
    sequence: int = 0,
) -> IdentityReport:
    """Compare the ids of two generations of one prompt; a difference is examined. ``sequence`` is
    the number both were sampled with."""
    dtype = str(engine.target.dtype).removeprefix("torch.")
    count = len(speculative_ids)
    if speculative_ids == plain_ids:
        return IdentityReport(True, None, count, count, 0, 0.0, dtype)
    reading = Rereader(engine, config).read(prompt_ids, speculative_ids, plain_ids, sequence)
    return IdentityReport(
        identical=False,
        first_difference=first_difference(speculative_ids, plain_ids),
        num_tokens=count,
        num_exact=reading.num_exact,
        num_near_ties=count - reading.num_exact - reading.num_far,
        worst_ulp=reading.worst_ulp,
        dtype=dtype,
        limit_ulp=reading.limit_ulp,
        noise_ulp=reading.noise_ulp,
    )
