"""A target in parts (`--shard-target`): the same heads, killed and resumed or not, and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdeft.heads.parallel import ALONE, Processes
from specdeft.heads.sharding import shard
from specdeft.heads.target import Target
from specdeft.heads.train import main
from specdeft.heads.training_state import STATE_NAME

from .conftest import make_target

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PAIR = Processes(2, 0)


def torchrun(script: str, *arguments: str, processes: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(processes), str(ROOT / script), *arguments]


def finish(command: list[str]) -> str:
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tiny_model(folder: Path) -> Path:
    target = make_target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("processes", [1, 2])
def test_parts_compute_what_the_whole_does_however_unevenly_used(processes: int) -> None:
    said = finish(torchrun("tests/heads/sharded_forwards.py", processes=processes))
    assert said.count("the same") == processes


@pytest.mark.gpu
def test_parts_on_a_gpu() -> None:
    said = finish(torchrun("tests/heads/sharded_forwards.py", processes=1))
    assert said.count("the same") == 1


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher and to everything it started."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rsplit(")")[-1].split()[1])
        except OSError:  # it has just ended
            continue
    family = [process.pid]
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
    for one in family:
        os.kill(one, signal.SIGKILL)
    process.wait()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the killed processes in /proc")
def test_sharded_killed_and_resumed_gives_the_files_of_the_whole_target(tmp_path: Path) -> None:
    command = [
        *("--model", str(tiny_model(tmp_path / "tiny")), "--self-generate", "40"),
        *("--wave-rows", "10", "--num-heads", "2", "--num-layers", "1", "--held-out", "0.1"),
        *("--batch-rows", "64", "--max-steps", "60", "--save-every", "5", "--seed", "5"),
    ]
    finish(torchrun("heads/train.py", *command, "--output", str(tmp_path / "whole")))
    parts = tmp_path / "parts"
    sharded = torchrun("heads/train.py", *command, "--shard-target", "--output", str(parts))
    with subprocess.Popen(
        sharded, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not (parts / STATE_NAME).is_file():
            time.sleep(0.005)
        assert process.poll() is None, "it ended before it could be killed"
        kill_session(process)
    saved = torch.load(parts / STATE_NAME, weights_only=True)
    assert 5 <= saved["step"] < 60
    assert not (parts / "training_record.json").exists()
    finish([*sharded, "--resume"])
    for name in ("model.safetensors", "documents.safetensors", "tree_values.json", "log.jsonl"):
        assert (parts / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads((parts / "run.json").read_text())["shard_target"]


def test_one_process_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--model", "no/such", "--output", str(tmp_path / "out"), "--shard-target"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "torchrun --nproc-per-node N" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_loaded_is_refused_by_all_processes(tmp_path: Path) -> None:
    command = ["--model", str(tmp_path / "no"), "--output", str(tmp_path / "o"), "--shard-target"]
    done = subprocess.run(
        torchrun("heads/train.py", *command),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("specdeft train: the model") == 2
    assert not (tmp_path / "o").exists()


def quantised_by_config() -> Target:
    target = make_target()
    target.model.config.quantization_config = {"quant_method": "fp8"}
    return target


def quantised_by_weights() -> Target:
    target = make_target()
    layer: Any = target.model.base_model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return target


@pytest.mark.parametrize("made", [quantised_by_config, quantised_by_weights])
def test_quantised_targets_are_refused(made: Any) -> None:
    with pytest.raises(ValueError, match="tiny is quantised and --shard-target"):
        shard(made(), PAIR, "cpu")


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    target = make_target()
    layers = target.model.base_model.layers
    target.model.base_model.layers = nn.Sequential(*layers)
    with pytest.raises(ValueError, match="no list of layers in tiny"):
        shard(target, PAIR, "cpu")


def test_alone_nobody_needs_attendance() -> None:
    ALONE.wait()
    assert ALONE.agree("this") == "this"
