"""Timing of one workload: at sampled steps every attention method runs the same step.

Between sampled steps the KV tree goes on (forks, frees, commits) and nothing is computed, so a step
is what it is in a whole run and a run of thousands of steps fits into minutes. At a sampled step
the methods take turns, A B .. B A over the repetitions; the first turn of a step warms up.

    attention   the kernels of all layers: a CUDA graph over the layers' own pools, which are cold
    forward     the stock model with this attention, a CUDA graph: the device's time alone
    end to end  plan, forward launched by the host, choice of tokens
    books       the KV tree's part since the step before, the same for all methods
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdeft.bench.cuda_timing import time_rotated
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import Clock
from specdeft.bench.workload_states import State, Step
from specdeft.kernels.baselines.per_path import duplicated, path_forest, prepare_plan
from specdeft.kernels.baselines.prepared import HeadShape, Prepared
from specdeft.kernels.launch_shape import sm_count
from specdeft.kernels.reference import tree_attention_reference
from specdeft.model import AttentionOptions, TargetModel
from specdeft.trees.forest import KVForest
from specdeft.trees.partition import balanced_chunk_tokens, build_plan
from specdeft.trees.plan import AttentionPlan, Partition

FLASH_DECODING = "flash-decoding"
METHODS = ("flatten", "node-chunk", "node", "radix", FLASH_DECODING)
PER_PATH = ("radix", FLASH_DECODING)
_TILE_ROWS = 64  # rows of a kernel tile: queries times the heads of a KV head's group
_BLOCK_TOKENS = 64  # of a kernel's inner step
_FIRST_ID = 3
# Relative errors beyond which a method is wrong: several times what the type itself loses.
_WORST_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Timed:
    """One method at one sampled step: medians over the repetitions, in milliseconds.

    Attributes:
        attention: kernels of all layers. plan: what is prepared once for all layers.
        forward: device time of the whole forward, attention included.
        end_to_end: plan, forward and choice; the KV tree's part left out.
        kv_tokens: tokens whose keys and values the method reads, repeats included.
        difference: of the logits from the first method's, relative (2-norm).
        choices: the token chosen for each query.
    """

    attention: float
    plan: float
    forward: float
    end_to_end: float
    kv_tokens: int
    difference: float
    choices: tuple[int, ...]


@dataclass
class Measured:
    """A workload's sampled steps.

    Attributes:
        steps: [sampled step] number of the step, its queries, tokens it brings, cached tokens.
        books_ms: of each sampled step, the mean of the KV tree's part per step since the last one.
        timed: [method][sampled step].
        errors: against float64, per method; failures: why a method has no times.
    """

    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    books_ms: list[float] = field(default_factory=list)
    timed: dict[str, list[Timed]] = field(default_factory=dict)
    errors: dict[str, float | None] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def take_errors(self, errors: dict[str, float | None], dtype: torch.dtype) -> None:
        """A method beyond the dtype's limit has failed and is not timed."""
        self.errors = errors
        for method, error in errors.items():
            if error is None:
                self.failures[method] = "wrong result: not finite"
            elif error > _WORST_ERROR[dtype]:
                self.failures[method] = f"wrong result: relative error {error:.1e}"


class ForestLayers:
    """Stores a forward's keys and values in their slots, then runs a prepared method."""

    def __init__(
        self, prepared: Prepared, keys: Tensor, values: Tensor, new_slots: Tensor, rows: Tensor
    ) -> None:
        """Args: the method; pools [L, S, Hkv, D]; slots int64 [W] to be written, each from a row
        int64 [W] of the queries."""
        self._run, self._keys, self._values = prepared.run, keys, values
        self._new_slots, self._rows = new_slots, rows

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `model.LayerAttention`."""
        if options.window is not None or options.softcap is not None or options.sinks is not None:
            raise ValueError(
                "bench workload compares plain attention only: choose a model without sliding "
                "windows, softcap or sinks"
            )
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, self._new_slots, k[0].index_select(0, self._rows))
        values.index_copy_(0, self._new_slots, v[0].index_select(0, self._rows))
        return self._run(q[0], keys, values)[None]


@dataclass(frozen=True)
class Meter:
    """What every measurement of a run shares.

    Attributes:
        target: the model. shape: of its heads. clock: seconds. repetitions: timed turns of a step.
    """

    target: TargetModel
    shape: HeadShape
    clock: Clock
    repetitions: int

    @classmethod
    def of(cls, target: TargetModel, clock: Clock, repetitions: int) -> "Meter":
        """The meter of a model."""
        heads, kv = target.num_query_heads, target.shape
        scale = kv.head_dim**-0.5
        shape = HeadShape(heads, kv.num_kv_heads, kv.head_dim, target.dtype, scale)
        return cls(target, shape, clock, repetitions)

    def wait(self) -> None:
        """For the device."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()


