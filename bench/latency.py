"""`specdeft bench latency`: what a user waits, beside plain decoding and transformers generate.

All rows run in one process on the same weights, dtype and threads, in the order A B .. B A over the
repetitions of every prompt, so that a slow moment of the machine falls on all of them. A row's text
is judged before its speed is believed: one that is not plain decoding's text gets no speed.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from specdeft.bench.analytic import kv_read_bytes_per_step, kv_read_ratio_vs_per_path
from specdeft.bench.baselines import BASELINES, PlannedRow, make_rows, parse_baselines, runs_sampled
from specdeft.bench.charts import BarChart, Chart, LineChart, cumulative
from specdeft.bench.gate import Verdict, judge
from specdeft.bench.manifest import describe_run
from specdeft.bench.metrics import (
    Run,
    acceptance,
    decode_throughput,
    emission_gaps_ms,
    known_values,
    latency,
    repeat_rate_pooled,
    speedup,
    speedup_end_to_end,
    summary,
    ttft_ms,
)
from specdeft.bench.phases import StepPhases, measure_phases
from specdeft.bench.reference_rows import TRANSFORMERS
from specdeft.bench.report import Cell, Finished, Report, Table
from specdeft.bench.rows import DecoderRow, Row, recorded
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import (
    PLAIN,
    Amount,
    HelpFormatter,
    Task,
    Workbench,
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
from specdeft.graphs import context_bucket

_WARM_UP_TOKENS = 16
_PHASE_TOKENS = 32
# Slowest over fastest repetition of a text; a quiet machine stays within a few percent.
_QUIET_SPREAD = 1.15
Judge = Callable[[Sequence[int], tuple[int, ...], tuple[int, ...]], Verdict]
_TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="specdeft bench latency",
        description="Time to first token, per token, between emissions and end to end; ratios to "
        "plain decoding and to transformers generate, paired by prompt.",
        epilog="Example: specdeft bench latency --dtype bfloat16 --trees auto,16 --num-prompts 10",
        formatter_class=HelpFormatter,
    )
    options.add_argument("--trees", default="auto", help="names, sizes or files, commas")
    options.add_argument("--temperature", default="0", help="0 is greedy")
    options.add_argument("-r", "--repetitions", type=int, metavar="N", help="5 if not given")
    options.add_argument("--no-warmup", action="store_true", help="time the first calls as well")
    options.add_argument(
        "--baselines",
        default=TRANSFORMERS,
        help=f"none, or with commas: {', '.join(BASELINES)}, or module:function (see rivals.py)",
    )
    options.add_argument("--assistant", help="the model that drafts for transformers-assisted")
    options.add_argument("--replay", metavar="FILE", help="accept lengths for the baseline replay")
    options.add_argument(
        "--lossy", action="store_true", help="print the speed of rows whose text differs, marked"
    )
    add_options(options, Amount(num_prompts=10, max_new_tokens=128, repetitions=5))
    return options


@dataclass
class RowResult:
    """What was measured of one row.

    Attributes:
        name, is_ours: the row's.
        kinds: of the prompts.
        kv: analytic figures of the KV cache; empty where the row is not our engine.
        phases_ms: medians over the steps of one text; empty where they were not measured.
        cold_start_s: its first call in this process, which warms it up; None without warm-up.
        runs: [prompt][repetition].
        verdicts: of each prompt's first repetition, against plain decoding.
        problems: why its figures are not to be believed, a clause each.
    """

    name: str
    is_ours: bool
    kinds: tuple[str, ...] = ()
    kv: dict[str, float] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)
    cold_start_s: float | None = None
    runs: list[list[Run]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def all_runs(self) -> list[Run]:
        """Of all prompts and repetitions."""
        return [run for runs in self.runs for run in runs]

    @property
    def num_identical(self) -> int:
        """Prompts whose text is plain decoding's, id by id."""
        return sum(verdict.identical for verdict in self.verdicts)

    @property
    def num_passed(self) -> int:
        """Prompts whose text passes the gate."""
        return sum(verdict.passed for verdict in self.verdicts)

    @property
    def has_speed(self) -> bool:
        """Whether its speed is printed. transformers is the yardstick, not a claim of ours."""
        return not self.problems and (not self.is_ours or self.num_passed == len(self.verdicts))


