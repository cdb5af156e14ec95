"""One method on one workload: the float64 gate, then the clock. A wrong result gets no time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.bench.attention_methods import OWN_LAYOUT, SPECULATION_ONLY, pool_for, prepare
from specdeft.bench.attention_workloads import Workload, random_inputs
from specdeft.bench.cuda_timing import Ceilings, num_sets, time_once, time_rotated
from specdeft.kernels import io_cost
from specdeft.kernels.baselines.prepared import Prepared
from specdeft.kernels.reference import tree_attention_reference

# Twice what a fused method in the same type loses, rounded up: 2.2e-3 was measured in bfloat16.
WORST_ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
UNFUSED_FACTOR = 2  # Medusa's form rounds its scores to that type too: 5.8e-3 measured
FAR_ABOVE = 3  # A method that many times slower than the first one needs fewer replays.


class Outcome(NamedTuple):
    """A method on a workload: the floor, error against float64, the time; or why there is none.

    replays: of the graph whose median the time is. repeat: which of the run's repeats this is.
    host_s: what measuring took, seconds of the host by step.
    """

    heads: str
    workload: str
    queries: int
    method: str
    floor_us: float
    floor_bytes: int
    error: float | None
    median_us: float | None
    spread_us: float | None
    note: str | None
    replays: int | None = 20
    repeat: int = 1
    host_s: dict[str, float] | None = None

    @property
    def place(self) -> tuple[str, str, int]:
        """What outcomes must share to be compared."""
        return self.heads, self.workload, self.queries


class Setting(NamedTuple):
    """What all measurements of a run share.

    slowest: a method that many times slower than the first one is not timed.
    """

    device: torch.device
    ceilings: Ceilings
    page_size: int
    slowest: float


class Subject:
    """A workload with its inputs, exact answer, rotated pools and prepared methods: each is made
    when first needed, and the first three are shared by all methods.

    first_us: time of the first method that has one; the caller sets it.
    """

    def __init__(self, workload: Workload, setting: Setting) -> None:
        self.workload = workload
        self.first_us: float | None = None
        self._setting = setting
        self._made: tuple[tuple[Tensor, Tensor, Tensor], Tensor] | None = None
        self._rotated: dict[bool, list[Tensor]] = {}
        self._prepared: dict[str, Prepared] = {}

    def measure(self, method: str, repeat: int = 1) -> Outcome:
        """Check a method, then time it."""
        host_s: dict[str, float] = {}
        outcome = self._start(method)._replace(repeat=repeat, host_s=host_s)
        error: float | None = None
        try:
            with _stopwatch(host_s, "prepare"):
                prepared = self._prepare(method)
            with _stopwatch(host_s, "inputs"):
                (q, _k, _v), exact = self._inputs()
                pools = self._pools(method)
            with _stopwatch(host_s, "check"):
                error = relative_error(prepared.run(q, pools[0][0], pools[1][0]), exact)
                if not error <= worst_error(method, self.workload.shape.dtype):
                    raise ValueError(f"wrong result: relative error {error:.1e}")
                self._refuse_hopeless(prepared, q, pools)
            with _stopwatch(host_s, "timing"):
                timing = time_rotated(
                    _rotating(prepared, q, pools),
                    len(pools[0]),
                    far_above_us=FAR_ABOVE * (self.first_us or math.inf),
                )
        except (ValueError, RuntimeError, ImportError) as failure:
            return outcome._replace(error=error, note=_first_line(failure))
        return outcome._replace(error=error, **timing._asdict())

    def _prepare(self, method: str) -> Prepared:
        if method not in self._prepared:
            self._prepared[method] = prepare(
                method, self.workload, self._setting.page_size, self._setting.device
            )
        return self._prepared[method]

    def _start(self, method: str) -> Outcome:
        workload = self.workload
        floor = io_cost.floor(workload.forest, workload.shape)
        return Outcome(
            workload.heads,
            workload.name,
            workload.forest.num_queries,
            method,
            1e6 * floor.seconds(*self._setting.ceilings),
            floor.num_bytes,
            error=None,
            median_us=None,
            spread_us=None,
            note=None,
            replays=None,
        )

    def _inputs(self) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        if self._made is None:
            torch.manual_seed(0)
            inputs = random_inputs(self.workload, self._setting.device)
            self._made = inputs, exact_output(self.workload, *inputs)
        return self._made

    def _pools(self, method: str) -> list[Tensor]:
        """K and V as the method reads them, [sets, slots, Hkv, D] each: copies to be rotated."""
        paged = method in SPECULATION_ONLY
        if method not in OWN_LAYOUT and paged in self._rotated:
            return self._rotated[paged]
        (_q, k, v), _exact = self._inputs()
        pools = [pool_for(method, self.workload, kv, self._setting.page_size) for kv in (k, v)]
        sets = num_sets(2 * pools[0].numel() * pools[0].element_size())
        rotated = [pool.expand(sets, *pool.shape).contiguous() for pool in pools]
        if method not in OWN_LAYOUT:
            self._rotated[paged] = rotated
        return rotated

    def _refuse_hopeless(self, prepared: Prepared, q: Tensor, pools: Sequence[Tensor]) -> None:
        if self.first_us is None:
            return
        once_us = time_once(lambda: prepared.run(q, pools[0][0], pools[1][0]))
        if once_us > self._setting.slowest * max(self.first_us, 20.0):
            raise ValueError(
                f"not timed: a call takes {once_us:.0f} us, over {self._setting.slowest:.0f} times "
                "the first method"
            )


@contextmanager
def _stopwatch(host_s: dict[str, float], step: str) -> Iterator[None]:
    """Seconds of the host inside, as host_s[step]."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        host_s[step] = time.perf_counter() - start_s


def exact_output(workload: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The float64 result, a KV head at a time."""
    visible = workload.forest.visible(q.device)
    group = workload.shape.group
    outs = [
        tree_attention_reference(
            q[:, head * group : (head + 1) * group],
            k[:, head : head + 1],
            v[:, head : head + 1],
            visible,
            scale=workload.shape.scale,
        )[0]
        for head in range(workload.shape.kv_heads)
    ]
    return torch.cat(outs, dim=1)


def worst_error(method: str, dtype: torch.dtype) -> float:
    """The gate: a method above it gets no time."""
    return WORST_ERROR[dtype] * (UNFUSED_FACTOR if method == "medusa" else 1)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """||out - exact|| / ||exact||; infinite where out is not finite everywhere."""
    error = float((out.double() - exact).norm() / exact.norm())
    return error if error == error else float("inf")


def _rotating(prepared: Prepared, q: Tensor, pools: Sequence[Tensor]) -> Callable[[int], object]:
    return lambda index: prepared.run(q, pools[0][index], pools[1][index])


def _first_line(failure: Exception) -> str:
    text = str(failure).strip()
    return text.splitlines()[0][:120] if text else repr(failure)