def sampled_steps(num_steps: int, samples: int) -> list[int]:
    """Up to so many step numbers, the middles of equal parts of the run."""
    count = min(samples, num_steps)
    return sorted({int((index + 0.5) * num_steps / count) + 1 for index in range(count)})


@torch.inference_mode()
def measure_workload(
    meter: Meter,
    state: State,
    methods: Sequence[str],
    samples: int,
    folder: RunFolder,
    name: str,
    done: Callable[[], None],
) -> Measured:
    """Replay the workload; time the methods at ``samples`` steps spread over it.

    Args:
        folder: holds what was measured before; it is not measured again.
        name: of the workload, for the folder.
        done: called after each sampled step.
    """
    found = Measured(timed={method: [] for method in methods})
    wanted = sampled_steps(state.num_steps, samples)
    # Cached text of any kind costs the same: the pools hold noise of the size that norms leave.
    for pool in (state.kv.keys, state.kv.values):
        pool.normal_(std=0.5)
    meter.wait()
    began, since = meter.clock(), 0
    for step in state.steps():
        since += 1
        if step.number in wanted:
            meter.wait()
            books = {"ms": (meter.clock() - began) * 1e3 / since}
            found.books_ms.append(_kept(folder, f"{name}|{step.number}|books", books)["ms"])
            queries, cached = step.forest.num_queries, step.forest.total_tokens
            found.steps.append((step.number, queries, step.num_tokens, cached))
            if not found.errors:
                errors = folder.get(f"{name}|errors") or _errors(meter, state, step, methods)
                found.take_errors(_kept(folder, f"{name}|errors", errors), meter.shape.dtype)
            _time_step(meter, state, step, found, folder, name)
            done()
            if step.number == wanted[-1]:
                break
            meter.wait()
            began, since = meter.clock(), 0
    return found


def _kept(folder: RunFolder, key: str, record: dict[str, Any]) -> dict[str, Any]:
    """The folder's record of this key, which is this one where it had none."""
    if folder.get(key) is None:
        folder.put(key, record)
    known = folder.get(key)
    assert known is not None
    return known


def _errors(
    meter: Meter, state: State, step: Step, methods: Sequence[str]
) -> dict[str, float | None]:
    """Every method's first layer against float64 on the step's own cache, relative; None is NaN."""
    device, forest = meter.target.device, step.forest
    q = torch.randn(
        forest.num_queries, meter.shape.query_heads, meter.shape.head_dim, device=device
    ).to(meter.shape.dtype)
    pools = (state.kv.keys[0], state.kv.values[0])
    slots = forest.slots.long().to(device)
    exact = _exact(q, pools[0][slots], pools[1][slots], forest, meter.shape)
    errors: dict[str, float | None] = {}
    for method in methods:
        prepared = prepare_plan(method, plan_of(method, forest, meter), meter.shape, device)
        own = [duplicated(forest, pool) for pool in pools] if method == FLASH_DECODING else pools
        out = prepared.run(q, own[0], own[1]).double()
        error = float((out - exact).norm() / exact.norm())
        errors[method] = error if math.isfinite(error) else None
    return errors


def _exact(q: Tensor, k: Tensor, v: Tensor, forest: KVForest, shape: HeadShape) -> Tensor:
    """The float64 result for tokens in flattened order, a KV head at a time."""
    visible = forest.visible().to(q.device)
    group = shape.group
    outs = [
        tree_attention_reference(
            q[:, head * group : (head + 1) * group],
            k[:, head : head + 1],
            v[:, head : head + 1],
            visible,
            scale=shape.scale,
        )[0]
        for head in range(shape.kv_heads)
    ]
    return torch.cat(outs, dim=1)


def _time_step(
    meter: Meter, state: State, step: Step, found: Measured, folder: RunFolder, name: str
) -> None:
    methods = [method for method in found.timed if method not in found.failures]
    keys = {method: f"{name}|{step.number}|{method}" for method in methods}
    # All or none: a difference from the first method's logits needs both in one place.
    missing = methods if any(folder.get(key) is None for key in keys.values()) else []
    if missing:
        turns = {method: _Turns(meter, state, step, method) for method in missing}
        for repetition in range(1 + meter.repetitions):
            for method in missing if repetition % 2 == 0 else reversed(missing):
                turns[method].take(is_timed=repetition > 0)
        first = turns[missing[0]]
        for method in missing:
            folder.put(keys[method], turns[method].record(first))
    for method in methods:
        record: Any = folder.get(keys[method])
        found.timed[method].append(Timed(**{**record, "choices": tuple(record["choices"])}))