def main(arguments: Sequence[str]) -> Finished:
    """Run the command; the exit code is 1 where a row of ours fails the gate."""
    options = parse(parser(), arguments)
    trees = parse_trees(options.trees)
    temperatures = parse_temperatures(options.temperature)
    if len(temperatures) != 1:
        raise ValueError("latency is measured at one temperature a run: give one number")
    if options.repetitions < 1:
        raise ValueError(f"repetitions is {options.repetitions}: give at least 1")
    task = Task.from_options(options)
    config = replace(task.config, temperature=temperatures[0])
    baselines = parse_baselines(options.baselines)
    if not config.is_greedy:
        baselines = tuple(name for name in baselines if runs_sampled(name))
    bench = load(options)
    task = prepare(task, bench, options)
    rows = make_rows(trees, baselines, bench, options)
    plain = next(row for row in rows if isinstance(row, DecoderRow))
    encoded = bench.encode(task.prompts, config, options.raw)
    manifest = describe_run(
        plain.decoder, task.prompts, ["bench", "latency", *arguments], settings_of(options)
    )
    with task.folder as folder:
        folder.open(manifest)
        measured = measure(
            rows,
            bench,
            config,
            {prompt.id: ids for prompt, ids in zip(task.prompts.prompts, encoded, strict=True)},
            folder,
            repetitions=options.repetitions,
            warm_up=not options.no_warmup,
            judge_text=partial(judge, plain.decoder.engine, config=config),
        )
        kinds = tuple(prompt.kind for prompt in task.prompts.prompts)
        for row, result in zip(rows, measured, strict=True):
            result.kinds = kinds
            result.kv = _kv_figures(row, result, encoded)
            result.phases_ms = _phase_figures(row, bench, encoded[0], config)
        reports = [
            f"{row.name}: {row.decoder.tree_report}"
            for row in rows
            if isinstance(row, DecoderRow) and row.name == "auto"
        ]
        report = make_report(measured, manifest, reports, lossy=options.lossy)
        folder.save(report)
    failed = any(row.is_ours and not row.has_speed for row in measured)
    return Finished(report, options.output, int(failed))


