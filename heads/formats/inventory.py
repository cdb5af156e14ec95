"""Which heads a file holds, by the names of its tensors alone: layout, heads, blocks, kinds.

Counts come from the names, never from a config (published ones are wrong); a name that the layout
does not know, or one that is missing, is an error that lists it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from specdeft.heads.formats import fasterdecoding, modelopt, tensorrt_llm, vllm
from specdeft.heads.formats.files import listed
from specdeft.heads.formats.layout import Layout, Place

LAYOUTS: tuple[Layout, ...] = (
    fasterdecoding.LAYOUT,
    fasterdecoding.MERGED,
    fasterdecoding.PREFIXED,
    vllm.LAYOUT,
    tensorrt_llm.CHECKPOINT,
    modelopt.LAYOUT,
)


class Names(NamedTuple):
    """Names in the file by their canonical ones, what they are, and the token map's."""

    by_canonical: dict[str, str]
    places: list[Place]
    token_map: str | None


class Shape(NamedTuple):
    """What the names say: numbers of the heads, blocks of each, and which kinds there are."""

    heads: range
    num_blocks: int
    bias: bool
    outputs: range


def recognise(path: Path, tensors: Iterable[str]) -> Layout:
    found = [layout for layout in LAYOUTS if any(layout.place(name) for name in tensors)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(layout.name for layout in found)
        raise ValueError(f"{path} holds heads in several layouts ({names}): keep those of one.")
    raise ValueError(
        f"{path} holds no Medusa heads: no known layout has a name like those of its "
        f"tensors ({listed(tensors)})."
    )


def sorted_out(path: Path, layout: Layout, tensors: Iterable[str]) -> Names:
    """Every name of the file as what it is; unknown ones are an error."""
    by_canonical: dict[str, str] = {}
    places, unknown = [], []
    for name in tensors:
        place = layout.place(name)
        canonical = layout.token_map if layout.is_token_map(name) else None
        if place is not None and place.part != "scale":
            canonical = layout.canonical(place)
            places.append(place)
        if canonical is None:
            if place is None and layout.owns(name):
                unknown.append(name)
        elif canonical in by_canonical:
            raise ValueError(
                f"{path}: {by_canonical[canonical]} and {name} are the same tensor: keep one."
            )
        else:
            by_canonical[canonical] = name
    if unknown:
        raise ValueError(
            f"{path} holds {listed(unknown)}, which heads in the layout {layout.name} do not "
            "have: nothing is left out in silence, so export them again."
        )
    token_map = None if layout.token_map is None else by_canonical.pop(layout.token_map, None)
    return Names(by_canonical, places, token_map)


def counted(path: Path, layout: Layout, names: Names) -> Shape:
    """Heads and blocks, counted from the names; every head must have the same kinds of tensors."""
    parts = {place.part for place in names.places}
    numbers = {place.head for place in names.places}
    if not numbers:
        raise ValueError(f"{path} holds scales of heads but no weights: fetch it again.")
    first = min(numbers) if min(numbers) in layout.first_heads else layout.first_heads[0]
    if first:
        notice(f"{path} counts its heads from {first}: head {first} is taken as the first.")
    heads = range(first, max(numbers) + 1)
    blocks = [place.block for place in names.places if place.part != "output"]
    num_blocks = 1 + max(blocks, default=-1)
    # One output layer for several heads is one that they share, where the project has that.
    one = {place.head for place in names.places if place.part == "output"} == {0}
    shared = one and len(heads) > 1 and layout.shares_output
    shape = Shape(
        heads,
        num_blocks,
        "bias" in parts,
        range(0) if "output" not in parts else range(1) if shared else heads,
    )
    expected = {
        layout.block_name(head, block, kind)
        for head in heads
        for block in range(num_blocks)
        for kind in ("weight", *(["bias"] if shape.bias else []))
    } | {layout.output_name(head, num_blocks) for head in shape.outputs}
    missing = sorted(expected - set(names.by_canonical))
    extra = sorted(set(names.by_canonical) - expected)
    if missing or extra:
        also = f" and has {listed(extra)} too many" if extra else ""
        raise ValueError(
            f"{path}, heads in the layout {layout.name}, lacks {listed(missing)}{also}: every "
            "head must have the same tensors; fetch or export it again."
        )
    return shape


def notice(text: str) -> None:
    """Say something that is no error and must not go by in silence."""
    warnings.warn(text, stacklevel=3)
