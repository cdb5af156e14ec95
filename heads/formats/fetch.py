"""Heads by their Hugging Face id: only the files that hold them are downloaded.

A merged model has shards of many gigabytes; its index says which of them hold heads.
"""

from __future__ import annotations

import re
from pathlib import Path

from specdeft.heads.formats.files import read_json
from specdeft.heads.formats.folder import HEAD_FILES, INDEX_FILES, WHOLE_FILES, member
from specdeft.heads.formats.inventory import LAYOUTS

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def local_path(heads: str | Path) -> Path:
    """Where heads are on this machine: a path as it is, a Hugging Face id after its download.

    Raises:
        ValueError: nothing of that name is here, and no download gave it.
    """
    path = Path(heads).expanduser()
    if path.exists() or isinstance(heads, Path) or not _HUB_ID.fullmatch(heads):
        return path
    try:
        return _fetched(heads)
    except Exception as error:  # the hub's client raises of every kind, network errors included
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"the heads {heads!r} are no local path and cannot be downloaded ({reason}): give a "
            "folder, a file, or the id of a repository that can be reached"
        ) from error


def _fetched(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(*names: str) -> Path:
        return Path(snapshot_download(repository, allow_patterns=list(names)))

    folder = fetch("config.json", "tree_values*.json", *HEAD_FILES, *INDEX_FILES)
    if any((folder / name).is_file() for name in HEAD_FILES):
        return folder
    for name in INDEX_FILES:
        if (folder / name).is_file():
            return fetch(*_shards_with_heads(member(folder, name)))
    return fetch(*WHOLE_FILES, "rank*.safetensors")


def _shards_with_heads(index: Path) -> list[str]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index.name} has no weight_map")
    known = {str(shard) for name, shard in places.items() if any(x.place(name) for x in LAYOUTS)}
    if not known:
        raise ValueError(f"{index.name} places no heads in any shard")
    return sorted(known)
