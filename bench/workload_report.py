"""The report of `bench workload`: times per step and token, ratios to Radix attention, drawings."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specdeft.bench.charts import BarChart, Chart, LineChart
from specdeft.bench.metrics import bootstrap_median
from specdeft.bench.report import Cell, Report, Table
from specdeft.bench.workload_jobs import Job
from specdeft.bench.workload_measure import Measured, Timed

BASELINE = "radix"


def figures(job: Job, measured: Measured) -> list[dict[str, Any]]:
    """Of every method: milliseconds per step and token, ratios to Radix paired by step."""
    steps = measured.steps
    tokens = statistics.fmean(count for _, _, count, _ in steps)
    books = statistics.fmean(measured.books_ms)
    baseline = measured.timed.get(BASELINE, [])
    found: list[dict[str, Any]] = []
    for method, timed in measured.timed.items():
        known: dict[str, Any] = {
            "workload": job.name,
            "method": method,
            "error": measured.errors.get(method),
            "failure": measured.failures.get(method),
            "num_steps": job.num_steps,
            "sampled_steps": [number for number, *_ in steps],
            "queries_per_step": statistics.fmean(queries for _, queries, _, _ in steps),
            "tokens_per_step": tokens,
            "cached_tokens": statistics.fmean(cached for *_, cached in steps),
        }
        if timed:
            known |= _times(timed, books, tokens) | {
                "timed": [asdict(one) for one in timed],
                "logits_difference": max(one.difference for one in timed),
                "same_choices": _same_choices(timed, next(iter(measured.timed.values()))),
                "kv_tokens_read": statistics.fmean(one.kv_tokens for one in timed),
            }
            if baseline and method != BASELINE:
                known |= _ratios(timed, baseline, measured.books_ms)
        found.append(known)
    return found


def _times(timed: Sequence[Timed], books: float, tokens: float) -> dict[str, float]:
    step = statistics.fmean(one.end_to_end for one in timed) + books
    return {
        "attention_ms_per_step": statistics.fmean(one.attention for one in timed),
        "forward_ms_per_step": statistics.fmean(one.forward for one in timed),
        "plan_ms_per_step": statistics.fmean(one.plan for one in timed),
        "books_ms_per_step": books,
        "step_ms": step,
        "ms_per_token": step / tokens,
    }


def _same_choices(timed: Sequence[Timed], first: Sequence[Timed]) -> float:
    """Share of the queries that chose the first method's token."""
    pairs = [
        mine == its
        for one, other in zip(timed, first, strict=True)
        for mine, its in zip(one.choices, other.choices, strict=True)
    ]
    return sum(pairs) / len(pairs)


def _ratios(
    timed: Sequence[Timed], baseline: Sequence[Timed], books_ms: Sequence[float]
) -> dict[str, Any]:
    attention = [b.attention / one.attention for one, b in zip(timed, baseline, strict=True)]
    whole = [
        (b.end_to_end + books) / (one.end_to_end + books)
        for one, b, books in zip(timed, baseline, books_ms, strict=True)
    ]
    forward = [b.forward / one.forward for one, b in zip(timed, baseline, strict=True)]
    ratios = {"attention": attention, "forward": forward, "end_to_end": whole}
    return {
        f"{name}_over_{BASELINE}": {
            "median": statistics.median(values),
            "low": (interval := bootstrap_median(values, 0))[0],
            "high": interval[1],
        }
        for name, values in ratios.items()
    }


