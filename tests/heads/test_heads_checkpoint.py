"""Heads on disk: round trips, and one clear sentence for whatever is wrong with a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdeft.heads.checkpoint import read_config, save_heads
from specdeft.heads.medusa import HeadsConfig, MedusaHeads

H, V = 8, 20


def make(output: str = "shared", num_heads: int = 2, num_layers: int = 1) -> MedusaHeads:
    output, _, over = output.partition(" over ")
    size = 5 if output == "reduced" or over else None
    config = HeadsConfig(
        num_heads,
        num_layers,
        H,
        V,
        output,
        True,
        True,
        size,
        "tiny",
    )
    heads = MedusaHeads(config, None if size is None else torch.tensor([0, 3, 4, 11, 19]))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


@pytest.mark.parametrize("output", ["shared", "own", "reduced", "own over a draft vocabulary"])
@pytest.mark.parametrize("num_heads", [1, 5])
@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_round_trip(tmp_path: Path, output: str, num_heads: int, num_layers: int) -> None:
    heads = make(output, num_heads, num_layers)
    heads.save(tmp_path)
    again = MedusaHeads.load(tmp_path, hidden_size=H, vocab_size=V)
    assert again.config == heads.config
    assert sorted(again.state_dict()) == sorted(heads.state_dict())
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert again.state_dict()[name].dtype == tensor.dtype
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert not list(tmp_path.glob("*.tmp"))
    assert not list(tmp_path.glob(".*"))


def test_dtype_on_disk_and_on_load(tmp_path: Path) -> None:
    save_heads(make("reduced"), tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["block_weight"].dtype == torch.bfloat16
    again = MedusaHeads.load(tmp_path, dtype=torch.float16)
    assert again.block_weight.dtype == torch.float16
    assert again.draft_ids is not None
    assert again.draft_ids.dtype == torch.int64


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    make().save(tmp_path)
    with pytest.raises(ValueError, match=r"hidden size 8 but the model has 576.*tiny"):
        MedusaHeads.load(tmp_path, hidden_size=576, vocab_size=V)
    with pytest.raises(ValueError, match="vocabulary of 20 but the model has 21"):
        MedusaHeads.load(tmp_path, hidden_size=H, vocab_size=21)


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("num_layers", [1, 2])
def test_round_trip_of_a_shared_cell(tmp_path: Path, num_layers: int) -> None:
    config = HeadsConfig(
        5, num_layers, H, V, token_input=True, projection=True, sequential=True, cell_size=12
    )
    heads = MedusaHeads(config)
    torch.nn.init.normal_(heads.block_bias)
    heads.save(tmp_path)
    again = MedusaHeads.load(tmp_path, hidden_size=H, vocab_size=V)
    assert again.config == config
    assert sorted(again.state_dict()) == sorted(heads.state_dict())
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_bias": None}, "missing"),
        ({"extra": torch.zeros(1)}, "unknown"),
        ({"block_bias": torch.zeros(1, 2, H + 1)}, "shape"),
        ({"block_bias": torch.full((1, 2, H), float("nan"))}, "NaN"),
        ({"block_bias": torch.zeros(1, 2, H, dtype=torch.int32)}, "dtype"),
        ({"draft_ids": torch.tensor([0, 1, 2, 3, V], dtype=torch.int32)}, "draft_ids"),
    ],
)
def test_damaged_weights_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    make("reduced").save(tmp_path)
    change_weights(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        MedusaHeads.load(tmp_path)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    make().save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="whole safetensors file"):
        MedusaHeads.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ('{"format": "other"}', "not a config of heads"),
        ('{"format": "specdeft-medusa-1", "num_heads": 2}', "incomplete"),
        ('{"format": "specdeft-medusa-1", "colour": 2}', "unknown"),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no heads"):
        MedusaHeads.load(tmp_path)


def test_a_failed_write_leaves_the_old_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = make()
    heads.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("specdeft.heads.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="space"):
        make(num_heads=3).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert json.loads(before["config.json"])["num_heads"] == 2


HUGE = 1 << 24


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": HUGE},
        {"num_heads": HUGE, "hidden_size": HUGE},
        {"num_heads": HUGE, "num_layers": HUGE, "hidden_size": HUGE},
        {"sequential": True, "token_input": True, "cell_size": HUGE},
        {"sequential": True, "token_input": True, "cell_size": HUGE, "hidden_size": HUGE},
        {"output": "reduced", "draft_vocab_size": HUGE, "vocab_size": HUGE},
    ],
)
def test_configs_of_any_size_cost_nothing(tmp_path: Path, changes: dict[str, object]) -> None:
    make("own").save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=r"calls for|does not fit"):
        MedusaHeads.load(tmp_path)
