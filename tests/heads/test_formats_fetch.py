"""Heads by hub id: what is asked of the hub, and one sentence when it cannot be reached."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from specdeft.heads.formats.fetch import local_path
from specdeft.heads.medusa import MedusaHeads
from tests.heads.formats_fixtures import (
    F1,
    F4,
    F5,
    H,
    K,
    V,
    base_tensors,
    table,
    values,
    write,
    write_shards,
)


class Hub:
    """One repository; downloads copy what the patterns allow, as the hub's client does."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.cache = repository, cache

    def snapshot_download(self, repository: str, allow_patterns: list[str]) -> str:
        assert repository == "lab/heads"
        self.cache.mkdir(exist_ok=True)
        for path in self.repository.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, self.cache / path.name)
        return str(self.cache)

    @property
    def downloaded(self) -> set[str]:
        return {path.name for path in self.cache.iterdir()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.chdir(tmp_path)
    hub = Hub(tmp_path / "repository", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def load() -> MedusaHeads:
    return MedusaHeads.load(local_path("lab/heads"), hidden_size=H, vocab_size=V)


def test_heads_alone(hub: Hub) -> None:
    folder = write(
        hub.repository, "medusa_lm_head.safetensors", table(F1, values()), medusa_num_heads=3
    )
    (folder / "pytorch_model.bin").write_bytes(b"large")
    (folder / "README.md").write_text("")
    assert load().config.num_heads == K
    assert hub.downloaded == {"config.json", "medusa_lm_head.safetensors"}


def test_of_a_merged_model_only_the_shards_with_heads(hub: Hub) -> None:
    tensors = {**table(F4, values()), **base_tensors()}
    folder = write_shards(hub.repository, "safetensors", table(F4, values()), medusa_num_heads=3)
    index = folder / "model.safetensors.index.json"
    places = ", ".join(f'"{name}": "model-base.safetensors"' for name in base_tensors())
    index.write_text(index.read_text().replace('"weight_map": {', f'"weight_map": {{{places}, '))
    write(folder, "model-base.safetensors", {name: tensors[name] for name in base_tensors()})
    assert load().config.num_heads == K
    assert "model-base.safetensors" not in hub.downloaded
    assert "model-00001-of-00002.safetensors" in hub.downloaded


def test_one_file(hub: Hub) -> None:
    write(hub.repository, "model.safetensors", table(F5, values()), model_type="medusa")
    assert torch.equal(load().block_weight, values().weight)


def test_a_model_without_heads_is_not_downloaded(hub: Hub) -> None:
    write_shards(hub.repository, "safetensors", base_tensors())
    with pytest.raises(ValueError, match="places no heads"):
        load()
    assert not any(name.startswith("model-") for name in hub.downloaded)


@pytest.mark.parametrize("error", [ConnectionError("no route\nto host"), RuntimeError()])
def test_a_hub_out_of_reach_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="'lab/heads' are no local path") as caught:
        local_path("lab/heads")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["here/heads", "nowhere", "a/b/c", "../x", "/x/y", "./a/b"])
def test_paths_are_not_looked_up(hub: Hub, name: str) -> None:
    Path("here/heads").mkdir(parents=True)
    assert local_path(name) == Path(name)
    assert not hub.cache.exists()


def test_a_path_object_is_a_path(hub: Hub) -> None:
    assert local_path(Path("lab/heads")) == Path("lab/heads")
