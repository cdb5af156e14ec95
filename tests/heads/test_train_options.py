"""What `specdeft train` refuses before it loads a model: nothing is written, one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdeft.heads.train import main
from specdeft.heads.train_options import DOCUMENTS_NAME, RUN_NAME, as_config, parse

from .conftest import make_target

VALUES: list[tuple[str, Any, str]] = [
    *((name, bad, "whole number from 1") for name in ("epochs", "batch_rows") for bad in (0, -1)),
    *((name, 0, "whole number from 1") for name in ("wave_rows", "num_heads", "self_generate")),
    *((name, 0, "whole number from 1") for name in ("accumulate", "save_every", "max_steps")),
    *((name, 0, "whole number from 1") for name in ("evaluate_every", "joint_steps")),
    ("draft_vocab_size", 0, "whole number from 1"),
    ("max_length", 1, "whole number from 2"),
    *((name, -1, "whole number from 0") for name in ("num_layers", "cell_size", "seed")),
    *((n, x, "above 0") for n in ("learning_rate", "time_limit_s") for x in (0, -1, "nan", "inf")),
    *(("held_out", bad, "share of the texts") for bad in (1, 1.5, -0.1, "nan")),
    ("seed", 1 << 40, "whole number from 0"),
]


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    command = ["--model", "no/such", "--output", str(folder / "out"), *arguments]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be loaded" not in said
    assert not (folder / "out").exists()
    return said


@pytest.mark.parametrize(("name", "value", "message"), VALUES)
def test_values_that_cannot_be_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any, message: str
) -> None:
    option = f"--{name.replace('_', '-')}"
    said = refused(capsys, tmp_path, option, str(value))
    assert f"{option} is " in said
    assert message in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"seed": 1.5}, "--seed is 1.5"),
        ({"epochs": True}, "--epochs is True"),
        ({"epochs": None}, "--epochs is None"),
        ({"learning_rate": [1]}, "--learning-rate is"),
        ({"resume": "yes"}, "--resume is 'yes': give true or false"),
        ({"shard_target": 1}, "--shard-target is 1: give true or false"),
        ({"loss": "weird"}, "--loss is 'weird': choose from hard, soft"),
        ({"heads_output": None}, "--heads-output is None: choose from"),
        ({"data": 5}, "--data is 5"),
        ({"data": []}, r"--data is \[\]"),
        ({"data": [7]}, r"--data is \[7\]"),
    ],
)
def test_values_of_a_config_are_checked_like_typed_ones(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        parse(["--model", "m", "--output", str(tmp_path / "out"), "--config", str(path)])


@pytest.mark.parametrize("content", [{"model": 7, "output": "o"}, {"model": "m", "output": 5}])
def test_names_of_a_config_are_checked(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="give a"):
        parse(["--config", str(path)])


def test_a_run_file_is_a_config(tmp_path: Path) -> None:
    options = parse(["--model", "m", "--output", "o", "--data", "a", "b", "--max-steps", "3"])
    path = tmp_path / RUN_NAME
    path.write_text(json.dumps(as_config(options)), encoding="utf-8")
    again = parse(["--config", str(path), "--output", "p"])
    assert as_config(again) == as_config(options)


def test_texts_to_learn_from_must_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is no file" in refused(capsys, tmp_path, "--data", str(tmp_path / "nothing.jsonl"))


def test_an_output_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    assert main(["--model", "no/such", "--output", str(tmp_path / "out")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "out").read_text(encoding="utf-8") == "mine"


def test_heads_that_the_model_cannot_have_are_refused_before_texts_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target()
    target.model.save_pretrained(tmp_path / "tiny")
    target.tokenizer.save_pretrained(tmp_path / "tiny")
    command = ["--model", str(tmp_path / "tiny"), "--output", str(tmp_path / "out")]
    too_many = ["--heads-output", "reduced", "--draft-vocab-size", "97"]
    assert main([*command, *too_many]) == 2
    assert "draft_vocab_size is 97" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_resuming_with_other_texts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    command = ["--model", "no/such", "--output", str(output), "--seed", "5"]
    (output / RUN_NAME).write_text(json.dumps(as_config(parse(command))), encoding="utf-8")
    (output / DOCUMENTS_NAME).write_bytes(b"")
    for change in (["--seed", "6"], ["--model", "other"], ["--self-generate", "7"]):
        assert main([*command, *change, "--resume"]) == 2
        said = capsys.readouterr().err
        assert f"{change[0]} " in said
        assert "--resume finds texts" in said
    assert main([*command, "--resume"]) == 2  # the same ones: only now is the model looked for
    assert "cannot be loaded" in capsys.readouterr().err
