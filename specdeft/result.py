"""What a generation returns: the text, its ids and the figures of how it came about."""

from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True)
class GenerationStats:
    """Counts and times of one generation; a step is one forward of the target after the prompt.

    Attributes:
        num_prompt_tokens, num_new_tokens: ids in, ids out.
        num_nodes: nodes of the token tree, the root included; 1 is plain decoding.
        num_steps: forwards of the target after the prefill.
        acceptance_histogram: entry a counts the steps that kept a drafted tokens.
        num_plain_steps: steps that drafted nothing, because that would not have paid.
        prefill_s, decode_s: seconds until the first token, and after it.
    """

    num_prompt_tokens: int
    num_new_tokens: int
    num_nodes: int
    num_steps: int
    acceptance_histogram: tuple[int, ...]
    num_plain_steps: int
    prefill_s: float
    decode_s: float

    @property
    def tau(self) -> float:
        """Mean tokens per step, the bonus token included; 1.0 is plain decoding, 0.0 is no step.

        Counted from the ids that were kept: the first one comes from the prefill, and what the
        last step emitted past the end does not flatter it.
        """
        return max(self.num_new_tokens - 1, 0) / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean accepted drafted tokens per step, the bonus token excluded."""
        return max(self.tau - 1.0, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first over the time after the first."""
        return max(self.num_new_tokens - 1, 0) / self.decode_s if self.decode_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For programs: fields and derived figures under their own names."""
        names = [*self.__dataclass_fields__, "tau", "acceptance_length", "tokens_per_second"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class GenerationResult:
    """One prompt's outcome.

    Attributes:
        text: the new text, special tokens left out, cut before a stop string.
        token_ids: the new ids; an end-of-text token that ended the run is kept.
        prompt_ids: the ids the target was given.
        finish_reason: "eos", "stop" (a stop string), "length" (max_new_tokens, or the default of
            it) or "context" (no limit was given and the context is full).
        stats: how it came about.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