class _Turns:
    """The repetitions of one method at one step."""

    def __init__(self, meter: Meter, state: State, step: Step, method: str) -> None:
        device = meter.target.device
        self._meter, self._step, self._method = meter, step, method
        self._keys, self._values = state.kv.keys, state.kv.values
        new_slots, rows = step.new_slots, torch.arange(step.forest.num_queries)
        if method == FLASH_DECODING:
            # Each sequence has a cache of its own, written token by token: granted, not timed.
            self._keys, self._values = (
                torch.stack([duplicated(step.forest, layer) for layer in pool])
                for pool in (state.kv.keys, state.kv.values)
            )
            new_slots, rows = _copies(step)
        self._new_slots, self._rows = new_slots.to(device), rows.to(device)
        self._positions = step.positions.to(device)[None]
        self._tokens = torch.full_like(self._positions, _FIRST_ID)
        self._plans: list[float] = []
        self._times: list[float] = []
        self._choices: list[int] = []
        self.logits = torch.empty(0)

    def take(self, *, is_timed: bool) -> None:
        """One step of the whole model."""
        meter = self._meter
        meter.wait()
        began = meter.clock()
        prepared = self._prepare()
        planned = meter.clock()
        self.logits = self._forward(prepared)
        self._choices = self.logits.argmax(-1).tolist()  # waits, as reading tokens does
        ended = meter.clock()
        if is_timed:
            self._plans.append((planned - began) * 1e3)
            self._times.append((ended - began) * 1e3)

    def record(self, first: "_Turns") -> dict[str, Any]:
        """The fields of `Timed`."""
        meter = self._meter
        mine, its = self.logits.float(), first.logits.float()
        return {
            "attention": self._attention_ms(),
            "plan": statistics.median(self._plans),
            "forward": self._forward_ms(),
            "end_to_end": statistics.median(self._times),
            "kv_tokens": plan_of(self._method, self._step.forest, meter).counts().kv_tokens,
            "difference": float((mine - its).norm() / its.norm()),
            "choices": self._choices,
        }

    def _forward(self, prepared: Prepared) -> Tensor:
        """Logits [Q, V]."""
        layers = ForestLayers(prepared, self._keys, self._values, self._new_slots, self._rows)
        target = self._meter.target
        return target.forward(self._tokens, self._positions, layers).logits[0]

    def _forward_ms(self) -> float:
        prepared = self._prepare()
        if self._meter.target.device.type == "cuda":
            return time_rotated(lambda _turn: self._forward(prepared), 2, replays=5).median_us / 1e3
        return 1e3 * _median_seconds(self._meter, partial(self._forward, prepared))

    def _prepare(self) -> Prepared:
        meter, forest = self._meter, self._step.forest
        plan = plan_of(self._method, forest, meter)
        return prepare_plan(self._method, plan, meter.shape, meter.target.device)

    def _attention_ms(self) -> float:
        meter, shape = self._meter, self._meter.shape
        num_layers = self._keys.shape[0]
        q = torch.randn(
            self._step.forest.num_queries,
            shape.query_heads,
            shape.head_dim,
            device=meter.target.device,
        ).to(shape.dtype)
        prepared = self._prepare()

        def run(layer: int) -> Tensor:
            return prepared.run(q, self._keys[layer], self._values[layer])

        if meter.target.device.type == "cuda":
            return num_layers * time_rotated(run, num_layers, replays=10).median_us / 1e3
        return 1e3 * _median_seconds(meter, partial(_all_layers, run, num_layers))


def _copies(step: Step) -> tuple[Tensor, Tensor]:
    """Where Flash-Decoding writes: the places of the step's new tokens in all paths that hold them,
    and the query row of each, int64 [W]."""
    slots = path_forest(step.forest, duplicate=False).slots.long()
    row_of = torch.full((int(slots.max()) + 1,), -1)
    row_of[step.new_slots] = torch.arange(step.forest.num_queries)
    rows = row_of[slots]
    places = (rows >= 0).nonzero()[:, 0]
    return places, rows[places]


def _all_layers(run: Callable[[int], Tensor], num_layers: int) -> None:
    for layer in range(num_layers):
        run(layer)


def _median_seconds(meter: Meter, call: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(meter.repetitions):
        began = meter.clock()
        call()
        times.append(meter.clock() - began)
    return statistics.median(times)


def plan_of(method: str, forest: KVForest, meter: Meter) -> AttentionPlan:
    """The plan that a method makes once a step, on the CPU.

    Radix attention and Flash-Decoding are the same kernels on Q separate paths, one query a tile;
    the latter's paths stand in a pool of their own.
    """
    shape, device = meter.shape, meter.target.device
    partition, tile_queries = Partition.FLATTEN, 1
    if method in PER_PATH:
        forest = path_forest(forest, duplicate=method == FLASH_DECODING)
    else:
        partition, tile_queries = Partition(method), max(1, _TILE_ROWS // shape.group)
    chunk = None
    if partition is not Partition.NODE:
        num_programs = 2 * (sm_count(device) if device.type == "cuda" else 1)
        chunk = balanced_chunk_tokens(
            forest,
            tile_queries=tile_queries,
            num_kv_heads=shape.kv_heads,
            num_programs=num_programs,
            block_tokens=_BLOCK_TOKENS,
        )
    return build_plan(forest, partition, tile_queries=tile_queries, chunk_tokens=chunk)
