"""A run's folder: records as they come (so that an interrupted run resumes), then its report.

    manifest.json   what the run is, written before the first record
    records.jsonl   one line a generation, appended as it ends
    report.md, report.json, report.html, and plots/*.png where asked for

Files other than the records appear whole or not at all.
"""

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from specdeft.bench.html_report import as_html
from specdeft.bench.manifest import fingerprint
from specdeft.bench.plots import check_available, save_plots
from specdeft.bench.report import Report, as_json, as_markdown
from specdeft.trees.atomic import write_text_atomic

_MIN_FREE_BYTES = 16 * 2**20


class RunFolder:
    """Records by key, kept in memory and, where a folder was asked for, on disk.

    A context manager: the records file is open inside.
    """

    def __init__(self, folder: str | Path | None, *, plots: bool = False) -> None:
        """Check that the folder can be written; nothing is written yet.

        Args:
            folder: where, or None to keep the records in memory only.
            plots: draw the report's charts as PNG files, too.

        Raises:
            ValueError: it cannot be written, the disk is full, or plots cannot be made.
        """
        if plots and folder is None:
            raise ValueError("--plots has nowhere to go: give --save-result FOLDER")
        if plots:
            check_available()
        self._plots = plots
        self.folder = None if folder is None else Path(folder)
        self._records: dict[str, dict[str, Any]] = {}
        self._file: TextIO | None = None
        if self.folder is not None:
            _check_writable(self.folder)

    def __len__(self) -> int:
        return len(self._records)

    def open(self, manifest: dict[str, Any]) -> None:
        """Start the run, or take up the one that the folder holds.

        Raises:
            ValueError: the folder holds another run.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        known = self.folder / "manifest.json"
        if known.exists():
            self._refuse_other(known, manifest)
            self._records = read_records(self.folder / "records.jsonl")
        else:
            write_text_atomic(known, json.dumps(manifest, indent=1) + "\n")
        self._file = (self.folder / "records.jsonl").open("a", encoding="utf-8")

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def get(self, key: str) -> dict[str, Any] | None:
        """The record of this key, if it was measured already."""
        return self._records.get(key)

    def put(self, key: str, record: dict[str, Any]) -> None:
        """Keep a record.

        Raises:
            ValueError: the disk refused it.
        """
        # Through JSON and back, so that a resumed run sees what an uninterrupted one sees.
        line = json.dumps({"key": key, "record": record})
        self._records[key] = json.loads(line)["record"]
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise ValueError(
                f"the records in {self.folder} cannot be written ({error.strerror}): make room "
                "and give the same command again, it goes on where it stopped"
            ) from error

    def save(self, report: Report) -> None:
        """Write the report beside the records.

        Raises:
            ValueError: the disk refused it.
        """
        if self.folder is None:
            return
        try:
            write_text_atomic(self.folder / "report.json", as_json(report))
            write_text_atomic(self.folder / "report.md", as_markdown(report))
            write_text_atomic(self.folder / "report.html", as_html(report))
            if self._plots:
                save_plots(report.charts, self.folder / "plots")
        except OSError as error:
            raise ValueError(
                f"the report cannot be written to {self.folder} ({error.strerror}): make room and "
                "give the same command again"
            ) from error

    def _refuse_other(self, path: Path, manifest: dict[str, Any]) -> None:
        try:
            known = fingerprint(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not the manifest of a run: give another folder to --save-result"
            ) from error
        mine = json.loads(json.dumps(fingerprint(manifest)))
        differing = [key for key in mine if mine[key] != known[key]]
        if differing:
            raise ValueError(
                f"{path.parent} holds a run with other {', '.join(differing)}: give the command "
                "of its manifest to resume it, or another folder"
            )


def _check_writable(folder: Path) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file: give --save-result a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{existing} cannot be written: give --save-result another folder")
    free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        raise ValueError(
            f"only {free // 2**20} MiB are free at {existing}: a run needs "
            f"{_MIN_FREE_BYTES // 2**20}, make room or give --save-result another folder"
        )


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """What was recorded; an interrupted last line is cut off and its measurement repeated."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            entry = json.loads(line)
            records[entry["key"]] = entry["record"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is not a record: give another folder to --save-result"
            ) from error
    return records
