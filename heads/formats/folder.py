"""Which files of a folder hold the heads: by the names the projects use, never by chance.

medusa_lm_head.safetensors | .pt                         heads alone
model.safetensors.index.json | pytorch_model.bin.index.json   shards, of a whole model or not
model.safetensors | pytorch_model.bin                    one file
rank0.safetensors ..                                     slices of a tensor-parallel checkpoint
the only other *.safetensors
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from specdeft.heads.formats.files import Tensors, open_tensors, read_json

HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")
_RANK = re.compile(r"rank(\d{1,4})\.safetensors")


def folder_tensors(folder: Path) -> Tensors:
    """The tensors of a folder by name, each read when its entry is called.

    Raises:
        ValueError: no file here can hold heads, several could, or one is not to be trusted.
    """
    # A safetensors file comes before its .pt twin: it cannot even try to run code.
    for name in HEAD_FILES:
        if (folder / name).is_file():
            return open_tensors(member(folder, name))
    for name in INDEX_FILES:
        if (folder / name).is_file():
            return _indexed(folder, name)
    for name in WHOLE_FILES:
        if (folder / name).is_file():
            return open_tensors(member(folder, name))
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if ranks := [name for name in found if _RANK.fullmatch(name)]:
        return _slices(folder, ranks)
    if len(found) == 1:
        return open_tensors(member(folder, found[0]))
    what = f"several files that could hold them ({', '.join(found)})" if found else "none of them"
    known = ", ".join((*HEAD_FILES, *INDEX_FILES, *WHOLE_FILES))
    raise ValueError(
        f"{folder} holds no heads: it should have one of {known} or a single safetensors file, and "
        f"has {what}; give the file itself, or a folder written by `specdeft train`."
    )


def member(folder: Path, name: str) -> Path:
    """The file `name` of `folder`.

    Raises:
        ValueError: the name leads out of the folder, or a link does (other than into the blobs of
            a Hugging Face cache, where every downloaded file is such a link).
    """
    path = folder / name
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable():
        raise ValueError(
            f"{folder}: the file name {name!r} is none of a file in it: fetch it anew."
        )
    home, real = folder.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if real.parent not in (home, blobs):
        raise ValueError(f"{path} is a link out of its folder: put the file itself there.")
    return path


def _indexed(folder: Path, name: str) -> Tensors:
    path = member(folder, name)
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise ValueError(f"{path} has no weight_map of file names: fetch or write it again.")
    shards = {shard: member(folder, shard) for shard in set(places.values())}
    open_once: Callable[[Path], Tensors] = cache(open_tensors)

    def read(name: str) -> Tensor:
        shard = shards[places[name]]
        tensors = open_once(shard)
        if name not in tensors:
            raise ValueError(
                f"{shard} lacks {name}, which {path.name} places there: fetch it anew."
            )
        return tensors[name]()

    return {name: partial(read, name) for name in places}


def _slices(folder: Path, names: list[str]) -> Tensors:
    """Tensor-parallel slices, put together again along dimension 0 (heads are split by columns)."""
    order = sorted(names, key=lambda name: int(name[4:].split(".")[0]))
    if order != [f"rank{rank}.safetensors" for rank in range(len(order))]:
        raise ValueError(f"{folder} has the slices {', '.join(order)}: the ranks have a gap.")
    slices = [open_tensors(member(folder, name)) for name in order]
    if any(set(tensors) != set(slices[0]) for tensors in slices):
        raise ValueError(f"{folder}: its rank files hold different tensors: convert it again.")

    def read(name: str) -> Tensor:
        parts = [tensors[name]() for tensors in slices]
        if len({part.shape for part in parts}) > 1 or parts[0].dim() == 0:
            raise ValueError(f"{folder}: the slices of {name} differ in shape: convert it again.")
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return {name: partial(read, name) for name in slices[0]}
