"""The drawings of `bench latency`. Where there are several temperatures each has its own."""

from collections.abc import Sequence
from typing import Any

from specdeft.bench.charts import BarChart, Chart, LineChart, Point, cumulative
from specdeft.bench.latency_measure import RowResult
from specdeft.bench.metrics import emission_gaps_ms
from specdeft.bench.phases import StepPhases

_MOST_LINES = 12  # more are not told apart
Shown = Sequence[tuple[RowResult, dict[str, Any]]]


def latency_charts(
    measured: Sequence[RowResult], found: Sequence[dict[str, Any]], *, lossy: bool
) -> tuple[Chart, ...]:
    """Speed by row, tree size and context, the gaps a reader sees, and the phases of a step."""
    shown = [
        (row, figure) for row, figure in zip(measured, found, strict=True) if row.has_speed or lossy
    ]
    charts: list[Chart] = []
    for temperature in dict.fromkeys(row.temperature for row, _ in shown):
        alike = [(row, figure) for row, figure in shown if row.temperature == temperature]
        where = f", T = {temperature:g}" if alike[0][0].is_sweep else ""
        charts += _speed_charts(alike, where)
    sizes: dict[str, list[Point]] = {}
    for row, figure in shown:
        if row.is_ours and "(" not in row.name and figure["decode_throughput"]:
            point = (float(figure["num_nodes"]), figure["decode_throughput"])
            sizes.setdefault(f"T = {row.temperature:g}", []).append(point)
    if max(map(len, sizes.values()), default=0) > 2:
        lines = {name: sorted(points) for name, points in sizes.items()}
        charts.append(
            LineChart("Speed against tree size", "nodes", "tokens/s", lines, is_log_x=True)
        )
    phases = {row.label: figure["phases_ms"] for row, figure in shown if figure["phases_ms"]}
    if phases:
        bars = {
            name: [known[part] for part in StepPhases._fields] for name, known in phases.items()
        }
        charts.append(BarChart("Phases of a step", "ms, measured apart", StepPhases._fields, bars))
    return tuple(charts)


def _speed_charts(alike: Shown, where: str) -> list[Chart]:
    """Of the rows at one temperature."""
    charts: list[Chart] = [
        BarChart(
            f"Speed{where}",
            "tokens/s, median over prompts, end to end",
            ("tokens/s",),
            {row.name: [figure["median_tokens_per_second"]] for row, figure in alike},
        ),
        LineChart(
            f"Gaps between emissions{where}",
            "ms",
            "share of gaps up to it",
            _fewer(
                {
                    row.name: cumulative(
                        [gap for run in row.all_runs for gap in emission_gaps_ms(run)]
                    )
                    for row, _ in alike
                }
            ),
            is_log_x=True,  # a compiled step and an eager one are a hundredfold apart
        ),
    ]
    contexts: dict[str, list[Point]] = {}
    for row, figure in alike:
        for kind, known in figure["by_kind"].items():
            length, _, unit = kind.partition(" ")
            if unit == "tokens" and length.isdecimal() and known["decode_throughput"]:
                point = (float(length), known["decode_throughput"])
                contexts.setdefault(row.name, []).append(point)
    if any(len(line) > 1 for line in contexts.values()):
        title = f"Speed against context{where}"
        charts.append(
            LineChart(title, "prompt tokens", "decode tokens/s", _fewer(contexts), is_log_x=True)
        )
    return charts


def _fewer(lines: dict[str, list[Point]]) -> dict[str, list[Point]]:
    """The lines that say something, as many as can be told apart: planned drafts go first."""
    known = {name: line for name, line in lines.items() if line}
    planned = [name for name in known if name.startswith(("random(", "replay(", "oracle("))]
    while len(known) > _MOST_LINES and planned:
        del known[planned.pop()]
    return dict(list(known.items())[:_MOST_LINES])


def batch_charts(found: Sequence[dict[str, Any]]) -> list[Chart]:
    """Tokens a second of all sequences against how many there are."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for figure in found:
        if "output_throughput" in figure:
            point = (float(figure["batch_size"]), figure["output_throughput"])
            lines.setdefault(figure["row"], []).append(point)
    if not any(len(line) > 1 for line in lines.values()):
        return []
    lines = {name: sorted(line) for name, line in lines.items()}
    title = "Speed against batch size"
    return [LineChart(title, "sequences", "tokens/s of all", lines, is_log_x=True)]
