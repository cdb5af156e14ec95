"""The report of `specdeft bench attention`: ours beside the best other, ratios, who is ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdeft.bench.attention_commit import NUM_ACCEPTED, NUM_LAYERS, NUM_NODES, CommitTime
from specdeft.bench.attention_measure import Outcome
from specdeft.bench.attention_methods import OURS
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


def make_report(
    outcomes: Sequence[Outcome],
    commits: Sequence[CommitTime],
    ceilings: Ceilings,
    manifest: dict[str, Any],
) -> Report:
    """Tables of what was measured, and a remark for each place where another is ahead of ours."""
    tables = [_best_table(outcomes), _ratio_table(outcomes), _commit_table(commits)]
    tables = [table for table in tables if table.rows]
    if outcomes:
        tables.append(_methods_table(outcomes))
    return Report(
        title="Tree attention, one layer",
        notes=(
            f"ceilings of this run: {ceilings.bytes_per_s / 1e12:.2f} TB/s copy, "
            f"{ceilings.flops_per_s / 1e12:.0f} TFLOP/s bf16 product",
            "cold KV, CUDA-graph replay, median; error against float64; TB/s of the floor's bytes",
            "tree mask, reduction and (ours, FlashInfer) scattered pages are included; what a step "
            "prepares once for all layers is not",
        ),
        tables=tuple(tables),
        remarks=tuple(behind(outcomes)),
        data={
            **manifest,
            "ceilings": ceilings._asdict(),
            "outcomes": [outcome._asdict() for outcome in outcomes],
            "commits": [commit._asdict() for commit in commits],
        },
    )


def behind(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each place in which our kernel is not the fastest."""
    found = []
    ours = {outcome.place: outcome.median_us for outcome in outcomes if outcome.method == OURS}
    for outcome in outcomes:
        mine, theirs = ours.get(outcome.place), outcome.median_us
        if outcome.method != OURS and mine is not None and theirs is not None and theirs < mine:
            found.append(
                f"{outcome.method} is ahead at {outcome.heads}, context {outcome.workload}, "
                f"{outcome.queries} nodes: {theirs:.1f} us against {mine:.1f}"
            )
    return found


def _best_table(outcomes: Sequence[Outcome]) -> Table:
    """Ours beside the fastest of the others, a row a place."""
    rows: list[tuple[Cell, ...]] = []
    for mine in outcomes:
        if mine.method != OURS or mine.median_us is None:
            continue
        timed = [
            (other.median_us, other.method)
            for other in outcomes
            if other.place == mine.place and other.method != OURS and other.median_us is not None
        ]
        best_us, best = min(timed, default=(None, None))
        rows.append(
            (
                mine.heads,
                mine.workload,
                mine.queries,
                mine.floor_us,
                mine.median_us,
                100 * mine.floor_us / mine.median_us,
                best,
                best_us,
                None if best_us is None else best_us / mine.median_us,
            )
        )
    columns = (
        "Hq/Hkv/D", "context", "nodes", "floor us", "specdeft us", "% of floor", "best other",
        "us", "times ours",
    )  # fmt: skip
    return Table("Ours beside the fastest other method", columns, tuple(rows))


def _ratio_table(outcomes: Sequence[Outcome]) -> Table:
    """Forests: every method's time over Flatten's, and the paper's ratio."""
    flatten = {
        outcome.place: outcome.median_us for outcome in outcomes if outcome.method == FLATTEN
    }
    rows = tuple(
        (
            outcome.heads,
            outcome.workload,
            outcome.queries,
            outcome.method,
            outcome.median_us,
            None if mine is None or not outcome.median_us else outcome.median_us / mine,
            paper_ratio(outcome.workload, outcome.method),
        )
        for outcome in outcomes
        if not outcome.workload.isdecimal()
        for mine in (flatten.get(outcome.place),)
    )
    columns = ("Hq/Hkv/D", "forest", "queries", "method", "us", "over Flatten", "paper")
    return Table("Forests", columns, rows)


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


def _methods_table(outcomes: Sequence[Outcome]) -> Table:
    columns = (
        "Hq/Hkv/D", "context", "nodes", "method", "us", "spread us", "% of floor", "TB/s",
        "error", "note",
    )  # fmt: skip
    return Table("Methods", columns, tuple(_row(outcome) for outcome in outcomes))


def _row(outcome: Outcome) -> tuple[Cell, ...]:
    time = outcome.median_us
    return (
        outcome.heads,
        outcome.workload,
        outcome.queries,
        outcome.method,
        time,
        outcome.spread_us,
        None if time is None else 100 * outcome.floor_us / time,
        None if time is None else outcome.floor_bytes / time / 1e6,
        None if outcome.error is None else f"{outcome.error:.1e}",
        outcome.note,
    )
