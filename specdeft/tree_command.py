"""`specdeft tree`: look at token trees, find the best ones by calibrated values, compare them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specdeft.default_model import DEFAULT_MODELS
from specdeft.trees.mixing import expected_mix, share_of_nodes
from specdeft.trees.named import NAMED_TREES
from specdeft.trees.options import Options
from specdeft.trees.picture import save_picture
from specdeft.trees.request import check_lookup, tree_of
from specdeft.trees.search import ValuedPaths, replayed_tau
from specdeft.trees.token_tree import TokenTree

SHOWN_SIZES = (2, 4, 8, 16, 24, 32, 48, 64)
_UNKNOWN = "-"
_WHY_UNKNOWN = "unknown: these values know nothing of lookup, run specdeft calibrate\n"
_VALUES_NAME = "tree_values.json"
_SHIPPED = Path(__file__).parent / "heads" / "pretrained"

_WHAT_A_TREE_IS = f"""\
A token tree says which guesses one forward pass of the model checks together. Its root is the last
token that is already decided. A node of depth d is a guess for the token d places later; its number
is the rank of the guess among those of the draft heads (0 is the likeliest), so the path 0, 2 reads
"the likeliest next token, then the third likeliest behind it". Nodes marked = are the lookup chain:
tokens copied from where the same words stood earlier in the text. tau is the mean number of tokens
that a step brings, the one that the model itself adds included: 1 is plain decoding.

A TREE is a number of nodes (the best tree of that size by calibrated values), chain-N, lookup-N,
one of {", ".join(NAMED_TREES)}, or a JSON file such as
{{"paths": [[0], [0, 0], [1]], "lookup": 4}}.
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft tree",
        description=_WHAT_A_TREE_IS,
        epilog="Examples:\n"
        "  specdeft tree show 16\n"
        "  specdeft tree show deft-64 --output tree.svg\n"
        "  specdeft tree search --nodes 32 --output best32.json\n"
        "  specdeft tree compare 16 32 deft-32 chain-4\n"
        '  specdeft generate --tree best32.json "Why is the sky blue?"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = options.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = _action(actions, "show", "draw one tree as text, SVG or PNG")
    show.add_argument("tree", metavar="TREE")
    show.add_argument("--ascii", action="store_true", help="draw with plain characters")
    _output(show, "write a picture (.svg, .png) or the tree itself (.json)")
    search = _action(actions, "search", "the best trees of all sizes, by calibrated values")
    search.add_argument("--nodes", type=int, metavar="N", help="also show the best tree of N nodes")
    search.add_argument("--ascii", action="store_true", help="draw with plain characters")
    _output(search, "write the tree of --nodes (.json, .svg or .png)")
    compare = _action(actions, "compare", "trees beside each other: size, shape, expected tau")
    compare.add_argument("trees", metavar="TREE", nargs="+")
    return options


