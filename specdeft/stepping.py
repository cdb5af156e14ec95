"""Running steps and reading what they emitted: at once, or a step late from replayed graphs."""

from typing import Protocol

from specdeft.batch import Batch
from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.sampling import Sampler
from specdeft.tree_tensors import TreeTensors


class Stepper(Protocol):
    """Launches steps and hands back their tokens in order, at most ``lead`` steps late."""

    lead: int

    @property
    def num_pending(self) -> int:
        """Steps launched and not collected."""

    def launch(self, tree: TreeTensors) -> None:
        """Start one step; does not wait for it."""

    def collect(self) -> list[int]:
        """The tokens of the oldest launched step that was not collected."""

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

    @property
    def num_pending(self) -> int:
        """See `Stepper`."""
        return int(self._launched)

    def launch(self, tree: TreeTensors) -> None:
        """See `Stepper`."""
        self._cache.reserve(self._batch.sequences[0], tree.num_nodes)
        self._engine.step(self._cache, self._batch, tree, self._sampler)
        self._launched = True

    def collect(self) -> list[int]:
        """See `Stepper`."""
        self._launched = False
        count = int(self._batch.counts[0])
        self._cache.advance(self._batch.sequences[0], count)
        return self._batch.emitted[0, :count].tolist()

    def finish(self) -> None:
        """See `Stepper`."""
        self._launched = False
