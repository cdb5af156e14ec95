"""One generation as it runs: steps in, kept tokens and text pieces out, then the result.

What a step emits past the end (end of text, stop string, token budget) is cut here from ids, text,
statistics and cache alike.
"""

from collections.abc import Callable, Iterator

import torch

from specdeft.engine import Engine
from specdeft.result import FinishReason, GenerationResult, GenerationStats
from specdeft.run_state import RunState
from specdeft.text import TextAssembler
from specdeft.tree_tensors import TreeTensors


class Generation:
    """Iterating yields pieces of text; ``result`` is set once the iterator is exhausted.

    Attributes:
        result: the outcome, None while it runs.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: list[int],
        budget: int,
        state: RunState,
        *,
        trees: Callable[[int], TreeTensors],
        eos_ids: frozenset[int],
        text: TextAssembler,
        clock: Callable[[], float],
    ) -> None:
        self.result: GenerationResult | None = None
        self._engine = engine
        self._prompt_ids = prompt_ids
        self._budget = budget
        self._state = state
        self._trees = trees
        self._eos_ids = eos_ids
        self._text = text
        self._clock = clock
        self._histogram: list[int] = []
        self._num_nodes = 1
        self._paused_s = 0.0

    @property
    def num_new_tokens(self) -> int:
        """Tokens kept so far."""
        return len(self._text.token_ids)

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._run()
        finally:
            self._state.stepper.finish()
            self._state.cache.clear()

    def _run(self) -> Iterator[str]:
        cache, batch, stepper = self._state.cache, self._state.batch, self._state.stepper
        prompt = torch.tensor(self._prompt_ids, dtype=torch.int64).to(self._engine.target.device)
        began = self._clock()
        self._engine.prefill(cache, batch, prompt, self._state.sampler)
        _, reason = self._keep([int(batch.root)])
        started = self._clock()
        yield from self._show()
        while reason is None:
            while stepper.num_pending <= stepper.lead:
                tree = self._trees(self._budget - len(self._text.token_ids))
                self._num_nodes = max(self._num_nodes, tree.num_nodes)
                stepper.launch(tree)
            kept, reason = self._keep(stepper.collect())
            self._count(kept)
            yield from self._show()
        decode_s = self._clock() - started - self._paused_s
        last_piece = self._text.finish()
        self.result = self._finish(reason, started - began, decode_s)
        yield last_piece

    def _show(self) -> Iterator[str]:
        # The consumer's own time is not decoding time.
        shown = self._clock()
        yield self._text.take()
        self._paused_s += self._clock() - shown

    def _keep(self, token_ids: list[int]) -> tuple[int, FinishReason | None]:
        """Append tokens until the generation ends; how many were kept, and why it ended."""
        before = len(self._text.token_ids)
        reason: FinishReason | None = None
        for token in token_ids:
            if self._text.push(token):
                reason = "stop"
            elif token in self._eos_ids:
                reason = "eos"
            elif len(self._text.token_ids) >= self._budget:
                reason = "length"
            if reason:
                break
        return len(self._text.token_ids) - before, reason

    def _count(self, num_kept: int) -> None:
        # A step always emits the bonus; a cut step counts only what was kept of it.
        accepted = max(num_kept - 1, 0)
        self._histogram += [0] * (accepted + 1 - len(self._histogram))
        self._histogram[accepted] += 1

    def _finish(self, reason: FinishReason, prefill_s: float, decode_s: float) -> GenerationResult:
        stats = GenerationStats(
            num_prompt_tokens=len(self._prompt_ids),
            num_new_tokens=len(self._text.token_ids),
            num_nodes=self._num_nodes,
            num_steps=sum(self._histogram),
            acceptance_histogram=tuple(self._histogram),
            prefill_s=prefill_s,
            decode_s=decode_s,
        )
        return GenerationResult(
            text=self._text.text,
            token_ids=tuple(self._text.token_ids),
            prompt_ids=tuple(self._prompt_ids),
            finish_reason=reason,
            stats=stats,
        )