def _action(actions: object, name: str, summary: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(  # type: ignore[attr-defined]
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. See specdeft tree --help for what a TREE "
        "is.",
    )
    action.add_argument(
        "--values",
        default=next(iter(DEFAULT_MODELS)),
        help="calibrated values: a file, a folder of heads, or an embedded model's name "
        "(default: %(default)s)",
    )
    action.add_argument(
        "--lookup",
        default="auto",
        help="auto: trees of a size get a lookup chain where it pays; on: every tree gets one; "
        "off: none does (default: %(default)s)",
    )
    return action


def _output(action: argparse.ArgumentParser, purpose: str) -> None:
    action.add_argument("--output", type=Path, metavar="FILE", help=purpose)


def main(arguments: Sequence[str]) -> int:
    """Run the command; bad input raises ValueError before anything is written."""
    options = parser().parse_args(arguments)
    check_lookup(options.lookup)
    run = {"show": _show, "search": _search, "compare": _compare}[options.action]
    run(options)
    return 0


def _show(options: argparse.Namespace) -> None:
    values = load_values(options.values)
    tree = tree_of(options.tree, values, options.lookup)
    _print(tree, values, options)
    if options.output is not None:
        _write(tree, values, options.output)


def _search(options: argparse.Namespace) -> None:
    values = load_values(options.values)
    if options.output is not None and options.nodes is None:
        raise ValueError("--output needs --nodes N: which of the best trees shall be written?")
    chosen = None if options.nodes is None else tree_of(options.nodes, values, options.lookup)
    most = 1 + len(values.paths) + (len(values.lookup) if options.lookup != "off" else 0)
    sizes = [size for size in SHOWN_SIZES if size <= most]
    _table({str(size): tree_of(size, values, options.lookup) for size in sizes}, values)
    if values.taus:
        sys.stdout.write("\n" + _replayed(sizes, values, options.lookup != "off"))
    if chosen is not None:
        sys.stdout.write("\n")
        _print(chosen, values, options)
        if options.output is not None:
            _write(chosen, values, options.output)


def _replayed(sizes: Sequence[int], values: ValuedPaths, lookup: bool) -> str:
    """What the best trees brought when the answers they were made from were decoded with them."""
    heats = sorted({row.temperature for row in values.taus})
    lines = ["replayed tau  " + "  ".join(f"T = {heat:<4g}" for heat in heats)]
    for size in sizes:
        taus = (replayed_tau(values, size, temperature=heat, lookup=lookup) for heat in heats)
        cells = "  ".join("       -" if tau is None else f"{tau:>8.2f}" for tau in taus)
        lines.append(f"{size:>5} nodes   {cells}")
    return "\n".join(lines) + "\n"


def _compare(options: argparse.Namespace) -> None:
    values = load_values(options.values)
    _table({name: tree_of(name, values, options.lookup) for name in options.trees}, values)


def load_values(source: str) -> ValuedPaths:
    """Calibrated values by an embedded model's name, a folder of heads or a file.

    Raises:
        ValueError: there are none.
    """
    path = _SHIPPED / source if source in DEFAULT_MODELS else Path(source)
    if path.is_dir():
        path = path / _VALUES_NAME
    if not path.is_file():
        raise ValueError(
            f"there are no calibrated values in {source}: run specdeft calibrate, or give a file, "
            f"a folder of heads that holds {_VALUES_NAME}, or one of {', '.join(DEFAULT_MODELS)}"
        )
    return ValuedPaths.load(path)


def _print(tree: TokenTree, values: ValuedPaths, options: argparse.Namespace) -> None:
    sys.stdout.write(tree.draw(ascii_only=options.ascii) + "\n\n" + tree.summary() + "\n")
    expected = _expected(values, tree)
    sys.stdout.write(
        f"expected tau {expected} tokens a step\n"
        if expected != _UNKNOWN
        else f"expected tau {_WHY_UNKNOWN}"
    )


def _expected(values: ValuedPaths, tree: TokenTree) -> str:
    """Expected tau; unknown where lookup was never measured, which is not the same as nothing."""
    if tree.num_lookup and not values.lookup:
        return _UNKNOWN
    return f"{expected_mix(values, tree):.2f}"


def _write(tree: TokenTree, values: ValuedPaths, path: Path) -> None:
    if path.suffix == ".json":
        tree.save(path)
    else:
        save_picture(tree, path, share_of_nodes(values, tree))
    sys.stderr.write(f"wrote {path}\n")


def _table(trees: dict[str, TokenTree], values: ValuedPaths) -> None:
    """Sizes and what a step of each is expected to bring."""
    width = max(4, *(len(name) for name in trees))
    heading = f"{'tree':<{width}}  nodes  lookup  depth  leaves  top-k  expected tau"
    lines = [heading, "-" * len(heading)]
    expected = {name: _expected(values, tree) for name, tree in trees.items()}
    for name, tree in trees.items():
        lines.append(
            f"{name:<{width}}  {tree.num_nodes:>5}  {tree.num_lookup:>6}  {tree.max_depth:>5}  "
            f"{tree.num_leaves:>6}  {tree.top_k:>5}  {expected[name]:>12}"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    if _UNKNOWN in expected.values():
        sys.stdout.write(f"{_UNKNOWN}: {_WHY_UNKNOWN}")
