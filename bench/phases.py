"""Where a step's time goes: draft, forward, attention, acceptance, commit, and what is left.

Measured in runs of their own, because looking slows what is looked at. Eager steps are timed by the
clock, the device waited for at every border. Steps in CUDA graphs are timed by events inside the
graph, read while the next step runs: once at the borders of the phases and, in another run, around
every layer's attention; what a step takes beyond them when nobody looks is the rest. A step lasts
from its start to the next one's, and the phases add up to it.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from specdeft.attention import CpuAttention, TritonAttention
from specdeft.bench.workbench import Workbench, tree_request
from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.engine import Engine
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from specdeft.graphs import StepGraphs

_PARTS = ("draft", "verify", "decide", "commit")
_ATTENTION = "attention"
_WARM_UP_TOKENS = 4
_WARMING_STEPS = 2  # replayed: the first one of either capture


class StepPhases(NamedTuple):
    """Milliseconds of one step. draft: heads and tree. forward: the target without its attention.
    attention: storing keys and values, attending, merging. accept: choosing tokens and the walk.
    commit: moving what is kept. idle: launches, reading tokens, text, the loop."""

    draft: float
    forward: float
    attention: float
    accept: float
    commit: float
    idle: float

    @property
    def step(self) -> float:
        """From its start to the start of the next."""
        return sum(self)


class _Watch(Protocol):
    """Sees the parts of steps go by."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Around one part of a step, or one layer's attention."""

    def step(self) -> AbstractContextManager[None]:
        """Around a whole step."""


