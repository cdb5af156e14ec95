"""The token tree: which guesses are verified together in one step of the target.

Node 0 is the root, the last token already decided. Every other node is a drafted token: its depth d
says which head proposed it (head d - 1), its rank which of that head's best tokens it is. A tree
may also hold a lookup chain, tokens copied from what followed the same words earlier in the text
(`lookup`): it hangs at the root, before all other children. Nodes stand in depth-first order,
parents before children and siblings by rank, so that the nodes below a node are a contiguous range
and equal trees are equal objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from specdeft.trees.atomic import write_text_atomic
from specdeft.trees.drawing import draw_tree
from specdeft.trees.mask import mask_words_from_ancestors
from specdeft.trees.topology import (
    MAX_NODES,
    RankPath,
    check_lookup,
    check_parents,
    check_paths,
    close_prefixes,
    depth_first,
    depths_of,
    full_paths,
    subtree_ends_of,
)
from specdeft.trees.tree_file import read_tree_json
from specdeft.trees.whole_numbers import whole_number, whole_numbers


@dataclass(frozen=True)
class TokenTree:
    """Topology of N nodes in depth-first order; checked once, here.

    parents: N numbers; parents[0] == -1 and 0 <= parents[i] < i.
    ranks: N numbers; ranks[i] is the rank inside the top-k of head depth - 1. The root and the
        lookup chain are proposed by no head and their entries are -1; nothing reads them.
    num_lookup: nodes 1 .. num_lookup are the lookup chain.
    Raises ValueError for anything else, naming the node.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    num_lookup: int = 0

    def __post_init__(self) -> None:
        # Numbers of numpy or torch would compare equal and be hashed and written differently.
        object.__setattr__(self, "parents", whole_numbers(self.parents, "parents"))
        object.__setattr__(self, "ranks", whole_numbers(self.ranks, "ranks"))
        check_parents(self.parents)
        if len(self.ranks) != len(self.parents):
            raise ValueError(
                f"the tree has {len(self.parents)} parents but {len(self.ranks)} ranks; "
                "give one rank a node"
            )
        if self.num_lookup:
            check_lookup(self.parents, self.ranks, self.num_lookup)
            _ = self.head_tree  # checks the rest
            return
        order, ranks = depth_first(self.parents, self.ranks)
        if order != list(range(len(self.parents))) or ranks != self.ranks:
            raise ValueError(
                "the nodes are not in depth-first order with siblings by rank; "
                "build the tree with TokenTree.from_parents, which sorts them"
            )

    # ---- constructors

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], top_k: int | None = None) -> TokenTree:
        """Tree from rank paths (Medusa's "choices") in any order; the root is implied.

        Prefixes that are not listed are added with a warning that says how many. Raises ValueError
        for a duplicate or empty path, a rank below 0, and a rank >= top_k when top_k is given.
        """
        checked = check_paths(paths, top_k)
        return cls._from_sorted_paths(close_prefixes(checked))

    @classmethod
    def from_parents(cls, parents: Sequence[int], ranks: Sequence[int] | None = None) -> TokenTree:
        """Tree from parent numbers, parents before children; nodes are renumbered depth-first.

        parents[0] must be -1. Without ranks, siblings get 0, 1, .. in the order given. Raises
        ValueError for a cycle, a child before its parent, a second root, repeated sibling ranks.
        """
        parents = whole_numbers(parents, "parents")
        ranks = None if ranks is None else whole_numbers(ranks, "ranks")
        check_parents(parents)
        if ranks is not None and len(ranks) != len(parents):
            raise ValueError(
                f"there are {len(parents)} parents but {len(ranks)} ranks; give one rank a node"
            )
        order, ordered_ranks = depth_first(parents, ranks)
        new_number = {old: new for new, old in enumerate(order)}
        ordered = (-1, *(new_number[parents[old]] for old in order[1:]))
        return cls(ordered, ordered_ranks)

    @classmethod
    def chain(cls, num_drafted: int) -> TokenTree:
        """The root and `num_drafted` guesses in a row, all of rank 0; 0 is plain decoding."""
        num_drafted = whole_number(num_drafted, "the length of a chain")
        if not 0 <= num_drafted < MAX_NODES:
            raise ValueError(
                f"a chain of {num_drafted} drafted tokens cannot be built; "
                f"give a number from 0 to {MAX_NODES - 1}"
            )
        return cls(tuple(range(-1, num_drafted)), (-1, *[0] * num_drafted))

    @classmethod
    def full(cls, widths: Sequence[int]) -> TokenTree:
        """Every combination: each node at depth d has widths[d] children. [] is the root alone."""
        return cls._from_sorted_paths(full_paths(whole_numbers(widths, "widths")))

    def with_lookup(self, num_lookup: int) -> TokenTree:
        """The same heads' nodes beside a lookup chain of ``num_lookup`` tokens; 0 takes it away."""
        heads = self.head_tree
        num_lookup = whole_number(num_lookup, "the length of a lookup chain")
        if not 0 <= num_lookup <= MAX_NODES - heads.num_nodes:
            raise ValueError(
                f"a lookup chain of {num_lookup} tokens cannot be added; give a number from 0 to "
                f"{MAX_NODES - heads.num_nodes}"
            )
        if num_lookup == 0:
            return heads
        moved = (parent + num_lookup if parent else 0 for parent in heads.parents[1:])
        return TokenTree(
            (*range(-1, num_lookup), *moved),
            (*[-1] * (num_lookup + 1), *heads.ranks[1:]),
            num_lookup,
        )

    @classmethod
    def _from_sorted_paths(cls, paths: Sequence[RankPath]) -> TokenTree:
        """Tree from prefix-closed paths in lexicographic order, which is depth-first order."""
        number: dict[RankPath, int] = {(): 0}
        for path in paths:
            number[path] = len(number)
        parents = (-1, *(number[path[:-1]] for path in paths))
        return cls(parents, (-1, *(path[-1] for path in paths)))

    # ---- what follows from the topology

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node, root 0; the node's position is the committed length + depth."""
        return depths_of(self.parents)

    @cached_property
    def max_depth(self) -> int:
        """Most drafted tokens a step can accept; 0 for the root alone."""
        return max(self.depths)

    @cached_property
    def head_tree(self) -> TokenTree:
        """The tree without its lookup chain: its depth is the number of heads it needs."""
        chain = self.num_lookup
        if not chain:
            return self
        moved = (max(parent - chain, 0) for parent in self.parents[chain + 1 :])
        return TokenTree((-1, *moved), (-1, *self.ranks[chain + 1 :]))

    @cached_property
    def top_k(self) -> int:
        """Tokens it needs from a head: the largest rank + 1; 0 for the root alone."""
        return max(self.ranks) + 1

    @cached_property
    def paths(self) -> tuple[RankPath, ...]:
        """Rank path of every node; () for the root, and -1 for every step of the lookup chain."""
        paths: list[RankPath] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, ascending."""
        inner = set(self.parents)
        return tuple(node for node in range(self.num_nodes) if node not in inner)

    @property
    def num_leaves(self) -> int:
        """How many root-to-leaf paths the tree holds."""
        return len(self.leaves)

    @cached_property
    def nodes_per_depth(self) -> tuple[int, ...]:
        """How many nodes stand at depth 0, 1, .. max_depth."""
        counts = [0] * (self.max_depth + 1)
        for depth in self.depths:
            counts[depth] += 1
        return tuple(counts)

    @cached_property
    def subtree_ends(self) -> tuple[int, ...]:
        """For every node one past its last descendant: its subtree is the range [i, end)."""
        return subtree_ends_of(self.parents)

    @cached_property
    def content_hash(self) -> str:
        """16 hex digits that name the content: two trees are equal iff their hashes are."""
        content = json.dumps([self.parents, self.ranks])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    # ---- tensors for the model and the kernels, on the CPU

    def ancestors(self) -> Tensor:
        """bool [N, N]: [i, j] says that node i sees node j, i.e. j is i or an ancestor of i."""
        node = torch.arange(self.num_nodes)
        ends = torch.tensor(self.subtree_ends)
        return (node <= node.unsqueeze(1)) & (node.unsqueeze(1) < ends)

    def mask_words(self) -> Tensor:
        """int64 [N, W]: `ancestors()` packed; bit j % 64 of word j // 64 of row i."""
        return mask_words_from_ancestors(self.ancestors())

    def path_nodes(self) -> Tensor:
        """int64 [N, max_depth + 1]: column d of row i is the ancestor of i at depth d.

        Columns past the node's own depth repeat the node: a legal number, never a stop mark; the
        length of a path is its depth.
        """
        rows = [[0] * (self.max_depth + 1)]
        for node in range(1, self.num_nodes):
            depth = self.depths[node]
            above = rows[self.parents[node]][:depth]
            rows.append(above + [node] * (self.max_depth + 1 - depth))
        return torch.tensor(rows, dtype=torch.int64)

    # ---- other trees, checks

    def prune(self, max_depth: int) -> TokenTree:
        """The nodes of depth <= max_depth; the tree itself when it is no deeper."""
        if max_depth < 0:
            raise ValueError(f"max_depth is {max_depth}; give 0 (the root alone) or more")
        if max_depth >= self.max_depth:
            return self
        kept = [path for path in self.head_tree.paths[1:] if len(path) <= max_depth]
        return self._from_sorted_paths(kept).with_lookup(min(self.num_lookup, max_depth))

    def validate_for(self, num_heads: int, top_k: int | None = None) -> None:
        """Raise ValueError when the tree asks for more than the heads propose.

        num_heads: heads available, so the largest depth. top_k: tokens a head can propose.
        """
        depth = self.head_tree.max_depth
        if depth > num_heads:
            raise ValueError(
                f"the tree is {depth} deep but there are {num_heads} heads; "
                f"prune it to depth {num_heads} or load heads for {self.max_depth} positions"
            )
        if top_k is not None and self.top_k > top_k:
            raise ValueError(
                f"the tree uses rank {self.top_k - 1} but a head proposes {top_k} tokens; "
                f"use ranks 0 to {top_k - 1} or raise top_k to {self.top_k}"
            )

    # ---- text and files

    def summary(self) -> str:
        """One line: size, depth, leaves, widest rank, lookup, nodes per depth, content hash."""
        levels = "/".join(map(str, self.nodes_per_depth[1:])) or "root only"
        lookup = f"lookup {self.num_lookup}, " if self.num_lookup else ""
        return (
            f"{self.num_nodes} nodes, depth {self.max_depth} ({levels}), {self.num_leaves} leaves, "
            f"top-{self.top_k}, {lookup}{self.content_hash}"
        )

    def draw(self, labels: Sequence[str] | None = None, *, ascii_only: bool = False) -> str:
        """Draw the tree, a line for every leaf and a column for every depth.

        labels: N strings, e.g. the drafted tokens; when left out the ranks, and = for the lookup
        chain. ascii_only: plain characters in place of box-drawing ones.
        """
        if labels is None:
            ranks = ("=" if rank < 0 else str(rank) for rank in self.ranks[1:])
            labels = ["o" if ascii_only else "●", *ranks]
        if len(labels) != self.num_nodes:
            raise ValueError(f"{len(labels)} labels for {self.num_nodes} nodes; give one a node")
        return draw_tree(self.parents, self.depths, labels, ascii_only=ascii_only)

    def to_json(self) -> str:
        """JSON text `{"paths": [[0], [0, 0], ..]}`, with `"lookup": 8` for a lookup chain of 8;
        `from_json` gives the equal tree back."""
        lookup = {"lookup": self.num_lookup} if self.num_lookup else {}
        return json.dumps({"paths": self.head_tree.paths[1:], **lookup}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TokenTree:
        """Tree from JSON: a list of rank paths, or an object with one of `paths`, `widths`,
        `parents` (with `ranks`, if wanted), and `lookup`, the length of a lookup chain, if wanted.
        Raises ValueError, in one sentence, for anything else.
        """
        fields = read_tree_json(text)
        if fields.paths is not None:
            tree = cls.from_paths(fields.paths)
        elif fields.widths is not None:
            tree = cls.full(fields.widths)
        else:
            tree = cls.from_parents(fields.parents or [], fields.ranks)
        return tree.with_lookup(fields.lookup)

    @classmethod
    def load(cls, path: str | Path) -> TokenTree:
        """Tree from a JSON file. Raises ValueError naming the file and what is wrong with it."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or error.__class__.__name__
            raise ValueError(f"tree file {path} cannot be read: {reason}") from error
        except ValueError as error:
            raise ValueError(f"tree file {path} is not a token tree: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the JSON file; it appears whole or not at all."""
        write_text_atomic(Path(path), self.to_json())
