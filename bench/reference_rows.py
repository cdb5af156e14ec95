"""transformers' own `generate` as rows: plain, with prompt lookup, compiled, with an assistant.

All on the very model object that our decoder runs, with our stop rules and none of the model's own
sampling settings. They are yardsticks: their speed is always shown, and whether their text is ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdeft.bench.metrics import Run
from specdeft.bench.rows import in_microseconds
from specdeft.bench.workbench import Clock, Workbench
from specdeft.config import GenerationConfig

TRANSFORMERS = "transformers"


class _Stopwatch:
    """A streamer for transformers' generate that notes when tokens came, and how many."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_prompt = True
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        """The prompt first, then what each step brings."""
        if not self._is_prompt:
            self.times.append(self._clock())
            self.counts.append(value.numel())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""


class TransformersRow:
    """`model.generate`; greedy only, because its noise cannot be ours."""

    is_ours = False

    def __init__(
        self,
        bench: Workbench,
        name: str = TRANSFORMERS,
        settings: Mapping[str, Any] | None = None,
        assistant: Any = None,
    ) -> None:
        """Args: what it runs on; its name; more of its generation config; a model that drafts."""
        self.name = name
        self._model: Any = bench.model
        self._eos_ids = sorted(bench.eos_ids())
        self._clock = bench.clock
        self._settings = dict(settings or {})
        self._arguments = {} if assistant is None else {"assistant_model": assistant}

    def run(self, prompt_ids: Sequence[int], config: GenerationConfig) -> Run:
        """Generate.

        Raises:
            ValueError: a temperature above 0.
        """
        if not config.is_greedy:
            raise ValueError("transformers generate is compared at temperature 0 only")
        prompt = torch.tensor([list(prompt_ids)], device=self._model.device)
        stopwatch = _Stopwatch(self._clock)
        with self._only_stop_rules(config):
            began = self._clock()
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=stopwatch,
                **self._arguments,
            )
            token_ids = tuple(output[0, len(prompt_ids) :].tolist())
            e2e_s = in_microseconds(self._clock() - began)
        return Run(
            token_ids=token_ids,
            finish_reason="eos" if token_ids[-1] in self._eos_ids else "length",
            num_nodes=1,
            max_depth=max(stopwatch.counts) - 1,
            per_step_accepted=tuple(count - 1 for count in stopwatch.counts[1:]),
            emission_s=tuple(in_microseconds(time - began) for time in stopwatch.times),
            e2e_s=e2e_s,
        )

    @contextmanager
    def _only_stop_rules(self, config: GenerationConfig) -> Iterator[None]:
        """The model's generation config, replaced by greedy decoding with our stop rules: sampling
        settings and penalties that a model brings along would change the text."""
        from transformers import GenerationConfig as TheirConfig

        known = self._model.generation_config
        pad = known.pad_token_id
        self._model.generation_config = TheirConfig(
            max_new_tokens=config.max_new_tokens,
            do_sample=False,
            eos_token_id=None if config.ignore_eos else self._eos_ids,
            # Nothing is padded in a batch of one; unset, it is announced at every call.
            pad_token_id=(self._eos_ids or [0])[0] if pad is None else pad,
            **self._settings,
        )
        try:
            yield
        finally:
            self._model.generation_config = known