def make_report(
    jobs: Sequence[Job], found: Mapping[str, Measured], manifest: dict[str, Any]
) -> Report:
    """One table a workload, and the attention time along its steps."""
    rows = {job.name: figures(job, found[job.name]) for job in jobs}
    settings = manifest["settings"]
    remarks = [
        f"{figure['workload']}: {figure['method']} has no times, {figure['failure']}"
        for figures_of in rows.values()
        for figure in figures_of
        if figure["failure"]
    ]
    return Report(
        title=f"Workloads, {settings['model']}, {manifest['dtype']}, {manifest['device']}",
        notes=(
            f"up to {settings['samples']} steps spread over each run, {settings['repetitions']} "
            "repetitions in the order A B .. B A after a warm-up; median of a step, mean of a run",
            "attention: the kernels of all layers, graph replay on cold caches; forward: the whole "
            "model's, graph replay; step: plan, forward, choice of tokens and the KV tree's books, "
            "launched by the host, "
            f"{'compiled' if settings['compile'] else 'eager'}",
            f"x {BASELINE}: {BASELINE}'s time over the method's, median over steps with its 95 % "
            "bootstrap interval",
            "KV read: tokens whose keys and values one head reads a step, counted from the plan "
            "(analytic)",
        ),
        tables=(_summary(rows), *(_table(name, of) for name, of in rows.items())),
        remarks=tuple(remarks),
        data={"manifest": manifest, "rows": [one for of in rows.values() for one in of]},
        charts=_charts(rows, found),
    )


def _summary(rows: Mapping[str, Sequence[dict[str, Any]]]) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for name, of in rows.items():
        flatten = next((one for one in of if one["method"] == "flatten"), None)
        if flatten is None or "step_ms" not in flatten:
            continue
        attention = flatten.get(f"attention_over_{BASELINE}")
        forward = flatten.get(f"forward_over_{BASELINE}")
        whole = flatten.get(f"end_to_end_over_{BASELINE}")
        lines.append(
            (
                name,
                flatten["num_steps"],
                flatten["queries_per_step"],
                flatten["cached_tokens"],
                flatten["attention_ms_per_step"],
                flatten["forward_ms_per_step"],
                flatten["step_ms"],
                flatten["ms_per_token"],
                attention["median"] if attention else None,
                forward["median"] if forward else None,
                whole["median"] if whole else None,
            )
        )
    columns = ("workload", "steps", "queries", "cached tokens", "attention ms", "forward ms")
    ratios = (f"attention x {BASELINE}", f"forward x {BASELINE}", f"step x {BASELINE}")
    return Table("DeFT-Flatten", (*columns, "step ms", "ms/token", *ratios), tuple(lines))


def _table(name: str, of: Sequence[dict[str, Any]]) -> Table:
    columns = ("method", "attention ms", f"x {BASELINE} (attention)", "forward ms")
    more = (f"x {BASELINE} (forward)", "plan ms", "books ms", "step ms", "ms/token")
    last = (f"x {BASELINE} (step)", "KV read", "logits differ", "error")
    rows = tuple(
        (
            one["method"],
            one.get("attention_ms_per_step"),
            _interval(one.get(f"attention_over_{BASELINE}")),
            one.get("forward_ms_per_step"),
            _interval(one.get(f"forward_over_{BASELINE}")),
            one.get("plan_ms_per_step"),
            one.get("books_ms_per_step"),
            one.get("step_ms"),
            one.get("ms_per_token"),
            _interval(one.get(f"end_to_end_over_{BASELINE}")),
            one.get("kv_tokens_read"),
            _power(one.get("logits_difference")),
            _power(one["error"]),
        )
        for one in of
    )
    return Table(name, (*columns, *more, *last), rows)


def _power(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


def _interval(known: dict[str, float] | None) -> str | None:
    if known is None:
        return None
    return f"{known['median']:.2f} [{known['low']:.2f}, {known['high']:.2f}]"


def _charts(
    rows: Mapping[str, Sequence[dict[str, Any]]], found: Mapping[str, Measured]
) -> tuple[Chart, ...]:
    charts: list[Chart] = []
    for name, of in rows.items():
        shown = [one for one in of if "step_ms" in one]
        parts = ("attention", "the rest of the forward")
        bars = {
            one["method"]: [
                one["attention_ms_per_step"],
                max(one["forward_ms_per_step"] - one["attention_ms_per_step"], 0.0),
            ]
            for one in shown
        }
        charts.append(BarChart(f"A forward, {name}", "ms, graph replay", parts, bars))
        numbers = [float(number) for number, *_ in found[name].steps]
        lines = {
            method: list(zip(numbers, (one.attention for one in timed), strict=True))
            for method, timed in found[name].timed.items()
            if timed
        }
        if len(numbers) > 1:
            charts.append(LineChart(f"Attention, {name}", "step", "ms, all layers", lines))
    return tuple(charts)
