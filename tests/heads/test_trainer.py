"""The training loop: it learns, leaves the target alone, skips empty batches, resumes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdeft.heads.documents import Documents, from_lists
from specdeft.heads.features import IGNORED, extract
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.heads.target import Target
from specdeft.heads.train import new_heads
from specdeft.heads.train_options import Shape
from specdeft.heads.trainer import (
    FeatureSource,
    TrainConfig,
    Trainer,
    batch_loss,
    batches,
    frequent_ids,
    in_draft_vocabulary,
    learning_rate,
)
from specdeft.heads.training_state import STATE_NAME

from .conftest import VOCAB_SIZE

CONFIG = TrainConfig(
    batch_rows=32,
    epochs=4,
    learning_rate=1e-2,
    log_every=5,
    evaluate_every=1000,
    save_every=1000,
    chunk_tokens=150,
)


def texts(count: int = 40, seed: int = 0) -> Documents:
    """Counting upwards in steps of one: easy to learn, but not for a random model."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(3, 60, (count,), generator=generator).tolist()
    ids = [list(range(start, start + 12)) for start in starts]
    return from_lists(ids, [[i > 2 for i in range(12)] for _ in ids])


def heads_for(target: Target, **changes: Any) -> MedusaHeads:
    settings = {"num_heads": 2, "num_layers": 1, "token_input": True, "projection": True, **changes}
    config = HeadsConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, **settings)
    ids = None
    if config.draft_vocab_size is not None:
        ids = frequent_ids(texts(), config.draft_vocab_size, VOCAB_SIZE)[0]
    heads = MedusaHeads(config, ids)
    if config.output == "own":
        heads.init_own_output(target.model.get_output_embeddings())
    return heads


def source_for(target: Target, documents: Documents, config: TrainConfig = CONFIG) -> FeatureSource:
    return FeatureSource(target.model, documents, 2, config.chunk_tokens, config.seed)


@pytest.mark.parametrize(
    "changes",
    [
        {"output": "shared"},
        {"output": "own", "projection": False},
        {"output": "own", "projection": False, "draft_vocab_size": 64},
        {"output": "reduced", "draft_vocab_size": 64},
        {"output": "shared", "token_input": False},
        {"output": "reduced", "draft_vocab_size": 64, "sequential": True},
        {"output": "shared", "sequential": True, "cell_size": 40, "num_layers": 2},
    ],
)
def test_training_reduces_the_loss_and_leaves_the_target_alone(
    tmp_path: Path, target: Target, changes: dict[str, Any]
) -> None:
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    heads = heads_for(target, **changes)
    held_out = extract(target.model, texts(10, seed=9), 2)
    trainer = Trainer(
        target.model,
        heads,
        source_for(target, texts()),
        CONFIG,
        tmp_path,
        held_out,
        say=lambda _: None,
    )
    result = trainer.run()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert result["top1"][0] > 5 / VOCAB_SIZE  # five times a guess
    assert set(result["tau"]) >= {"4", "8"}
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_soft_targets_with_an_untrained_answer_learn_the_target_itself(
    tmp_path: Path, target: Target
) -> None:
    config = replace(CONFIG, loss="soft", soft_temperature=1.0)
    trainer = Trainer(
        target.model, heads_for(target), source_for(target, texts(), config), config, tmp_path
    )
    trainer.run()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["loss"] < json.loads(lines[0])["loss"]


