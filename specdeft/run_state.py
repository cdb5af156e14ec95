"""The memory generations run on: a KV tree, a step's tensors, and graphs; reused between them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from specdeft.batch import Batch
from specdeft.config import GenerationConfig
from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.prompts import read_prompts
from specdeft.sampling import Sampler
from specdeft.stepping import EagerStepper, Stepper
from specdeft.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from specdeft.graphs import StepGraphs

CAPACITY_STEP_TOKENS = 256
MIN_GRAPH_CAPACITY_TOKENS = 4096  # a larger request later means capturing again
MIN_GRAPH_LEVELS = 8


class Request(NamedTuple):
    """One sequence of a generation: its prompt, most tokens to emit behind it, and the number that
    keys its noise beside the seed."""

    prompt_ids: list[int]
    budget: int
    number: int


class RunState(NamedTuple):
    """What a generation runs on: a KV tree of its own for the time, and the step's tensors."""

    engine: Engine
    cache: KVTree
    batch: Batch
    sampler: Sampler
    stepper: Stepper
    prompts: list[list[int]]
    capacities: list[int]

    def read_prompts(self) -> None:
        """Read the prompts into their sequences; the first tokens are `Batch.root` then."""
        read_prompts(
            self.engine, self.cache, self.batch, self.sampler, self.prompts, self.capacities
        )


class RunStates:
    """Hands out the state of one generation at a time; grows when a larger one comes.

    Attributes:
        cache: the KV tree, None before the first generation.
    """

    def __init__(self, engine: Engine) -> None:
        self.cache: KVTree | None = None
        self._engine = engine
        self._graphs: dict[int, StepGraphs] = {}  # by batch size

    def fresh(
        self, requests: Sequence[Request], config: GenerationConfig, tree: TokenTree
    ) -> RunState:
        """Room for the requests and the tree behind them, and their step's tensors."""
        engine, num_levels = self._engine, tree.max_depth + 1
        # Two steps of a graph can be in flight when the last token kept is read.
        beyond = tree.num_nodes + (2 * num_levels if engine.cuda_graphs else 0)
        capacities = [_rounded(len(r.prompt_ids) + r.budget + beyond) for r in requests]
        numbers = tuple(request.number for request in requests)
        if engine.cuda_graphs:
            graphs = self._graphs_for(capacities, config, numbers, num_levels)
            cache, batch, sampler = graphs.cache, graphs.batch, graphs.sampler
            sampler.restart(config, numbers)
            stepper: Stepper = graphs.stepper()
        else:
            cache = self._cache_for(capacities)
            batch = self._batch_for(cache, len(requests), max(capacities), num_levels)
            sampler = Sampler.build(config, numbers, engine.target.device)
            stepper = EagerStepper(engine, cache, batch, sampler)
        cache.clear()
        prompts = [request.prompt_ids for request in requests]
        return RunState(engine, cache, batch, sampler, stepper, prompts, capacities)

    def _graphs_for(
        self,
        capacities: list[int],
        config: GenerationConfig,
        numbers: tuple[int, ...],
        num_levels: int,
    ) -> "StepGraphs":
        """The graphs of this batch size, with their tensors."""
        from specdeft.graphs import StepGraphs

        capacity = max(max(capacities), MIN_GRAPH_CAPACITY_TOKENS)
        graphs = self._graphs.get(len(capacities))
        if graphs is None or not graphs.fits(max(capacities), num_levels):
            self._graphs.pop(len(capacities), None)  # free the old ones first
            graphs = None
        cache = self._cache_for([max(c, MIN_GRAPH_CAPACITY_TOKENS) for c in capacities])
        if graphs is None or graphs.cache is not cache:
            levels = max(num_levels, MIN_GRAPH_LEVELS)
            batch = self._batch_for(cache, len(capacities), capacity, levels)
            sampler = Sampler.build(config, numbers, self._engine.target.device)
            graphs = StepGraphs(self._engine, cache, batch, sampler)
            self._graphs[len(capacities)] = graphs
        return graphs

    def _batch_for(self, cache: KVTree, size: int, capacity: int, num_levels: int) -> Batch:
        return Batch.allocate(
            self._engine.target,
            size,
            num_levels,
            num_pages=-(-capacity // cache.page_size),
            page_size=cache.page_size,
        )

    def _cache_for(self, capacities: list[int]) -> KVTree:
        """A KV tree that holds such sequences; a new one ends what ran on the old one."""
        if self.cache is None or not self._engine.can_hold(self.cache, capacities):
            self.cache = None  # free the old one first, and the graphs that read it
            self._graphs.clear()
            self.cache = self._engine.new_cache_for(capacities)
        return self.cache


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // CAPACITY_STEP_TOKENS) * CAPACITY_STEP_TOKENS
