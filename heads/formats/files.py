"""Tensors and JSON out of files nobody vouches for: nothing in them is ever executed.

Two kinds of tensor file are read, told apart by their first bytes: safetensors, and torch's zip
files with weights-only loading. Every tensor is checked to be plain, dense and no larger than the
bytes behind it before anything is computed from it.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# A tensor is read when its entry is called, so that a large model costs only what is asked of it.
Tensors = Mapping[str, Callable[[], Tensor]]

# What weights may be stored in; float8 only with a scale (heads/formats/modelopt.py).
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_SHOWN = 6  # names listed in a message
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_MOST_JSON = _MOST_PICKLE = 1 << 26  # bytes; indexes of the largest models have a hundredth


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ValueError says what is wrong with it."""
    try:
        if path.stat().st_size > _MOST_JSON:
            raise ValueError("too large")
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are ValueErrors
        reason = str(error) or "nested too deeply"
        raise ValueError(f"{path} is not JSON ({reason}): fetch or write it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object but a {type(content).__name__}: replace it.")
    return content


def open_tensors(path: Path) -> Tensors:
    """The tensors of one file by name.

    Raises:
        ValueError: it is neither kind of tensor file, is cut short or damaged, or holds more than
            named tensors.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not there or is no regular file: fetch or write it again.")
    with path.open("rb") as file:
        start = file.read(len(_ZIP))
    if start == _ZIP:
        return _open_torch(path)
    if start.startswith(_PICKLE) and path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is a bare pickle, which could run code: save it again as safetensors."
        )
    return _open_safetensors(path)


def all_finite(tensor: Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity.

    By its extremes, which both of them show up in: 40 times as fast as looking at every element.
    """
    if tensor.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def printable(text: str) -> str:
    """Text of a file as a message may show it: on one line, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def listed(names: Iterable[str]) -> str:
    """Names in a message: the first few, none too long, and nothing that a terminal obeys."""
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (", ".join(printable(name[:80]) for name in found[:_SHOWN]) or "nothing") + more


def _open_safetensors(path: Path) -> Tensors:
    try:
        handle: Any = safe_open(path, framework="pt")
        names = list(handle.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({_first_line(error)}): fetch or write it "
            "again."
        ) from error
    return {name: partial(_from_safetensors, path, handle, name) for name in names}


def _from_safetensors(path: Path, handle: Any, name: str) -> Tensor:
    try:
        return _checked(path, name, handle.get_tensor(name))
    except (SafetensorError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path}: {name} cannot be read ({_first_line(error)}).") from error


def _open_torch(path: Path) -> Tensors:
    try:
        _check_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds objects other than tensors, which could run code; nothing of it was "
            "run: get the weights as safetensors."
        ) from error
    except ValueError:
        raise
    # The reader of damaged archives raises of every kind, IndexError and AttributeError included.
    except Exception as error:
        raise ValueError(
            f"{path} is not a whole torch file ({_first_line(error)}): fetch or write it again."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(
            f"{path} holds a {type(content).__name__} that is no table of named tensors: "
            "save the state dict of the heads."
        )
    return {name: partial(_checked, path, name, value) for name, value in content.items()}


def _check_archive(path: Path) -> None:
    """Refuse archives that would unpack to more than they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole torch file ({error}): fetch or write it again."
        ) from error
    for entry in entries:
        packed = entry.compress_type != zipfile.ZIP_STORED
        if packed or (entry.filename.endswith(".pkl") and entry.file_size > _MOST_PICKLE):
            raise ValueError(f"{path} is compressed or has a huge index, as torch never writes it.")


def _checked(path: Path, name: str, value: Any) -> Tensor:
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"{path}: {name} is a {type(value).__name__}, not a tensor.")
    tensor: Tensor = value.detach()
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.is_quantized or tensor.is_complex():
        raise ValueError(
            f"{path}: {name} is no plain dense tensor ({tensor.layout}, {tensor.dtype}, "
            f"{tensor.device}): save it as one."
        )
    # Strides of 0 let a file of a few bytes claim any size.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(
            f"{path}: {name} claims the shape {tuple(tensor.shape)} but the file does not hold so "
            "much: save it again."
        )
    return tensor


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in content if names.count(name) > 1)
        raise ValueError(f"the entry {twice!r} stands there twice")
    return content


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    return printable(text[:200])
