"""The harness on the accelerator: graphs, planned drafts inside them, memory, phases."""

import json

import pytest

from specdeft.bench import cli

pytestmark = pytest.mark.gpu
MODEL = ["--model", "random:llama-tiny", "--heads", "random", "--device", "cuda"]
WORK = ["--trees", "deft-32", "--input-len", "10,1000", "--output-len", "41", "--lossy"]


def test_latency_with_planned_drafts(capsys, tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text('{"accept_lengths": [[3, 1], [5]]}')
    arguments = ["latency", *MODEL, *WORK, "--dtype", "float32", "-r", "2", "--output", "json"]
    arguments += ["--baselines", "transformers,oracle,random,replay", "--replay", str(lengths)]
    cli.main(arguments)
    rows = {row["row"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    replayed = rows["replay(deft-32)"]["by_kind"]
    assert replayed["10 tokens"]["mean_acceptance_length"] == pytest.approx(2.0)
    assert replayed["1000 tokens"]["mean_acceptance_length"] == pytest.approx(5.0)
    assert rows["oracle(deft-32)"]["mean_acceptance_length"] == pytest.approx(5.0)
    assert rows["random(deft-32)"]["mean_acceptance_length"] == pytest.approx(1.0)
    for row in rows.values():
        assert row["max_memory_allocated"] > 0
        assert row["ttft_ms"]["median"] > 0
    phases = rows["deft-32"]["phases_ms"]
    # Marks between phases cost some microseconds each, which idle then lacks.
    assert min(value for name, value in phases.items() if name != "idle") > 0
    # 41 tokens behind 1,000 pass 1,024, where another graph is captured: not in the time.
    assert abs(phases["idle"]) < 3


def test_no_capture_is_taken_for_a_step(capsys):
    """A text that grows into another context bucket: its graph is captured before it is timed."""
    arguments = ["latency", *MODEL, "--trees", "deft-32", "--input-len", "1000", "--lossy"]
    arguments += ["--output-len", "60", "--dtype", "float32", "-r", "3", "--baselines", "none"]
    cli.main([*arguments, "--output", "json"])
    for row in json.loads(capsys.readouterr().out)["rows"]:
        step_ms = row["itl_ms"]["median"]
        assert sum(row["phases_ms"].values()) < 2 * step_ms


def test_acceptance(capsys):
    arguments = ["acceptance", *MODEL, "--trees", "deft-32", "--input-len", "30"]
    arguments += ["--output-len", "60", "--dtype", "bfloat16", "--output", "json"]
    assert cli.main(arguments) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert row["num_output_tokens"] == 60
        assert row["mean_acceptance_length"] >= 1.0


def test_workloads_of_every_method(capsys):
    arguments = ["workload", "--model", "random:llama-tiny", "--device", "cuda"]
    arguments += ["--dtype", "bfloat16", "--prompt-len", "300", "--branches", "3", "--samples", "2"]
    arguments += ["--branch-len", "20", "--trees", "deft-32", "-r", "2", "--output", "json"]
    assert cli.main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 3 * 5
    for row in rows:
        assert row["logits_difference"] < 0.05
        assert 0 < row["attention_ms_per_step"] < row["forward_ms_per_step"]


def test_batches_and_temperatures(capsys):
    arguments = ["latency", *MODEL, "--trees", "deft-32", "--input-len", "40", "--num-prompts", "4"]
    arguments += ["--output-len", "30", "--dtype", "float32", "-r", "2", "--baselines", "none"]
    arguments += ["--temperature", "0,0.7", "--batch-sizes", "1,4", "--output", "json"]
    assert cli.main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["batch_size"] for row in data["batches"]] == [1, 1, 4, 4]
    assert all(row["has_speed"] for row in [*data["rows"], *data["batches"]])