class _ClockWatch:
    """Times of eager steps by a clock that waits for the device.

    Attributes:
        steps: start, and seconds by part, of every step.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self.steps: list[tuple[float, dict[str, float]]] = []
        self._read = read
        self._is_in_step = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """See `_Watch`."""
        self.steps.append((self._read(), defaultdict(float)))
        self._is_in_step = True
        yield
        self._is_in_step = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """See `_Watch`."""
        if not self._is_in_step:  # a prompt's
            yield
            return
        began = self._read()
        yield
        self.steps[-1][1][name] += self._read() - began

    def phases(self) -> list[StepPhases]:
        """All steps but the last, whose end is not followed by a start."""
        starts = [start for start, _parts in self.steps]
        return [
            _phases(parts, following - start)
            for (start, parts), following in zip(self.steps, starts[1:], strict=False)
        ]


_Marks = list[tuple[str, torch.cuda.Event, torch.cuda.Event]]


class _EventWatch:
    """Times of replayed steps by events that their graph records.

    Two captures of every step take turns, each with events of its own: one is read while the other
    runs, so that a step follows the one before as it does when nobody looks.

    Attributes:
        steps: seconds by part of every replay.
    """

    def __init__(self, watched: Sequence[str]) -> None:
        """Args: the parts to watch."""
        self.steps: list[dict[str, float]] = []
        self._watched = watched
        self._marks: _Marks = []  # of the step that is captured
        self._marks_of: dict[torch.cuda.CUDAGraph, _Marks] = {}
        self._turns: list[StepGraphs] = []
        self._running: deque[_Marks] = deque()

    @contextmanager
    def step(self) -> Iterator[None]:
        """See `_Watch`: a step that is captured begins a list of events."""
        if torch.cuda.is_current_stream_capturing():
            self._marks = []
        yield

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """See `_Watch`."""
        if name not in self._watched or not torch.cuda.is_current_stream_capturing():
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._marks.append((name, begin, end))

    def run(self, graphs: "StepGraphs", tree: TreeTensors, max_context: int) -> None:
        """Stands for `StepGraphs.run`: a replay, then the times of the one before."""
        if not self._turns:
            twin = type(graphs)(graphs.engine, graphs.cache, graphs.batch, graphs.sampler)
            self._turns = [graphs, twin]
        graph = self._turns[0].graph(tree, max_context)
        if graph is None:
            raise RuntimeError("no memory is left to capture the steps whose phases are measured")
        marks = self._marks_of.setdefault(graph, self._marks)
        graph.replay()
        self._running.append(marks)
        self._turns.reverse()
        if len(self._running) > 1:
            self.read()

    def read(self) -> None:
        """Wait for the oldest replay that was not read and note its times."""
        parts: dict[str, float] = defaultdict(float)
        for name, begin, end in self._running.popleft():
            end.synchronize()
            parts[name] += begin.elapsed_time(end) / 1e3
        self.steps.append(parts)


def _phases(parts: dict[str, float], step_s: float) -> StepPhases:
    known = [
        parts["draft"],
        parts["verify"] - parts[_ATTENTION],
        parts[_ATTENTION],
        parts["decide"],
        parts["commit"],
    ]
    return StepPhases(*(seconds * 1e3 for seconds in (*known, step_s - sum(known))))


@contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """Show the watch every step that runs inside, whichever decoder runs it; not nested."""

    def shown(original: Callable[..., Any], around: Callable[[], Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            with around():
                return original(*arguments, **settings)

        return call

    places: list[tuple[Any, str, Callable[[], Any]]] = [(Engine, "step", watch.step)]
    places += [(Engine, name, partial(watch.part, name)) for name in _PARTS]
    attend = partial(watch.part, _ATTENTION)
    places += [(CpuAttention, "attend", attend), (TritonAttention, "attend", attend)]
    originals = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, around), original in zip(places, originals, strict=True):
        setattr(owner, name, shown(original, around))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def measure_phases(
    bench: Workbench, tree: str | TokenTree, prompt_ids: Sequence[int], config: GenerationConfig
) -> list[StepPhases]:
    """Phases of every step of one generation but the last; empty where there is at most one."""

    def decoder(request: Any) -> SpecDecoder:
        return SpecDecoder(
            bench.model,
            bench.tokenizer,
            bench.heads,
            tree=request,
            lookup=bench.lookup,
            tree_values=bench.values,
            cuda_graphs=bench.cuda_graphs,
            compile=bench.compile,
            clock=bench.clock,
        )

    prompt = list(prompt_ids)
    first = decoder(tree_request(tree) if isinstance(tree, str) else tree)
    # Warm, and "auto" resolved, before anything is timed; on a GPU all graphs of the text captured.
    warm_up = GenerationConfig(max_new_tokens=_WARM_UP_TOKENS)
    first.generate(prompt, config=config if first.engine.cuda_graphs else warm_up)
    if not first.engine.cuda_graphs:
        watch = _ClockWatch(_waiting_clock(bench, first.device))
        with _watched(watch):
            first.generate(prompt, config=config)
        return watch.phases()
    stats = first.generate(prompt, config=config).stats
    if stats.num_steps <= _WARMING_STEPS:
        return []
    borders = _replayed(decoder(first.tree), prompt, config, _PARTS)
    layers = _replayed(decoder(first.tree), prompt, config, (_ATTENTION,))
    # Attention and forward come from two runs of the same steps: a median serves all.
    attention = statistics.median(parts[_ATTENTION] for parts in layers)
    step_s = stats.decode_s / stats.num_steps
    return [_phases({**parts, _ATTENTION: attention}, step_s) for parts in borders]


def _replayed(
    decoder: SpecDecoder, prompt: list[int], config: GenerationConfig, watched: Sequence[str]
) -> list[dict[str, float]]:
    """Seconds by part of the replayed steps of a generation."""
    from specdeft.graphs import StepGraphs

    watch, run = _EventWatch(watched), StepGraphs.run

    def watched_run(*arguments: Any) -> None:
        watch.run(*arguments)

    with _watched(watch):
        setattr(StepGraphs, "run", watched_run)  # noqa: B010  (a method: mypy)
        try:
            decoder.generate(prompt, config=config)
        finally:
            setattr(StepGraphs, "run", run)  # noqa: B010
    return watch.steps[_WARMING_STEPS:]


def _waiting_clock(bench: Workbench, device: torch.device) -> Callable[[], float]:
    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return bench.clock()

    return read
