"""`specdeft bench identity`: is the text the same? For every prompt, tree and temperature.

Speculative decoding is compared with plain decoding by the same engine, id by id, and plain greedy
decoding with transformers' own `generate`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdeft.bench.gate import Verdict, judge
from specdeft.bench.manifest import describe_run
from specdeft.bench.metrics import Run, mean_acceptance_length
from specdeft.bench.reference_rows import TRANSFORMERS, TransformersRow
from specdeft.bench.report import Finished, Report, Table
from specdeft.bench.rows import DecoderRow, Row, recorded
from specdeft.bench.run_folder import RunFolder
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
    progress,
    settings_of,
)
from specdeft.config import GenerationConfig
from specdeft.rereading import Rereader
from specdeft.trees.options import HelpFormatter, Options


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft bench identity",
        description="Compare speculative with plain decoding token for token, and plain decoding "
        "with transformers generate. Exit code 1 where a text differs (in 16 bits: by more than "
        "near ties).",
        epilog="The 40 questions of the README: specdeft bench identity --dtype float32 --prompts "
        "questions.jsonl --num-prompts 40 --trees chain-4,16,64 --save-result results/identity",
        formatter_class=HelpFormatter,
    )
    options.add_argument("--trees", default="chain-4,16,64", help="names, sizes or files, commas")
    options.add_argument("--temperatures", default="0,0.7", help="numbers with commas")
    options.add_argument(
        "--no-transformers", action="store_true", help="leave out transformers generate"
    )
    add_options(options, Amount(num_prompts=40, max_new_tokens=96))
    options.set_defaults(dtype="float32")
    return options


@dataclass(frozen=True)
class Outcome:
    """One text beside plain decoding's."""

    row: str
    temperature: float
    prompt_id: str
    run: Run
    verdict: Verdict


def main(arguments: Sequence[str]) -> Finished:
    """Run the command; the exit code is 1 where a text differs."""
    options = parse(parser(), arguments)
    trees = parse_trees(options.trees)
    temperatures = parse_temperatures(options.temperatures)
    task = Task.from_options(options)
    configs = [replace(task.config, temperature=temperature) for temperature in temperatures]
    bench = load(options)
    task = prepare(task, bench, options)
    plain = DecoderRow(PLAIN, bench)
    rows: list[Row] = [DecoderRow(tree, bench) for tree in trees]
    if not options.no_transformers and 0.0 in temperatures:
        rows.append(TransformersRow(bench))
    encoded = bench.encode(task.prompts, task.config, options.raw)
    manifest = describe_run(
        plain.decoder, task.prompts, ["bench", "identity", *arguments], settings_of(options)
    )
    with task.folder as folder:
        folder.open(manifest)
        outcomes = compare_all(plain, rows, configs, task, encoded, folder)
        report = make_report(outcomes, manifest)
        folder.save(report)
    failed = not all(outcome.verdict.passed for outcome in outcomes)
    return Finished(report, options.output, int(failed))


def compare_all(
    plain: DecoderRow,
    rows: Sequence[Row],
    configs: Sequence[GenerationConfig],
    task: Task,
    encoded: Sequence[Sequence[int]],
    folder: RunFolder,
) -> list[Outcome]:
    """Every row on every prompt at every temperature; what the folder holds is not run again."""
    outcomes: list[Outcome] = []
    jobs = [
        (prompt.id, ids, config)
        for prompt, ids in zip(task.prompts.prompts, encoded, strict=True)
        for config in configs
    ]
    rereaders = {config: Rereader(plain.decoder.engine, config) for config in configs}
    total = sum(len(_rows_for(rows, config)) + 1 for _, _, config in jobs)
    with progress(total, "identity") as done:
        for prompt_id, ids, config in jobs:
            expected = _recorded(folder, plain, prompt_id, ids, config)
            done()
            for row in _rows_for(rows, config):
                run = _recorded(folder, row, prompt_id, ids, config)
                key = f"verdict|{_key(row, prompt_id, config)}"
                record = folder.get(key)
                if record is None:
                    rereader = rereaders[config]
                    found = judge(rereader, ids, run.token_ids, expected.token_ids)
                    record = asdict(found)
                    folder.put(key, record)
                verdict = Verdict(**record)
                outcomes.append(Outcome(row.name, config.temperature, prompt_id, run, verdict))
                done()
    return outcomes


def _rows_for(rows: Sequence[Row], config: GenerationConfig) -> list[Row]:
    # Only greedy texts can be compared with transformers: its noise is another one.
    return [row for row in rows if config.is_greedy or row.name != TRANSFORMERS]


def _key(row: Row, prompt_id: str, config: GenerationConfig) -> str:
    return f"{row.name}|T={config.temperature:g}|{prompt_id}"


def _recorded(
    folder: RunFolder, row: Row, prompt_id: str, ids: Sequence[int], config: GenerationConfig
) -> Run:
    key = _key(row, prompt_id, config)
    name = f"{row.name}, T = {config.temperature:g}"
    return recorded(folder, key, name, prompt_id, lambda: row.run(ids, config))


def make_report(outcomes: Sequence[Outcome], manifest: dict[str, Any]) -> Report:
    """Identical prompts, tokens and tau of each row and temperature, and every difference."""
    groups: dict[tuple[float, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.temperature, outcome.row), []).append(outcome)
    figures = [_figures(row, temperature, group) for (temperature, row), group in groups.items()]
    against = "each tree is compared with plain decoding by the same engine"
    if any(figure["row"] == TRANSFORMERS for figure in figures):
        against += ", and that with transformers generate"
    differences = [
        f"{outcome.row}, T = {outcome.temperature:g}, prompt {outcome.prompt_id}: "
        + outcome.verdict.describe(len(outcome.run.token_ids))
        for outcome in outcomes
        if not outcome.verdict.identical
    ]
    columns = ("compared", "T", "nodes", "identical", "prompts", "passed", "tokens", "tau")
    table = Table(
        "Identity",
        columns,
        tuple(
            (
                "plain = transformers" if figure["row"] == TRANSFORMERS else figure["row"],
                f"{figure['temperature']:g}",
                figure["num_nodes"],
                figure["identical_prompts"],
                figure["num_prompts"],
                figure["passed_prompts"],
                figure["num_tokens"],
                None if figure["row"] == TRANSFORMERS else figure["mean_acceptance_length"],
            )
            for figure in figures
        ),
    )
    return Report(
        title=f"Identity of texts, {manifest['dtype']}, {manifest['device']}",
        notes=(
            manifest["prompts"]["rule"],
            against,
            f"up to {manifest['settings']['max_new_tokens']} new tokens a prompt",
        ),
        tables=(table,),
        remarks=tuple(differences) or ("no text differs",),
        data={"manifest": manifest, "rows": figures, "differences": differences},
    )


def _figures(row: str, temperature: float, group: Sequence[Outcome]) -> dict[str, Any]:
    runs = [outcome.run for outcome in group]
    return {
        "row": row,
        "temperature": temperature,
        "num_nodes": max(run.num_nodes for run in runs),
        "num_prompts": len(group),
        "identical_prompts": sum(outcome.verdict.identical for outcome in group),
        "passed_prompts": sum(outcome.verdict.passed for outcome in group),
        "num_tokens": sum(len(run.token_ids) for run in runs),
        "mean_acceptance_length": mean_acceptance_length(runs),
    }
