"""JSON files of token trees: reading with one clear sentence for each mistake."""

from __future__ import annotations

import json
from typing import NamedTuple


class TreeFields(NamedTuple):
    """What a tree file said; exactly one of paths, widths and parents is set, and lookup is 0 where
    the file does not name it."""

    paths: list[list[int]] | None
    widths: list[int] | None
    parents: list[int] | None
    ranks: list[int] | None
    lookup: int


def read_tree_json(text: str) -> TreeFields:
    """Parse and type-check the text; the tree constructors check the meaning.

    Raises ValueError when it is not JSON or not a list of paths or an object with `paths`,
    `widths` or `parents`.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} is not valid JSON ({error.msg})") from error
    except ValueError as error:  # Python converts no number of thousands of digits
        raise ValueError("a number in it has too many digits; write smaller ones") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply; write a list of rank paths") from error
    if isinstance(content, list):
        content = {"paths": content}
    if not isinstance(content, dict):
        raise ValueError(
            f"it holds a {type(content).__name__}; write a list of rank paths like [[0], [0, 0]]"
        )
    return _fields_of(content)


def _fields_of(content: dict[str, object]) -> TreeFields:
    kinds = [name for name in ("paths", "widths", "parents") if name in content]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise ValueError(f"it must have one of the keys paths, widths, parents; it has {found}")
    allowed = {"paths", "widths", "parents", "ranks", "lookup"}
    unknown = sorted(set(content) - allowed)
    if unknown:
        raise ValueError(
            f"key {unknown[0]!r} is not known; use paths, widths, or parents and ranks, and lookup"
        )
    if "ranks" in content and "parents" not in content:
        raise ValueError("ranks go with parents; with paths or widths leave them out")
    return TreeFields(
        paths=_paths(content["paths"]) if "paths" in content else None,
        widths=_integers(content["widths"], "widths") if "widths" in content else None,
        parents=_integers(content["parents"], "parents") if "parents" in content else None,
        ranks=_integers(content["ranks"], "ranks") if "ranks" in content else None,
        lookup=_integers([content.get("lookup", 0)], "lookup")[0],
    )


def _paths(value: object) -> list[list[int]]:
    if not isinstance(value, list):
        raise ValueError(f"paths is a {type(value).__name__}; write a list of lists of ranks")
    return [_integers(path, f"path {index}") for index, path in enumerate(value)]


def _integers(value: object, name: str) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is a {type(value).__name__}; write a list of whole numbers")
    for entry in value:
        # JSON's true is a bool, and a Python bool is an int: refuse it by exact type.
        if type(entry) is not int:
            raise ValueError(f"{name} holds {json.dumps(entry)}; write whole numbers only")
    return value
