"""The report of `specdeft bench attention`: ours beside the best other, ratios, who is ahead.

Where places were measured several times a figure is the median of its repeats, and a ratio the
median of the repeats' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from specdeft.bench.attention_commit import NUM_ACCEPTED, NUM_LAYERS, NUM_NODES, CommitTime
from specdeft.bench.attention_measure import FAR_ABOVE, Outcome
from specdeft.bench.attention_methods import APART, ONCE, OUR_WAYS, OURS
from specdeft.bench.attention_workloads import FEW_SHOT
from specdeft.bench.cuda_timing import Ceilings
from specdeft.bench.report import Cell, Report, Table

FLATTEN = "flatten"
# Attention time over DeFT-Flatten's: Tables 6 and 16 of Yao et al. (arXiv 2404.00242), A100 80 GB,
# Llama-3-8B, whole generations.
_COLUMNS = ("node", "node-chunk", "radix", "flash-decoding", "medusa")
_PAPER_RATIOS = {
    f"{FEW_SHOT}20": (3.05, 2.46, 1.73, 12.53, 1.13),
    f"{FEW_SHOT}30": (2.61, 2.38, 1.79, 16.24, 1.85),
    f"{FEW_SHOT}50": (1.85, 2.29, 1.70, 18.75, 1.63),
    "sorting128": (1.51, 1.75, 1.39, 5.66, 1.36),
    "docmerge": (1.55, 1.70, 1.15, 4.93, 1.36),
}


class Comparison(NamedTuple):
    """Another method beside ours at a place: medians over repeats, and how many times ours."""

    ours: Outcome
    method: str
    ours_us: float
    theirs_us: float
    ratio: float


def make_report(
    outcomes: Sequence[Outcome],
    commits: Sequence[CommitTime],
    ceilings: Sequence[Ceilings],
    manifest: dict[str, Any],
) -> Report:
    """Tables of what was measured, first of all the places where we are not ahead."""
    compared = comparisons(outcomes)
    best = _best_table(outcomes, compared)
    tables = [
        best,
        *_grid_tables(best),
        _not_ahead_table(compared),
        _peers_table(outcomes, compared),
        _batch_table(outcomes),
        _ratio_table(outcomes),
        _commit_table(commits),
    ]
    tables = [table for table in tables if table.rows]
    if outcomes:
        tables += [_methods_table(outcomes), _host_table(outcomes)]
    return Report(
        title="Tree attention, one layer",
        notes=(
            *(
                f"ceilings of {'this run' if len(ceilings) == 1 else f'run {number}'}: "
                f"{of_run.bytes_per_s / 1e12:.2f} TB/s copy, "
                f"{of_run.flops_per_s / 1e12:.0f} TFLOP/s bf16 product"
                for number, of_run in enumerate(ceilings, start=1)
            ),
            "cold KV, CUDA-graph replay, median; error against float64; TB/s of the floor's bytes",
            "tree mask, reduction and (ours, FlashInfer) scattered pages are included; what a step "
            "prepares once for all layers is not",
            f"methods more than {FAR_ABOVE} times slower than the first one get fewer replays",
        ),
        tables=tuple(tables),
        remarks=tuple(_remarks(outcomes, compared)),
        data={
            **manifest,
            "ceilings": [of_run._asdict() for of_run in ceilings],
            "outcomes": [outcome._asdict() for outcome in outcomes],
            "commits": [commit._asdict() for commit in commits],
        },
    )


def comparisons(outcomes: Sequence[Outcome]) -> list[Comparison]:
    """Every other method at every place where it and ours were timed, repeat by repeat."""
    ours = {(o.place, o.repeat): o for o in outcomes if o.method == OURS and o.median_us}
    pairs: dict[tuple[tuple[str, str, int], str], list[tuple[Outcome, float]]] = {}
    for other in outcomes:
        mine = ours.get((other.place, other.repeat))
        if other.method not in OUR_WAYS and other.median_us is not None and mine is not None:
            pairs.setdefault((other.place, other.method), []).append((mine, other.median_us))
    return [
        Comparison(
            repeats[0][0],
            method,
            statistics.median(mine.median_us or 0.0 for mine, _theirs in repeats),
            statistics.median(theirs for _mine, theirs in repeats),
            statistics.median(theirs / (mine.median_us or 0.0) for mine, theirs in repeats),
        )
        for (_place, method), repeats in pairs.items()
    ]


def _remarks(outcomes: Sequence[Outcome], compared: Sequence[Comparison]) -> Iterable[str]:
    """In how many places we are ahead; what could not be timed, by reason."""
    places = {one.ours.place for one in compared}
    behind = {one.ours.place for one in compared if one.ratio <= 1}
    if places:
        yield (
            f"{OURS} is ahead of every other timed method at {len(places - behind)} of "
            f"{len(places)} places"
        )
    reasons: dict[tuple[str, str], int] = {}
    for outcome in outcomes:
        if outcome.median_us is None:
            # One reason, however many times slower a method is.
            known = (outcome.method, str(outcome.note).partition(":")[0])
            reasons[known] = reasons.get(known, 0) + 1
    for (method, reason), count in reasons.items():
        places_or_turns = "place" if count == 1 else "places (or repeats)"
        yield f"{method} has no time at {count} {places_or_turns}: {reason}"


def _best_table(outcomes: Sequence[Outcome], compared: Sequence[Comparison]) -> Table:
    """Ours beside the fastest of the others, a row a place."""
    times: dict[tuple[str, str, int], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.method == OURS and outcome.median_us is not None:
            times.setdefault(outcome.place, []).append(outcome)
    rows: list[tuple[Cell, ...]] = []
    for place, repeats in times.items():
        others = [one for one in compared if one.ours.place == place]
        best = min(others, key=lambda one: one.ratio, default=None)
        ours_us = statistics.median(outcome.median_us or 0.0 for outcome in repeats)
        rows.append(
            (
                *place,
                repeats[0].floor_us,
                ours_us,
                100 * repeats[0].floor_us / ours_us,
                None if best is None else best.method,
                None if best is None else best.theirs_us,
                None if best is None else best.ratio,
            )
        )
    columns = (
        "Hq/Hkv/D", "context", "nodes", "floor us", "specdeft us", "% of floor", "best other",
        "us", "times ours",
    )  # fmt: skip
    return Table("Ours beside the fastest other method", columns, tuple(rows))


def _grid_tables(best: Table) -> list[Table]:
    """The same as a grid for each head shape with several contexts and several tree sizes."""
    cells: dict[str, dict[tuple[int, int], str]] = {}
    for heads, context, nodes, _floor, ours_us, _percent, method, _us, ratio in best.rows:
        if str(context).isdecimal():
            nearest = "" if method is None else f" ({ratio:.2f} {method})"
            cells.setdefault(str(heads), {})[int(str(context)), int(str(nodes))] = (
                f"{ours_us:.1f}{nearest}"
            )
    tables = []
    for heads, of_place in cells.items():
        contexts, sizes = (sorted({place[axis] for place in of_place}) for axis in (0, 1))
        if len(contexts) > 1 and len(sizes) > 1:
            rows = [
                (size, *(of_place.get((context, size)) for context in contexts)) for size in sizes
            ]
            title = f"{heads}: us by nodes and context (nearest other method, times ours)"
            tables.append(Table(title, ("nodes", *map(str, contexts)), tuple(rows)))
    return tables


def _not_ahead_table(compared: Sequence[Comparison]) -> Table:
    columns = ("Hq/Hkv/D", "context", "nodes", "method", "us", "specdeft us", "times ours")
    return Table(
        "Places where we are not ahead",
        columns,
        tuple(
            (*one.ours.place, one.method, one.theirs_us, one.ours_us, one.ratio)
            for one in sorted(compared, key=lambda one: one.ratio)
            if one.ratio <= 1
        ),
    )


def _peers_table(outcomes: Sequence[Outcome], compared: Sequence[Comparison]) -> Table:
    """A row a method: how far it is from ours over all places where both were timed."""
    rows: list[tuple[Cell, ...]] = []
    for method in dict.fromkeys(one.method for one in compared):
        ratios = sorted(one.ratio for one in compared if one.method == method)
        nearest = min((one for one in compared if one.method == method), key=lambda o: o.ratio)
        heads, context, nodes = nearest.ours.place
        untimed = {o.place for o in outcomes if o.method == method and o.median_us is None}
        rows.append(
            (
                method,
                len(ratios),
                len(untimed),
                ratios[0],
                f"{heads}, {context} x {nodes}",
                statistics.median(ratios),
                ratios[-1],
            )
        )
    columns = ("method", "places", "not timed", "least", "where", "median", "most")
    return Table("Times ours, by method", columns, tuple(rows))


def _batch_table(outcomes: Sequence[Outcome]) -> Table:
    """Batches: common tokens read by each sequence, read once, and as the launcher has it."""
    times: dict[tuple[tuple[str, str, int], str], list[float]] = {}
    for outcome in outcomes:
        if outcome.method in OUR_WAYS and outcome.median_us is not None:
            times.setdefault((outcome.place, outcome.method), []).append(outcome.median_us)
    rows: list[tuple[Cell, ...]] = []
    for place in dict.fromkeys(place for place, method in times if method == ONCE):
        apart, once, ours = (times.get((place, method)) for method in (APART, ONCE, OURS))
        if apart and once:
            ratios = [mine / theirs for mine, theirs in zip(once, apart, strict=False)]
            chosen = statistics.median(ours) if ours else None
            medians = (statistics.median(apart), statistics.median(once))
            rows.append((*place, *medians, statistics.median(ratios), chosen))
    columns = (
        "Hq/Hkv/D", "common + own tokens x sequences", "queries", "by each us", "once us",
        "once over by each", "specdeft us",
    )  # fmt: skip
    return Table("Common tokens of a batch", columns, tuple(rows))


def _ratio_table(outcomes: Sequence[Outcome]) -> Table:
    """Forests: every method's time over Flatten's, and the paper's ratio."""
    found = {(o.place, o.method, o.repeat): o.median_us for o in outcomes}
    rows: list[tuple[Cell, ...]] = []
    for place, method in dict.fromkeys((o.place, o.method) for o in outcomes):
        if place[1].isdecimal():
            continue
        mine_and_theirs = [
            (found.get((place, FLATTEN, repeat)), theirs)
            for (at, name, repeat), theirs in found.items()
            if (at, name) == (place, method) and theirs is not None
        ]
        times = [theirs for _mine, theirs in mine_and_theirs]
        ratios = [theirs / mine for mine, theirs in mine_and_theirs if mine is not None]
        rows.append(
            (
                *place,
                method,
                statistics.median(times) if times else None,
                statistics.median(ratios) if ratios else None,
                paper_ratio(place[1], method),
            )
        )
    columns = ("Hq/Hkv/D", "forest", "queries", "method", "us", "over Flatten", "paper")
    return Table("Forests", columns, tuple(rows))


