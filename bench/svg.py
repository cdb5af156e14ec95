"""Charts as SVG for the HTML report. Colours are CSS classes, so that they follow light and dark.

The drawings are narrow (380 units) and are shown one to one on a phone, side by side on a desk.
"""

import math
from collections.abc import Sequence
from html import escape

from specdeft.bench.charts import (
    BarChart,
    Chart,
    HeatMap,
    LineChart,
    Point,
    TreeChart,
    log_ticks,
    ticks,
)
from specdeft.trees.drawing import tree_places

WIDTH = 380
WIDE_WIDTH = 820
_MOST_LEAVES = 24  # of a tree in the usual width
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 8, 38
_PLOT_HEIGHT = 190
_LABEL_ROOM = 18  # left of the numbers of an axis, for what they are
_LINE = 16  # height of a line of text
_LETTER = 6.2  # mean width of a letter at the drawings' font size
_NARROW, _WIDE = frozenset("iljtfrI.,:;'|!()[] "), frozenset("mwMW@%")
_NARROW_LETTER, _OTHER_LETTER, _WIDE_LETTER = 4.6, 7.2, 11.0
NUM_COLOURS = 6


def draw(chart: Chart) -> str:
    """One SVG element."""
    if isinstance(chart, LineChart):
        return _lines(chart)
    if isinstance(chart, BarChart):
        return _bars(chart)
    if isinstance(chart, HeatMap):
        return _heat_map(chart)
    return _tree(chart)


