"""Device time of a repeated call: a CUDA graph over rotated inputs, the median of its replays.

Rotation keeps the data cold: the sets together are several times the L2, as the KV of a layer is
when a model's weights have passed in between.
"""

import math
import statistics
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

COLD_BYTES = 320 << 20  # over five times the 60 MB of L2 of an H100 or H200
MOST_SETS = 512
_FEW_REPLAYS = 5


class Timing(NamedTuple):
    """Microseconds per call: median over so many replays, and the quartiles' distance."""

    median_us: float
    spread_us: float
    replays: int


class Ceilings(NamedTuple):
    """What the device reached in this run: a copy (bytes read + written), a bf16 product."""

    bytes_per_s: float
    flops_per_s: float


def num_sets(set_bytes: int) -> int:
    """Input sets to rotate so that none is still cached when it comes round."""
    return max(2, min(MOST_SETS, math.ceil(COLD_BYTES / max(set_bytes, 1))))


def time_rotated(
    call: Callable[[int], object],
    sets: int,
    *,
    replays: int = 20,
    far_above_us: float = math.inf,
) -> Timing:
    """Capture call(0) .. call(sets - 1) in one graph; time per call over `replays` replays.

    A call whose first few replays take more than `far_above_us` is replayed no further.
    """
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(sets):
            call(index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not by the context manager: it gives all cached memory back to the driver first, and
        # asking for it again takes longer than the measurement.
        graph.capture_begin()
        try:
            for index in range(sets):
                call(index)
        finally:
            graph.capture_end()
        for _ in range(3):
            graph.replay()
        times = [_replay_us(graph) / sets for _ in range(min(_FEW_REPLAYS, replays))]
        if statistics.median(times) <= far_above_us:
            times += [_replay_us(graph) / sets for _ in range(replays - len(times))]
    low, _, high = statistics.quantiles(times, n=4)
    return Timing(statistics.median(times), high - low, len(times))


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    elapsed_ms: float = start.elapsed_time(stop)
    return elapsed_ms * 1e3


@lru_cache(maxsize=16)
def _side_stream(_device_index: int) -> torch.cuda.Stream:
    """One for all captures of a device: freed memory stays with the stream that it was asked on."""
    return torch.cuda.Stream()


def time_once(call: Callable[[], object]) -> float:
    """Microseconds of one call after a first one, launches included: an estimate, nothing more."""
    return _event_us(call, repeats=1)


def measure_ceilings(device: torch.device) -> Ceilings:
    """A 2 GiB copy and an 8192 x 8192 x 8192 product of random bf16, each the median of 10.

    The copy is timed outside a graph: there it would be a memory node, which reached 2.8 TB/s where
    the copy kernel reaches 4.3.
    """
    source = torch.randn(512 << 20, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size()
    size = 8192
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    copy_us = statistics.median(_event_us(lambda: target.copy_(source)) for _ in range(10))
    product_us = statistics.median(_event_us(lambda: torch.matmul(a, b)) for _ in range(10))
    return Ceilings(copied / copy_us * 1e6, 2 * size**3 / product_us * 1e6)


def _event_us(call: Callable[[], object], *, repeats: int = 4) -> float:
    """Microseconds per call of `repeats` calls in a row, after one that is not timed."""
    call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    torch.cuda.synchronize()
    elapsed_ms: float = start.elapsed_time(stop)
    return elapsed_ms * 1e3 / repeats