def _kv_figures(row: Row, result: RowResult, encoded: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of a step in the middle of the mean text."""
    if not isinstance(row, DecoderRow):
        return {}
    texts = [
        len(ids) + len(runs[0].token_ids) // 2
        for ids, runs in zip(encoded, result.runs, strict=True)
    ]
    context = round(statistics.fmean(texts))
    target, tree = row.decoder.engine.target, row.decoder.tree
    return {
        "num_context_tokens": context,
        "kv_read_bytes_per_step": kv_read_bytes_per_step(target.shape, target.dtype, tree, context),
        "kv_read_ratio_vs_per_path": kv_read_ratio_vs_per_path(tree, context),
    }


def _phase_figures(
    row: Row, bench: Workbench, ids: Sequence[int], config: GenerationConfig
) -> dict[str, float]:
    if not isinstance(row, DecoderRow) or isinstance(row, PlannedRow):
        return {}
    short = replace(config, max_new_tokens=min(config.max_new_tokens or 0, _PHASE_TOKENS) or None)
    steps = measure_phases(bench, row.name, ids, short)
    return {
        name: statistics.median(getattr(step, name) for step in steps)
        for name in StepPhases._fields
        if steps
    }


def measure(
    rows: Sequence[Row],
    bench: Workbench,
    config: GenerationConfig,
    encoded: dict[str, list[int]],
    folder: RunFolder,
    *,
    repetitions: int,
    warm_up: bool,
    judge_text: Judge,
) -> list[RowResult]:
    """Time every row on every prompt; what the folder holds is not run again.

    Args:
        rows: what is timed; one is called "plain".
        encoded: the prompts' ids by prompt id.
        judge_text: compares a row's ids with plain decoding's, for one prompt.
    """
    results = [RowResult(row.name, row.is_ours) for row in rows]
    with progress(len(encoded) * repetitions * len(rows), "latency") as done:
        if warm_up:
            _warm_up(rows, results, bench, config, list(encoded.values()))
        for prompt_id, ids in encoded.items():
            for result in results:
                result.runs.append([])
            for repetition in range(repetitions):
                pairs = list(zip(rows, results, strict=True))
                for row, result in pairs if repetition % 2 == 0 else reversed(pairs):
                    key = f"{row.name}|{prompt_id}|{repetition}"
                    measure_one = partial(_measured, row, ids, config)
                    run = recorded(folder, key, row.name, prompt_id, measure_one)
                    result.runs[-1].append(run)
                    done()
            _judge_prompt(results, bench, config, prompt_id, ids, judge_text, folder)
    return results


def _warm_up(
    rows: Sequence[Row],
    results: Sequence[RowResult],
    bench: Workbench,
    config: GenerationConfig,
    encoded: Sequence[Sequence[int]],
) -> None:
    """The first call is timed apart. On a GPU every context bucket is visited in full length, so
    that no graph is captured later; on a CPU a few tokens are enough."""
    short = replace(
        config, max_new_tokens=min(config.max_new_tokens or _WARM_UP_TOKENS, _WARM_UP_TOKENS)
    )
    is_cuda = bench.model.device.type == "cuda"
    longest = {context_bucket(len(ids)): ids for ids in sorted(encoded, key=len)}
    for row, result in zip(rows, results, strict=True):
        began = bench.clock()
        row.run(encoded[0], short)
        result.cold_start_s = bench.clock() - began
        for ids in longest.values() if is_cuda else [encoded[0]]:
            row.run(ids, config if is_cuda else short)


def _measured(row: Row, ids: Sequence[int], config: GenerationConfig) -> Run:
    with _peak_memory() as peak:
        run = row.run(ids, config)
    return replace(run, max_memory_allocated=peak())


@contextmanager
def _peak_memory() -> Iterator[Callable[[], int | None]]:
    """What torch held at most on the GPU inside; None without one."""
    if not torch.cuda.is_initialized():
        yield lambda: None
        return
    torch.cuda.reset_peak_memory_stats()
    yield torch.cuda.max_memory_allocated


def _judge_prompt(
    results: Sequence[RowResult],
    bench: Workbench,
    config: GenerationConfig,
    prompt_id: str,
    ids: Sequence[int],
    judge_text: Judge,
    folder: RunFolder,
) -> None:
    """The gate for one prompt: the counts are right, the text is repeatable and plain's."""
    plain_ids = next(row for row in results if row.name == PLAIN).runs[-1][0].token_ids
    eos_ids = frozenset[int]() if config.ignore_eos else bench.eos_ids()
    for result in results:
        runs = result.runs[-1]
        problem = runs[0].check(config.max_new_tokens, eos_ids) if result.is_ours else None
        if any(run.token_ids != runs[0].token_ids for run in runs):
            problem = "its repetitions give different texts"
        if problem:
            result.problems.append(f"prompt {prompt_id}: {problem}")
        key = f"verdict|{result.name}|{prompt_id}"
        record = folder.get(key)
        if record is None:
            record = asdict(judge_text(ids, runs[0].token_ids, plain_ids))
            folder.put(key, record)
        result.verdicts.append(Verdict(**record))


def figures(
    result: RowResult, baselines: dict[str, RowResult], seed: int, *, lossy: bool
) -> dict[str, Any]:
    """Everything about one row by metric name; speeds only if they may be shown."""
    runs = result.all_runs
    shown = result.has_speed or lossy
    known: dict[str, Any] = {
        "row": result.name,
        "num_nodes": max(run.num_nodes for run in runs),
        "has_speed": result.has_speed,
        "lossy": not result.has_speed,
        "identical_prompts": result.num_identical,
        "passed_prompts": result.num_passed,
        "num_prompts": len(result.verdicts),
        "problems": result.problems,
        "cold_start_s": result.cold_start_s,
        "mean_acceptance_length": acceptance(runs)["mean_acceptance_length"],
        "repeat_rate": repeat_rate_pooled([runs[0] for runs in result.runs]),
        "num_output_tokens": sum(len(runs[0].token_ids) for runs in result.runs),
        "max_memory_allocated": _peak(runs),
        "kv_analytic": result.kv,
        "phases_ms": result.phases_ms,
    }
    if shown:
        known |= latency(runs)
        known["median_tokens_per_second"] = _median_tokens_per_second(result)
        for name, baseline in baselines.items():
            decode = speedup(baseline.runs, result.runs, seed)
            known[f"speedup_over_{name}"] = decode.to_dict() if decode else None
            whole = speedup_end_to_end(baseline.runs, result.runs, seed)
            known[f"speedup_end_to_end_over_{name}"] = whole.to_dict()
        known["by_kind"] = {
            kind: _figures_of_kind(kind, result, baselines.get(PLAIN))
            for kind in dict.fromkeys(result.kinds)
        }
    return known


def _figures_of_kind(kind: str, result: RowResult, plain: RowResult | None) -> dict[str, Any]:
    chosen = [index for index, its in enumerate(result.kinds) if its == kind]
    runs = [run for index in chosen for run in result.runs[index]]
    ratio = None
    if plain is not None:
        ratio = speedup([plain.runs[i] for i in chosen], [result.runs[i] for i in chosen])
    return {
        "num_prompts": len(chosen),
        "mean_acceptance_length": acceptance(runs)["mean_acceptance_length"],
        "ttft_ms": summary(known_values(ttft_ms, runs)),
        "decode_throughput": decode_throughput(runs),
        "speedup_over_plain": ratio.to_dict() if ratio else None,
    }


def _peak(runs: Sequence[Run]) -> int | None:
    known = [run.max_memory_allocated for run in runs if run.max_memory_allocated is not None]
    return max(known) if known else None


def _median_tokens_per_second(result: RowResult) -> float:
    """Over prompts, of the median over repetitions; end to end."""
    return statistics.median(
        statistics.median(len(run.token_ids) / run.e2e_s for run in runs) for runs in result.runs
    )


def make_report(
    measured: Sequence[RowResult],
    manifest: dict[str, Any],
    tree_reports: Sequence[str],
    *,
    lossy: bool,
) -> Report:
    """The main table with the ratios, then the percentiles of every time."""
    baselines = {row.name: row for row in measured if row.name in (PLAIN, TRANSFORMERS)}
    settings = manifest["settings"]
    found = [figures(row, baselines, settings["seed"], lossy=lossy) for row in measured]
    remarks = [
        f"{row.name}: no speed, {_why(row)}" if not lossy else f"{row.name}: LOSSY, {_why(row)}"
        for row in measured
        if not row.has_speed
    ]
    remarks += [
        f"{row.name}: {row.num_passed} of {len(row.verdicts)} texts are plain decoding's but for "
        f"near ties, {row.num_identical} of them exactly"
        for row in measured
        if row.num_identical < len(row.verdicts) and row.has_speed
    ]
    unrest = _unrest(measured)
    if unrest > _QUIET_SPREAD:
        remarks.append(
            f"the machine was not quiet: of two repetitions of one text the slower took "
            f"{unrest:.2f} times as long (median over rows and prompts)"
        )
    return Report(
        title=f"Latency, {manifest['dtype']}, {manifest['device']}",
        notes=(
            manifest["prompts"]["rule"],
            f"up to {settings['max_new_tokens']} new tokens a prompt, "
            f"{settings['repetitions']} repetitions in the order A B .. B A, "
            f"{'no warm-up' if settings['no_warmup'] else 'warmed up'}, "
            f"T = {settings['temperature']}, {manifest['machine']['threads']} threads",
            "ratios: time per token after the first (decode) or in all (whole), median over "
            "prompts of the ratio of medians over repetitions, with its 95 % bootstrap interval",
            *tree_reports,
        ),
        tables=tuple(
            table
            for table in (
                _main_table(found, list(baselines)),
                _speedup_table(found, list(baselines)),
                _kind_table(found),
                _phase_table(found),
                _kv_table(found),
                _times_table(found),
            )
            if table.rows
        ),
        remarks=tuple(remarks),
        data={"manifest": manifest, "rows": found},
        charts=latency_charts(measured, found, lossy=lossy),
    )


def _unrest(measured: Sequence[RowResult]) -> float:
    """Slowest over fastest repetition of one text, median over rows and prompts; 1 if unknown."""
    spreads = [
        max(run.e2e_s for run in runs) / min(run.e2e_s for run in runs)
        for row in measured
        for runs in row.runs
        if len(runs) > 1
    ]
    return statistics.median(spreads) if spreads else 1.0


def _why(row: RowResult) -> str:
    if row.problems:
        return row.problems[0]
    index = next(i for i, verdict in enumerate(row.verdicts) if not verdict.passed)
    verdict = row.verdicts[index]
    return f"the text of {len(row.verdicts) - row.num_passed} prompts is not plain decoding's: " + (
        verdict.describe(len(row.runs[index][0].token_ids))
    )


def _main_table(found: Sequence[dict[str, Any]], baselines: Sequence[str]) -> Table:
    ratios = [f"x {name}" for name in baselines]
    columns = ("row", "nodes", "tau", "tokens/s", "ttft ms", "tpot ms", "p99 gap ms", *ratios)
    rows = tuple(_main_row(row, baselines) for row in found)
    return Table("Latency", (*columns, "identical", "cold start s"), rows)


def _main_row(figure: dict[str, Any], baselines: Sequence[str]) -> tuple[Cell, ...]:
    def of(name: str, statistic: str) -> float | None:
        known = figure.get(name)
        return known[statistic] if known else None

    return (
        f"{figure['row']} (lossy)" if figure["lossy"] else figure["row"],
        figure["num_nodes"],
        figure["mean_acceptance_length"],
        figure.get("median_tokens_per_second"),
        of("ttft_ms", "median"),
        of("tpot_ms", "median"),
        of("itl_ms", "p99"),
        *(of(f"speedup_over_{name}", "median") for name in baselines),
        f"{figure['identical_prompts']}/{figure['num_prompts']}",
        figure["cold_start_s"],
    )


def _speedup_table(found: Sequence[dict[str, Any]], baselines: Sequence[str]) -> Table:
    rows = [
        (
            figure["row"],
            name,
            measured,
            known["median"],
            f"[{known['low']:.3f}, {known['high']:.3f}]",
            known["pooled"],
            min(known["per_prompt"]),
            max(known["per_prompt"]),
        )
        for figure in found
        for name in baselines
        if name != figure["row"]
        for measured, key in (("decode", "speedup"), ("whole", "speedup_end_to_end"))
        if (known := figure.get(f"{key}_over_{name}"))
    ]
    columns = ("row", "over", "of", "median", "95 % interval", "pooled", "worst", "best")
    return Table("Speed-up by prompt", columns, tuple(rows))


def _ratio(known: dict[str, Any] | None, is_itself: bool) -> str | None:
    if known is None or is_itself:
        return None
    return f"{known['median']:.2f} [{known['low']:.2f}, {known['high']:.2f}]"


def _times_table(found: Sequence[dict[str, Any]]) -> Table:
    statistics_shown = ("mean", "std", "p50", "p90", "p95", "p99")
    rows = [
        (figure["row"], name, *(figure[name][statistic] for statistic in statistics_shown))
        for figure in found
        for name in _TIMES
        if figure.get(name)
    ]
    return Table("Times", ("row", "time", *statistics_shown), tuple(rows))


def _kind_table(found: Sequence[dict[str, Any]]) -> Table:
    rows = [
        (
            kind,
            figure["row"],
            known["num_prompts"],
            known["mean_acceptance_length"],
            known["ttft_ms"]["median"] if known["ttft_ms"] else None,
            known["decode_throughput"],
            _ratio(known["speedup_over_plain"], figure["row"] == PLAIN),
        )
        for figure in found
        for kind, known in figure.get("by_kind", {}).items()
    ]
    # One kind says nothing that the main table does not.
    rows = rows if len({row[0] for row in rows}) > 1 else []
    columns = ("kind", "row", "prompts", "tau", "ttft ms", "decode tokens/s", "x plain (decode)")
    return Table("By kind of prompt", columns, tuple(sorted(rows, key=lambda row: str(row[0]))))


def _phase_table(found: Sequence[dict[str, Any]]) -> Table:
    rows = [
        (
            figure["row"],
            *(phases[name] for name in StepPhases._fields),
            sum(phases.values()),
            sum(phases.values()) - phases["verify"],
        )
        for figure in found
        if (phases := figure["phases_ms"])
    ]
    columns = ("row", *(f"{name} ms" for name in StepPhases._fields), "step ms", "not forward ms")
    return Table("Phases of a step (medians, eager, measured apart)", columns, tuple(rows))


def _kv_table(found: Sequence[dict[str, Any]]) -> Table:
    rows = [
        (
            figure["row"],
            figure["kv_analytic"]["num_context_tokens"],
            figure["kv_analytic"]["kv_read_bytes_per_step"] / 2**20,
            figure["kv_analytic"]["kv_read_ratio_vs_per_path"],
            None if peak is None else peak / 2**20,
        )
        for figure in found
        if figure["kv_analytic"]
        for peak in [figure["max_memory_allocated"]]
    ]
    columns = ("row", "context", "KV read MiB/step", "x less than per path", "GPU peak MiB")
    return Table("Memory (KV reads are analytic)", columns, tuple(rows))


def latency_charts(
    measured: Sequence[RowResult], found: Sequence[dict[str, Any]], *, lossy: bool
) -> tuple[Chart, ...]:
    """Speed by row, tree size and context, the gaps a reader sees, and the phases of a step."""
    shown = [
        (row, figure) for row, figure in zip(measured, found, strict=True) if row.has_speed or lossy
    ]
    charts: list[Chart] = [
        BarChart(
            "Speed",
            "tokens/s, median over prompts, end to end",
            ("tokens/s",),
            {row.name: [figure["median_tokens_per_second"]] for row, figure in shown},
        ),
        LineChart(
            "Gaps between emissions",
            "ms",
            "share of gaps up to it",
            {
                row.name: cumulative([gap for run in row.all_runs for gap in emission_gaps_ms(run)])
                for row, _ in shown
            },
        ),
    ]
    sizes = sorted(
        (figure["num_nodes"], figure["decode_throughput"])
        for row, figure in shown
        if row.is_ours and "(" not in row.name and figure["decode_throughput"]
    )
    if len(sizes) > 2:
        line = {"decode": [(float(nodes), speed) for nodes, speed in sizes]}
        charts.append(
            LineChart("Speed against tree size", "nodes", "tokens/s", line, is_log_x=True)
        )
    charts += _context_charts(shown)
    phases = {row.name: figure["phases_ms"] for row, figure in shown if figure["phases_ms"]}
    if phases:
        charts.append(
            BarChart(
                "Phases of a step",
                "ms, eager, measured apart",
                StepPhases._fields,
                {
                    name: [known[part] for part in StepPhases._fields]
                    for name, known in phases.items()
                },
            )
        )
    return tuple(charts)


def _context_charts(shown: Sequence[tuple[RowResult, dict[str, Any]]]) -> list[Chart]:
    """Speed against the prompt's length, where random prompts of several lengths were asked for."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row, figure in shown:
        for kind, known in figure["by_kind"].items():
            length, _, unit = kind.partition(" ")
            if unit == "tokens" and length.isdecimal() and known["decode_throughput"]:
                lines.setdefault(row.name, []).append((float(length), known["decode_throughput"]))
    if not any(len(line) > 1 for line in lines.values()):
        return []
    title = "Speed against context"
    return [LineChart(title, "prompt tokens", "decode tokens/s", lines, is_log_x=True)]
