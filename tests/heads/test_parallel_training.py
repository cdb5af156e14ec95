"""Two processes under torchrun train the same heads as one that adds up the same parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from specdeft.heads import train
from specdeft.heads.features import extract
from specdeft.heads.parallel import ALONE
from specdeft.heads.target import Target
from specdeft.heads.trainer import batch_loss, known_labels

from .conftest import make_target
from .test_trainer import CONFIG, heads_for, texts

ROOT = Path(__file__).parents[2]


def test_two_processes_and_two_parts_give_the_same_weights(tmp_path: Path) -> None:
    target = make_target()
    target.model.save_pretrained(tmp_path / "tiny")
    target.tokenizer.save_pretrained(tmp_path / "tiny")
    data = tmp_path / "data.jsonl"
    lines = [" ".join(f"w{i + j}" for j in range(12)) for i in range(40)]
    data.write_text("\n".join(json.dumps({"text": line}) for line in lines), encoding="utf-8")
    command = [
        *("--model", str(tmp_path / "tiny"), "--data", str(data), "--num-heads", "2"),
        *("--num-layers", "1", "--batch-rows", "50", "--epochs", "4", "--held-out", "0.1"),
        *("--save-every", "10"),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    two = [*torchrun, "--nproc-per-node", "2", str(ROOT / "heads" / "train.py"), *command]
    done = subprocess.run(
        [*two, "--output", str(tmp_path / "two")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert train.main([*command, "--accumulate", "2", "--output", str(tmp_path / "one")]) == 0
    # The sum of two numbers has no order, so nothing may differ at all.
    states = [
        torch.load(tmp_path / name / "training_state.pt", weights_only=True)
        for name in ("one", "two")
    ]
    assert states[0]["step"] == states[1]["step"] >= 20
    for name, tensor in states[0]["heads"].items():
        assert torch.equal(tensor, states[1]["heads"][name])
    for name in ("model.safetensors", "tree_values.json", "log.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_parts_of_a_batch_add_up_to_its_gradient(target: Target) -> None:
    """Against the whole batch in float64, the parts err as little as the whole does."""
    features = extract(target.model, texts(), 2)
    index = torch.arange(0, len(features), 3)

    def gradient(parts: int, dtype: torch.dtype) -> torch.Tensor:
        heads = heads_for(target).to(dtype)
        model = target.model.to(dtype)
        rows = replace(features, hidden=features.hidden.to(dtype))
        counts = known_labels(heads, rows, index)
        for part in index.tensor_split(parts):
            batch_loss(model, heads, CONFIG, rows, part, counts).total.backward()
        target.model.to(torch.float32)
        assert heads.token_weight is not None
        assert heads.token_weight.grad is not None
        return heads.token_weight.grad.double()

    exact = gradient(1, torch.float64)
    whole_error = (gradient(1, torch.float32) - exact).abs().max()
    ulp = exact.abs().max() * torch.finfo(torch.float32).eps
    for parts in (2, 5):
        error = (gradient(parts, torch.float32) - exact).abs().max()
        assert error <= 2 * (whole_error + ulp)


def test_one_process_alone_needs_no_group() -> None:
    assert ALONE.first
    assert torch.equal(ALONE.add(torch.ones(2)), torch.ones(2))
    assert ALONE.agree(7) == 7
    ALONE.wait()
