"""Where a step's time goes: draft, the target's forward, acceptance with commit, and the host.

Measured in a run of its own, because looking slows what is looked at: steps run eagerly, and on a
GPU the device is waited for at every border. A step lasts from its start to the next one's, so the
phases add up to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specdeft.bench.workbench import Workbench, tree_request
from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.engine import Engine
from specdeft.model import TargetModel, TargetOutput


class StepPhases(NamedTuple):
    """Milliseconds of one step. draft: heads and tree. verify: the target's forward.
    accept: choosing tokens, the walk, commit. host: reading tokens, text, the loop."""

    draft: float
    verify: float
    accept: float
    host: float

    @property
    def step(self) -> float:
        """From its start to the start of the next."""
        return sum(self)


@dataclass
class _Watch:
    """Times inside the steps of a run; every reading waits for the device first."""

    read: Callable[[], float]
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    is_in_step: bool = False

    def phases(self) -> list[StepPhases]:
        """All steps but the last, whose end is not followed by a start."""
        rows = zip(self.starts, self.starts[1:], self.ends, self.draft, self.verify, strict=False)
        return [
            StepPhases(
                draft * 1e3,
                verify * 1e3,
                (end - start - draft - verify) * 1e3,
                (following - end) * 1e3,
            )
            for start, following, end, draft, verify in rows
        ]


class _WatchedTarget:
    """The target, its forwards timed while a step runs."""

    def __init__(self, target: TargetModel, watch: _Watch) -> None:
        self._target = target
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, *arguments: Any, **settings: Any) -> TargetOutput:
        began = self._watch.read()
        output = self._target.forward(*arguments, **settings)
        if self._watch.is_in_step:
            self._watch.verify.append(self._watch.read() - began)
        return output


@dataclass(frozen=True)
class _WatchedEngine(Engine):
    """The engine with a watch."""

    watch: _Watch

    def step(self, *arguments: Any, **settings: Any) -> None:
        watch = self.watch
        watch.starts.append(watch.read())
        watch.is_in_step = True
        super().step(*arguments, **settings)
        watch.is_in_step = False
        watch.ends.append(watch.read())

    def _draft(self, *arguments: Any) -> Tensor:
        began = self.watch.read()
        tokens = super()._draft(*arguments)
        self.watch.draft.append(self.watch.read() - began)
        return tokens


class _WatchedDecoder(SpecDecoder):
    """The decoder on a watched engine."""

    def watch(self, watch: _Watch) -> None:
        engine = self._engine
        target = cast(TargetModel, _WatchedTarget(engine.target, watch))
        self._engine = _WatchedEngine(target, engine.heads, engine.kernels, watch)


def measure_phases(
    bench: Workbench, tree: str, prompt_ids: Sequence[int], config: GenerationConfig
) -> list[StepPhases]:
    """Phases of every step of one generation but the last; empty where there is at most one."""
    decoder = _WatchedDecoder(
        bench.model,
        bench.tokenizer,
        bench.heads,
        tree=tree_request(tree),
        tree_values=bench.values,
        cuda_graphs=False,
        clock=bench.clock,
    )
    tree_tensors = decoder.tree  # "auto" is resolved before anything is timed
    assert tree_tensors.num_nodes >= 1
    decoder.generate(list(prompt_ids), config=GenerationConfig(max_new_tokens=4))
    is_cuda = decoder.device.type == "cuda"

    def read() -> float:
        if is_cuda:
            torch.cuda.synchronize()
        return bench.clock()

    watch = _Watch(read)
    decoder.watch(watch)
    decoder.generate(list(prompt_ids), config=config)
    return watch.phases()
