"""`specdeft bench compare RUN_A RUN_B`: what changed between two saved runs, beyond noise.

Prompts that both runs hold are paired. A figure has changed where the 95 % bootstrap interval of
its median per-prompt change leaves out "none".
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdeft.bench import metrics
from specdeft.bench.metrics import Run
from specdeft.bench.report import FORMATS, Finished, Report, Table
from specdeft.bench.run_folder import read_records
from specdeft.trees.options import Options

_MANIFEST_KEYS = ("settings", "prompts", "versions", "git", "device", "dtype", "machine")
Figure = Callable[[Run], float | None]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft bench compare",
        description="Compare two folders that --save-result wrote: prompts paired, changes with "
        "their 95 % bootstrap intervals.",
    )
    options.add_argument("before", metavar="RUN_A", help="folder of the first run")
    options.add_argument("after", metavar="RUN_B", help="folder of the second run")
    options.add_argument("--output", default="table", choices=list(FORMATS), help="to stdout")
    return options


@dataclass(frozen=True)
class SavedRun:
    """A folder read back: its manifest, and the runs of each row by prompt."""

    manifest: dict[str, Any]
    rows: dict[str, dict[str, list[Run]]]


def main(arguments: Sequence[str]) -> Finished:
    """Run the command."""
    options = parser().parse_args(arguments)
    before, after = read_run(options.before), read_run(options.after)
    shared = [row for row in before.rows if row in after.rows]
    if not shared:
        raise ValueError(
            f"the two runs have no row in common: {options.before} has {', '.join(before.rows)}, "
            f"{options.after} has {', '.join(after.rows)}"
        )
    changes = [
        change for row in shared for change in compare_rows(row, before.rows[row], after.rows[row])
    ]
    return Finished(make_report(before, after, changes), options.output)


def read_run(folder: str | Path) -> SavedRun:
    """Read what a run saved.

    Raises:
        ValueError: the folder holds no run.
    """
    path = Path(folder)
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        records = read_records(path / "records.jsonl")
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{folder} holds no run: give a folder that --save-result wrote"
        ) from error
    rows: dict[str, dict[str, list[Run]]] = {}
    for record in records.values():
        if "row" in record:
            row = rows.setdefault(record["row"], {})
            row.setdefault(record["prompt"], []).append(Run.from_dict(record["run"]))
    return SavedRun(manifest, rows)


@dataclass(frozen=True)
class Change:
    """One figure of one row.

    Attributes:
        before, after: medians over the shared prompts.
        ratio, low, high: median of the per-prompt ratios after/before and its interval.
    """

    row: str
    figure: str
    num_prompts: int
    before: float
    after: float
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Beyond noise or not; a change under 1 % is none."""
        if self.low <= 1.0 <= self.high or abs(self.ratio - 1.0) < 0.01:
            return "no change"
        better_is_less = self.figure.endswith("ms")
        return "better" if (self.ratio < 1.0) == better_is_less else "worse"


def compare_rows(
    row: str, before: dict[str, list[Run]], after: dict[str, list[Run]]
) -> list[Change]:
    """Every figure that both sides have, over the prompts that both have."""
    figures: dict[str, Figure] = {
        "ttft_ms": metrics.ttft_ms,
        "tpot_ms": metrics.tpot_ms,
        "e2el_ms": metrics.e2el_ms,
        "mean_acceptance_length": lambda run: metrics.mean_acceptance_length([run]),
    }
    shared = [prompt for prompt in before if prompt in after]
    changes: list[Change] = []
    for name, figure in figures.items():
        pairs = [
            (old, new)
            for prompt in shared
            if (old := _median(before[prompt], figure)) and (new := _median(after[prompt], figure))
        ]
        if pairs:
            changes.append(_change(row, name, pairs))
    return changes


def _median(runs: Sequence[Run], figure: Figure) -> float | None:
    values = metrics.known_values(figure, runs)
    return statistics.median(values) if values else None


def _change(row: str, figure: str, pairs: Sequence[tuple[float, float]]) -> Change:
    ratios = [new / old for old, new in pairs]
    low, high = metrics.bootstrap_median(ratios, 0)
    return Change(
        row,
        figure,
        len(pairs),
        statistics.median(old for old, _ in pairs),
        statistics.median(new for _, new in pairs),
        statistics.median(ratios),
        low,
        high,
    )


def changed_texts(before: SavedRun, after: SavedRun) -> list[str]:
    """Rows whose ids differ for a prompt that both runs hold, a sentence each."""
    sentences: list[str] = []
    for row, prompts in before.rows.items():
        shared = [prompt for prompt in prompts if prompt in after.rows.get(row, {})]
        differing = [
            prompt
            for prompt in shared
            if prompts[prompt][0].token_ids != after.rows[row][prompt][0].token_ids
        ]
        if differing:
            sentences.append(
                f"{row}: {len(differing)} of {len(shared)} texts differ, first that of prompt "
                f"{differing[0]}"
            )
    return sentences


def make_report(before: SavedRun, after: SavedRun, changes: Sequence[Change]) -> Report:
    """The changes, and what in the manifests differs."""
    table = Table(
        "Changes",
        ("row", "figure", "prompts", "before", "after", "ratio", "95 % interval", "verdict"),
        tuple(
            (
                change.row,
                change.figure,
                change.num_prompts,
                change.before,
                change.after,
                change.ratio,
                f"[{change.low:.3f}, {change.high:.3f}]",
                change.verdict,
            )
            for change in changes
        ),
    )
    different = [
        f"{key} differs: {_short(before.manifest.get(key))} before, "
        f"{_short(after.manifest.get(key))} after"
        for key in _MANIFEST_KEYS
        if before.manifest.get(key) != after.manifest.get(key)
    ]
    texts = changed_texts(before, after)
    return Report(
        title="What changed",
        notes=("medians over the prompts that both runs hold; ratios after/before, paired",),
        tables=(table,),
        remarks=(*different, *(texts or ["no text differs"])),
        data={
            "changes": [{**vars(change), "verdict": change.verdict} for change in changes],
            "manifest_differs": different,
            "texts_differ": texts,
        },
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."
