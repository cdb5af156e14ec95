"""`specdeft bench attention`: one layer's tree attention, ours beside every other method.

In one process, on the same inputs, each method is first checked against float64, and a wrong one
gets no time; then timed by CUDA-graph replay over rotated, cold KV. The floor is
max(bytes / bandwidth, operations / rate) with both ceilings measured in the run. Ours and
FlashInfer read scattered pages; methods without page tables are granted a contiguous cache. What a
step prepares once for all layers is not in the times.

Places are measured in the order of the options, so a run that is stopped has the first ones. All
methods of a place share its inputs and take turns where it is measured several times. `--merge`
makes one report of stored runs that share a grid.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from specdeft.bench.attention_commit import CommitTime, time_commit
from specdeft.bench.attention_measure import Outcome, Setting, Subject
from specdeft.bench.attention_merge import merged
from specdeft.bench.attention_methods import BATCH_METHODS, FOREST_METHODS, METHODS, OURS
from specdeft.bench.attention_report import make_report
from specdeft.bench.attention_workloads import (
    Workload,
    named_forest,
    parse_heads,
    random_tree,
    shared_prefix,
    speculation,
)
from specdeft.bench.cuda_timing import Ceilings, measure_ceilings
from specdeft.bench.manifest import describe
from specdeft.bench.report import FORMATS, Finished
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import progress
from specdeft.kernels.baselines.prepared import HeadShape
from specdeft.trees.options import Options

DEFAULT_METHODS = (OURS, "flashinfer", "sdpa", "medusa", "flex")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_NOT_SETTINGS = ("output", "save_result", "merge")
_PROMPTS = {"source": "none: seeded random queries, keys and values"}


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft bench attention",
        description="Time one layer's tree attention against the floor and other methods, each "
        "checked against float64 first. Needs a CUDA device.",
    )
    options.add_argument("--heads", nargs="+", default=["32/8/128"], metavar="HQ/HKV/D")
    options.add_argument("--context", nargs="+", type=int, default=[2048, 8192, 32768])
    options.add_argument("--nodes", nargs="+", type=int, default=[16, 64, 256])
    options.add_argument(
        "--methods", nargs="+", choices=METHODS, help="default: the usual ones of the workload"
    )
    options.add_argument(
        "--forests",
        nargs="+",
        metavar="NAME",
        help="instead of token trees: few-shot-B, or a JSON file of recorded generation trees",
    )
    options.add_argument(
        "--batch",
        nargs="+",
        type=int,
        metavar="B",
        help="instead of single sequences: batches that begin with --context common tokens",
    )
    options.add_argument(
        "--own", type=int, default=512, help="tokens of each sequence of a batch behind those"
    )
    options.add_argument(
        "--commit", action="store_true", help="instead of token trees: the commit of 32 layers"
    )
    options.add_argument("--page-size", type=int, default=128, help="of paged KV")
    options.add_argument("--dtype", default="bfloat16", choices=list(_DTYPES))
    options.add_argument(
        "--slowest", type=float, default=100.0, metavar="X", help="skip methods X times slower"
    )
    options.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="time the methods of a place N times, in turns",
    )
    options.add_argument("--output", default="table", choices=list(FORMATS), help="to stdout")
    options.add_argument(
        "--save-result", metavar="FOLDER", help="keep records and report; resumes a stopped run"
    )
    options.add_argument(
        "--merge",
        nargs="+",
        metavar="FOLDER",
        help="measure nothing: one report of stored runs, finished or not; needs no GPU",
    )
    return options


def main(arguments: Sequence[str]) -> Finished:
    """Run the command.

    Raises:
        ValueError: there is no CUDA device, or an option is malformed.
    """
    options = parser().parse_args(arguments)
    if options.merge:
        return _merge(options)
    if options.repeats < 1:
        raise ValueError(f"--repeats is {options.repeats}: measure 1 time or more")
    if min(options.batch or (2,)) < 2 or options.own < 1:
        raise ValueError(
            f"--batch is {options.batch} and --own {options.own}: give 2 sequences or more, with "
            "at least 1 token each"
        )
    shapes = [parse_heads(text, _DTYPES[options.dtype]) for text in options.heads]
    workloads = list(_workloads(options, shapes))
    device = _device()
    settings = {key: value for key, value in vars(options).items() if key not in _NOT_SETTINGS}
    if options.forests:
        settings["forests"] = [Path(name).name for name in options.forests]
    manifest = describe(
        device, options.dtype, _PROMPTS, ["bench", "attention", *arguments], settings
    )
    with RunFolder(options.save_result) as folder:
        folder.open(manifest)
        ceilings = _ceilings(folder, device)
        setting = Setting(device, ceilings, options.page_size, options.slowest)
        outcomes = list(_outcomes(folder, workloads, options, setting))
        commits = [_commit(folder, shape, device) for shape in shapes if options.commit]
        report = make_report(outcomes, commits, [ceilings], manifest)
        folder.save(report)
    return Finished(report, options.output)


def _merge(options: argparse.Namespace) -> Finished:
    stored = merged(options.merge)
    with RunFolder(options.save_result) as folder:
        folder.open(stored.manifest)
        for key, record in stored.records.items():
            if folder.get(key) is None:
                folder.put(key, record)
        report = make_report(stored.outcomes, stored.commits, stored.ceilings, stored.manifest)
        folder.save(report)
    return Finished(report, options.output)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError("bench attention times CUDA kernels: run it on a machine with a GPU")
    return torch.device("cuda", torch.cuda.current_device())


def _workloads(options: argparse.Namespace, shapes: Sequence[HeadShape]) -> Iterator[Workload]:
    for shape in shapes:
        for name in options.forests or ():
            yield named_forest(name, shape)
        if not options.forests and not options.commit:
            for context in options.context:
                for nodes in options.nodes:
                    tree = random_tree(nodes)
                    if not options.batch:
                        yield speculation(shape, context, tree)
                    for batch in options.batch or ():
                        yield shared_prefix(shape, context, options.own, batch, tree)


def _outcomes(
    folder: RunFolder,
    workloads: Sequence[Workload],
    options: argparse.Namespace,
    setting: Setting,
) -> Iterator[Outcome]:
    """Every method on every workload; what the folder holds already is not measured again."""
    with progress(len(workloads), "attention", "place") as done:
        for workload in workloads:
            subject = Subject(workload, setting)
            usual: Sequence[str] = FOREST_METHODS
            if workload.tree is not None:
                usual = DEFAULT_METHODS if workload.batch == 1 else BATCH_METHODS
            for repeat in range(1, options.repeats + 1):
                for method in options.methods or usual:
                    yield _outcome(folder, subject, method, repeat)
            done()
            # Rarely: giving memory back and asking for it again takes longer than the timing.
            if setting.device.type == "cuda" and _mostly_taken(setting.device):
                torch.cuda.empty_cache()


def _outcome(folder: RunFolder, subject: Subject, method: str, repeat: int) -> Outcome:
    """From the folder, or measured; the first one says of the others when they are far above it."""
    workload = subject.workload
    key = f"{workload.heads} {workload.name} {workload.forest.num_queries} {method}"
    key += f" #{repeat}" if repeat > 1 else ""
    record = folder.get(key)
    if record is None:
        record = subject.measure(method, repeat)._asdict()
        folder.put(key, record)
    outcome = Outcome(**record)
    subject.first_us = subject.first_us or outcome.median_us
    return outcome


def _mostly_taken(device: torch.device) -> bool:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return 2 * free_bytes < total_bytes


def _commit(folder: RunFolder, shape: HeadShape, device: torch.device) -> CommitTime:
    key = f"commit {shape.kv_heads}/{shape.head_dim}"
    record = folder.get(key)
    if record is None:
        record = time_commit(shape, device)._asdict()
        folder.put(key, record)
    return CommitTime(**record)


def _ceilings(folder: RunFolder, device: torch.device) -> Ceilings:
    """Measured once a run."""
    record = folder.get("ceilings")
    if record is None:
        record = measure_ceilings(device)._asdict()
        folder.put("ceilings", record)
    return Ceilings(**record)
