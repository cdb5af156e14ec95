"""Running steps and reading what they emitted: at once, or a step late from replayed graphs."""

from collections.abc import Sequence
from typing import Protocol

from specdeft.batch import Batch
from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.sampling import Sampler
from specdeft.tree_tensors import TreeTensors


class Stepper(Protocol):
    """Launches steps of a batch and hands back their tokens in order, at most ``lead`` steps late.

    Rows are those of the batch as it began, also after some of them ended.
    """

    lead: int

    @property
    def num_pending(self) -> int:
        """Steps launched and not collected."""

    def launch(self, tree: TreeTensors) -> None:
        """Start one step; does not wait for it."""

    def collect(self) -> list[list[int]]:
        """By row, the tokens of the oldest launched step that was not collected; none of a row
        that ended."""

    def retire(self, rows: Sequence[int]) -> None:
        """These rows have ended: they cost no attention any more. Does not wait."""

    def finish(self) -> None:
        """Wait for what was launched; its tokens are dropped."""


class EagerStepper:
    """One step after the other, its tokens read when they are asked for."""

    lead = 0

    def __init__(self, engine: Engine, cache: KVTree, batch: Batch, sampler: Sampler) -> None:
        self._launched = False
        self._engine = engine
        self._cache = cache
        self._batch = batch
        self._sampler = sampler
        self._num_rows = batch.size
        self._rows = list(range(batch.size))  # of the batch as it began

    @property
    def num_pending(self) -> int:
        """See `Stepper`."""
        return int(self._launched)

    def launch(self, tree: TreeTensors) -> None:
        """See `Stepper`."""
        for sequence in self._batch.sequences:
            self._cache.reserve(sequence, tree.num_nodes)
        self._engine.step(self._cache, self._batch, tree, self._sampler)
        self._launched = True

    def collect(self) -> list[list[int]]:
        """See `Stepper`."""
        self._launched = False
        counts, emitted = self._batch.counts.tolist(), self._batch.emitted.tolist()
        tokens: list[list[int]] = [[] for _ in range(self._num_rows)]
        for row, sequence, count, ids in zip(
            self._rows, self._batch.sequences, counts, emitted, strict=True
        ):
            self._cache.advance(sequence, count)
            tokens[row] = ids[:count]
        return tokens

    def retire(self, rows: Sequence[int]) -> None:
        """See `Stepper`: the batch goes on without them."""
        kept = [index for index, row in enumerate(self._rows) if row not in rows]
        if len(kept) == len(self._rows) or not kept:
            return
        self._rows = [self._rows[index] for index in kept]
        self._batch = self._batch.select(kept)
        self._sampler = self._sampler.select(kept)

    def finish(self) -> None:
        """See `Stepper`."""
        self._launched = False
