"""`specdeft bench latency`: what a user waits, beside plain decoding and transformers generate.

All rows run in one process on the same weights, dtype and threads, in the order A B .. B A over the
repetitions of every prompt, so that a slow moment of the machine falls on all of them. A row's text
is judged before its speed is believed: one that is not plain decoding's text gets no speed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from specdeft.bench.baselines import (
    BASELINES,
    check_baselines,
    make_rows,
    parse_baselines,
    runs_sampled,
)
from specdeft.bench.batches import measure_batches, parse_batch_sizes
from specdeft.bench.gate import judge
from specdeft.bench.latency_measure import (
    Amounts,
    RowResult,
    check_reuse,
    kv_figures,
    measure,
    phase_figures,
)
from specdeft.bench.latency_report import make_report
from specdeft.bench.manifest import describe_run
from specdeft.bench.reference_rows import TRANSFORMERS
from specdeft.bench.report import Finished
from specdeft.bench.rows import DecoderRow, rows_of_more_heads
from specdeft.bench.workbench import (
    PLAIN,
    Amount,
    Task,
    add_options,
    load,
    parse,
    parse_temperatures,
    parse_trees,
    prepare,
    settings_of,
)
from specdeft.rereading import Rereader
from specdeft.trees.options import HelpFormatter, Options


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft bench latency",
        description="Time to first token, per token, between emissions and end to end; ratios to "
        "plain decoding and to transformers generate, paired by prompt. Exit code 1 where a row of "
        "ours gets no speed because its text or its counts are not right.",
        epilog="Example: specdeft bench latency --dtype bfloat16 --trees auto,16 --num-prompts 10",
        formatter_class=HelpFormatter,
    )
    options.add_argument("--trees", default="auto", help="names, sizes or files, commas")
    options.add_argument(
        "--temperature", default="0", help="0 is greedy; several with commas, each against its own"
    )
    options.add_argument(
        "--batch-sizes", metavar="N,N", help="also decode prompts in batches of these sizes"
    )
    options.add_argument("-r", "--repetitions", type=int, metavar="N", help="5 if not given")
    options.add_argument(
        "--yardstick-repetitions",
        type=int,
        metavar="N",
        help="of the rows that are not ours, which may be slow; as many as ours if not given",
    )
    options.add_argument(
        "--yardstick-limit",
        type=float,
        metavar="SECONDS",
        default=180.0,
        help="a row that is not ours is given up, aloud, where its first call takes longer",
    )
    options.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="begin no further prompt after so long, and report what was measured; the same "
        "command goes on where a result was saved",
    )
    options.add_argument(
        "--no-phases", action="store_true", help="leave out where the time of a step goes"
    )
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
    options.add_argument(
        "--more-heads", metavar="DIR,DIR", help="folders of further heads: rows of the same trees"
    )
    add_options(options, Amount(num_prompts=10, max_new_tokens=128, repetitions=5))
    return options


def main(arguments: Sequence[str]) -> Finished:
    """Run the command; the exit code is 1 where a row of ours fails the gate."""
    options = parse(parser(), arguments)
    trees = parse_trees(options.trees)
    temperatures = parse_temperatures(options.temperature)
    if options.repetitions < 1:
        raise ValueError(f"repetitions is {options.repetitions}: give at least 1")
    if options.yardstick_repetitions is not None and options.yardstick_repetitions < 1:
        raise ValueError(
            f"yardstick-repetitions is {options.yardstick_repetitions}: give at least 1"
        )
    for name in ("yardstick_limit", "time_limit"):
        given = getattr(options, name)
        if given is not None and not 0 < given < float("inf"):
            raise ValueError(f"{name.replace('_', '-')} is {given:g}: give seconds above 0")
    task = Task.from_options(options)
    configs = [replace(task.config, temperature=temperature) for temperature in temperatures]
    baselines = parse_baselines(options.baselines)
    if not any(config.is_greedy for config in configs):
        baselines = tuple(name for name in baselines if runs_sampled(name))
    sizes = parse_batch_sizes(options.batch_sizes, len(task.prompts.prompts))
    if sizes and 0.0 not in temperatures:
        raise ValueError("batches are measured at temperature 0: add it to --temperature")
    if sizes and options.time_limit is not None:
        raise ValueError("--time-limit and --batch-sizes were both given: give one")
    check_baselines(baselines, options)
    bench = load(options)
    began = bench.clock()
    task = prepare(task, bench, options)
    encoded = bench.encode(task.prompts, task.config, options.raw)
    rows = [
        *make_rows(trees, baselines, bench, options, task.config, encoded),
        *rows_of_more_heads(trees, bench, options),
    ]
    plain = next(row for row in rows if isinstance(row, DecoderRow))
    by_id = {prompt.id: ids for prompt, ids in zip(task.prompts.prompts, encoded, strict=True)}
    manifest = describe_run(
        plain.decoder, task.prompts, ["bench", "latency", *arguments], settings_of(options)
    )
    with task.folder as folder:
        folder.open(manifest)
        measured: list[RowResult] = []
        given_up: dict[str, str] = {}
        for turn, config in enumerate(configs, start=1):
            # The noise of others cannot be ours: above temperature 0 our rows stand alone.
            chosen = [row for row in rows if row.is_ours or config.is_greedy]
            share = None if options.time_limit is None else options.time_limit * turn / len(configs)
            found = measure(
                chosen,
                bench,
                config,
                by_id,
                folder,
                Amounts(
                    options.repetitions,
                    options.yardstick_repetitions,
                    not options.no_warmup,
                    options.yardstick_limit,
                    None if share is None else began + share,
                ),
                judge_text=partial(judge, Rereader(plain.decoder.engine, config)),
                is_sweep=len(configs) > 1,
            )
            measured += found.results
            given_up |= found.given_up
            for row, result in zip(found.rows, found.results, strict=True):
                num_measured = len(result.runs)
                result.kinds = tuple(p.kind for p in task.prompts.prompts[:num_measured])
                result.kv = kv_figures(row, result, encoded[:num_measured], config)
                if not options.no_phases:
                    result.phases_ms = phase_figures(row, result, encoded[0], config, folder)
                check_reuse(row, result, encoded[0], config, folder)
        greedy = next((config for config in configs if config.is_greedy), task.config)
        batches = (
            measure_batches(
                trees,
                sizes,
                bench,
                greedy,
                by_id,
                _plain_texts(measured, list(by_id)),
                folder,
                options.repetitions,
                partial(judge, Rereader(plain.decoder.engine, greedy)),
            )
            if sizes
            else []
        )
        # Prompts of other lengths and other temperatures may be given other trees.
        reports = dict.fromkeys(
            f"{row.name}, T = {config.temperature:g}: "
            f"{row.decoder.tree_report_of(config, len(ids))}"
            for row in rows
            if isinstance(row, DecoderRow) and row.tree_name == "auto"
            for config in configs
            for ids in encoded
        )
        report = make_report(
            measured, manifest, list(reports), batches, given_up, lossy=options.lossy
        )
        folder.save(report)
    failed = any(row.is_ours and not row.has_speed for row in measured)
    failed |= any(not result.has_speed for result in batches)
    return Finished(report, options.output, int(failed))


def _plain_texts(
    measured: Sequence[RowResult], prompt_ids: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Greedy plain decoding's ids of each prompt."""
    plain = next(row for row in measured if row.name == PLAIN and row.temperature == 0.0)
    return {prompt: runs[0].token_ids for prompt, runs in zip(prompt_ids, plain.runs, strict=True)}
