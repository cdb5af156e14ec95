"""`bench workload` on a tiny model in Triton's interpreter: every method, one text."""

import argparse
import itertools
import json

import pytest
import torch

from specdeft.bench import cli, workload, workload_jobs, workload_measure, workload_report
from specdeft.bench.growing_tree import GrowingTree
from specdeft.bench.random_model import random_model
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import Workbench
from specdeft.bench.workload_measure import Measured, Timed, sampled_steps
from specdeft.kernels.baselines import per_path
from specdeft.model import TargetModel
from tests.core.tiny import tiny_model

# The interpreter takes milliseconds for each program of a kernel: everything here is small.
WORK = ["workload", "--samples", "2", "-r", "1", "--prompt-len", "20", "--branches", "2"]
METHODS_TRIED = ("flatten", "radix", "flash-decoding")
WORK += ["--branch-len", "9", "--dtype", "float32", "--output", "json"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count()
    model, tokenizer = random_model("random:llama-tiny", torch.float32, torch.device("cpu"))
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    bench = Workbench(model, tokenizer, None, None, lambda: next(readings) * 1e-3)
    monkeypatch.setattr(workload, "load", lambda _options: bench)


@pytest.mark.usefixtures("tiny")
def test_all_methods_choose_the_same_tokens_and_are_right(capsys, tmp_path):
    folder, lengths = tmp_path / "run", tmp_path / "lengths.json"
    lengths.write_text("[[3, 1]]")
    arguments = [*WORK, "--workloads", "few-shot,speculative", "--trees", "chain-4"]
    arguments += ["--save-result", str(folder), "--replay", str(lengths)]
    arguments += ["--methods", ",".join(METHODS_TRIED)]
    assert cli.main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in data["rows"]] == [*METHODS_TRIED, *METHODS_TRIED]
    for row in data["rows"]:
        assert row["failure"] is None
        assert row["error"] < 1e-5
        assert row["same_choices"] == 1.0
        assert row["logits_difference"] < 1e-5
    flatten, radix, flash = data["rows"][:3]
    assert radix["queries_per_step"] == radix["tokens_per_step"] == 2.0
    # 9 steps, the middles of two halves: 3 and 7. Radix reads 20 tokens and the branch's own.
    assert radix["sampled_steps"] == [3, 7]
    assert radix["kv_tokens_read"] == flash["kv_tokens_read"] == 2 * (20 + (3 + 7) / 2)
    # 16 tokens fill a page and are shared; 4 were copied to each branch.
    assert flatten["cached_tokens"] == 16 + 2 * (4 + (3 + 7) / 2)
    assert flatten["kv_tokens_read"] == flatten["cached_tokens"]
    assert {"manifest.json", "records.jsonl", "report.html"} <= {p.name for p in folder.iterdir()}
    assert data["manifest"]["settings"]["branch_len"] == 9
    tree = data["rows"][3]
    assert tree["sampled_steps"] == [1, 2]
    assert tree["queries_per_step"] == 5.0
    assert tree["tokens_per_step"] == 2.0
    assert tree["cached_tokens"] == (20 + 23) / 2 + 5
    # The same command again takes everything from the folder.
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == data["rows"]


@pytest.mark.usefixtures("tiny")
def test_a_method_that_is_wrong_gets_no_times(capsys, monkeypatch):
    honest = per_path.prepare_plan

    def dishonest(method, plan, shape, device):
        prepared = honest(method, plan, shape, device)
        if method != "node":
            return prepared
        return prepared._replace(run=lambda q, k, v: prepared.run(q, k, v) * 1.01)

    monkeypatch.setattr(workload_measure, "prepare_plan", dishonest)
    arguments = [*WORK, "--workloads", "few-shot", "--methods", "flatten,node"]
    assert cli.main(arguments) == 1
    flatten, node = json.loads(capsys.readouterr().out)["rows"]
    assert "step_ms" in flatten
    assert "step_ms" not in node
    assert node["failure"] == "wrong result: relative error 1.0e-02"


def test_figures_by_hand():
    job = workload_jobs.Job("few-shot, 2 branches", 4, GrowingTree.few_shot(4, 2, 8))

    def timed(attention: float, end_to_end: float, choices: tuple[int, ...]) -> Timed:
        return Timed(attention, 0.5, 2 * attention, end_to_end, 20, attention / 100, choices)

    measured = Measured(
        steps=[(2, 2, 2, 10), (6, 2, 2, 18)],
        books_ms=[1.0, 3.0],
        timed={
            "flatten": [timed(1.0, 7.0, (1, 2)), timed(2.0, 9.0, (3, 4))],
            "radix": [timed(3.0, 15.0, (1, 2)), timed(4.0, 21.0, (3, 5))],
        },
        errors={"flatten": 1e-6, "radix": 2e-6},
    )
    flatten, radix = workload_report.figures(job, measured)
    assert flatten["attention_ms_per_step"] == 1.5
    assert flatten["books_ms_per_step"] == 2.0
    assert flatten["forward_ms_per_step"] == 3.0
    assert flatten["logits_difference"] == 0.02
    assert flatten["forward_over_radix"]["median"] == (3.0 + 2.0) / 2
    assert flatten["step_ms"] == 8.0 + 2.0
    assert flatten["ms_per_token"] == 5.0
    assert flatten["cached_tokens"] == 14.0
    assert flatten["attention_over_radix"]["median"] == (3.0 + 2.0) / 2
    assert flatten["end_to_end_over_radix"]["median"] == (16.0 / 8.0 + 24.0 / 12.0) / 2
    assert radix["same_choices"] == 0.75
    assert "attention_over_radix" not in radix


def test_samples_are_the_middles_of_equal_parts():
    assert sampled_steps(400, 4) == [51, 151, 251, 351]
    assert sampled_steps(3, 16) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workloads", "beam"], "there is no workload 'beam': give some of few-shot, reasoning"),
        (["--workloads", ","], "no workload was given"),
        (["--methods", "magic"], "there is no method 'magic': give some of flatten, node-chunk"),
        (["--trees", "64"], "there is no tree '64'"),
        (["--branches", "0"], "branches are '0': give numbers from 1"),
        (["--branch-len", "0"], "a node holds 0 tokens"),
        (["--tree-file", "nowhere.json"], "nowhere.json cannot be read"),
        (["--replay", "nowhere.json"], "nowhere.json cannot be read"),
        (["--samples", "0"], "samples is 0"),
        (["--plots"], "give --save-result FOLDER"),
        (["--prompt-len", "9000", "--workloads", "few-shot"], "needs 9009 positions and the model"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_bad_input_is_one_sentence(arguments, named):
    with pytest.raises(ValueError, match=named) as caught:
        cli.main([*WORK, *arguments])
    assert "\n" not in str(caught.value)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="on a machine with a GPU"):
        cli.main(["workload"])
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        cli.main(["workload", "--device", "cuda"])


def test_windows_are_refused():
    meter = workload_measure.Meter.of(TargetModel(tiny_model("mistral-window")), lambda: 0.0, 1)
    options = argparse.Namespace(branches="2", prompt_len=40, branch_len=3)
    (job,) = workload_jobs.make_jobs(argparse.Namespace(**vars(options), workloads="few-shot"))
    state = job.state(meter.target, 16)
    with pytest.raises(ValueError, match="without sliding windows"):
        workload_measure.measure_workload(
            meter, state, ("flatten",), 1, RunFolder(None), "w", lambda: None
        )
