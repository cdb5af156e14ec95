"""Charts as PNG files, by matplotlib (the extra ``bench``)."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdeft.bench.charts import BarChart, Chart, HeatMap, LineChart, TreeChart
from specdeft.bench.svg import shorten
from specdeft.trees.drawing import tree_places

_SIZE_INCHES = (6.0, 4.0)
_DPI = 150
_NAME_WIDTH = 200.0


def check_available() -> None:
    """Refuse early.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("--plots needs matplotlib: pip install 'specdeft[bench]'")


def save_plots(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """A PNG file a chart, numbered in order; each appears whole or not at all."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for number, chart in enumerate(charts, start=1):
        figure, axes = pyplot.subplots(figsize=_SIZE_INCHES, layout="constrained")
        _draw(chart, axes)
        axes.set_title(chart.title)
        path = folder / f"{number:02}-{_slug(chart.title)}.png"
        temporary = path.with_suffix(".tmp")
        figure.savefig(temporary, dpi=_DPI, format="png")
        temporary.replace(path)
        pyplot.close(figure)
        paths.append(path)
    return paths


def _slug(title: str) -> str:
    kept = "".join(letter if letter.isalnum() else " " for letter in title.lower())
    return "-".join(kept.split())[:60]


def _draw(chart: Chart, axes: Any) -> None:
    if isinstance(chart, LineChart):
        _lines(chart, axes)
    elif isinstance(chart, BarChart):
        _bars(chart, axes)
    elif isinstance(chart, HeatMap):
        _heat_map(chart, axes)
    else:
        _tree(chart, axes)


def _lines(chart: LineChart, axes: Any) -> None:
    for name, line in chart.series.items():
        marker = "o" if len(line) <= 20 else None
        axes.plot(
            [x for x, _ in line],
            [y for _, y in line],
            label=shorten(name, _NAME_WIDTH),
            marker=marker,
        )
    if chart.is_log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(alpha=0.3)
    if len(chart.series) > 1:
        axes.legend()


def _bars(chart: BarChart, axes: Any) -> None:
    names = list(chart.rows)
    shown = [shorten(name, _NAME_WIDTH) for name in names]
    left = [0.0] * len(names)
    for index, part in enumerate(chart.parts):
        widths = [chart.rows[name][index] for name in names]
        axes.barh(shown, widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(chart.unit)
    if len(chart.parts) > 1:
        # Inside the axes it would lie on the bars.
        axes.figure.legend(loc="outside lower center", ncols=len(chart.parts))


def _heat_map(chart: HeatMap, axes: Any) -> None:
    axes.imshow(chart.values, cmap="Blues", vmin=0, aspect="auto")
    axes.set_xticks(range(len(chart.x_names)), chart.x_names)
    axes.set_yticks(range(len(chart.y_names)), chart.y_names)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    most = max((value for row in chart.values for value in row), default=0.0)
    for y, row in enumerate(chart.values):
        for x, value in enumerate(row):
            if value >= 0.005:
                colour = "white" if value > 0.55 * most else "black"
                axes.text(x, y, f"{value:.0%}", ha="center", va="center", color=colour)


def _tree(chart: TreeChart, axes: Any) -> None:
    places = tree_places(chart.tree.parents, chart.tree.depths)
    for node, parent in enumerate(chart.tree.parents):
        if parent >= 0:
            (x1, y1), (x2, y2) = places[parent], places[node]
            axes.plot([x1, x2], [y1, y2], color="grey", linewidth=0.6, zorder=1)
    axes.scatter(
        [x for x, _ in places],
        [depth for _, depth in places],
        c=[share**0.5 for share in chart.shares],
        cmap="Blues",
        vmin=0,
        vmax=1,
        edgecolors="grey",
        zorder=2,
    )
    axes.invert_yaxis()
    axes.set_axis_off()
