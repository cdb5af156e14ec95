"""What is measured: rows that turn a prompt into a `Run`, all with the same weights in one process.

The clock stands outside the decoders: a run is timed as a reader of its stream sees it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from specdeft.bench.metrics import Run
from specdeft.bench.workbench import PLAIN, Clock, Workbench
from specdeft.config import GenerationConfig
from specdeft.decoder import Stream

TRANSFORMERS = "transformers"


class Row(Protocol):
    """One way to generate.

    Attributes:
        name: unique among the rows of a run.
        is_ours: its speed is claimed, so its text must be plain decoding's.
    """

    name: str
    is_ours: bool

    def run(self, prompt_ids: Sequence[int], config: GenerationConfig) -> Run:
        """Generate for one prompt."""


class DecoderRow:
    """Our decoder with one tree; the one-node tree is the plain baseline."""

    is_ours = True

    def __init__(self, name: str, bench: Workbench) -> None:
        """Args: the tree's name as on the command line; what it runs on.

        Raises:
            ValueError: there is no such tree, or the heads cannot fill it.
        """
        self.name = name
        self.decoder = bench.decoder(name)
        self._clock = bench.clock

    @property
    def num_nodes(self) -> int:
        """Of its tree."""
        return self.decoder.tree.num_nodes

    def run(self, prompt_ids: Sequence[int], config: GenerationConfig) -> Run:
        """Generate as a stream; a piece that brought tokens is an emission."""
        decoder, clock = self.decoder, self._clock
        tree = decoder.tree  # "auto" is resolved outside the measured time
        emission_s: list[float] = []
        counts: list[int] = [0]
        began = clock()
        stream = decoder.stream(list(prompt_ids), config=config)
        for _piece in stream:
            now, count = clock() - began, num_new_tokens(stream)
            # The last piece is text that was held back; it brings no token.
            if count > counts[-1]:
                emission_s.append(now)
                counts.append(count)
        e2e_s = clock() - began
        result = stream.result
        assert result is not None
        return Run(
            token_ids=result.token_ids,
            finish_reason=result.finish_reason,
            num_nodes=tree.num_nodes,
            max_depth=tree.max_depth,
            per_step_accepted=tuple(after - before - 1 for before, after in pairwise(counts[1:])),
            emission_s=tuple(emission_s),
            e2e_s=e2e_s,
        )


def num_new_tokens(stream: Stream) -> int:
    """Tokens that a stream has brought so far."""
    assert stream._generation is not None
    return len(stream._generation._text.token_ids)


class _Stopwatch:
    """A streamer for transformers' generate that notes when each token came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_prompt = True
        self.times: list[float] = []

    def put(self, _value: Tensor) -> None:
        """The prompt first, then each token."""
        if not self._is_prompt:
            self.times.append(self._clock())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""


class TransformersRow:
    """transformers' own `generate`, eager, on the same model object: the reference."""

    is_ours = False

    def __init__(self, bench: Workbench) -> None:
        self.name = TRANSFORMERS
        self._model: Any = bench.model
        self._eos_ids = sorted(bench.eos_ids())
        self._clock = bench.clock

    def run(self, prompt_ids: Sequence[int], config: GenerationConfig) -> Run:
        """Greedy only: its noise cannot be ours.

        Raises:
            ValueError: a temperature above 0.
        """
        if not config.is_greedy:
            raise ValueError("transformers generate is compared at temperature 0 only")
        prompt = torch.tensor([prompt_ids], device=self._model.device)
        stopwatch = _Stopwatch(self._clock)
        with self._only_stop_rules(config):
            began = self._clock()
            output = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=stopwatch
            )
            token_ids = tuple(output[0, len(prompt_ids) :].tolist())
            e2e_s = self._clock() - began
        return Run(
            token_ids=token_ids,
            finish_reason="eos" if token_ids[-1] in self._eos_ids else "length",
            num_nodes=1,
            max_depth=0,
            per_step_accepted=(0,) * (len(token_ids) - 1),
            emission_s=tuple(time - began for time in stopwatch.times),
            e2e_s=e2e_s,
        )

    @contextmanager
    def _only_stop_rules(self, config: GenerationConfig) -> Iterator[None]:
        """The model's generation config, replaced by greedy decoding with our stop rules: sampling
        settings and penalties that a model brings along would change the text."""
        from transformers import GenerationConfig as TheirConfig

        known = self._model.generation_config
        eos = None if config.ignore_eos else self._eos_ids
        self._model.generation_config = TheirConfig(
            max_new_tokens=config.max_new_tokens,
            do_sample=False,
            eos_token_id=eos,
            # Nothing is padded in a batch of one; unset, it is announced at every call.
            pad_token_id=known.pad_token_id or (self._eos_ids or [0])[0],
        )
        try:
            yield
        finally:
            self._model.generation_config = known


def make_rows(trees: Sequence[str], bench: Workbench, *, transformers: bool) -> list[Row]:
    """The rows of a run in order: the baselines, then a row for each tree."""
    rows: list[Row] = [TransformersRow(bench)] if transformers else []
    names = [PLAIN, *(tree for tree in trees if tree != PLAIN)]
    return rows + [DecoderRow(name, bench) for name in names]
