"""What is drawn: charts as data, rendered to SVG by `svg` and to PNG by `plots`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdeft.trees.token_tree import TokenTree

Point = tuple[float, float]


@dataclass(frozen=True)
class LineChart:
    """Lines by name over shared axes; ``is_log_x`` spaces the x axis by factors."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    is_log_x: bool = False


@dataclass(frozen=True)
class BarChart:
    """A horizontal bar a row, made of parts that lie end to end."""

    title: str
    unit: str
    parts: tuple[str, ...]
    rows: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class HeatMap:
    """values[y][x] in 0..1, shaded."""

    title: str
    x_label: str
    y_label: str
    x_names: tuple[str, ...]
    y_names: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class TreeChart:
    """A token tree, every node shaded by the share of steps that kept it; the root is 1."""

    title: str
    tree: TokenTree
    shares: tuple[float, ...]


Chart = LineChart | BarChart | HeatMap | TreeChart


def cumulative(values: Sequence[float]) -> list[Point]:
    """The empirical distribution: (value, share of values up to it), at most 200 points."""
    ordered = sorted(values)
    count = len(ordered)
    stride = max(count // 200, 1)
    kept = sorted({*range(0, count, stride), count - 1}) if count else []
    return [(ordered[index], (index + 1) / count) for index in kept]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``: steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0
    while power * 10 <= span:
        power *= 10
    while power > span:
        power /= 10
    step = next(
        factor * power for factor in (0.2, 0.5, 1, 2, 5, 10) if span / (factor * power) <= most
    )
    first = int(low / step) * step
    marks = [first + index * step for index in range(int(span / step) + 3)]
    return [mark for mark in marks if low - 1e-9 * span <= mark <= high + 1e-9 * span]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``, both above 0, evenly in the logarithm: 1, 2 and 5
    times powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [mark for mark in marks if low * (1 - 1e-9) <= mark <= high * (1 + 1e-9)]
