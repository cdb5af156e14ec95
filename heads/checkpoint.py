"""Heads on disk: `model.safetensors` beside `config.json`, written whole or not at all.

Nothing here can execute code from a file: safetensors and JSON only. Loading is strict: every
tensor that the config calls for, in its shape, and no other; finite values; sizes that fit the
target.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdeft.heads.formats.files import (
    FLOATS,
    INTEGERS,
    all_finite,
    listed,
    open_tensors,
    read_json,
)
from specdeft.heads.formats.folder import member
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.trees.atomic import write_atomic, write_text_atomic

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
FORMAT = "specdeft-medusa-1"


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, atomically."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_text_atomic(path, text)


def save_heads(heads: MedusaHeads, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write the heads into `folder`; `dtype` (default: as they are) is that of the weights."""
    tensors = {name: _for_disk(tensor, dtype) for name, tensor in heads.state_dict().items()}
    content = {"format": FORMAT, **asdict(heads.config)}
    # The config goes last: a folder without it is not taken for heads.
    write_atomic(folder / WEIGHTS_NAME, lambda temporary: save_file(tensors, temporary))
    write_json(folder / CONFIG_NAME, content)


def load_heads(
    folder: Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    hidden_size: int | None = None,
    vocab_size: int | None = None,
) -> MedusaHeads:
    """Read heads; ValueError says what is wrong with the folder or that they fit another model.

    dtype: None keeps that of the file, the widest where there are several.
    """
    config = read_config(folder)
    _check_target(config, hidden_size, vocab_size)
    stored = open_tensors(member(folder, WEIGHTS_NAME))
    tensors = {name: read() for name, read in stored.items()}
    skeleton = _skeleton(folder / CONFIG_NAME, config)
    _check_tensors(folder / WEIGHTS_NAME, tensors, skeleton.state_dict(), config.vocab_size)
    if "draft_ids" in tensors:
        tensors["draft_ids"] = tensors["draft_ids"].to(torch.int64)
    skeleton.load_state_dict(tensors, strict=True, assign=True)
    if dtype is None:
        floats = (x.dtype for x in tensors.values() if x.is_floating_point())
        dtype = reduce(torch.promote_types, floats)
    heads = skeleton.to(device=device, dtype=dtype)
    return heads.eval().requires_grad_(False)


def read_config(folder: Path) -> HeadsConfig:
    """The config of the heads in `folder`."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no heads: {CONFIG_NAME} is missing; give a folder written by "
            "`specdeft train`."
        )
    content = read_json(member(folder, CONFIG_NAME))
    if content.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a config of heads: its format must be {FORMAT!r}.")
    known = {field.name for field in fields(HeadsConfig)}
    if unknown := sorted(set(content) - known):
        raise ValueError(
            f"{path} has unknown entries {unknown}: the known ones are {sorted(known)}."
        )
    try:
        return HeadsConfig(**content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is incomplete or malformed ({error}): write it again.") from error


def _skeleton(path: Path, config: HeadsConfig) -> MedusaHeads:
    """The heads with their shapes and no memory."""
    try:
        with torch.device("meta"):
            empty = torch.zeros(config.num_logits, dtype=torch.int64)
            return MedusaHeads(config, None if config.draft_vocab_size is None else empty)
    except RuntimeError as error:  # a tensor of more bytes than 64 bits count
        raise ValueError(
            f"{path} calls for tensors that no memory holds: write it again."
        ) from error


def _check_target(config: HeadsConfig, hidden_size: int | None, vocab_size: int | None) -> None:
    base = f" They were trained on {config.base_model}." if config.base_model else ""
    for what, ours, target in (
        ("hidden size", config.hidden_size, hidden_size),
        ("a vocabulary of", config.vocab_size, vocab_size),
    ):
        if target is not None and ours != target:
            raise ValueError(
                f"These heads are for {what} {ours} but the model has {target}: "
                f"use heads trained on this model.{base}"
            )


def _check_tensors(
    path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor], vocab_size: int
) -> None:
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        raise ValueError(
            f"{path} does not fit its config: missing {listed(missing)}, unknown "
            f"{listed(unknown)}; weights and config must come from the same training."
        )
    for name, tensor in found.items():
        shape = tuple(wanted[name].shape)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(tensor.shape)} but the config calls for {shape}."
            )
        allowed = FLOATS if wanted[name].is_floating_point() else INTEGERS
        if tensor.dtype not in allowed:
            raise ValueError(f"{path}: {name} has the wrong dtype {tensor.dtype}.")
        if tensor.is_floating_point() and not all_finite(tensor):
            raise ValueError(
                f"{path}: {name} holds NaN or infinity; these heads are damaged, train them again."
            )
    ids = found.get("draft_ids")
    if ids is not None and not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise ValueError(f"{path}: draft_ids leave the vocabulary 0..{vocab_size - 1}.")


def _for_disk(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor.to(torch.int32).contiguous()
    return (tensor if dtype is None else tensor.to(dtype)).contiguous()
