"""A token tree as a picture: SVG text of its own making, or PNG through matplotlib."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specdeft.trees.atomic import write_atomic, write_text_atomic
from specdeft.trees.drawing import tree_places
from specdeft.trees.token_tree import TokenTree

_LEVEL_HEIGHT = 56
_MARGIN = 16
_LEAF_WIDTH = 22
_NARROWEST = 240
_HEADS_COLOUR, _LOOKUP_COLOUR = "#2f6db5", "#c2662d"


class _Node(NamedTuple):
    x: float
    y: float
    radius: float
    colour: str
    name: str


def tree_svg(tree: TokenTree, shares: Sequence[float] | None = None) -> str:
    """The tree as an SVG document, root at the top.

    shares: N numbers from 0 to 1, how often each node's tokens come true; the area of a node is its
    share, and pointing at it shows the number. Every node is as large as the others without them.
    """
    width = _width(tree)
    height = 2 * _MARGIN + _LEVEL_HEIGHT * tree.max_depth + 14
    nodes = _nodes(tree, shares)
    body = [
        f'<line x1="{nodes[parent].x:.1f}" y1="{nodes[parent].y:.1f}" '
        f'x2="{nodes[node].x:.1f}" y2="{nodes[node].y:.1f}"/>'
        for node, parent in enumerate(tree.parents)
        if node
    ]
    for index, node in enumerate(nodes):
        title = node.name if shares is None else f"{node.name}: {shares[index]:.1%}"
        body.append(
            f'<circle cx="{node.x:.1f}" cy="{node.y:.1f}" r="{node.radius:.1f}" '
            f'fill="{node.colour}"><title>{html.escape(title)}</title></circle>'
        )
    body.append(f'<text x="{_MARGIN}" y="{height - 6}">{html.escape(tree.summary())}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{tree.num_nodes} nodes">\n'
        "<style>line{stroke:#888;stroke-width:1}circle{stroke:#fff;stroke-width:.8}"
        "text{font:11px sans-serif;fill:#666}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def save_picture(tree: TokenTree, path: Path, shares: Sequence[float] | None = None) -> None:
    """Write the tree to `path`, as SVG or PNG by its suffix.

    Raises ValueError for another suffix, or for PNG where matplotlib is missing.
    """
    if path.suffix == ".svg":
        write_text_atomic(path, tree_svg(tree, shares))
    elif path.suffix == ".png":
        _save_png(tree, path, shares)
    else:
        raise ValueError(f"{path} is no picture: give a name that ends in .svg or .png")


def _save_png(tree: TokenTree, path: Path, shares: Sequence[float] | None) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            'PNG pictures need matplotlib: run pip install "specdeft[bench]" or write an .svg'
        ) from error
    nodes = _nodes(tree, shares)
    figure = Figure(figsize=(_width(tree) / 72, (tree.max_depth + 1) * _LEVEL_HEIGHT / 72), dpi=144)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.08, 1.0, 0.9))
    for node, parent in enumerate(tree.parents):
        if node:
            ends = nodes[parent], nodes[node]
            axes.plot([n.x for n in ends], [n.y for n in ends], color="#888", lw=0.7, zorder=1)
    areas = [(2 * node.radius) ** 2 for node in nodes]
    colours = [node.colour for node in nodes]
    axes.scatter([n.x for n in nodes], [n.y for n in nodes], s=areas, c=colours, zorder=2)
    axes.invert_yaxis()
    axes.set_axis_off()
    figure.text(0.01, 0.01, tree.summary(), fontsize=7, color="#666")
    write_atomic(path, lambda partial: figure.savefig(partial, format="png"))


def _width(tree: TokenTree) -> int:
    return max(_NARROWEST, 2 * _MARGIN + _LEAF_WIDTH * tree.num_leaves)


def _nodes(tree: TokenTree, shares: Sequence[float] | None) -> list[_Node]:
    if shares is not None and len(shares) != tree.num_nodes:
        raise ValueError(f"{len(shares)} shares for {tree.num_nodes} nodes; give one a node")
    inner = _width(tree) - 2 * _MARGIN
    nodes = []
    for node, (x, depth) in enumerate(tree_places(tree.parents, tree.depths)):
        by_lookup = 1 <= node <= tree.num_lookup
        name = f"lookup {depth}" if by_lookup else ", ".join(map(str, tree.paths[node])) or "root"
        area = 0.45 if shares is None else min(max(shares[node], 0.01), 1.0)
        nodes.append(
            _Node(
                _MARGIN + x * inner,
                _MARGIN + depth * _LEVEL_HEIGHT,
                9.0 * math.sqrt(area),
                _LOOKUP_COLOUR if by_lookup else _HEADS_COLOUR,
                name,
            )
        )
    return nodes
