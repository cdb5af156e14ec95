"""A generation over the KV tree, step by step: what is cached where, and who asks.

Every step says which nodes hang below whom (a `KVForest` over the pool's slots), where the new
tokens' keys and values go and at which positions they stand. Pages, forks, copies on write and
freeing are those of `specdeft.kv_tree`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdeft.bench.growing_tree import GrowingTree
from specdeft.kernels.commit import commit
from specdeft.kv_tree import KVShape, KVTree
from specdeft.trees.forest import KVForest
from specdeft.trees.token_tree import TokenTree


class Step(NamedTuple):
    """One decoding step, its new slots included.

    number: from 1. forest: Q queries. new_slots, positions: int64 [Q] on the CPU, of the queries'
    own tokens. num_tokens: how many tokens of text the step brings.
    """

    number: int
    forest: KVForest
    new_slots: Tensor
    positions: Tensor
    num_tokens: int


class State(Protocol):
    """A workload on its KV tree."""

    kv: KVTree
    num_steps: int

    def steps(self) -> Iterator[Step]:
        """All steps in order; the KV tree follows as the iterator advances."""


class GrowingState:
    """A recorded tree replayed: branches are forks, an ended branch is closed."""

    def __init__(
        self,
        tree: GrowingTree,
        shape: KVShape,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Args: the record; the model's cache shape; tokens of a page; where the pool is."""
        self.tree = tree
        self.num_steps = tree.num_steps
        most_pages = sum(-(-count // page_size) + 1 for count in tree.tokens)
        self.kv = KVTree(
            shape, num_pages=most_pages, page_size=page_size, dtype=dtype, device=device
        )
        self._sequence: dict[int, int] = {}
        self._length: dict[int, int] = {}  # tokens of the whole path when the node has ended
        self._first: dict[int, int] = {}  # position from which the node's slots are its own
        self._slots: dict[int, Tensor] = {}  # int32, of its own positions

    def steps(self) -> Iterator[Step]:
        """See `State`."""
        tree = self.tree
        self._open(0, self.kv.open(), 0, tree.tokens[0])
        self.kv.advance(self._sequence[0], tree.tokens[0])
        self._length[0] = tree.tokens[0]
        for number in range(1, self.num_steps + 1):
            self._branch(tree.begins_at(number))
            self._prune(number)
            yield self._step(number)
            for node in tree.alive(number):
                self.kv.advance(self._sequence[node], 1)

    def _open(self, node: int, sequence: int, num_shared: int, num_new: int) -> None:
        length = self.kv.length(sequence)
        self.kv.reserve(sequence, num_new)
        self._sequence[node] = sequence
        self._first[node] = num_shared
        self._length[node] = length + num_new
        self._slots[node] = self.kv.slots(sequence, num_shared, length + num_new).int().cpu()

    def _branch(self, children: Sequence[int]) -> None:
        tree = self.tree
        for node in children:
            parent = tree.parents[node]
            # Full pages are shared; the fork has copied the rest, which is the child's own.
            shared = self._length[parent] // self.kv.page_size * self.kv.page_size
            self._open(node, self.kv.fork(self._sequence[parent]), shared, tree.tokens[node])
        for parent in {tree.parents[node] for node in children}:
            self.kv.close(self._sequence.pop(parent))

    def _prune(self, number: int) -> None:
        for node in [n for n in self._sequence if self.tree.ends[n] == number - 1]:
            self.kv.close(self._sequence.pop(node))

    def _step(self, number: int) -> Step:
        tree, kept, alive = self.tree, self.tree.kept(number), self.tree.alive(number)
        place = {node: index for index, node in enumerate(kept)}
        held = {node: self._length[node] for node in kept}
        for node in alive:
            held[node] = self.kv.length(self._sequence[node]) + 1
        # A parent's last, partial page was copied to its children.
        for node in kept:
            if tree.parents[node] in held:
                held[tree.parents[node]] = self._first[node]
        runs = [self._slots[node][: held[node] - self._first[node]] for node in kept]
        forest = KVForest(
            torch.tensor([place.get(tree.parents[node], -1) for node in kept]),
            torch.tensor([len(run) for run in runs]),
            torch.cat(runs),
            torch.tensor([place[node] for node in alive]),
        )
        positions = torch.tensor([held[node] - 1 for node in alive])
        new_slots = torch.stack([runs[place[node]][-1] for node in alive]).long()
        return Step(number, forest, new_slots, positions, len(alive))


class SpeculativeState:
    """One growing sequence with a token tree after it; recorded lengths say how much is kept."""

    def __init__(
        self,
        prompt: int,
        tree: TokenTree,
        accepted: Sequence[int],
        shape: KVShape,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Args: prompt tokens; the token tree; drafted tokens kept at each step; the pool's."""
        self.tree = tree
        self._prompt = prompt
        self._accepted = [min(count, tree.max_depth) for count in accepted]
        self.num_steps = len(accepted)
        most = prompt + sum(self._accepted) + self.num_steps + tree.num_nodes
        self.kv = KVTree(
            shape, num_pages=-(-most // page_size), page_size=page_size, dtype=dtype, device=device
        )
        deepest = tree.depths.index(tree.max_depth)
        self._path = [deepest]
        while tree.parents[self._path[-1]] >= 0:
            self._path.append(tree.parents[self._path[-1]])
        self._path.reverse()
        self._sequence = self.kv.open()
        self.kv.reserve(self._sequence, self.kv.capacity)
        self._commit(0, 0)  # compiles the kernel

    def steps(self) -> Iterator[Step]:
        """See `State`."""
        kv, tree, sequence = self.kv, self.tree, self._sequence
        kv.advance(sequence, self._prompt)
        slots = kv.slots(sequence, 0, kv.capacity).int().cpu()
        depths = torch.tensor(tree.depths)
        for number, count in enumerate(self._accepted, start=1):
            length = kv.length(sequence)
            end = length + tree.num_nodes
            forest = KVForest(
                torch.tensor([-1, *(1 + parent for parent in tree.parents)]),
                torch.tensor([length, *([1] * tree.num_nodes)]),
                slots[:end],
                torch.arange(1, 1 + tree.num_nodes),
            )
            new = slots[length:end].long()
            yield Step(number, forest, new, length + depths, 1 + count)
            self._commit(length, count)
            kv.advance(sequence, 1 + count)

    def _commit(self, length: int, count: int) -> None:
        kv, device = self.kv, self.kv.keys.device
        table = kv.page_table([self._sequence])
        commit(
            kv.keys,
            kv.values,
            lengths=torch.tensor([length], dtype=torch.int32, device=device),
            path_nodes=torch.tensor([self._path], device=device),
            num_accepted=torch.tensor([count], dtype=torch.int32, device=device),
            page_table=table,
            page_size=kv.page_size,
            capacity=kv.page_size * table.shape[1],
        )