def number(value: float) -> str:
    """For axes and labels: three significant digits, no trailing zeros."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _svg(height: float, body: Sequence[str], label: str, width: int = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{chosen}>{escape(text)}</text>'


def shorten(text: str, width: float) -> str:
    """Text that fits into ``width`` units; what is cut is shown by an ellipsis."""
    fits = max(int(width / _LETTER), 4)
    return text if len(text) <= fits else text[: fits - 1] + "…"


def text_width(text: str) -> float:
    """An upper estimate, for text that stands before other text: fonts differ from reader to
    reader, and too much room is better than an overlap."""
    return sum(
        _NARROW_LETTER if letter in _NARROW else _WIDE_LETTER if letter in _WIDE else _OTHER_LETTER
        for letter in text
    )


def _legend(names: Sequence[str], y: float) -> tuple[list[str], float]:
    """Coloured names in as many lines as they need; the drawing and its height."""
    parts: list[str] = []
    x, line = 4.0, 0
    for index, name in enumerate(names):
        shown = shorten(name, WIDTH - 30)
        width = 22 + text_width(shown)
        if x + width > WIDTH and x > 4:
            x, line = 4.0, line + 1
        top = y + line * _LINE
        # The second round of colours is dashed, and its marks are hollow.
        kind = "fill" if index < NUM_COLOURS else "hollow line"
        parts.append(
            f'<rect class="{kind}{index % NUM_COLOURS}" x="{x + 1:.1f}" y="{top + 4:.1f}" '
            'width="8" height="8" rx="2"/>'
        )
        parts.append(_text(x + 14, top + 12, shown, "start"))
        x += width
    return parts, (line + 1) * _LINE + 4


# ---- lines


def _lines(chart: LineChart) -> str:
    legend, top = _legend(list(chart.series), 0) if len(chart.series) > 1 else ([], 0.0)
    top += _TOP
    points = [point for line in chart.series.values() for point in line]
    place = _Axes(points, top, chart.is_log_x)
    body = [*legend, *place.grid(chart.x_label, chart.y_label)]
    for index, line in enumerate(chart.series.values()):
        colour = index % NUM_COLOURS
        # The colours are used up: the next round of lines is dashed.
        dashes = ' stroke-dasharray="5 4"' if index >= NUM_COLOURS else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place.at, line))
        body.append(f'<polyline class="line{colour}" points="{path}"{dashes}/>')
        if len(line) <= 20:
            body += [
                f'<circle class="fill{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
                for x, y in map(place.at, line)
            ]
    return _svg(top + _PLOT_HEIGHT + _BOTTOM, body, chart.title)


class _Axes:
    """Maps values to the plot; y starts at 0."""

    def __init__(self, points: Sequence[Point], top: float, is_log_x: bool) -> None:
        self._is_log_x = is_log_x
        self._values_x = sorted({x for x, _ in points}) or [0.0]
        xs = [self._x(x) for x in self._values_x]
        self._low, self._high = min(xs), max(xs)
        self._most = max((y for _, y in points), default=1.0) or 1.0
        self._top = top
        widest = max(text_width(number(mark)) for mark in ticks(0.0, self._most))
        self._left = max(_LEFT, _LABEL_ROOM + widest + 6)

    def at(self, point: Point) -> Point:
        span = (self._high - self._low) or 1.0
        x = self._left + (self._x(point[0]) - self._low) / span * (WIDTH - self._left - _RIGHT)
        return x, self._top + _PLOT_HEIGHT * (1 - point[1] / self._most)

    def grid(self, x_label: str, y_label: str) -> list[str]:
        bottom = self._top + _PLOT_HEIGHT
        body: list[str] = []
        for mark in ticks(0.0, self._most):
            _, y = self.at((self._values_x[0], mark))
            body.append(
                f'<line class="grid" x1="{self._left:.1f}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" '
                f'y2="{y:.1f}"/>'
            )
            body.append(_text(self._left - 6, y + 4, number(mark), "end"))
        taken = -math.inf
        for mark in self._x_marks():
            x, _ = self.at((mark, 0.0))
            shown = number(mark)
            half = _LETTER * len(shown) / 2
            if x - half < taken:
                continue
            x = min(x, WIDTH - half - 4)
            taken = x + half + 6
            body.append(_text(x, bottom + 16, shown))
        middle = (self._left + WIDTH - _RIGHT) / 2
        body.append(_text(middle, bottom + 32, shorten(x_label, WIDTH - self._left), kind="label"))
        shown = shorten(y_label, _PLOT_HEIGHT)
        body.append(
            f'<text class="label" text-anchor="middle" transform="translate(11 '
            f'{self._top + _PLOT_HEIGHT / 2:.1f}) rotate(-90)">{escape(shown)}</text>'
        )
        return body

    def _x(self, value: float) -> float:
        return math.log2(max(value, 1e-9)) if self._is_log_x else value

    def _x_marks(self) -> Sequence[float]:
        if len(self._values_x) <= 12:
            return self._values_x
        low, high = self._values_x[0], self._values_x[-1]
        return log_ticks(low, high) if self._is_log_x else ticks(low, high)


# ---- bars


def _bars(chart: BarChart) -> str:
    legend, y = _legend(chart.parts, 0) if len(chart.parts) > 1 else ([], 0.0)
    most = max((sum(values) for values in chart.rows.values()), default=1.0) or 1.0
    body = list(legend)
    room = WIDTH - 70
    for name, values in chart.rows.items():
        body.append(_text(2, y + 13, shorten(name, WIDTH - 10), "start"))
        x = 2.0
        for index, value in enumerate(values):
            width = value / most * room
            body.append(
                f'<rect class="fill{index % NUM_COLOURS}" x="{x:.1f}" y="{y + 18:.1f}" '
                f'width="{width:.1f}" height="14"/>'
            )
            x += width
        body.append(_text(x + 5, y + 29, number(sum(values)), "start"))
        y += 40
    body.append(_text(WIDTH / 2, y + 8, chart.unit, kind="label"))
    return _svg(y + 16, body, chart.title)


# ---- shaded cells


def _heat_map(chart: HeatMap) -> str:
    left, cell_height = 62.0, 30.0
    cell_width = (WIDTH - left - 4) / max(len(chart.x_names), 1)
    body: list[str] = [_text(2, 12, shorten(chart.y_label, left), "start", "label")]
    for column, name in enumerate(chart.x_names):
        body.append(_text(left + (column + 0.5) * cell_width, 12, shorten(name, cell_width)))
    most = max((value for row in chart.values for value in row), default=0.0) or 1.0
    for index, (name, row) in enumerate(zip(chart.y_names, chart.values, strict=True)):
        y = 20 + index * cell_height
        body.append(_text(left - 6, y + 19, name, "end"))
        for column, value in enumerate(row):
            x = left + column * cell_width
            body.append(
                f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{cell_width - 2:.1f}" '
                f'height="{cell_height - 2:.0f}" style="--shade:{value / most:.3f}"/>'
            )
            shown = f"{value:.0%}" if value >= 0.005 else ""
            kind = "on-dark" if value / most > 0.55 else ""
            body.append(_text(x + cell_width / 2 - 1, y + 19, shown, kind=kind))
    bottom = 20 + len(chart.y_names) * cell_height
    body.append(_text((left + WIDTH) / 2, bottom + 14, chart.x_label, kind="label"))
    return _svg(bottom + 22, body, chart.title)


# ---- trees


def _tree(chart: TreeChart) -> str:
    places = tree_places(chart.tree.parents, chart.tree.depths)
    height = 24 + 52 * chart.tree.max_depth
    width = WIDE_WIDTH if is_wide(chart) else WIDTH
    leaves = max(chart.tree.num_leaves, 1)
    radius = max(min(9.0, (width - 20) / leaves / 2.2), 2.5)

    def at(node: int) -> Point:
        x, depth = places[node]
        return 10 + x * (width - 20), 14 + depth * 52

    body: list[str] = []
    for node, parent in enumerate(chart.tree.parents):
        if parent >= 0:
            (x1, y1), (x2, y2) = at(parent), at(node)
            body.append(
                f'<line class="edge" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
            )
    for node, share in enumerate(chart.shares):
        x, y = at(node)
        path = ", ".join(map(str, chart.tree.paths[node])) or "root"
        body.append(
            f'<circle class="node" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" '
            f'style="--shade:{math.sqrt(share):.3f}"><title>{path}: {share:.1%}</title></circle>'
        )
    return _svg(height, body, chart.title, width)


def is_wide(chart: Chart) -> bool:
    """Whether the drawing wants the room of two: a tree of many leaves."""
    return isinstance(chart, TreeChart) and chart.tree.num_leaves > _MOST_LEAVES
