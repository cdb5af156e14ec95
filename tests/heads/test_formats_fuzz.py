"""Random damage to files of every format: a ValueError of one line or whole heads, nothing else."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from tests.heads.formats_fixtures import (
    F1,
    F2,
    F4,
    F5,
    F7,
    F8,
    H,
    V,
    base_tensors,
    table,
    values,
    write,
    write_shards,
)

FORMATS = ("own", "pt", "f1", "f2", "vllm", "merged", "bin shards", "modelopt", "ranks")
EXAMPLES = settings(max_examples=60, deadline=None)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def build(path: Path, kind: str) -> None:
    """Valid heads of one format."""
    made = values()
    counts = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    if kind == "own":
        ids = torch.tensor([1, 2, 3])
        MedusaHeads(HeadsConfig(2, 1, H, V, "reduced", draft_vocab_size=3), ids).save(path)
    elif kind in ("pt", "f1"):
        file = "medusa_lm_head." + ("pt" if kind == "pt" else "safetensors")
        write(path, file, table(F1, made), **counts)
    elif kind == "f2":
        write(path, "medusa_lm_head.safetensors", table(F2, made), **counts)
    elif kind == "vllm":
        tensors = {**table(F5, made), "token_map": torch.arange(V)}
        write(path, "model.safetensors", tensors, model_type="medusa", num_heads=3)
    elif kind == "modelopt":
        tensors = table(F7, made)
        name = "medusa_heads.0.0.linear.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[name + "_scale"] = torch.ones(())
        write(path, "model.safetensors", tensors, medusa={"num_medusa_heads": 3})
    elif kind == "ranks":
        for rank in range(2):
            write(path, f"rank{rank}.safetensors", table(F8, made))
    else:
        shards = "bin" if kind == "bin shards" else "safetensors"
        write_shards(path, shards, {**table(F4, made), **base_tensors()}, **counts)


BUILT: dict[str, dict[str, bytes]] = {}


def content_of(kind: str) -> dict[str, bytes]:
    """The files of valid heads of one format, built once."""
    if kind not in BUILT:
        with folder() as path:
            build(path, kind)
            BUILT[kind] = {file.name: file.read_bytes() for file in path.iterdir()}
    return BUILT[kind]


def load_or_refuse(path: Path) -> None:
    """What every loader promises for every input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            heads = MedusaHeads.load(path, hidden_size=H, vocab_size=V)
        except ValueError as error:
            reason = str(error)
            heads = None
    if heads is None:
        assert "\n" not in reason
        assert 0 < len(reason) < 2000
        return
    assert (heads.config.hidden_size, heads.config.vocab_size) == (H, V)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in heads.parameters())


@pytest.mark.parametrize("kind", FORMATS)
def test_undamaged_files_load(kind: str) -> None:
    with folder() as path:
        build(path, kind)
        vocab_size = 2 * V if kind == "ranks" else V
        load = {"hidden_size": 2 * H} if kind == "ranks" else {}
        if kind == "ranks":  # two slices that each have every row: no square blocks, so refused
            with pytest.raises(ValueError, match="belongs"):
                MedusaHeads.load(path, vocab_size=vocab_size, **load)
            return
        assert MedusaHeads.load(path, vocab_size=vocab_size).config.hidden_size == H


