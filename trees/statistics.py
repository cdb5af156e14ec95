"""Joint acceptance statistics: how often the target's continuation follows each rank path.

A sample is one position of text the target wrote: for every head the rank of the token that really
came, or R when it was not among the head's best R. Counting whole paths keeps what a product of
per-head accuracies loses: a later head is right more often where the earlier ones were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdeft.trees.atomic import write_text_atomic
from specdeft.trees.search import ValuedPaths, grow
from specdeft.trees.token_tree import TokenTree
from specdeft.trees.topology import RankPath

# How many samples of the path itself weigh as much as the product of marginals. Paths seen far more
# often keep their own frequency; paths seen once or twice are mostly chance.
DEFAULT_SHRINKAGE = 16.0


@dataclass(frozen=True)
class PathCount:
    """hits: samples that start with the path. trials: those of them whose next token is known."""

    hits: int
    trials: int


_UNSEEN = PathCount(0, 0)


@dataclass(frozen=True)
class RankStatistics:
    """Counts of joint rank paths and of each head's ranks; statistics of two runs add up.

    num_heads: K. num_ranks: R, the ranks looked at. counts: by path, the empty one included; a path
    that is left out was never seen. rank_hits: [K][R], samples where rank r of head k was right.
    rank_trials: [K], samples where the token that head k guesses is known.
    """

    num_heads: int
    num_ranks: int
    counts: Mapping[RankPath, PathCount]
    rank_hits: tuple[tuple[int, ...], ...]
    rank_trials: tuple[int, ...]

    def __post_init__(self) -> None:
        rows = {len(row) for row in self.rank_hits}
        if {len(self.rank_hits), len(self.rank_trials)} != {self.num_heads} or rows - {
            self.num_ranks
        }:
            raise ValueError(
                f"rank_hits must be {self.num_heads} rows of {self.num_ranks} counts and "
                f"rank_trials {self.num_heads} counts"
            )

    @property
    def num_samples(self) -> int:
        """Positions counted."""
        return self.counts.get((), _UNSEEN).hits

    def __add__(self, other: RankStatistics) -> RankStatistics:
        """The statistics of both sets of samples together."""
        if (self.num_heads, self.num_ranks) != (other.num_heads, other.num_ranks):
            raise ValueError(
                f"statistics of {self.num_heads} heads x {self.num_ranks} ranks cannot be added to "
                f"{other.num_heads} x {other.num_ranks}; count both alike"
            )
        counts = dict(self.counts)
        for path, count in other.counts.items():
            mine = counts.get(path, _UNSEEN)
            counts[path] = PathCount(mine.hits + count.hits, mine.trials + count.trials)
        return RankStatistics(
            self.num_heads,
            self.num_ranks,
            counts,
            tuple(
                tuple(a + b for a, b in zip(mine, theirs, strict=True))
                for mine, theirs in zip(self.rank_hits, other.rank_hits, strict=True)
            ),
            tuple(a + b for a, b in zip(self.rank_trials, other.rank_trials, strict=True)),
        )

    def head_accuracies(self) -> list[list[float]]:
        """[K][R]: share of each rank of each head, whatever the other heads did."""
        return [
            [hits / max(trials, 1) for hits in row]
            for row, trials in zip(self.rank_hits, self.rank_trials, strict=True)
        ]

    def next_rank_shares(self, path: RankPath, shrinkage: float = DEFAULT_SHRINKAGE) -> list[float]:
        """Estimated shares of the ranks of head len(path) where the path before it was right.

        The path's own frequencies, shrunk towards the head's marginal as if `shrinkage` further
        samples had followed it. Past the last head: [].
        """
        head = len(path)
        if head >= self.num_heads:
            return []
        weight = self.counts.get(path, _UNSEEN).trials + shrinkage
        if weight == 0:
            return [0.0] * self.num_ranks
        prior = max(self.rank_trials[head], 1)
        return [
            (
                self.counts.get((*path, rank), _UNSEEN).hits
                + shrinkage * self.rank_hits[head][rank] / prior
            )
            / weight
            for rank in range(self.num_ranks)
        ]

    def valued_paths(
        self, max_paths: int = 1023, shrinkage: float = DEFAULT_SHRINKAGE
    ) -> ValuedPaths:
        """The most valuable paths, best first: the input of `search.best_tree`."""
        return grow(lambda path: self.next_rank_shares(path, shrinkage), max_paths)

    def expected_tau(self, tree: TokenTree, shrinkage: float = DEFAULT_SHRINKAGE) -> float:
        """Expected tokens a step of what the heads propose of a tree; paths that the statistics do
        not cover add nothing."""
        tree = tree.head_tree
        values = [1.0] + [0.0] * (tree.num_nodes - 1)
        for node in range(1, tree.num_nodes):
            parent, rank = tree.parents[node], tree.ranks[node]
            shares = self.next_rank_shares(tree.paths[parent], shrinkage)
            values[node] = values[parent] * shares[rank] if rank < len(shares) else 0.0
        return sum(values)

    # ---- files

    def to_json(self) -> str:
        """JSON text that `from_json` reads back to equal statistics."""
        content = {
            "num_heads": self.num_heads,
            "num_ranks": self.num_ranks,
            "rank_hits": self.rank_hits,
            "rank_trials": self.rank_trials,
            "counts": [[path, c.hits, c.trials] for path, c in sorted(self.counts.items())],
        }
        return json.dumps(content) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RankStatistics:
        """Inverse of `to_json`. Raises ValueError when the text is anything else."""
        try:
            content = json.loads(text)
            return cls(
                int(content["num_heads"]),
                int(content["num_ranks"]),
                {
                    tuple(path): PathCount(int(hits), int(trials))
                    for path, hits, trials in content["counts"]
                },
                tuple(tuple(map(int, row)) for row in content["rank_hits"]),
                tuple(map(int, content["rank_trials"])),
            )
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the text is not rank statistics ({error!r}); write it with RankStatistics.save"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the JSON file; it appears whole or not at all."""
        write_text_atomic(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> RankStatistics:
        """Read a saved file. Raises ValueError naming the file and what is wrong with it."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"statistics file {path} cannot be used: {error}") from error


def count_ranks(ranks: Tensor, num_ranks: int, num_known: Tensor | None = None) -> RankStatistics:
    """Count rank tuples.

    ranks: int64 [samples, K]; entry [s, k] is the rank of the true token in head k's best
        `num_ranks`, or `num_ranks` when it is not among them.
    num_known: int64 [samples], how many heads' true tokens exist before the text ends; all K when
        left out. Entries past it are not read, and each depth has its own denominator.
    Raises ValueError for other shapes and for ranks outside 0 .. num_ranks.
    """
    if ranks.dim() != 2 or ranks.dtype != torch.int64:
        raise ValueError(
            f"ranks is {ranks.dtype} of shape {tuple(ranks.shape)}; pass int64 [samples, heads]"
        )
    num_samples, num_heads = ranks.shape
    if num_known is None:
        num_known = torch.full((num_samples,), num_heads, device=ranks.device)
    known = torch.arange(num_heads, device=ranks.device) < num_known.unsqueeze(1)
    in_range = (ranks >= 0) & (ranks <= num_ranks)
    if not bool((in_range | ~known).all()):
        raise ValueError(
            f"ranks hold a number outside 0 to {num_ranks}; write {num_ranks} for a missed token"
        )
    hit = known & (ranks < num_ranks)
    # Samples whose first d heads were all right, for every depth d.
    on_path = torch.cat([hit.new_ones(num_samples, 1), hit.long().cumprod(dim=1).bool()], dim=1)
    counts: dict[RankPath, PathCount] = {}
    for depth in range(num_heads + 1):
        starts = ranks[on_path[:, depth], :depth]
        goes_on = num_known[on_path[:, depth]] > depth
        counts.update(_count_rows(starts, goes_on))
    return RankStatistics(
        num_heads,
        num_ranks,
        counts,
        tuple(
            tuple(ranks[hit[:, head], head].bincount(minlength=num_ranks).tolist())
            for head in range(num_heads)
        ),
        tuple(known.sum(0).tolist()),
    )


def with_lookup(
    valued: ValuedPaths,
    ranks: Tensor,
    num_known: Tensor,
    lookup_depth: Tensor,
    lookup_known: Tensor,
    shrinkage: float = DEFAULT_SHRINKAGE,
) -> ValuedPaths:
    """The valued paths with what a lookup chain holds of the same samples beside them.

    ranks, num_known: as for `count_ranks`. lookup_depth: int64 [samples], how many tokens of a
    chain of M come true. lookup_known: int64 [samples], how many of the M true tokens exist. A path
    seen rarely is shrunk towards all paths of its depth.
    """
    unlooked: dict[RankPath, float] = {}
    for depth in range(1, ranks.shape[1] + 1):
        known = num_known >= depth
        starts = ranks[known, :depth]
        missed = lookup_depth[known] < depth
        counts = _count_rows(starts, missed)
        held = [path for path in valued.paths if len(path) == depth]
        seen = [counts.get(path, _UNSEEN) for path in held]
        hits = sum(count.hits for count in seen)
        prior = sum(count.trials for count in seen) / hits if hits else 1.0
        for path, count in zip(held, seen, strict=True):
            weight = count.hits + shrinkage
            unlooked[path] = (count.trials + shrinkage * prior) / weight if weight else 1.0
    return ValuedPaths(
        valued.paths,
        valued.values,
        _survival(lookup_depth, lookup_known),
        tuple(
            value * unlooked[path] for path, value in zip(valued.paths, valued.values, strict=True)
        ),
    )


def _survival(depth: Tensor, num_known: Tensor) -> tuple[float, ...]:
    """Share of samples that hold 1, 2, .. tokens, each depth judged where its token exists."""
    shares, share = [], 1.0
    for length in range(1, int(num_known.max()) + 1 if len(num_known) else 1):
        reached = (depth >= length - 1) & (num_known >= length)
        share *= float((depth[reached] >= length).double().mean()) if bool(reached.any()) else 0.0
        shares.append(share)
    return tuple(shares)


def _count_rows(rows: Tensor, goes_on: Tensor) -> dict[RankPath, PathCount]:
    """How often each row of int64 [n, d] occurs, and how often with goes_on (bool [n]) set."""
    if rows.shape[1] == 0:
        return {(): PathCount(rows.shape[0], int(goes_on.sum()))}
    paths, index = torch.unique(rows, dim=0, return_inverse=True)
    hits = index.bincount(minlength=len(paths))
    trials = index[goes_on].bincount(minlength=len(paths))
    return {
        tuple(path): PathCount(num_hits, num_trials)
        for path, num_hits, num_trials in zip(
            paths.tolist(), hits.tolist(), trials.tolist(), strict=True
        )
    }


def accepted_depths(tree: TokenTree, ranks: Tensor) -> Tensor:
    """Acceptance length of what the heads propose of `tree` on every sample: int64 [samples], the
    bonus token excluded.

    ranks: int64 [samples, K] as for `count_ranks`, K >= the tree's depth; a rank the tree does not
    hold ends the walk.
    """
    tree = tree.head_tree
    tree.validate_for(num_heads=ranks.shape[1])
    # One column more than ranks in the tree: every rank it lacks leads there, and nowhere on.
    stop = tree.num_nodes
    child = torch.full((tree.num_nodes + 1, tree.top_k + 1), stop)
    for node in range(1, tree.num_nodes):
        child[tree.parents[node], tree.ranks[node]] = node
    node_of = torch.zeros(len(ranks), dtype=torch.int64)
    depth = torch.zeros_like(node_of)
    for head in range(tree.max_depth):
        node_of = child[node_of, ranks[:, head].clamp(max=tree.top_k)]
        depth += node_of != stop
    return depth
