"""Texts as they are written: a file for each wave, so that a killed run loses one wave at most."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdeft.heads.documents import Documents
from specdeft.trees.atomic import write_text_atomic

_PLAN_NAME = "plan.json"
_FREE = ("time_limit_s", "capture", "count")  # what may differ when a run goes on


@dataclass
class TextStore:
    """A folder of waves, numbered from 0, beside the plan they follow from."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, plan: Mapping[str, Any], model: str, *, resume: bool) -> TextStore:
        """An empty store, or with `resume` the one that is there; ValueError if it follows another
        plan."""
        path, store = folder / _PLAN_NAME, cls(folder)
        fixed = {name: value for name, value in plan.items() if name not in _FREE}
        content = json.dumps({"model": model, **fixed}, indent=1) + "\n"
        if not (resume and path.is_file()):
            store.remove()
            write_text_atomic(path, content)
        elif path.read_bytes() != content.encode():
            raise ValueError(
                f"{folder} holds texts of another model or plan: repeat that command, or leave out "
                "--resume to write them anew."
            )
        return store

    def waves(self) -> list[Documents]:
        """All waves, in the order they were written."""
        return [Documents.load(path) for path in self._paths()]

    def add(self, documents: Documents) -> None:
        """Keep the next wave; it is on the disk, whole, when this returns."""
        documents.save(self._path(len(self._paths())))

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _paths(self) -> list[Path]:
        found = sorted(self.folder.glob("wave-*.safetensors"))
        for number, path in enumerate(found):
            if path != self._path(number):
                raise ValueError(
                    f"{self.folder} lacks {self._path(number).name}, which {path.name} follows "
                    "from: leave out --resume to write the texts anew."
                )
        return found

    def _path(self, number: int) -> Path:
        return self.folder / f"wave-{number:05d}.safetensors"