@st.composite
def damage(draw: Any, content: bytes) -> bytes:
    """Bytes cut, overwritten, repeated or inserted, more often near the start, where sizes are."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        near = draw(st.booleans())
        at = draw(st.integers(0, max(0, min(len(data), 400 if near else len(data)) - 1)))
        how = draw(st.sampled_from(["cut", "overwrite", "insert", "repeat", "flip"]))
        if how == "cut":
            del data[at : at + draw(st.integers(1, 4096))]
        elif how == "overwrite":
            new = draw(st.binary(min_size=1, max_size=16))
            data[at : at + len(new)] = new
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=64))
        elif how == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 512))]
        elif data:
            data[at % len(data)] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


@EXAMPLES
@given(data=st.data(), kind=st.sampled_from(FORMATS))
def test_damaged_files(data: Any, kind: str) -> None:
    files = content_of(kind)
    victim = data.draw(st.sampled_from(sorted(files)))
    with folder() as path:
        for name, content in files.items():
            changed = data.draw(damage(content)) if name == victim else content
            (path / name).write_bytes(changed)
        load_or_refuse(path)


@EXAMPLES
@given(
    content=st.binary(max_size=300),
    start=st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x02\0\0\0\0\0\0\0{}", b"{"]),
    name=st.sampled_from(
        ["medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin", "rank0.safetensors",
         "config.json", "model.safetensors.index.json"],
    ),
)  # fmt: skip
def test_random_bytes(content: bytes, start: bytes, name: str) -> None:
    with folder() as path:
        (path / name).write_bytes(start + content)
        load_or_refuse(path)
        load_or_refuse(path / name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["format", "num_heads", "num_layers", "hidden_size", "vocab_size", "output", "draft_vocab_size",
     "sequential", "token_input", "base_model", "medusa_num_heads", "medusa_num_layers", "medusa",
     "model_type", "num_hidden_layers", "original_lm_head", "base_model_name_or_path"],
)  # fmt: skip


@EXAMPLES
@given(kind=st.sampled_from(FORMATS), changes=st.dictionaries(KEYS, JSON, min_size=1))
def test_configs_of_anything(kind: str, changes: dict[str, Any]) -> None:
    files = content_of(kind)
    config = {**json.loads(files.get("config.json", b"{}")), **changes}
    with folder() as path:
        for name, content in files.items():
            (path / name).write_bytes(content)
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        load_or_refuse(path)


@EXAMPLES
@given(kind=st.sampled_from(["merged", "bin shards"]), data=st.data())
def test_indexes_of_anything(kind: str, data: Any) -> None:
    files = content_of(kind)
    (index,) = (name for name in files if name.endswith("index.json"))
    content = json.loads(files[index])
    names = sorted(content["weight_map"])
    place = st.sampled_from([*files, "..", "../x", "/dev/zero", "", "missing"]) | JSON
    content["weight_map"][data.draw(st.sampled_from(names) | st.text(max_size=30))] = data.draw(
        place
    )
    with folder() as path:
        for name, raw in files.items():
            (path / name).write_bytes(raw)
        (path / index).write_text(json.dumps(content), encoding="utf-8")
        load_or_refuse(path)


FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
OTHERS = [torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]


@EXAMPLES
@given(
    names=st.sampled_from([F1, F2, F4, F5, F7, F8]),
    torch_file=st.booleans(),
    data=st.data(),
)
def test_tensors_of_other_dtypes_shapes_and_names(names: str, torch_file: bool, data: Any) -> None:
    tensors = table(names, values())
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        shape = data.draw(st.lists(st.sampled_from([0, 1, H, V, H + 1]), max_size=3))
        dtype = data.draw(st.sampled_from(FLOATS + OTHERS))
        new = data.draw(
            st.sampled_from([name, "token_map", f"module.{name}", "0.0.weight", name + "_scale"])
        )
        shape = list(tensors[name].shape) if data.draw(st.booleans()) else shape
        tensors[new] = torch.ones(shape).to(dtype)
    file = "pytorch_model.bin" if torch_file else "model.safetensors"
    if not torch_file:
        tensors = {name: x for name, x in tensors.items() if not x.is_complex()}
    with folder() as path:
        load_or_refuse(write(path, file, tensors))


@EXAMPLES
@given(
    name=st.sampled_from(["block_weight", "block_bias", "draft_ids", "other"]),
    dtype=st.sampled_from(FLOATS + [dtype for dtype in OTHERS if not dtype.is_complex]),
    shape=st.none() | st.lists(st.sampled_from([0, 1, 2, 3, H]), max_size=4),
)
def test_our_own_format_with_other_tensors(
    name: str, dtype: torch.dtype, shape: list[int] | None
) -> None:
    with folder() as path:
        build(path, "own")
        tensors = load_file(path / "model.safetensors")
        size = tensors.get(name, torch.zeros(1)).shape if shape is None else shape
        tensors[name] = torch.ones(size).to(dtype)
        save_file(tensors, path / "model.safetensors")
        load_or_refuse(path)
