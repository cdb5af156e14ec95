"""The report of `bench latency`: figures by metric name, tables, drawings."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from specdeft.bench.batches import BatchResult, batch_figures
from specdeft.bench.latency_charts import batch_charts, latency_charts
from specdeft.bench.latency_measure import RowResult
from specdeft.bench.metrics import (
    Run,
    acceptance,
    decode_throughput,
    is_looping,
    known_values,
    latency,
    mean_acceptance_length,
    request_figures,
    speedup,
    speedup_end_to_end,
    summary,
    ttft_ms,
)
from specdeft.bench.phases import StepPhases
from specdeft.bench.reference_rows import TRANSFORMERS
from specdeft.bench.report import Cell, Report, Table
from specdeft.bench.workbench import PLAIN

# Slowest over fastest repetition of a text; a quiet machine stays within a few percent.
_QUIET_SPREAD = 1.15
_DEPTHS_SHOWN = 6
_TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def figures(
    result: RowResult, baselines: dict[str, RowResult], seed: int, *, lossy: bool
) -> dict[str, Any]:
    """Everything about one row by metric name; speeds only if they may be shown."""
    runs = result.all_runs
    texts = [repetitions[0] for repetitions in result.runs]
    shown = result.has_speed or lossy
    known: dict[str, Any] = {
        "row": result.label,
        "name": result.name,
        "temperature": result.temperature,
        "num_nodes": max(run.num_nodes for run in runs),
        "has_speed": result.has_speed,
        "lossy": lossy and not result.has_speed,
        "identical_prompts": result.num_identical,
        "passed_prompts": result.num_passed,
        "num_prompts": len(result.verdicts),
        "problems": result.problems,
        "fickle_prompts": result.fickle,
        "cold_start_s": result.cold_start_s,
        **acceptance(texts),
        "mean_acceptance_length_not_looping": mean_acceptance_length(
            [run for run in texts if not is_looping(run)]
        ),
        "max_memory_allocated": _peak(runs),
        "kv_analytic": result.kv,
        "phases_ms": result.phases_ms,
        "requests": [request_figures(runs, is_timed=shown) for runs in result.runs],
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
    batches: Sequence[BatchResult] = (),
    given_up: Mapping[str, str] | None = None,
    *,
    lossy: bool,
) -> Report:
    """The main table with the ratios, then the percentiles of every time."""
    baselines = {row.name: None for row in measured if row.name in (PLAIN, TRANSFORMERS)}
    settings = manifest["settings"]
    found = [
        figures(row, _baselines_of(row, measured), settings["seed"], lossy=lossy)
        for row in measured
    ]
    remarks = [
        f"{row.label}: no speed, {_why(row)}" if not lossy else f"{row.label}: LOSSY, {_why(row)}"
        for row in measured
        if not row.has_speed
    ]
    remarks += [
        f"{row.label}: {row.num_passed} of {len(row.verdicts)} texts are plain decoding's but for "
        f"near ties, {row.num_identical} of them exactly"
        for row in measured
        if row.num_identical < len(row.verdicts) and row.has_speed
    ]
    remarks += [
        f"{row.label}: its repetitions give different texts at {len(row.fickle)} of "
        f"{len(row.verdicts)} prompts"
        for row in measured
        if row.fickle
    ]
    if any(row.phases_ms.get("idle", 0.0) < 0 for row in measured):
        remarks.append(
            "phases: idle is below zero where the marks between the phases cost more than what "
            "lies between them"
        )
    remarks += [
        f"{result.row}, batches of {result.size}: no speed, "
        + (result.problems[0] if result.problems else "a text is not plain decoding's")
        for result in batches
        if not result.has_speed
    ]
    given_up = given_up or {}
    remarks += [f"{label}: not measured, {why}" for label, why in given_up.items()]
    remarks += _stopped(measured, len(manifest["prompts"]["ids"]))
    in_batches = batch_figures(batches, settings["seed"])
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
            f"{settings['repetitions']} repetitions in the order A B .. B A{_fewer(settings)}, "
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
                _acceptance_table(found),
                _batch_table(in_batches),
                _kind_table(found),
                _phase_table(found),
                _kv_table(found),
                _times_table(found),
            )
            if table.rows
        ),
        remarks=tuple(remarks),
        data={
            "manifest": manifest,
            "rows": found,
            "batches": in_batches,
            "given_up": dict(given_up),
        },
        charts=(*latency_charts(measured, found, lossy=lossy), *batch_charts(in_batches)),
    )


def _stopped(measured: Sequence[RowResult], num_prompts: int) -> list[str]:
    """What the time limit left out, a clause for each temperature."""
    counts = {
        row.temperature: (len(row.runs), f", T = {row.temperature:g}" if row.is_sweep else "")
        for row in measured
        if len(row.runs) < num_prompts
    }
    return [
        f"the time limit ended the run after {count} of {num_prompts} prompts{where}"
        for count, where in counts.values()
    ]


def _fewer(settings: dict[str, Any]) -> str:
    given = settings.get("yardstick_repetitions")
    return f" ({given} of the rows that are not ours)" if given else ""


def _baselines_of(row: RowResult, measured: Sequence[RowResult]) -> dict[str, RowResult]:
    """What its speed is compared with: the baselines at its own temperature."""
    return {
        other.name: other
        for other in measured
        if other.name in (PLAIN, TRANSFORMERS) and other.temperature == row.temperature
    }


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
        if name != figure["name"]
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
            _ratio(known["speedup_over_plain"], figure["name"] == PLAIN),
        )
        for figure in found
        for kind, known in figure.get("by_kind", {}).items()
    ]
    kinds = list(dict.fromkeys(row[0] for row in rows))
    # One kind says nothing that the main table does not.
    rows = sorted(rows, key=lambda row: kinds.index(row[0])) if len(kinds) > 1 else []
    columns = ("kind", "row", "prompts", "tau", "ttft ms", "decode tokens/s", "x plain (decode)")
    return Table("By kind of prompt", columns, tuple(rows))


def _acceptance_table(found: Sequence[dict[str, Any]]) -> Table:
    """Of the rows that draft; `bench acceptance` has the ranks, kinds and histograms."""
    drafting = [figure for figure in found if figure["num_spec_tokens"]]
    deepest = max((len(f["per_position_acceptance_rate"]) for f in drafting), default=0)
    depths = range(min(deepest, _DEPTHS_SHOWN))
    rows = tuple(
        (
            figure["row"],
            figure["mean_acceptance_length"],
            figure["mean_acceptance_length_per_request"],
            figure["accepted_len_excl_bonus"],
            figure["mean_acceptance_length_not_looping"],
            figure["repeat_rate"],
            figure["num_looping"],
            *(
                rates[depth] if depth < len(rates) else None
                for rates in [figure["per_position_acceptance_rate"]]
                for depth in depths
            ),
        )
        for figure in drafting
    )
    columns = ("row", "tau", "per request", "accepted", "tau not looping", "repeats", "looping")
    survived = (f"depth {depth + 1}" for depth in depths)
    return Table("Acceptance (share of steps by depth)", (*columns, *survived), rows)


def _batch_table(found: Sequence[dict[str, Any]]) -> Table:
    rows = tuple(
        (
            figure["row"],
            figure["batch_size"],
            figure["mean_acceptance_length"],
            figure.get("output_throughput"),
            figure.get("output_throughput_per_sequence"),
            figure.get("over_batch_1"),
            _ratio(figure.get("speedup_end_to_end_over_plain"), figure["row"] == PLAIN),
            f"{figure['identical_prompts']}/{figure['num_prompts']}",
        )
        for figure in found
    )
    columns = ("row", "batch", "tau", "tokens/s", "of a sequence", "x batch 1")
    return Table("Batches (end to end)", (*columns, "x plain (whole)", "identical"), rows)


def _phase_table(found: Sequence[dict[str, Any]]) -> Table:
    rows = [
        (
            figure["row"],
            *(phases[name] for name in StepPhases._fields),
            sum(phases.values()),
            sum(phases.values()) - phases["forward"] - phases["attention"],
        )
        for figure in found
        if (phases := figure["phases_ms"])
    ]
    columns = ("row", *(f"{name} ms" for name in StepPhases._fields), "step ms", "not forward ms")
    return Table("Phases of a step (medians, measured apart)", columns, tuple(rows))


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
