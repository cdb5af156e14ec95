"""Steps as CUDA graphs: captured once per (tree, rule, context bucket, whether a shared prefix is
read once), replayed without the host.

A `StepGraphs` owns the static tensors its graphs were captured on (one batch, one sampler, one KV
tree) and a ring of pinned outboxes: after every replay the step's tokens are copied out
asynchronously, and the host reads them one step late, while the next step runs.
"""

import warnings
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdeft.batch import Batch
from specdeft.capturing import capture
from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.sampling import Sampler, SamplingRule
from specdeft.tree_tensors import TreeTensors

RING_SIZE = 4  # outboxes: more than the steps in flight
SMALLEST_BUCKET_TOKENS = 1024


class _Key(NamedTuple):
    tree: str
    rule: SamplingRule
    max_context: int
    prefix_once: bool


class _Outbox(NamedTuple):
    """Pinned host memory for one step's emitted tokens and counts, and when they are there."""

    emitted: torch.Tensor
    counts: torch.Tensor
    ready: torch.cuda.Event


def context_bucket(num_tokens: int) -> int:
    """The power of two (from 1,024) that bounds ``num_tokens``: it fixes a graph's launches."""
    return max(SMALLEST_BUCKET_TOKENS, 1 << max(num_tokens - 1, 0).bit_length())


def context_buckets(num_tokens: int) -> list[int]:
    """All buckets that sequences of up to ``num_tokens`` pass through, the smallest first."""
    buckets = [SMALLEST_BUCKET_TOKENS]
    while buckets[-1] < num_tokens:
        buckets.append(2 * buckets[-1])
    return buckets


