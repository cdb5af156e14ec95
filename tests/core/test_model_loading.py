"""Both ways to a model, the decoder's and the trainer's, refuse the same in the same words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdeft import loading
from specdeft.heads import target as training
from tests.core.test_generate_command import save_tokenizer
from tests.core.tiny import tiny_model

LOADERS: list[Callable[..., Any]] = [
    lambda path: loading.load_target(path, dtype="float32", device="cpu"),
    lambda path: training.load_target(str(path), device="cpu"),
]


@pytest.fixture(params=LOADERS, ids=["decoder", "trainer"])
def load(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    save_tokenizer(tmp_path, chat=False)
    return tmp_path


def test_a_whole_model_loads(load: Any, folder: Path) -> None:
    loaded = load(folder)
    assert loaded.model.get_output_embeddings().weight.shape[1] == 64
    assert not loaded.model.training


def test_missing_weights_are_not_made_up(load: Any, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights \(model.layers.0.mlp.up_proj.weight"):
        load(folder)


@pytest.mark.parametrize("damage", ["truncated", "no config", "no tokenizer", "nothing"])
def test_what_cannot_be_loaded_is_one_sentence(load: Any, folder: Path, damage: str) -> None:
    if damage == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "nothing":
        folder = folder / "nothing"
    else:
        pattern = "config.json" if damage == "no config" else "tokenizer*"
        for path in folder.glob(pattern):
            path.unlink()
    with pytest.raises(ValueError, match=r"the model .* cannot be loaded \(.*\): give ") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
