"""Where a step's time goes: draft, the target's forward, acceptance with commit, and the host.

Measured in a run of its own, because looking slows what is looked at: steps run eagerly, and on a
GPU the device is waited for at every border. A step lasts from its start to the next one's, so the
phases add up to it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdeft import drafting
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


@contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """Time the parts of every step that runs inside, whichever decoder runs it; not nested."""
    step, draft, forward = Engine.step, drafting.draft_tokens, TargetModel.forward

    def timed_step(*arguments: Any, **settings: Any) -> None:
        watch.starts.append(watch.read())
        watch.is_in_step = True
        step(*arguments, **settings)
        watch.is_in_step = False
        watch.ends.append(watch.read())

    def timed_draft(*arguments: Any) -> Tensor:
        began = watch.read()
        tokens = draft(*arguments)
        watch.draft.append(watch.read() - began)
        return tokens

    def timed_forward(*arguments: Any, **settings: Any) -> TargetOutput:
        began = watch.read()
        output = forward(*arguments, **settings)
        if watch.is_in_step:  # and not a prompt's
            watch.verify.append(watch.read() - began)
        return output

    originals = {
        "step": (Engine, step),
        "draft_tokens": (drafting, draft),
        "forward": (TargetModel, forward),
    }
    timed = {"step": timed_step, "draft_tokens": timed_draft, "forward": timed_forward}
    for name, (owner, _) in originals.items():
        setattr(owner, name, timed[name])
    try:
        yield
    finally:
        for name, (owner, original) in originals.items():
            setattr(owner, name, original)


def measure_phases(
    bench: Workbench, tree: str, prompt_ids: Sequence[int], config: GenerationConfig
) -> list[StepPhases]:
    """Phases of every step of one generation but the last; empty where there is at most one."""
    decoder = SpecDecoder(
        bench.model,
        bench.tokenizer,
        bench.heads,
        tree=tree_request(tree),
        lookup=bench.lookup,
        tree_values=bench.values,
        cuda_graphs=False,
        clock=bench.clock,
    )
    # Warm, and "auto" resolved, before anything is timed.
    decoder.generate(list(prompt_ids), config=GenerationConfig(max_new_tokens=4))
    is_cuda = decoder.device.type == "cuda"

    def read() -> float:
        if is_cuda:
            torch.cuda.synchronize()
        return bench.clock()

    watch = _Watch(read)
    with _watched(watch):
        decoder.generate(list(prompt_ids), config=config)
    return watch.phases()
