"""`specdeft bench workload`: the DeFT paper's workloads end to end, DeFT beside per-path attention.

    few-shot     one prompt, many continuations
    reasoning    a recorded search: branches are opened, prolonged and cut away
    speculative  one sequence, a token tree a step, recorded accept lengths

A stock model runs with each attention method on the same KV tree, weights and steps; only the plan
and the kernels' work differ. Times are of sampled steps, paired by step.
"""

import argparse
import os
from collections.abc import Sequence

from specdeft.bench.manifest import describe
from specdeft.bench.report import FORMATS, Finished
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import load, progress, settings_of
from specdeft.bench.workload_jobs import WORKLOADS, make_jobs, pick_names
from specdeft.bench.workload_measure import (
    METHODS,
    Measured,
    Meter,
    measure_workload,
    sampled_steps,
)
from specdeft.bench.workload_report import make_report
from specdeft.default_model import DEFAULT_MODELS
from specdeft.loading import pick_device
from specdeft.model import TargetModel
from specdeft.trees.options import HelpFormatter, Options


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft bench workload",
        description="Few-shot prompting, multi-step reasoning and speculative decoding on a KV "
        "tree: attention and end-to-end time per step and per token with DeFT-Flatten, Node-Chunk, "
        "Node, Radix and Flash-Decoding attention. Needs a CUDA device.",
        epilog="Example, the paper's reasoning workload: specdeft bench workload --workloads "
        "reasoning --tree-file sorting128.json --model random:llama-3-8b --dtype bfloat16",
        formatter_class=HelpFormatter,
    )
    what = options.add_argument_group("workload")
    what.add_argument("--workloads", default=",".join(WORKLOADS), help="some of these, commas")
    what.add_argument("--methods", default=",".join(METHODS), help="some of these, commas")
    what.add_argument("--prompt-len", type=int, default=4000, metavar="N", help="few-shot, spec.")
    what.add_argument("--branches", default="30", metavar="N,N", help="few-shot: continuations")
    what.add_argument("--branch-len", type=int, default=400, metavar="N", help="few-shot: of each")
    what.add_argument("--tree-file", metavar="FILE", help="reasoning: recorded trees; else our own")
    what.add_argument("--tree-index", type=int, metavar="N", help="the first complete one if none")
    what.add_argument("--trees", default="deft-64", help="speculative: named trees, commas")
    what.add_argument("--replay", metavar="FILE", help="speculative: recorded accept lengths")
    what.add_argument("--samples", type=int, default=16, metavar="N", help="steps that are timed")
    what.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="of each step")
    what.add_argument("--page-size", type=int, default=16, help="tokens of a page of the KV tree")
    model = options.add_argument_group("model")
    model.add_argument("--model", default=next(iter(DEFAULT_MODELS)), help="as in latency")
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    model.add_argument("--device", default="auto", help="auto or cuda")
    model.add_argument("--compile", action="store_true", help="torch.compile the forwards")
    result = options.add_argument_group("result")
    result.add_argument("--output", default="table", choices=list(FORMATS), help="to stdout")
    result.add_argument(
        "--save-result", metavar="FOLDER", help="keep records and report; resumes a stopped run"
    )
    result.add_argument("--plots", action="store_true", help="PNG files in the folder, too")
    options.set_defaults(heads="none", lookup="off", threads=None, no_cuda_graphs=False, prompts="")
    return options


def main(arguments: Sequence[str]) -> Finished:
    """Run the command; the exit code is 1 where a method's result is wrong.

    Raises:
        ValueError: bad input, or no CUDA device; nothing was measured.
    """
    options = parser().parse_args(arguments)
    jobs = make_jobs(options)
    methods = pick_names(options.methods, METHODS, "method")
    for name in ("samples", "repetitions", "page_size"):
        if getattr(options, name) < 1:
            raise ValueError(
                f"{name.replace('_', '-')} is {getattr(options, name)}: give 1 or more"
            )
    if options.plots and options.save_result is None:
        raise ValueError("--plots has nowhere to go: give --save-result FOLDER")
    folder = RunFolder(options.save_result, plots=options.plots)
    device = pick_device(options.device)
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "bench workload runs the forest kernels, which need CUDA: run it on a machine with a "
            "GPU"
        )
    bench = load(options)
    target = TargetModel(bench.model)
    too_long = next((job for job in jobs if job.longest_path > target.max_context), None)
    if too_long is not None:
        raise ValueError(
            f"{too_long.name} needs {too_long.longest_path} positions and the model has "
            f"{target.max_context}: shorten it, or take a model with a longer context"
        )
    if options.compile:
        target.compile()
    meter = Meter.of(target, bench.clock, options.repetitions)
    manifest = describe(
        target.device,
        str(target.dtype).removeprefix("torch."),
        {"source": "random cache contents", "jobs": [job.name for job in jobs]},
        ["bench", "workload", *arguments],
        settings_of(options),
    )
    found: dict[str, Measured] = {}
    with folder:
        folder.open(manifest)
        total = sum(len(sampled_steps(job.num_steps, options.samples)) for job in jobs)
        with progress(total, "workload", "step") as done:
            for job in jobs:
                state = job.state(target, options.page_size)
                found[job.name] = measure_workload(
                    meter, state, methods, options.samples, folder, job.name, done
                )
        report = make_report(jobs, found, manifest)
        folder.save(report)
    failed = any(measured.failures for measured in found.values())
    return Finished(report, options.output, int(failed))
