"""`specdeft bench acceptance`: how many tokens a step brings, and where the drafts fail.

tau by tree and temperature, the share of repeated text beside it (a model that loops flatters tau),
survival and conditional acceptance by depth, acceptance by depth and rank, expected against
realised.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specdeft.bench.charts import Chart, HeatMap, LineChart, TreeChart
from specdeft.bench.manifest import describe_run
from specdeft.bench.metrics import (
    LOOPING_REPEAT_RATE,
    NGRAM,
    Run,
    acceptance,
    is_looping,
    mean_acceptance_length,
    rank_table,
    repeat_rate_pooled,
    request_figures,
)
from specdeft.bench.ranks import kept_ranks
from specdeft.bench.report import Finished, Report, Table
from specdeft.bench.rows import DecoderRow, recorded, rows_of_more_heads
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import (
    Amount,
    Task,
    add_options,
    load,
    parse,
    parse_temperatures,
    parse_trees,
    prepare,
    progress,
    settings_of,
)
from specdeft.config import GenerationConfig
from specdeft.trees.options import HelpFormatter, Options
from specdeft.trees.token_tree import TokenTree

_RANKS_SHOWN = 8


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft bench acceptance",
        description="Measure tau (tokens a step, the bonus token included) of trees on prompts.",
        epilog="Example: specdeft bench acceptance --trees 16,64 --temperatures 0,0.7 "
        "--prompts questions.jsonl --num-prompts 40",
        formatter_class=HelpFormatter,
    )
    options.add_argument("--trees", default="64", help="names, sizes or files, commas")
    options.add_argument("--temperatures", default="0,0.7", help="numbers with commas")
    options.add_argument(
        "--more-heads", metavar="DIR,DIR", help="folders of further heads: rows of the same trees"
    )
    add_options(options, Amount(num_prompts=40, max_new_tokens=128))
    return options


@dataclass(frozen=True)
class Measurement:
    """The runs of one tree at one temperature, by prompt.

    Attributes:
        tree, shape, temperature: what was run.
        expected_tau: of the tree on the heads' calibration text, where they were calibrated.
        runs: in the order of the prompts.
        kinds: of the prompts.
    """

    tree: str
    shape: TokenTree
    temperature: float
    expected_tau: float | None
    runs: tuple[Run, ...]
    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        """For tables of details."""
        return f"{self.tree}, T = {self.temperature:g}"

    @property
    def not_looping(self) -> list[Run]:
        """The runs whose text does not repeat itself."""
        return [run for run in self.runs if not is_looping(run)]

    def of_kind(self, kind: str) -> list[Run]:
        """The runs of the prompts of one kind."""
        return [run for run, its in zip(self.runs, self.kinds, strict=True) if its == kind]


def main(arguments: Sequence[str]) -> Finished:
    """Run the command."""
    options = parse(parser(), arguments)
    trees = parse_trees(options.trees)
    temperatures = parse_temperatures(options.temperatures)
    task = Task.from_options(options)
    configs = [replace(task.config, temperature=temperature) for temperature in temperatures]
    bench = load(options)
    task = prepare(task, bench, options)
    rows = [DecoderRow(tree, bench) for tree in trees]
    rows += rows_of_more_heads(trees, bench, options)
    encoded = bench.encode(task.prompts, task.config, options.raw)
    manifest = describe_run(
        rows[0].decoder, task.prompts, ["bench", "acceptance", *arguments], settings_of(options)
    )
    with task.folder as folder:
        folder.open(manifest)
        measured = measure(rows, configs, task, encoded, folder)
        report = make_report(measured, manifest)
        folder.save(report)
    return Finished(report, options.output)


def measure(
    rows: Sequence[DecoderRow],
    configs: Sequence[GenerationConfig],
    task: Task,
    encoded: Sequence[Sequence[int]],
    folder: RunFolder,
) -> list[Measurement]:
    """Every tree at every temperature on every prompt; what the folder holds is not run again."""
    prompts = task.prompts.prompts
    runs: dict[tuple[int, int], list[Run]] = {}
    with progress(len(prompts) * len(rows) * len(configs), "acceptance") as done:
        for prompt, ids in zip(prompts, encoded, strict=True):
            for c, config in enumerate(configs):
                for r, row in enumerate(rows):
                    name = f"{row.name}, T = {config.temperature:g}"
                    measure_one = partial(_run_with_ranks, row, ids, config)
                    key = f"{name}|{prompt.id}"
                    run = recorded(folder, key, name, prompt.id, measure_one)
                    runs.setdefault((c, r), []).append(run)
                    done()
    kinds = tuple(prompt.kind for prompt in prompts)
    longest = max(map(len, encoded))
    return [
        Measurement(
            row.name,
            row.decoder.tree_of(config, longest),
            config.temperature,
            row.decoder.expected_tau_of(config, longest),
            tuple(runs[c, r]),
            kinds,
        )
        for c, config in enumerate(configs)
        for r, row in enumerate(rows)
    ]


def _run_with_ranks(row: DecoderRow, ids: Sequence[int], config: GenerationConfig) -> Run:
    run = row.run(ids, config)
    top_k = row.decoder.tree_of(config, len(ids)).top_k
    return replace(run, per_step_ranks=kept_ranks(row.bench, ids, run, top_k))


def figures(measurement: Measurement) -> dict[str, Any]:
    """Everything about one tree at one temperature, by metric name."""
    kept = measurement.not_looping
    by_kind: Mapping[str, Any] = {
        kind: acceptance(measurement.of_kind(kind)) for kind in dict.fromkeys(measurement.kinds)
    }
    return {
        "tree": measurement.tree,
        "num_nodes": measurement.shape.num_nodes,
        "temperature": measurement.temperature,
        "expected_mean_acceptance_length": measurement.expected_tau,
        **acceptance(measurement.runs),
        "mean_acceptance_length_not_looping": mean_acceptance_length(kept),
        "repeat_rate_not_looping": repeat_rate_pooled(kept),
        "acceptance_by_depth_and_rank": rank_table(measurement.runs),
        "by_kind": by_kind,
        "requests": [request_figures([run], is_timed=False) for run in measurement.runs],
    }


def make_report(measured: Sequence[Measurement], manifest: dict[str, Any]) -> Report:
    """The main table, then by kind, by depth, by depth and rank, and the histogram."""
    found = [figures(measurement) for measurement in measured]
    names = [measurement.name for measurement in measured]
    return Report(
        title=f"Acceptance, {manifest['dtype']}, {manifest['device']}",
        notes=(
            manifest["prompts"]["rule"],
            f"up to {manifest['settings']['max_new_tokens']} new tokens a prompt",
            "tau: tokens a step, the bonus token included, every step weighing the same; "
            "per request: the mean of the requests' own",
            f"repeats: share of {NGRAM}-grams of a text that occurred in it before; a text with "
            f"{LOOPING_REPEAT_RATE:.0%} of them or more counts as looping",
        ),
        tables=tuple(
            table
            for table in (
                _main_table(found),
                _kind_table(found, names),
                _depth_table(found, names),
                *(_rank_table(figure, name) for figure, name in zip(found, names, strict=True)),
                _histogram_table(found, names),
            )
            if table.rows
        ),
        data={"manifest": manifest, "rows": found},
        charts=acceptance_charts(measured, found),
    )


def _main_table(found: Sequence[dict[str, Any]]) -> Table:
    columns = {
        "tree": "tree",
        "T": "temperature",
        "nodes": "num_nodes",
        "tau": "mean_acceptance_length",
        "expected": "expected_mean_acceptance_length",
        "per request": "mean_acceptance_length_per_request",
        "accepted": "accepted_len_excl_bonus",
        "of drafted": "draft_acceptance_rate",
        "repeats": "repeat_rate",
        "looping": "num_looping",
        "tau not looping": "mean_acceptance_length_not_looping",
        "repeats not looping": "repeat_rate_not_looping",
        "tokens": "num_output_tokens",
        "prompts": "num_requests",
    }
    rows = tuple(tuple(_cell(name, figure[name]) for name in columns.values()) for figure in found)
    return Table("Acceptance", tuple(columns), rows)


def _cell(name: str, value: Any) -> Any:
    return f"{value:g}" if name == "temperature" else value


def _kind_table(found: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    rows = [
        (
            kind,
            name,
            of_kind["num_requests"],
            of_kind["mean_acceptance_length"],
            of_kind["repeat_rate"],
            of_kind["num_looping"],
        )
        for figure, name in zip(found, names, strict=True)
        for kind, of_kind in figure["by_kind"].items()
    ]
    columns = ("kind", "tree", "prompts", "tau", "repeats", "looping")
    return Table("By kind of prompt", columns, tuple(rows))


def _depth_table(found: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    rows = [
        (name, depth, sum(figure["acceptance_histogram"][depth - 1 :]), accepted, share, survived)
        for figure, name in zip(found, names, strict=True)
        for depth, (share, survived, accepted) in enumerate(
            zip(
                figure["conditional_acceptance_rate"],
                figure["per_position_acceptance_rate"],
                _at_least(figure["acceptance_histogram"]),
                strict=True,
            ),
            start=1,
        )
    ]
    columns = ("tree", "depth", "opportunities", "accepted", "conditional", "survival")
    return Table("By depth", columns, tuple(rows))


def _at_least(histogram: Sequence[int]) -> list[int]:
    """Steps that kept at least d drafted tokens, for d = 1, 2, ..."""
    return [sum(histogram[depth:]) for depth in range(1, len(histogram))]


def _rank_table(figure: dict[str, Any], name: str) -> Table:
    table = figure["acceptance_by_depth_and_rank"]
    width = min(_RANKS_SHOWN, max((len(shares) for shares in table), default=0))
    rows = tuple(
        (depth, *shares[:width], sum(shares[width:])) for depth, shares in enumerate(table, start=1)
    )
    columns = ("depth", *(f"rank {rank}" for rank in range(width)), "further")
    return Table(f"Share of steps that kept a node, {name}", columns, rows)


def _histogram_table(found: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    deepest = max(len(figure["acceptance_histogram"]) for figure in found)
    rows = tuple(
        (
            name,
            *figure["acceptance_histogram"],
            *[None] * (deepest - len(figure["acceptance_histogram"])),
        )
        for figure, name in zip(found, names, strict=True)
    )
    return Table("Steps by accepted drafted tokens", ("tree", *map(str, range(deepest))), rows)


def acceptance_charts(
    measured: Sequence[Measurement], found: Sequence[dict[str, Any]]
) -> tuple[Chart, ...]:
    """By depth, by depth and rank, and every tree with its nodes shaded by how often they held."""
    names = [measurement.name for measurement in measured]
    speculative = [
        (name, measurement, figure)
        for name, measurement, figure in zip(names, measured, found, strict=True)
        if measurement.shape.max_depth
    ]
    if not speculative:
        return ()

    def by_depth(metric: str) -> dict[str, list[tuple[float, float]]]:
        return {
            name: [
                (float(depth), share)
                for depth, share in enumerate(figure[metric], start=1)
                if share is not None
            ]
            for name, _, figure in speculative
        }

    charts: list[Chart] = [
        LineChart(
            "Survival: steps that kept a token at depth d",
            "depth",
            "share of steps",
            by_depth("per_position_acceptance_rate"),
        ),
        LineChart(
            "Conditional: of the steps that got to d - 1",
            "depth",
            "share",
            by_depth("conditional_acceptance_rate"),
        ),
    ]
    for name, measurement, figure in speculative:
        table = figure["acceptance_by_depth_and_rank"]
        if table:
            charts.append(_heat_map(table, name))
        charts.append(
            TreeChart(f"Nodes kept, {name}", measurement.shape, _node_shares(measurement))
        )
    return tuple(charts)


def _heat_map(table: Sequence[Sequence[float]], name: str) -> HeatMap:
    width = min(_RANKS_SHOWN, len(table[0]))
    return HeatMap(
        f"Kept by depth and rank, {name}",
        "rank",
        "depth",
        tuple(map(str, range(width))),
        tuple(str(depth) for depth in range(1, len(table) + 1)),
        tuple(tuple(row[:width]) for row in table),
    )


def _node_shares(measurement: Measurement) -> tuple[float, ...]:
    """Share of the steps that kept each node; a path is kept with all its prefixes."""
    counts: dict[tuple[int, ...], int] = {}
    num_steps = 0
    for run in measurement.runs:
        num_steps += len(run.per_step_ranks)
        for ranks in run.per_step_ranks:
            for depth in range(1, len(ranks) + 1):
                counts[ranks[:depth]] = counts.get(ranks[:depth], 0) + 1
    if not num_steps:
        return (0.0,) * measurement.shape.num_nodes
    return tuple(
        counts.get(path, 0) / num_steps if path else 1.0 for path in measurement.shape.paths
    )
