"""Writing heads for other engines: one folder for each, written, read again, compared, renamed.

A writer turns the heads' parts into the tensors and the config of its format. What it wrote is
read with the reader of heads/formats/reading.py and compared bit for bit before the folder gets its
name.
"""

from __future__ import annotations

import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdeft.heads.checkpoint import write_json
from specdeft.heads.formats import fasterdecoding, tensorrt_llm, tgi, vllm
from specdeft.heads.formats.content import Content, Source
from specdeft.heads.formats.declared import declared
from specdeft.heads.formats.express import to_parts
from specdeft.heads.formats.parts import HeadParts
from specdeft.heads.formats.reading import read_heads

Writer = Callable[[Source, HeadParts], Content]

WRITERS: dict[str, Writer] = {
    "fasterdecoding": fasterdecoding.write,
    "vllm": vllm.write,
    "tgi": tgi.write,
    "tensorrt-llm": tensorrt_llm.write,
}


def export_heads(source: Source, to: str, folder: Path) -> tuple[str, ...]:
    """Write heads in one of the formats of `WRITERS` into a new folder; its files' names.

    Raises:
        ValueError: the format cannot say what these heads do, the folder is not new, or what was
            read again is not what was written.
    """
    content = WRITERS[to](source, to_parts(source.heads, source.output_layer))
    with new_folder(folder) as place:
        tensors = content.tensors()
        if content.file.endswith(".safetensors"):
            save_file(tensors, place / content.file, metadata={"format": "pt"})
        else:
            torch.save(tensors, place / content.file)
        write_json(place / "config.json", content.config)
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(place)
        _check(place, content)
    return tuple(sorted(path.name for path in folder.iterdir()))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that gets its name when all went well; what is put in
    there includes a config.json.

    Raises:
        ValueError: `folder` exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty: name a new folder, one for each format.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    place.mkdir()
    try:
        yield place
        # safetensors writes files that only their owner can read; a server may be another user.
        mode = (place / "config.json").stat().st_mode
        for path in place.iterdir():
            path.chmod(mode)
        place.rename(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _check(folder: Path, content: Content) -> None:
    """Read the folder again; everything must be there, bit for bit, without a notice."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_heads(folder)
    said = declared(found.config)
    same = found.layout == content.layout and said.base_model == content.config.get(
        "base_model_name_or_path", ""
    )
    for name in ("weight", "bias", "output", "token_ids"):
        same = same and same_bits(getattr(found.parts, name), getattr(content.parts, name))
    if not same:
        raise ValueError(f"{folder}: what was read again is not what was written: nothing is kept.")


def same_bits(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two tensors (or two times none) have the same shape, dtype and bits."""
    if first is None or second is None:
        return first is second
    if first.shape != second.shape or (first.dtype != second.dtype and first.numel()):
        return False
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(first, second)
