"""Whole steps: ratios by hand, places in turns, what is refused."""

import json
from typing import Any

import pytest
import torch

from specdeft.bench import cli, steps
from specdeft.bench.report import as_text
from specdeft.bench.steps import StepTime, make_report
from specdeft.step_cost import Place, StepStand
from specdeft.trees.token_tree import TokenTree
from tests.bench.test_bench_commands import tiny_bench

MODEL = ["--model", "random:llama-tiny", "--heads", "random", "--device", "cpu"]
WORK = ["--dtype", "float32", "--trees", "plain,deft-32", "--context", "40,70", "-r", "3"]


def test_ratios_are_to_the_plain_step_and_to_one_sequence():
    one, eight = Place(64, 1), Place(64, 8)
    found = [
        StepTime("plain", 1, one, [3.0, 2.0, 1.0], False),
        StepTime("deft-32", 32, one, [4.0, 4.0, 5.0], False),
        StepTime("plain", 1, eight, [3.0], True),
        StepTime("deft-32", 32, eight, [6.0], False),
        StepTime("deft-32", 32, Place(128, 8), [7.0], False),
    ]
    manifest = {
        "dtype": "float32",
        "device": "CPU",
        "settings": {"repetitions": 3, "shared": 32},
    }
    report = make_report(found, manifest)
    rows = report.data["rows"]
    assert [row["step_ms"] for row in rows] == [2.0, 4.0, 3.0, 6.0, 7.0]
    assert [row["over_plain"] for row in rows] == [1.0, 2.0, 1.0, 2.0, None]
    assert [row["over_one_sequence"] for row in rows] == [1.0, 1.0, 1.5, 1.5, None]
    assert [row["shared_read"] for row in rows] == ["by each", "by each", "once", *["by each"] * 2]
    assert (rows[0]["fastest_ms"], rows[0]["slowest_ms"]) == (1.0, 3.0)
    assert "32 tokens of the context common" in as_text(report)
    manifest["settings"] = {"repetitions": 3, "shared": 0}
    nothing_shared = make_report(found, manifest).data["rows"]
    assert {row["shared_read"] for row in nothing_shared} == {""}


def test_the_command_times_every_place_and_resumes(capsys, tmp_path, monkeypatch):
    arguments = ["steps", *MODEL, *WORK, "--batch-sizes", "1,2", "--shared", "20"]
    arguments += ["--output", "json", "--save-result", str(tmp_path / "run")]
    assert cli.main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    places = [(row["num_context_tokens"], row["num_sequences"]) for row in first["rows"][::2]]
    assert places == [(40, 1), (40, 2), (70, 1), (70, 2)]
    assert [row["num_nodes"] for row in first["rows"]] == [1, 32] * 4
    assert all(row["step_ms"] > 0 for row in first["rows"])
    monkeypatch.setattr(steps, "_measured", None)
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == first["rows"]


@pytest.mark.parametrize("num_shared", [0, 20])
def test_the_stand_holds_sequences_that_begin_alike(num_shared):
    engine = tiny_bench().decoder("plain").engine
    trees = [TokenTree.chain(0), TokenTree.chain(3)]
    stand = StepStand.build(engine, trees, Place(50, 3), num_shared=num_shared)
    assert stand.batch.lengths.tolist() == [50] * 3
    assert [stand.cache.length(sequence) for sequence in stand.batch.sequences] == [50] * 3
    stand.cache.check_invariants()
    now = iter(range(100))
    assert stand.time_ms(engine.load_tree(trees[1]), lambda: float(next(now)), 1) == 1000.0
    assert torch.isfinite(stand.batch.hidden).all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--shared", "40"], "--shared is 40: give 0 or more, and less than .* .40."),
        (["--shared", "-1"], "--shared is -1"),
        (["--context", "0"], "contexts are '0'"),
        (["--batch-sizes", "x"], "batch sizes are 'x'"),
        (["-r", "0"], "repetitions is 0"),
        (["--trees", "deft-1"], "deft-1"),
        (["--context", "2040"], "context of 2048 tokens does not hold 2040 and the .* of steps"),
        (["--context", "40,2040"], "does not hold 2040"),
        (["--context", "3000", "--shared", "2500"], "does not hold 3000"),
        (["--context", "40,40"], "contexts are '40,40': give each number once"),
        (["--batch-sizes", "2,2"], "batch sizes are '2,2': give each number once"),
        (["--batch-sizes", "1,100000000"], "100000000 sequences of 40 tokens do not fit"),
        (["--seed", "99999999999999999999999"], "seed is 9+"),
        (["--threads", "0"], "threads is 0: give at least 1"),
        (["--plots"], "--plots has nowhere to go: give --save-result FOLDER"),
    ],
)
def test_what_is_refused_before_a_step_is_timed(
    wrong: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_measured", None)
    arguments: Any = ["steps", *MODEL, *WORK, *wrong]
    with pytest.raises(ValueError, match=said) as caught:
        cli.main(arguments)
    assert "\n" not in str(caught.value)
