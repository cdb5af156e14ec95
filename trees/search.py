"""Which token tree to use: the best tree of every size, and the size that pays.

The value of a node is the share of decoding positions at which the target's continuation starts
with the node's rank path, so a step that verifies a set of nodes emits 1 + (sum of their values)
tokens on average. A child is never worth more than its parent; therefore the first n - 1 paths by
value, parents first on ties, are closed under prefixes and no tree of n nodes is worth more. The
best trees of all sizes are the prefixes of one list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from specdeft.trees.atomic import write_text_atomic
from specdeft.trees.token_tree import TokenTree
from specdeft.trees.topology import RankPath
from specdeft.trees.whole_numbers import whole_numbers

# What reading JSON of any origin can raise, numbers beyond every measure included.
_MALFORMED = (TypeError, KeyError, ValueError, AttributeError, RecursionError, ArithmeticError)


class ReplayedTau(NamedTuple):
    """Tokens a step that the best tree of a size brought when known texts were decoded with it.

    temperature: how those texts were drawn. lookup: whether the tree could hold a lookup chain.
    num_tokens: how much of each text was decoded at most; None where that was not noted. The longer
        a text, the more of it has been said before.
    """

    temperature: float
    lookup: bool
    num_nodes: int
    tau: float
    num_tokens: int | None = None


@dataclass(frozen=True)
class ValuedPaths:
    """Rank paths by falling value, every path after its prefixes; and what lookup adds to them.

    paths: P distinct non-empty rank paths. values: P numbers in [0, 1], not rising.
    lookup: entry j is the share of positions at which the first j + 1 tokens of a lookup chain
        come true, not rising; empty where lookup was not measured.
    unlooked: with lookup P numbers, the share of each path where the lookup chain is wrong by the
        path's depth: what the path is still worth beside the chain, at most its value.
    taus: what trees of some sizes really brought (`replayed_tau`), where it was tried.
    Raises ValueError when the order, a value or a missing prefix breaks this.
    """

    paths: tuple[RankPath, ...]
    values: tuple[float, ...]
    lookup: tuple[float, ...] = ()
    unlooked: tuple[float, ...] = ()
    taus: tuple[ReplayedTau, ...] = ()

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.values):
            raise ValueError(
                f"there are {len(self.paths)} paths but {len(self.values)} values; give one a path"
            )
        self._check_lookup()
        for path, value in zip(self.paths, self.values, strict=True):
            if not 0.0 <= value <= 1.0:
                raise ValueError(
                    f"the value of path {list(path)} is {value}; values are shares from 0 to 1"
                )
        if any(later > earlier for earlier, later in pairwise(self.values)):
            raise ValueError("the values rise along the list; sort the paths by falling value")
        seen: set[RankPath] = {()}
        for path in self.paths:
            if path in seen:
                raise ValueError(f"path {list(path)} is empty or listed twice; list each path once")
            if min(path) < 0:
                raise ValueError(f"path {list(path)} has a negative rank; ranks count from 0")
            if path[:-1] not in seen:
                raise ValueError(
                    f"path {list(path)} stands before its prefix {list(path[:-1])}; "
                    "list parents before children"
                )
            seen.add(path)

    def _check_lookup(self) -> None:
        if len(self.unlooked) != (len(self.paths) if self.lookup else 0):
            raise ValueError(
                f"there are {len(self.unlooked)} values beside the lookup chain for "
                f"{len(self.paths)} paths; give one a path with lookup and none without"
            )
        if any(not 0.0 <= share <= 1.0 for share in (*self.lookup, *self.unlooked)):
            raise ValueError("a share beside or of the lookup chain lies outside 0 to 1")
        if any(later > earlier for earlier, later in pairwise(self.lookup)):
            raise ValueError("the shares of the lookup chain rise; a longer chain holds less often")
        if any(beside > value for beside, value in zip(self.unlooked, self.values, strict=False)):
            raise ValueError("a path is worth more beside the lookup chain than alone")
        if any(not (1 <= row.tau < math.inf and row.num_nodes >= 1) for row in self.taus):
            raise ValueError("a replayed tau is below 1 or belongs to no tree")
        if any(row.num_tokens is not None and row.num_tokens < 1 for row in self.taus):
            raise ValueError("a replayed tau belongs to texts of no token")

    def to_json(self) -> str:
        """JSON text; the values are rounded to 9 digits, which keeps their order."""
        content: dict[str, object] = {"paths": self.paths}
        for name in ("values", "lookup", "unlooked"):
            content[name] = [round(value, 9) for value in getattr(self, name)]
        content["taus"] = [[*row[:3], round(row.tau, 4), row.num_tokens] for row in self.taus]
        return json.dumps(content) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ValuedPaths:
        """Inverse of `to_json`. Raises ValueError when the text is anything else."""
        try:
            fields = json.loads(text)
            paths = tuple(whole_numbers(path, "a path") for path in fields["paths"])
            values = tuple(map(float, fields["values"]))
            lookup = tuple(map(float, fields.get("lookup", ())))
            unlooked = tuple(map(float, fields.get("unlooked", ())))
            taus = tuple(
                ReplayedTau(float(heat), bool(looked_up), int(size), float(tau), _length(*length))
                for heat, looked_up, size, tau, *length in fields.get("taus", ())
            )
        except _MALFORMED as error:
            raise ValueError(
                "the text is not valued paths: write an object with paths and values"
            ) from error
        return cls(paths, values, lookup, unlooked, taus)

    def save(self, path: str | Path) -> None:
        """Write the JSON file; it appears whole or not at all."""
        write_text_atomic(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> ValuedPaths:
        """Read a saved file. Raises ValueError naming the file and what is wrong with it."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"valued paths file {path} cannot be used: {error}") from error


