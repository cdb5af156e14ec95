"""Files that appear whole or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary name in the folder of `path` (made if need be), flush the file to
    the disk and rename it to `path`. A `write` that fails leaves what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(temporary)
        _flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Delete what killed writers left in `folder` and below: files with names of `write_atomic`,
    which has 32 hexadecimal digits in each; a folder may hold files of others too."""
    for path in folder.rglob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` in UTF-8, atomically."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _flush(path: Path) -> None:
    # Without this a crash of the machine could leave the new name on an empty file.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
