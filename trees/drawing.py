"""A token tree as text: a column for every depth, a line for every leaf.

●─┬─0─┬─0
  │   └─1
  └─1
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class _Pens(NamedTuple):
    dash: str
    fork: str
    middle: str
    last: str
    bar: str


_BOX = _Pens("─", "┬", "├", "└", "│")
_ASCII = _Pens("-", "+", "|", "`", "|")


def draw_tree(
    parents: Sequence[int], depths: Sequence[int], labels: Sequence[str], *, ascii_only: bool
) -> str:
    """Draw a depth-first tree; the lines end without trailing blanks.

    parents, depths, labels: one entry a node. Control characters in labels are shown escaped, so
    that a token such as a line break cannot tear the drawing.
    """
    pens = _ASCII if ascii_only else _BOX
    shown = [_printable(label, ascii_only=ascii_only) for label in labels]
    widths = [0] * (max(depths) + 1)
    for depth, label in zip(depths, shown, strict=True):
        widths[depth] = max(widths[depth], _columns(label))
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)

    lines: list[str] = []
    line = ""
    # margin[d]: what a later line shows under the connector that leads to depth d + 1.
    margins = [""] * (len(widths) + 1)
    for node, label in enumerate(shown):
        depth = depths[node]
        if node:
            siblings = children[parents[node]]
            is_last = node == siblings[-1]
            if node == siblings[0]:
                line += pens.dash + (pens.dash if is_last else pens.fork) + pens.dash
            else:
                line = margins[depth] + " " + (pens.last if is_last else pens.middle) + pens.dash
            bar = " " if is_last else pens.bar
            margins[depth + 1] = f"{margins[depth]} {bar} " + " " * widths[depth]
        else:
            margins[1] = " " * widths[0]
        line += label
        if children[node]:
            line += pens.dash * (widths[depth] - _columns(label))
        else:
            lines.append(line.rstrip())
    return "\n".join(lines)


def tree_places(parents: Sequence[int], depths: Sequence[int]) -> list[tuple[float, int]]:
    """(x in 0..1, depth) of every node: leaves evenly in order, a parent above its children."""
    children: Mapping[int, list[int]] = {node: [] for node in range(len(parents))}
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    leaves = [node for node in range(len(parents)) if not children[node]]
    x = {node: (index + 0.5) / len(leaves) for index, node in enumerate(leaves)}
    for node in reversed(range(len(parents))):
        if children[node]:
            x[node] = (x[children[node][0]] + x[children[node][-1]]) / 2
    return [(x[node], depths[node]) for node in range(len(parents))]


def _printable(label: str, *, ascii_only: bool) -> str:
    if ascii_only:
        return ascii(label)[1:-1]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in label)


def _columns(text: str) -> int:
    """Terminal columns: wide East Asian characters take two, combining marks none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
