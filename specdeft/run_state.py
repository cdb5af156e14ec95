"""The memory generations run on: a KV tree, a step's tensors, and graphs; reused between them."""

from typing import TYPE_CHECKING, NamedTuple

from specdeft.batch import Batch
from specdeft.config import GenerationConfig
from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.sampling import Sampler
from specdeft.stepping import EagerStepper, Stepper
from specdeft.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from specdeft.graphs import StepGraphs

CAPACITY_STEP_TOKENS = 256
MIN_GRAPH_CAPACITY_TOKENS = 4096  # a larger request later means capturing again
MIN_GRAPH_LEVELS = 8


class RunState(NamedTuple):
    """What a generation runs on: the KV tree with its one open sequence, and the step's tensors."""

    cache: KVTree
    batch: Batch
    sampler: Sampler
    stepper: Stepper


class RunStates:
    """Hands out the state of one generation at a time; grows when a larger one comes.

    Attributes:
        cache: the KV tree, None before the first generation.
    """

    def __init__(self, engine: Engine) -> None:
        self.cache: KVTree | None = None
        self._engine = engine
        self._graphs: StepGraphs | None = None

    def fresh(
        self, num_tokens: int, config: GenerationConfig, tree: TokenTree, number: int
    ) -> RunState:
        """A new sequence with room for ``num_tokens`` and the tree, and its step's tensors;
        ``number`` keys its noise beside the seed."""
        if self._engine.cuda_graphs:
            return self._on_graphs(num_tokens, config, tree, number)
        engine, capacity = self._engine, num_tokens + tree.num_nodes
        cache = self._cache_for(capacity)
        sequence = _only_sequence(cache, capacity)
        batch = Batch.empty(engine.target, cache, (sequence,), tree.max_depth + 1)
        sampler = Sampler.build(config, (number,), engine.target.device)
        return RunState(cache, batch, sampler, EagerStepper(engine, cache, batch, sampler))

    def _on_graphs(
        self, num_tokens: int, config: GenerationConfig, tree: TokenTree, number: int
    ) -> RunState:
        """The same on the tensors that the graphs were captured on."""
        from specdeft.graphs import GraphStepper, StepGraphs

        num_levels = tree.max_depth + 1
        # Two steps can be in flight when the last token kept is read.
        needed = num_tokens + tree.num_nodes + 2 * num_levels
        graphs = self._graphs
        if graphs is None or not graphs.fits(needed, num_levels):
            self._graphs = graphs = None  # free the old pool first
            cache = self._cache_for(max(needed, MIN_GRAPH_CAPACITY_TOKENS))
            sequence = _only_sequence(cache, cache.capacity)
            levels = max(num_levels, MIN_GRAPH_LEVELS)
            batch = Batch.empty(self._engine.target, cache, (sequence,), levels)
            sampler = Sampler.build(config, (number,), self._engine.target.device)
            self._graphs = graphs = StepGraphs(self._engine, cache, batch, sampler)
        sequence = _only_sequence(graphs.cache, graphs.cache.capacity)
        graphs.batch.restart(graphs.cache, (sequence,))
        graphs.sampler.restart(config, (number,))
        return RunState(graphs.cache, graphs.batch, graphs.sampler, GraphStepper(graphs))

    def _cache_for(self, num_tokens: int) -> KVTree:
        if self.cache is None or self.cache.capacity < num_tokens:
            self.cache = None  # free the old one first
            rounded = -(-num_tokens // CAPACITY_STEP_TOKENS) * CAPACITY_STEP_TOKENS
            self.cache = self._engine.new_cache(rounded)
        return self.cache


def _only_sequence(cache: KVTree, num_tokens: int) -> int:
    """Empty the cache and open one sequence with room for ``num_tokens``."""
    cache.clear()
    sequence = cache.open()
    cache.reserve(sequence, num_tokens)
    return sequence
