"""One method on one workload: the float64 gate, then the clock. A wrong result gets no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.bench.attention_methods import pool_for, prepare
from specdeft.bench.attention_workloads import Workload, random_inputs
from specdeft.bench.cuda_timing import Ceilings, num_sets, time_once, time_rotated
from specdeft.kernels import io_cost
from specdeft.kernels.baselines.prepared import Prepared
from specdeft.kernels.reference import tree_attention_reference

# Twice what a fused method in the same type loses, rounded up: 2.2e-3 was measured in bfloat16.
WORST_ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
UNFUSED_FACTOR = 2  # Medusa's form rounds its scores to that type too: 5.8e-3 measured


class Outcome(NamedTuple):
    """A method on a workload: the floor, error against float64, the time; or why there is none."""

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
    """A workload with its inputs and its exact answer, which are made when first needed."""

    def __init__(self, workload: Workload, setting: Setting) -> None:
        self.workload = workload
        self._setting = setting
        self._made: tuple[tuple[Tensor, Tensor, Tensor], Tensor] | None = None
        self._first_us: float | None = None

    def measure(self, method: str) -> Outcome:
        """Check a method, then time it."""
        outcome = self._start(method)
        error: float | None = None
        try:
            prepared = prepare(method, self.workload, self._setting.page_size, self._setting.device)
            (q, k, v), exact = self._inputs()
            pools = [pool_for(method, self.workload, kv, self._setting.page_size) for kv in (k, v)]
            error = relative_error(prepared.run(q, pools[0], pools[1]), exact)
            if not error <= worst_error(method, self.workload.shape.dtype):
                raise ValueError(f"wrong result: relative error {error:.1e}")
            self._refuse_hopeless(prepared, q, pools)
            sets = num_sets(2 * pools[0].numel() * pools[0].element_size())
            rotated = [[pool.clone() for pool in pools] for _ in range(sets)]
            timing = time_rotated(_rotating(prepared, q, rotated), sets)
        except (ValueError, RuntimeError, ImportError) as failure:
            return outcome._replace(error=error, note=_first_line(failure))
        self._first_us = self._first_us or timing.median_us
        return outcome._replace(error=error, median_us=timing.median_us, spread_us=timing.spread_us)

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
            None,
            None,
            None,
            None,
        )

    def _inputs(self) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        if self._made is None:
            torch.manual_seed(0)
            inputs = random_inputs(self.workload, self._setting.device)
            self._made = inputs, exact_output(self.workload, *inputs)
        return self._made

    def _refuse_hopeless(self, prepared: Prepared, q: Tensor, pools: Sequence[Tensor]) -> None:
        if self._first_us is None:
            return
        once_us = time_once(lambda: prepared.run(q, pools[0], pools[1]))
        if once_us > self._setting.slowest * max(self._first_us, 20.0):
            raise ValueError(
                f"not timed: a call takes {once_us:.0f} us, over {self._setting.slowest:.0f} times "
                "the first method"
            )


def exact_output(workload: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The float64 result, a KV head at a time."""
    visible = workload.forest.visible().to(q.device)
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


def _rotating(
    prepared: Prepared, q: Tensor, rotated: list[list[Tensor]]
) -> Callable[[int], object]:
    return lambda index: prepared.run(q, rotated[index][0], rotated[index][1])


def _first_line(failure: Exception) -> str:
    text = str(failure).strip()
    return text.splitlines()[0][:120] if text else repr(failure)