class StepGraphs:
    """The captured steps of one KV tree.

    Attributes:
        engine, cache, batch, sampler: what the graphs were captured on; their storage never moves.
    """

    def __init__(self, engine: Engine, cache: KVTree, batch: Batch, sampler: Sampler) -> None:
        self.engine = engine
        self.cache = cache
        self.batch = batch
        self.sampler = sampler
        # A graph reads its tree's tensors where they were at capture: they are kept with it.
        self._graphs: dict[_Key, tuple[torch.cuda.CUDAGraph | None, TreeTensors]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.ring = [
            _Outbox(
                torch.empty_like(batch.emitted, device="cpu").pin_memory(),
                torch.empty_like(batch.counts, device="cpu").pin_memory(),
                torch.cuda.Event(),
            )
            for _ in range(RING_SIZE)
        ]

    def fits(self, capacity: int, num_levels: int) -> bool:
        """Whether sequences of so many tokens and a tree of so many levels fit these tensors."""
        held = self.batch.page_table.shape[1] * self.cache.page_size
        return capacity <= held and num_levels <= self.batch.emitted.shape[1]

    def stepper(self) -> "GraphStepper":
        """What runs one generation on these graphs."""
        return GraphStepper(self)

    def run(self, tree: TreeTensors, max_context: int) -> None:
        """One step of ``tree`` with at most ``max_context`` committed tokens: replayed, or eager
        where there was no memory to capture it, which is said once."""
        graph = self.graph(tree, max_context)
        if graph is None:
            self._step(tree, max_context)
        else:
            graph.replay()

    def graph(self, tree: TreeTensors, max_context: int) -> torch.cuda.CUDAGraph | None:
        """The graph of such a step, captured when first asked for; None where memory is too short.

        Raises:
            ValueError: the model does something that no graph can hold.
        """
        prefix_once = self.engine.reads_prefix_once(self.cache, self.batch, tree.num_nodes)
        key = _Key(tree.tree.content_hash, self.sampler.rule, max_context, prefix_once)
        if key not in self._graphs:
            self._graphs[key] = self._captured(tree, max_context), tree
        return self._graphs[key][0]

    def _captured(self, tree: TreeTensors, max_context: int) -> torch.cuda.CUDAGraph | None:
        """Capture; where memory is too short for it, without the graphs there are."""
        for attempt in range(2):
            try:
                return self._capture(tree, max_context)
            except torch.cuda.OutOfMemoryError:
                if attempt == 0:
                    self._graphs.clear()
                    torch.cuda.empty_cache()
        warnings.warn(
            f"no memory is left to capture a step of {tree.num_nodes} nodes x {self.batch.size} "
            f"sequences at {max_context} tokens: it runs without a CUDA graph, which is slower; "
            "use a smaller tree or batch, or a lower kv_memory_fraction",
            RuntimeWarning,
            stacklevel=2,
        )
        return None

    def _capture(self, tree: TreeTensors, max_context: int) -> torch.cuda.CUDAGraph:
        batch = self.batch
        state = [batch.root, batch.hidden, batch.lengths, batch.emitted, batch.counts]
        state.append(batch.history)
        kept = [tensor.clone() for tensor in state]
        try:
            return self._warm_and_capture(tree, max_context)
        finally:
            for tensor, value in zip(state, kept, strict=True):
                tensor.copy_(value)

    def _warm_and_capture(self, tree: TreeTensors, max_context: int) -> torch.cuda.CUDAGraph:
        lengths = self.batch.lengths.clone()
        graph, _ = capture(
            lambda: self._step(tree, max_context),
            self._pool,
            type(self.engine.target.model).__name__,
            reset=lambda: self.batch.lengths.copy_(lengths),
        )
        return graph

    def _step(self, tree: TreeTensors, max_context: int) -> None:
        self.engine.step(self.cache, self.batch, tree, self.sampler, max_context)


class GraphStepper:
    """Replays steps one ahead of the host (`stepping.Stepper`)."""

    lead = 1

    def __init__(self, graphs: StepGraphs) -> None:
        self._graphs = graphs
        self._launched = 0
        self._rows = list(range(graphs.batch.size))  # that have not ended
        self._levels: deque[int] = deque()  # most tokens of each step in flight

    @property
    def num_pending(self) -> int:
        """See `stepping.Stepper`."""
        return len(self._levels)

    def launch(self, tree: TreeTensors) -> None:
        """See `stepping.Stepper`."""
        graphs = self._graphs
        # What the device may have committed at most, without asking it.
        lengths = (graphs.cache.length(graphs.batch.sequences[row]) for row in self._rows)
        most_tokens = max(lengths, default=0) + sum(self._levels)
        graphs.run(tree, context_bucket(most_tokens))
        box = graphs.ring[self._launched % RING_SIZE]
        box.emitted.copy_(graphs.batch.emitted, non_blocking=True)
        box.counts.copy_(graphs.batch.counts, non_blocking=True)
        box.ready.record()
        self._launched += 1
        self._levels.append(tree.num_levels)

    def collect(self) -> list[list[int]]:
        """See `stepping.Stepper`."""
        graphs = self._graphs
        box = graphs.ring[(self._launched - self.num_pending) % RING_SIZE]
        box.ready.synchronize()  # of a step before the one that runs: the device does not wait
        self._levels.popleft()
        counts, emitted = box.counts.tolist(), box.emitted.tolist()
        tokens: list[list[int]] = [[] for _ in counts]
        for row in self._rows:
            graphs.cache.advance(graphs.batch.sequences[row], counts[row])
            tokens[row] = emitted[row][: counts[row]]
        return tokens

    def retire(self, rows: Sequence[int]) -> None:
        """See `stepping.Stepper`."""
        batch, cache = self._graphs.batch, self._graphs.cache
        for row in rows:
            self._rows.remove(row)
            batch.retire(row, cache.own_page(batch.sequences[row]))

    def finish(self) -> None:
        """See `stepping.Stepper`."""
        if self.num_pending:
            self._graphs.ring[(self._launched - 1) % RING_SIZE].ready.synchronize()
            self._levels.clear()
