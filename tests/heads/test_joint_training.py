"""Medusa-2: the target bends towards its heads and stays what it was in what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

from specdeft.heads import joint
from specdeft.heads.features import extract
from specdeft.heads.joint import JointConfig, train_jointly
from specdeft.heads.medusa import MedusaHeads
from specdeft.heads.target import Target
from specdeft.heads.train import main
from specdeft.heads.trainer import Trainer, batch_loss

from .conftest import make_target
from .test_trainer import CONFIG, heads_for, source_for, texts

WAYS = ["full", "lora"]


def needs(how: str) -> None:
    if how == "lora":
        pytest.importorskip("peft")


def heads_loss(target: Target, heads: MedusaHeads) -> float:
    rows = extract(target.model, texts(20, seed=7), 2)
    index = torch.arange(len(rows))
    return float(batch_loss(target.model, heads, CONFIG, rows, index).total.detach())


@pytest.mark.parametrize("how", WAYS)
def test_joint_training_helps_the_heads_and_keeps_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    needs(how)
    target = make_target()
    documents = texts(60)
    heads = heads_for(target, projection=False)
    Trainer(target.model, heads, source_for(target, documents), CONFIG, tmp_path).run()
    alone = heads_loss(target, heads)
    config = JointConfig(how, steps=120, learning_rate=1e-3, batch_tokens=120)
    log: list[dict[str, Any]] = []
    new, report = train_jointly(target, heads, documents, config, log.append)
    assert report["steps"] == 120
    assert len(log) >= 6
    assert log[0]["target_kl"] == pytest.approx(0, abs=1e-5)  # nothing has moved yet
    assert heads_loss(new, heads) < 0.95 * alone
    assert not any(parameter.requires_grad for parameter in new.model.parameters())
    # The negative control: the same steps without the term that keeps the target.
    drifting = make_target()
    monkeypatch.setattr(joint, "kl_div", lambda said, *rest, **how: 0 * said.sum())
    start = heads_for(drifting, projection=False)
    drifted, _ = train_jointly(drifting, start, documents, config)
    assert 0 < divergence(new) < 0.25 * divergence(drifted)


def divergence(target: Target) -> float:
    """From the target as it was, nats a token, at the positions to learn."""
    rows = extract(make_target().model, texts(20), 2)
    rows_now = extract(target.model, texts(20), 2)
    said, wanted = (
        t.model.get_output_embeddings()(r.hidden).log_softmax(-1)
        for t, r in ((target, rows_now), (make_target(), rows))
    )
    return float(kl_div(said, wanted, reduction="batchmean", log_target=True))


@pytest.mark.parametrize("how", WAYS)
def test_the_command_writes_a_target_that_loads(tmp_path: Path, how: str) -> None:
    needs(how)
    tiny = make_target()
    tiny.model.save_pretrained(tmp_path / "tiny")
    tiny.tokenizer.save_pretrained(tmp_path / "tiny")
    data, output = tmp_path / "data.jsonl", tmp_path / "heads"
    lines = [json.dumps({"text": " ".join(f"w{i + j}" for j in range(12))}) for i in range(40)]
    data.write_text("\n".join(lines), encoding="utf-8")
    command = ["--model", str(tmp_path / "tiny"), "--data", str(data), "--output", str(output)]
    small = ["--num-heads", "2", "--num-layers", "1", "--batch-rows", "64", "--epochs", "2"]
    assert main([*command, *small, "--joint", how, "--joint-steps", "30"]) == 0
    new = AutoModelForCausalLM.from_pretrained(output / "target")
    old = tiny.model.state_dict()
    assert new.state_dict().keys() == old.keys()
    assert any(not torch.equal(t, old[n]) for n, t in new.state_dict().items())
    record = json.loads((output / "training_record.json").read_text())
    assert record["joint"]["how"] == how
    assert record["joint"]["target_kl"] >= 0
    assert MedusaHeads.load(output, hidden_size=16, vocab_size=96).config.num_heads == 2


def test_lora_without_peft_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joint, "find_spec", lambda name: None)
    command = ["--model", "no/such", "--output", str(tmp_path), "--joint", "lora"]
    assert main(command) == 2
    assert "pip install 'specdeft[peft]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["steps", "learning_rate", "heads_weight"])
def test_impossible_joint_settings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(JointConfig(), **{name: 0})
