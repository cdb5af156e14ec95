"""From what a user calls a tree to the tree: a size, a name, a file; with or without lookup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

from specdeft.trees.mixing import best_mix
from specdeft.trees.named import NAMED_TREES, named_tree
from specdeft.trees.search import ReplayedTau, ValuedPaths, best_tree
from specdeft.trees.token_tree import TokenTree
from specdeft.trees.whole_numbers import typed_number, whole_number

TreeRequest = str | int | Path | TokenTree
LookupRequest = Literal["auto", "on", "off"]
DEFAULT_CHAIN = 8  # tokens of the lookup chain that "on" adds to a tree that has none

NOT_CALIBRATED = (
    "these heads were not calibrated, so the best tree of a size is not known: run specdeft "
    f"calibrate, name a tree ({', '.join(NAMED_TREES)}) or give a JSON file"
)

# Without heads nothing need be trained to look up. Until `specdeft calibrate` is run for a model,
# this is what is expected: measured with SmolLM2-135M's answers to the 80 prompts of bench/prompts
# at temperature 0.7, which hardly repeat themselves.
_CHAIN_SHARES = (0.18, 0.099, 0.065, 0.049, 0.037, 0.031, 0.026, 0.021, 0.017, 0.015, 0.013, 0.012)
_CHAIN_TAUS = {2: 1.258, 4: 1.412, 6: 1.459, 8: 1.480, 12: 1.498}
LOOKUP_ONLY = ValuedPaths(
    (),
    (),
    _CHAIN_SHARES,
    taus=tuple(ReplayedTau(0.7, True, size, tau) for size, tau in _CHAIN_TAUS.items()),
)


def check_lookup(lookup: str) -> LookupRequest:
    """The request, checked. Raises ValueError when it is none of auto, on, off."""
    for known in get_args(LookupRequest):
        if lookup == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"lookup is {lookup!r}: give {', '.join(get_args(LookupRequest))}")


def tree_of(
    request: TreeRequest, values: ValuedPaths | None, lookup: LookupRequest = "auto"
) -> TokenTree:
    """The tree that is asked for.

    request: a tree; a number of nodes (the best tree of that size by `values`); a name; chain-N; a
    JSON file. lookup: "auto" mixes a chain into trees of a size where `values` say that it pays and
    leaves other trees alone, "on" gives every tree a chain, "off" wants none.
    Raises ValueError when there is no such tree or it cannot be had with these values.
    """
    if isinstance(request, int):
        return _of_size(whole_number(request, "the number of nodes"), values, lookup)
    if str(request).isdecimal():
        return _of_size(typed_number(str(request), "the number of nodes"), values, lookup)
    tree = _named(request)
    if lookup == "off" and tree.num_lookup:
        raise ValueError(
            f"the tree has a lookup chain of {tree.num_lookup} tokens and lookup is off: name "
            "another tree or allow lookup"
        )
    # The root alone is plain decoding, asked for by name.
    if lookup == "on" and not tree.num_lookup and tree.num_nodes > 1:
        return tree.with_lookup(DEFAULT_CHAIN)
    return tree


def _named(request: TreeRequest) -> TokenTree:
    if isinstance(request, TokenTree):
        return request
    text = str(request)
    if text in NAMED_TREES:
        return named_tree(text)
    if chain := re.fullmatch(r"(chain|lookup)-(\d+)", text):
        length = typed_number(chain[2], "the length of the chain")
        return TokenTree.chain(length) if chain[1] == "chain" else lookup_tree(length)
    if Path(text).suffix == ".json" or _is_there(text):
        return TokenTree.load(text)
    raise ValueError(
        f"there is no tree {text[:60]!r}: give auto, a number of nodes, a JSON file, chain-N, "
        f"lookup-N, or one of {', '.join(NAMED_TREES)}"
    )


def _is_there(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a name, or with a character that none can have
        return False


def lookup_tree(length: int) -> TokenTree:
    """A lookup chain alone: what a model without heads can draft."""
    return TokenTree.chain(0).with_lookup(length)


def _of_size(num_nodes: int, values: ValuedPaths | None, lookup: LookupRequest) -> TokenTree:
    if num_nodes < 1:
        raise ValueError(f"a tree of {num_nodes} nodes is empty: ask for 1 (plain) or more")
    if num_nodes == 1:
        return TokenTree.chain(0)
    if values is None:
        raise ValueError(NOT_CALIBRATED)
    if lookup == "off":
        return best_tree(values, num_nodes)
    tree = best_mix(values, num_nodes).tree
    if lookup == "on" and not tree.num_lookup:
        chain = min(DEFAULT_CHAIN, num_nodes - 1)
        return best_tree(values, num_nodes - chain).with_lookup(chain)
    return tree