# Given that the heads so far were right with these ranks: the shares of the ranks 0, 1, .. of the
# next head, summing to at most 1; an empty sequence past the last head.
NextRankShares = Callable[[RankPath], Sequence[float]]


def grow(next_rank_shares: NextRankShares, max_paths: int) -> ValuedPaths:
    """The `max_paths` most valuable paths, best first; fewer when the heads allow no more.

    A path is worth its parent's value times its share below the parent. Best-first growth from the
    root: cost O(max_paths x ranks x log).
    """
    frontier: list[tuple[float, int, RankPath]] = []

    def open_children(path: RankPath, value: float) -> None:
        for rank, share in enumerate(next_rank_shares(path)):
            heappush(frontier, (-value * share, len(path) + 1, (*path, rank)))

    open_children((), 1.0)
    paths: list[RankPath] = []
    values: list[float] = []
    while frontier and len(paths) < max_paths:
        negative_value, _, path = heappop(frontier)
        paths.append(path)
        values.append(-negative_value)
        open_children(path, -negative_value)
    return ValuedPaths(tuple(paths), tuple(values))


def grow_from_accuracies(accuracies: Sequence[Sequence[float]], max_paths: int) -> ValuedPaths:
    """Valued paths when only each head's accuracy by rank is known, heads taken as independent.

    accuracies: [K][R], entry [k][r] = share of positions where rank r of head k is right (Medusa's
    published estimate). Joint statistics are better when there are any: `statistics`.
    """
    for head, shares in enumerate(accuracies):
        if any(share < 0 for share in shares) or sum(shares) > 1 + 1e-6:
            raise ValueError(
                f"the accuracies of head {head} are not shares; their sum must be at most 1"
            )
    return grow(
        lambda path: accuracies[len(path)] if len(path) < len(accuracies) else [], max_paths
    )


def best_tree(valued: ValuedPaths, num_nodes: int) -> TokenTree:
    """The tree of `num_nodes` nodes, root included, with the largest expected tau.

    Raises ValueError when num_nodes is below 1 or more than the paths known allow.
    """
    _check_size(valued, num_nodes)
    return TokenTree.from_paths(valued.paths[: num_nodes - 1])


def expected_tau(valued: ValuedPaths, num_nodes: int) -> float:
    """Expected tokens a step of `best_tree(valued, num_nodes)`, the bonus token included."""
    _check_size(valued, num_nodes)
    return 1.0 + math.fsum(valued.values[: num_nodes - 1])


def replayed_tau(
    valued: ValuedPaths,
    num_nodes: int,
    *,
    temperature: float,
    lookup: bool,
    num_tokens: int | None = None,
) -> float | None:
    """Tokens a step to expect of the best tree of a size in texts of `num_tokens`, None for the
    longest: from the replays at the temperature nearest to `temperature`, between two sizes and two
    lengths by the logarithm; None where none was tried."""
    rows = [row for row in valued.taus if row.lookup == lookup]
    if num_nodes <= 1 or not rows:
        return 1.0 if num_nodes == 1 else None
    nearest = min({row.temperature for row in rows}, key=lambda heat: abs(heat - temperature))
    by_length: dict[float, dict[float, float]] = {}
    for row in rows:
        if row.temperature == nearest:
            sizes = by_length.setdefault(row.num_tokens or math.inf, {1: 1.0})
            sizes[row.num_nodes] = row.tau
    return _between(
        {length: _between(sizes, num_nodes) for length, sizes in by_length.items()},
        num_tokens or math.inf,
    )


def _between(known: Mapping[float, float], place: float) -> float:
    """What is known at a place: the value there, else between its neighbours by the logarithm of
    the place, and past the last one that one's."""
    below = max((at for at in known if at <= place), default=min(known))
    above = min((at for at in known if at >= place), default=below)
    if below >= above or math.inf in (below, above):
        return known[below]
    share = math.log(place / below) / math.log(above / below)
    return known[below] + share * (known[above] - known[below])


def _length(num_tokens: int | None = None) -> int | None:
    return None if num_tokens is None else int(num_tokens)


def _check_size(valued: ValuedPaths, num_nodes: int) -> None:
    if not 1 <= num_nodes <= len(valued.paths) + 1:
        raise ValueError(
            f"a tree of {num_nodes} nodes cannot be chosen from {len(valued.paths)} valued paths; "
            f"give a size from 1 to {len(valued.paths) + 1}"
        )


def choose_size(expected: Mapping[int, float], cost_ms: Mapping[int, float]) -> int:
    """The tree size with the most tokens per millisecond; the smaller one on a tie.

    expected: tau by number of nodes. cost_ms: time of a whole step by number of nodes, measured on
    the device in use. Only sizes in both are compared; size 1 is plain decoding and wins when
    speculation does not pay. Raises ValueError when no size is in both or a number is not positive.
    """
    sizes = sorted(expected.keys() & cost_ms.keys())
    if not sizes:
        raise ValueError(
            f"no tree size has both a tau and a step time: taus are for {sorted(expected)}, "
            f"times for {sorted(cost_ms)}; measure the same sizes"
        )
    for size in sizes:
        if not (0 < expected[size] < math.inf and 0 < cost_ms[size] < math.inf):
            raise ValueError(
                f"size {size} has tau {expected[size]} and step time {cost_ms[size]} ms; "
                "both must be positive numbers"
            )
    return max(sizes, key=lambda size: (expected[size] / cost_ms[size], -size))