def paper_ratio(workload: str, method: str) -> float | None:
    """The paper's attention time of a method over Flatten's on a workload."""
    return dict(zip(_COLUMNS, _PAPER_RATIOS.get(workload, ()), strict=False)).get(method)


def _commit_table(commits: Sequence[CommitTime]) -> Table:
    columns = ("Hq/Hkv/D", "us", "spread us", "GB/s")
    return Table(
        f"Commit of {NUM_ACCEPTED} accepted of {NUM_NODES} nodes, {NUM_LAYERS} layers, one launch",
        columns,
        tuple(
            (
                commit.heads,
                commit.median_us,
                commit.spread_us,
                commit.num_bytes / commit.median_us / 1e3,
            )
            for commit in commits
        ),
    )


def _host_table(outcomes: Sequence[Outcome]) -> Table:
    """Where the time of the run itself went."""
    steps = ("prepare", "inputs", "check", "timing")
    rows: list[tuple[Cell, ...]] = []
    for method in dict.fromkeys(outcome.method for outcome in outcomes):
        spent = [o.host_s for o in outcomes if o.method == method and o.host_s]
        if spent:
            by_step = [sum(host_s.get(step, 0.0) for host_s in spent) for step in steps]
            rows.append((method, len(spent), *by_step, sum(by_step)))
    return Table("Seconds of the run", ("method", "places", *steps, "all"), tuple(rows))


def _methods_table(outcomes: Sequence[Outcome]) -> Table:
    columns = (
        "Hq/Hkv/D", "context", "nodes", "method", "repeat", "us", "spread us", "replays",
        "% of floor", "TB/s", "error", "note",
    )  # fmt: skip
    return Table("Methods", columns, tuple(_row(outcome) for outcome in outcomes))


def _row(outcome: Outcome) -> tuple[Cell, ...]:
    time = outcome.median_us
    return (
        outcome.heads,
        outcome.workload,
        outcome.queries,
        outcome.method,
        outcome.repeat,
        time,
        outcome.spread_us,
        outcome.replays,
        None if time is None else 100 * outcome.floor_us / time,
        None if time is None else outcome.floor_bytes / time / 1e6,
        None if outcome.error is None else f"{outcome.error:.1e}",
        outcome.note,
    )
