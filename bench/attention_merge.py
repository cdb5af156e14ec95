"""Stored runs of `bench attention` read back as one, finished or not, themselves merged or not.

Runs that share the work of a grid measure different places. The same place and method in two of
them is refused: one report would then compare figures of different runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdeft.bench.attention_commit import CommitTime
from specdeft.bench.attention_measure import Outcome
from specdeft.bench.cuda_timing import Ceilings
from specdeft.bench.run_folder import read_records

_CEILINGS, _COMMIT = "ceilings", "commit "
_SHARED = ("prompts", "versions", "device", "dtype")


class Stored(NamedTuple):
    """Several runs as one: the manifest names them all, a record stands under its own key."""

    manifest: dict[str, Any]
    records: dict[str, dict[str, Any]]
    ceilings: list[Ceilings]
    outcomes: list[Outcome]
    commits: list[CommitTime]


def merged(folders: Sequence[str]) -> Stored:
    """Read the runs in the order given.

    Raises:
        ValueError: a folder holds no run, two hold the same place and method, or they ran on
            different devices or versions.
    """
    runs = [_read(Path(folder)) for folder in folders]
    first = runs[0][0]
    for (manifest, _records), folder in zip(runs, folders, strict=True):
        differing = [key for key in _SHARED if manifest.get(key) != first.get(key)]
        if differing:
            raise ValueError(
                f"--merge: {folder} and {folders[0]} differ in {', '.join(differing)}: merge runs "
                "of one device and of the same versions"
            )
    records: dict[str, dict[str, Any]] = {}
    ceilings: list[Ceilings] = []
    for (_manifest, of_run), folder in zip(runs, folders, strict=True):
        for key, record in of_run.items():
            if key.startswith(_CEILINGS):
                ceilings.append(Ceilings(**record))
                records[f"{_CEILINGS} {len(ceilings)}"] = record
            elif key in records:
                raise ValueError(
                    f"--merge: {folder} measures {key!r}, which a folder before it holds already: "
                    "merge runs of different places"
                )
            else:
                records[key] = record
    measured = {key: value for key, value in records.items() if not key.startswith(_CEILINGS)}
    return Stored(
        {
            "command": [*first["command"][:3], "--merge", *(Path(name).name for name in folders)],
            "settings": {"merge": [manifest["settings"] for manifest, _records in runs]},
            **{key: first[key] for key in (*_SHARED, "machine")},
            # A run that was merged already stands for its parts.
            "runs": [run for manifest, _ in runs for run in manifest.get("runs", [manifest])],
        },
        records,
        ceilings,
        [Outcome(**r) for key, r in measured.items() if not key.startswith(_COMMIT)],
        [CommitTime(**r) for key, r in measured.items() if key.startswith(_COMMIT)],
    )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["command"][2] != "attention":
            raise ValueError("another command's run")
        return manifest, read_records(folder / "records.jsonl")
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"--merge: {folder} holds no run of bench attention: give folders that its "
            "--save-result wrote"
        ) from error
