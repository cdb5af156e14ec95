"""The answer to one prompt as it grows: what is kept of the tokens a step emits, and its figures.

What a step emits past the end (end of text, stop string, token budget) is cut here from ids, text
and statistics alike.
"""

from collections.abc import Sequence

from specdeft.result import FinishReason, GenerationResult, GenerationStats
from specdeft.text import TextAssembler


class Reply:
    """One sequence's tokens, text and counts.

    Attributes:
        reason: why it ended; None while it goes on.
        text: its ids and text so far.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        budget: int,
        *,
        budget_reason: FinishReason,
        eos_ids: frozenset[int],
        text: TextAssembler,
    ) -> None:
        """Args: the prompt; the most tokens to keep and why it would end there; the tokens that
        end a text; what assembles the text."""
        self.reason: FinishReason | None = None
        self.text = text
        self._prompt_ids = prompt_ids
        self._budget = budget
        self._budget_reason = budget_reason
        self._eos_ids = eos_ids
        self._histogram: list[int] = []
        self._num_plain_steps = 0

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be kept; 0 once it has ended."""
        return 0 if self.reason else self._budget - len(self.text.token_ids)

    def begin(self, token: int) -> None:
        """Keep the first token, which the prefill decided."""
        self._keep([token])

    def go_on(self, token_ids: Sequence[int], *, drafted: bool) -> None:
        """Keep what a step emitted, until the reply ends; ``drafted``: it verified a tree."""
        before = len(self.text.token_ids)
        self._keep(token_ids)
        # A step always emits the bonus; a cut step counts only what was kept of it.
        accepted = max(len(self.text.token_ids) - before - 1, 0)
        self._histogram += [0] * (accepted + 1 - len(self._histogram))
        self._histogram[accepted] += 1
        self._num_plain_steps += not drafted

    def _keep(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self.text.push(token):
                self.reason = "stop"
            elif token in self._eos_ids:
                self.reason = "eos"
            elif len(self.text.token_ids) >= self._budget:
                self.reason = self._budget_reason
            if self.reason:
                break

    def result(self, num_nodes: int, prefill_s: float, decode_s: float) -> GenerationResult:
        """The outcome of a reply that ended, its text finished.

        Raises:
            ValueError: it goes on.
        """
        if self.reason is None:
            raise ValueError("a reply that goes on has no result: run its generation to the end")
        stats = GenerationStats(
            num_prompt_tokens=len(self._prompt_ids),
            num_new_tokens=len(self.text.token_ids),
            num_nodes=num_nodes,
            num_steps=sum(self._histogram),
            acceptance_histogram=tuple(self._histogram),
            num_plain_steps=self._num_plain_steps,
            prefill_s=prefill_s,
            decode_s=decode_s,
        )
        return GenerationResult(
            text=self.text.text,
            token_ids=tuple(self.text.token_ids),
            prompt_ids=tuple(self._prompt_ids),
            finish_reason=self.reason,
            stats=stats,
        )
