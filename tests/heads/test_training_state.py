"""States to resume from that are damaged, made up or another run's: refused, nothing changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdeft.heads.curves import LOG_NAME
from specdeft.heads.documents import Documents
from specdeft.heads.medusa import MedusaHeads
from specdeft.heads.target import Target
from specdeft.heads.text_store import TextStore
from specdeft.heads.trainer import Trainer
from specdeft.heads.training_state import STATE_NAME, fingerprint

from .test_trainer import CONFIG, heads_for, source_for, texts

SHORT = replace(CONFIG, max_steps=4, save_every=2)
State = dict[str, Any]


def trainer(target: Target, folder: Path, heads: MedusaHeads, documents: Documents) -> Trainer:
    return Trainer(target.model, heads, source_for(target, documents), SHORT, folder)


def saved(target: Target, folder: Path) -> State:
    trainer(target, folder, heads_for(target), texts()).run()
    state: State = torch.load(folder / STATE_NAME, weights_only=True)
    return state


def moments(state: State) -> State:
    entry: State = next(iter(state["optimizer"]["state"].values()))
    return entry


def put(*path: Any) -> Callable[[State], None]:
    """Sets the place `path[:-1]` of a state to path[-1]."""

    def change(state: State) -> None:
        place: Any = state
        for key in path[:-2]:
            place = place[key]
        place[path[-2]] = path[-1]

    return change


def first_moment(name: str, tensor: Any) -> Callable[[State], None]:
    return lambda state: moments(state).update({name: tensor})


DAMAGES: dict[str, Callable[[State], Any]] = {
    "no last": lambda state: state.pop("last"),
    "no skipped": lambda state: state.pop("skipped"),
    "negative step": put("step", -5),
    "step past the end": put("step", 5),
    "step no number": put("step", "4"),
    "step a truth": put("step", True),
    "no steps in all": put("num_steps", 0),
    "more skipped than done": put("skipped", 9),
    "negative log": put("log_bytes", -1),
    "log longer than it is": put("log_bytes", 1 << 30),
    "last no table": put("last", "x"),
    "last no JSON": put("last", {"x": torch.zeros(2)}),
    "last not a number": put("last", {"x": float("nan")}),
    "configuration no table": put("config", 5),
    "configuration of tensors": put("config", {"seed": torch.zeros(3)}),
    "heads a list": put("heads", [1]),
    "a tensor of the heads missing": lambda state: state["heads"].pop("token_weight"),
    "a tensor of the heads too many": put("heads", "x", torch.zeros(1)),
    "heads of another shape": put("heads", "token_weight", torch.zeros(3)),
    "heads of another dtype": lambda state: state["heads"].update(
        token_weight=state["heads"]["token_weight"].to(torch.int8)
    ),
    "heads of no memory": lambda state: state["heads"].update(
        token_weight=state["heads"]["token_weight"].to("meta")
    ),
    "heads not finite": lambda state: state["heads"]["token_weight"].fill_(float("nan")),
    "optimizer no table": put("optimizer", "x"),
    "optimizer without groups": put("optimizer", "param_groups", []),
    "optimizer of other settings": put("optimizer", "param_groups", 0, "betas", "zz"),
    "optimizer of other parameters": put("optimizer", "param_groups", 0, "params", [0]),
    "optimizer without moments": put("optimizer", "state", {}),
    "moments of an unknown parameter": put("optimizer", "state", 77, {}),
    "moments of another shape": first_moment("exp_avg", torch.zeros(2)),
    "moments no tensor": first_moment("exp_avg", 3),
    "moments not finite": lambda state: moments(state)["exp_avg"].fill_(float("inf")),
    "negative squares": lambda state: moments(state)["exp_avg_sq"].fill_(-1.0),
    "moments of a later step": first_moment("step", torch.tensor(99.0)),
    "moments of no step": first_moment("step", torch.tensor(float("nan"))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_states_are_refused_and_nothing_changes(
    tmp_path: Path, target: Target, damage: str
) -> None:
    state = saved(target, tmp_path)
    DAMAGES[damage](state)
    torch.save(state, tmp_path / STATE_NAME)
    log, heads = (tmp_path / LOG_NAME).read_bytes(), heads_for(target)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    with pytest.raises(ValueError, match="delete the file to start anew") as refusal:
        trainer(target, tmp_path, heads, texts()).run(resume=True)
    assert str(refusal.value).count("\n") == 0
    assert STATE_NAME in str(refusal.value)
    assert (tmp_path / LOG_NAME).read_bytes() == log
    assert all(torch.equal(before[name], now) for name, now in heads.state_dict().items())


@pytest.mark.parametrize("content", [torch.zeros(3), [1, 2], 5, {}])
def test_states_of_something_else(tmp_path: Path, target: Target, content: Any) -> None:
    torch.save(content, tmp_path / STATE_NAME)
    with pytest.raises(ValueError, match="delete the file to start anew"):
        trainer(target, tmp_path, heads_for(target), texts()).run(resume=True)


def test_code_in_a_state_is_not_run(tmp_path: Path, target: Target) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"config": Evil()}, tmp_path / STATE_NAME)
    with pytest.raises(ValueError, match="no whole training state"):
        trainer(target, tmp_path, heads_for(target), texts()).run(resume=True)
    assert not (tmp_path / "executed").exists()
    torch.load(tmp_path / STATE_NAME, weights_only=False)  # the file is what it is said to be
    assert (tmp_path / "executed").is_dir()


def test_a_state_without_its_log_is_refused(tmp_path: Path, target: Target) -> None:
    saved(target, tmp_path)
    (tmp_path / LOG_NAME).unlink()
    with pytest.raises(ValueError, match="the log has 0 bytes"):
        trainer(target, tmp_path, heads_for(target), texts()).run(resume=True)


def test_states_of_other_texts_and_other_heads_are_refused(tmp_path: Path, target: Target) -> None:
    saved(target, tmp_path)
    other = trainer(target, tmp_path, heads_for(target), texts(seed=1))
    with pytest.raises(ValueError, match="another model, kind of heads or set of texts"):
        other.run(resume=True)
    named = heads_for(target, base_model="another")
    with pytest.raises(ValueError, match="another model, kind of heads or set of texts"):
        trainer(target, tmp_path, named, texts()).run(resume=True)


def test_fingerprints_tell_texts_apart() -> None:
    documents = texts()
    turned = replace(documents, learn=~documents.learn)
    assert fingerprint(documents) == fingerprint(texts())
    assert len({fingerprint(documents), fingerprint(texts(seed=1)), fingerprint(turned)}) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", torch.full((40,), float("nan"))),
        ("temperature", torch.zeros(40, dtype=torch.int32)),
        ("temperature", torch.full((40,), -1.0)),
        ("learn", torch.ones(480)),
    ],
)
def test_texts_with_odd_values_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "documents.safetensors"
    texts().save(path)
    save_file({**load_file(path), name: value}, path)
    with pytest.raises(ValueError, match="do not add up"):
        Documents.load(path)


def test_a_wave_that_is_missing_is_named(tmp_path: Path) -> None:
    store = TextStore.open(tmp_path / "waves", {"seed": 1}, "tiny", resume=False)
    for seed in range(3):
        store.add(texts(4, seed))
    assert len(store.waves()) == 3
    (tmp_path / "waves" / "wave-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks wave-00001"):
        store.waves()


def test_a_plan_that_is_no_text_is_another_plan(tmp_path: Path) -> None:
    TextStore.open(tmp_path, {"seed": 1}, "tiny", resume=False)
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="another model or plan"):
        TextStore.open(tmp_path, {"seed": 1}, "tiny", resume=True)