def test_soft_teacher_is_the_hidden_state_that_decided_the_label(target: Target) -> None:
    """With the teacher's distribution as the student's own, the loss is the teacher's entropy."""
    rows = extract(target.model, texts(3), 2)
    config = replace(CONFIG, loss="soft", soft_temperature=1.0)
    losses = batch_loss(target.model, heads_for(target), config, rows, torch.arange(len(rows)))
    teacher = target.model.lm_head(rows.hidden).log_softmax(-1)
    student = teacher  # fresh heads repeat the target's next-token logits
    for head in range(2):
        known = (rows.labels[:, head] != IGNORED).nonzero().squeeze(1)
        expected = -(teacher[known + 1 + head].exp() * student[known]).sum(-1).mean()
        torch.testing.assert_close(losses.per_head[head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("killed_at", [1, 7, 13])
def test_resume_gives_the_same_weights(tmp_path: Path, target: Target, killed_at: int) -> None:
    config = replace(CONFIG, max_steps=16, save_every=3)
    whole, cut = heads_for(target), heads_for(target)
    Trainer(target.model, whole, source_for(target, texts()), config, tmp_path / "whole").run()

    class KilledError(Exception):
        pass

    class Dying(Trainer):
        def _limit_time(self, bar: Any, done: int) -> None:
            if done == killed_at:
                raise KilledError

    with pytest.raises(KilledError):
        Dying(target.model, cut, source_for(target, texts()), config, tmp_path / "cut").run()
    fresh = heads_for(target)
    Trainer(target.model, fresh, source_for(target, texts()), config, tmp_path / "cut").run(
        resume=True
    )
    for name, tensor in whole.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)


def test_resume_with_another_configuration_is_refused(tmp_path: Path, target: Target) -> None:
    config = replace(CONFIG, max_steps=4, save_every=2)
    heads = heads_for(target)
    Trainer(target.model, heads, source_for(target, texts()), config, tmp_path).run()
    other = replace(config, learning_rate=1e-3)
    with pytest.raises(ValueError, match="another configuration"):
        Trainer(target.model, heads, source_for(target, texts()), other, tmp_path).run(resume=True)


@pytest.mark.parametrize("damage", ["cut", "empty", "other content", "no table"])
def test_resume_from_a_damaged_state_is_refused(
    tmp_path: Path, target: Target, damage: str
) -> None:
    config = replace(CONFIG, max_steps=4, save_every=2)
    heads = heads_for(target)
    Trainer(target.model, heads, source_for(target, texts()), config, tmp_path).run()
    state = tmp_path / STATE_NAME
    if damage in ("cut", "empty"):
        state.write_bytes(state.read_bytes()[:-200] if damage == "cut" else b"")
    else:
        torch.save({"step": 2} if damage == "other content" else 5, state)
    with pytest.raises(ValueError, match="delete the file to start anew"):
        Trainer(target.model, heads, source_for(target, texts()), config, tmp_path).run(resume=True)


def test_batches_cover_each_chunk_once_per_epoch_and_start_anywhere(target: Target) -> None:
    source = source_for(target, texts())
    assert len(source.chunks) > 1
    assert sorted(i for chunk in source.chunks for i in chunk.tolist()) == list(range(40))
    assert [len(source.features(i)) for i in range(len(source.chunks))] == source.rows
    everything = [(step, index.tolist()) for step, _, index in batches(source, CONFIG, 0, 25)]
    assert [step for step, _ in everything] == list(range(25))
    later = [(step, index.tolist()) for step, _, index in batches(source, CONFIG, 9, 25)]
    assert later == everything[9:]


def test_batches_without_labels_are_skipped_and_counted(tmp_path: Path, target: Target) -> None:
    lonely = from_lists([[5, 6, 7]] * 4, [[False, False, True]] * 4)  # a root and nothing after
    heads = heads_for(target)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    result = Trainer(target.model, heads, source_for(target, lonely), CONFIG, tmp_path).run()
    assert result["skipped_batches"] == result["steps"] > 0
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_nothing_to_learn_is_refused(tmp_path: Path, target: Target) -> None:
    mute = from_lists([[5, 6, 7]], [[False] * 3])
    with pytest.raises(ValueError, match="no token to learn"):
        Trainer(target.model, heads_for(target), source_for(target, mute), CONFIG, tmp_path).run()


def test_learning_rate_warms_up_and_falls() -> None:
    config = TrainConfig(learning_rate=1.0, warmup_share=0.1, final_learning_rate_share=0.1)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_draft_vocabulary_holds_the_frequent_tokens() -> None:
    documents = from_lists([[7, 7, 7, 3, 3, 9, 1]], [[True] * 6 + [False]])
    ids, coverage = frequent_ids(documents, 2, 12)
    assert ids.tolist() == [3, 7]
    assert coverage == pytest.approx(5 / 6)
    labels = torch.tensor([[7, 9, IGNORED, 3]])
    assert in_draft_vocabulary(labels, ids, 12).tolist() == [[1, IGNORED, IGNORED, 0]]


@pytest.mark.parametrize("name", ["learning_rate", "batch_rows", "epochs"])
def test_impossible_settings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TrainConfig(**{name: 0})


class Int8Linear(torch.nn.Module):
    """A linear layer as quantised models have it: no floating-point weight, no gradients."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return torch.nn.functional.linear(x, weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("output", ["shared", "own", "reduced"])
def test_a_quantised_target_is_learnt_from(tmp_path: Path, target: Target, output: str) -> None:
    layers = target.model.base_model.layers
    for layer in layers:
        for room in (layer.self_attn, layer.mlp):
            for name, child in list(room.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(room, name, Int8Linear(child))
    assert not any(isinstance(m, torch.nn.Linear) for m in layers.modules())
    size = {"draft_vocab_size": 64} if output == "reduced" else {}
    heads = heads_for(target, output=output, **size)
    source = source_for(target, texts())
    trainer = Trainer(target.model, heads, source, CONFIG, tmp_path, say=lambda _: None)
    trainer.run()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]


def test_a_quantised_output_layer_is_refused(target: Target) -> None:
    target.model.lm_head = Int8Linear(target.model.lm_head)
    with pytest.raises(ValueError, match="left out of the quantisation"):
        new_heads(target, Shape(num_heads=2, num_layers=1), texts())
