"""The KV forest: which runs of cached tokens exist, who hangs below whom, and who asks.

One description for every workload: a node is a run of tokens, a sequence is a root-to-node path,
and a query sees its own node and everything above it. Few-shot branches are leaves of one root,
a batch is many roots, a token tree is a tree of one-token nodes below a sequence.

Nodes stand in depth-first order, so the queries below a node are a contiguous range once they are
sorted by node. `from_nodes` takes any order with parents first and sorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.trees.token_tree import TokenTree


class PathTable(NamedTuple):
    """Every query's own tokens, for methods that work per path.

    slots: int32 [Q, L], row q holds its path's slots in order; past lengths[q] the entries are 0
        and mean nothing. lengths: int64 [Q].
    """

    slots: Tensor
    lengths: Tensor


@dataclass(frozen=True, eq=False)
class KVForest:
    """M nodes, S tokens, Q queries; all tensors on the CPU. Checked when it is made.

    parents: int64 [M]; -1 for a root, else an earlier node; depth-first.
    num_tokens: int64 [M]; tokens of the node, 0 allowed.
    slots: int32 [S]; cache slot of every token, the nodes' runs one after the other. The place of a
        token in this list is its flattened index.
    query_nodes: int64 [Q]; node of each query, row by row of the query tensor. Any number a node.
    Raises ValueError when a shape, dtype or number is outside this.
    """

    parents: Tensor
    num_tokens: Tensor
    slots: Tensor
    query_nodes: Tensor

    def __post_init__(self) -> None:
        for name in ("parents", "num_tokens", "query_nodes"):
            if getattr(self, name).dtype != torch.int64:
                raise ValueError(f"{name} is {getattr(self, name).dtype}; pass an int64 tensor")
        if self.slots.dtype != torch.int32:
            raise ValueError(f"slots is {self.slots.dtype}; pass an int32 tensor")
        if self.parents.shape != self.num_tokens.shape or self.parents.dim() != 1:
            raise ValueError(
                f"parents has shape {tuple(self.parents.shape)} and num_tokens "
                f"{tuple(self.num_tokens.shape)}; give both one number a node"
            )
        if self.num_nodes and int(self.num_tokens.min()) < 0:
            raise ValueError("num_tokens holds a negative number; a node has 0 tokens or more")
        if self.slots.shape != (self.total_tokens,):
            raise ValueError(
                f"slots has shape {tuple(self.slots.shape)} but the nodes hold "
                f"{self.total_tokens} tokens; give one slot a token"
            )
        if self.num_queries:
            low, high = map(int, self.query_nodes.aminmax())
            if low < 0 or high >= self.num_nodes:
                raise ValueError(
                    f"query_nodes holds a node outside 0 to {self.num_nodes - 1}; "
                    "attach queries to nodes of the forest"
                )
        _ = self.subtree_ends

    @classmethod
    def from_nodes(
        cls, parents: Sequence[int], slots: Sequence[Sequence[int]], query_nodes: Sequence[int]
    ) -> KVForest:
        """Forest from nodes in any order with parents first; they are renumbered depth-first.

        slots: one sequence of slots a node (a `range` for a contiguous run). query_nodes: numbers
        of the given order. The order of children and of the query rows is kept.
        """
        if len(slots) != len(parents):
            raise ValueError(
                f"there are {len(parents)} parents but {len(slots)} slot lists; give one a node"
            )
        order = _depth_first(parents)
        number = [0] * len(parents)
        for new, old in enumerate(order):
            number[old] = new
        if any(not 0 <= node < len(parents) for node in query_nodes):
            raise ValueError(f"query_nodes holds a node outside 0 to {len(parents) - 1}")
        flat = [torch.tensor(slots[old], dtype=torch.int32) for old in order]
        return cls(
            torch.tensor([number[p] if (p := parents[old]) >= 0 else -1 for old in order]).long(),
            torch.tensor([len(slots[old]) for old in order]).long(),
            torch.cat(flat) if flat else torch.zeros(0, dtype=torch.int32),
            torch.tensor([number[node] for node in query_nodes]).long(),
        )

    @classmethod
    def with_token_trees(
        cls,
        parents: Sequence[int],
        slots: Sequence[Sequence[int]],
        leaves: Sequence[int],
        tree: TokenTree,
        tree_slots: Sequence[Sequence[int]],
    ) -> KVForest:
        """Cached nodes as for `from_nodes`, and below each leaf the tokens of one token tree.

        leaves: B nodes in which the sequences end. tree_slots: B sequences of N slots, tree node by
        tree node. Query row b * N + i is tree node i of sequence b.
        """
        if len(leaves) != len(tree_slots) or any(len(s) != tree.num_nodes for s in tree_slots):
            raise ValueError(
                f"tree_slots must hold {tree.num_nodes} slots for each of {len(leaves)} leaves"
            )
        all_parents, all_slots = list(parents), list(slots)
        for leaf, node_slots in zip(leaves, tree_slots, strict=True):
            root = len(all_parents)
            all_parents += [leaf, *(root + parent for parent in tree.parents[1:])]
            all_slots += [(slot,) for slot in node_slots]
        return cls.from_nodes(all_parents, all_slots, range(len(parents), len(all_parents)))

    # ---- sizes

    @property
    def num_nodes(self) -> int:
        """M."""
        return self.parents.shape[0]

    @property
    def num_queries(self) -> int:
        """Q."""
        return self.query_nodes.shape[0]

    @cached_property
    def total_tokens(self) -> int:
        """S: every token counted once, however many sequences share it."""
        return int(self.num_tokens.sum())

    # ---- what the partitions need

    @cached_property
    def subtree_ends(self) -> Tensor:
        """int64 [M]: one past the last node below each node; raises ValueError for a bad order."""
        return torch.tensor(_subtree_ends(self.parents.tolist()), dtype=torch.int64)

    @cached_property
    def token_ends(self) -> Tensor:
        """int64 [M]: flattened index one past each node's last token."""
        return self.num_tokens.cumsum(0)

    @cached_property
    def token_begins(self) -> Tensor:
        """int64 [M]: flattened index of each node's first token."""
        return self.token_ends - self.num_tokens

    @cached_property
    def query_order(self) -> Tensor:
        """int64 [Q]: query rows sorted by node, rows of one node in their own order."""
        return self.query_nodes.argsort(stable=True)

    @cached_property
    def query_begins(self) -> Tensor:
        """int64 [M]: first place in `query_order` of a query that sees the node; never falls."""
        return torch.searchsorted(self._sorted_query_nodes, torch.arange(self.num_nodes))

    @cached_property
    def query_ends(self) -> Tensor:
        """int64 [M]: one past the last place in `query_order` of a query that sees the node."""
        return torch.searchsorted(self._sorted_query_nodes, self.subtree_ends)

    @cached_property
    def _sorted_query_nodes(self) -> Tensor:
        return self.query_nodes[self.query_order]

    # ---- positions and the plain meaning

    @cached_property
    def _tokens_above(self) -> Tensor:
        """int64 [M]: tokens of all ancestors, by a sum over depth-first intervals."""
        change = torch.zeros(self.num_nodes + 1, dtype=torch.int64)
        change[1:] += self.num_tokens
        change.index_add_(0, self.subtree_ends, -self.num_tokens)
        return change.cumsum(0)[:-1]

    def token_positions(self) -> Tensor:
        """int32 [S]: position of every token in its sequence, counted from the root's first."""
        shift = self._tokens_above - self.token_begins
        spread = shift.repeat_interleave(self.num_tokens, output_size=self.total_tokens)
        return (torch.arange(self.total_tokens) + spread).to(torch.int32)

    def query_positions(self) -> Tensor:
        """int32 [Q]: position of the last token that each query row sees; -1 when it sees none."""
        return (self.path_lengths() - 1).to(torch.int32)

    def path_lengths(self) -> Tensor:
        """int64 [Q]: how many tokens each query row sees."""
        return (self._tokens_above + self.num_tokens)[self.query_nodes]

    def visible(self, device: torch.device | str = "cpu") -> Tensor:
        """bool [Q, S] on `device`: the meaning of the forest, row by query row, column by
        flattened index.

        Quadratic: for tests, references and methods that want a dense mask.
        """
        node = torch.arange(self.num_nodes, device=device)
        home = self.query_nodes.to(device).unsqueeze(1)
        sees_node = (node <= home) & (home < self.subtree_ends.to(device))
        return sees_node.repeat_interleave(
            self.num_tokens.to(device), dim=1, output_size=self.total_tokens
        )

    def path_table(self) -> PathTable:
        """The slots of every query's path, shared tokens repeated. Quadratic, like `visible`."""
        lengths = self.path_lengths()
        columns = torch.arange(int(lengths.max()) if self.num_queries else 0)
        table = torch.zeros(self.num_queries, len(columns), dtype=torch.int32)
        table[columns < lengths.unsqueeze(1)] = self.slots[self.visible().nonzero()[:, 1]]
        return PathTable(table, lengths)


def _depth_first(parents: Sequence[int]) -> list[int]:
    """Depth-first order of the nodes, children in the order given; parents must come first."""
    children: list[list[int]] = [[] for _ in parents]
    stack: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"the parent of node {node} is {parent}; give -1 for a root or an earlier node"
            )
        (stack if parent < 0 else children[parent]).append(node)
    stack.reverse()
    order: list[int] = []
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    return order


def _subtree_ends(parents: list[int]) -> list[int]:
    """One past the last node below each; raises ValueError unless the order is depth-first."""
    ends = [len(parents)] * len(parents)
    open_nodes: list[int] = []
    for node, parent in enumerate(parents):
        while open_nodes and open_nodes[-1] != parent:
            ends[open_nodes.pop()] = node
        if not open_nodes and parent != -1:
            if not -1 <= parent < node:
                raise ValueError(
                    f"the parent of node {node} is {parent}; give -1 for a root or an earlier node"
                )
            raise ValueError(
                f"node {node} stands apart from the other nodes below its parent {parent}; "
                "build the forest with KVForest.from_nodes, which sorts them"
            )
        open_nodes.append(node)
    return ends
