"""The memory generations run on: a KV tree, a step's tensors, and graphs; reused between them."""

from collections.abc import Sequence
from typing import NamedTuple

from specdeft.batch import Batch
from specdeft.config import GenerationConfig
from specdeft.engine import CAPACITY_STEP_TOKENS, Engine
from specdeft.graphs import StepGraphs
from specdeft.kv_tree import KVTree
from specdeft.memory import DEFAULT_KV_FRACTION, plan_memory
from specdeft.prompt_graphs import PromptGraphs
from specdeft.prompts import num_shared_tokens, read_prompts
from specdeft.sampling import Sampler
from specdeft.stepping import EagerStepper, Stepper
from specdeft.trees.token_tree import TokenTree

MIN_GRAPH_CAPACITY_TOKENS = 4096
MIN_GRAPH_LEVELS = 32  # more than any tree of "auto": no capturing again for a deeper one


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
    prompt_graphs: PromptGraphs | None
    prompts: list[list[int]]
    capacities: list[int]

    def read_prompts(self) -> None:
        """Read the prompts into their sequences; the first tokens are `Batch.root` then."""
        read_prompts(
            self.engine,
            self.cache,
            self.batch,
            self.sampler,
            self.prompts,
            self.capacities,
            self.prompt_graphs,
        )


class RunStates:
    """Hands out the state of one generation at a time; grows when a larger one comes.

    Attributes:
        cache: the KV tree, None before the first generation.
    """

    def __init__(self, engine: Engine, kv_memory_fraction: float = DEFAULT_KV_FRACTION) -> None:
        """Args: what runs; the share of the free memory that the KV tree may take.

        Raises:
            ValueError: the share is not above 0 and at most 1.
        """
        if not 0.0 < kv_memory_fraction <= 1.0:
            raise ValueError(
                f"kv_memory_fraction is {kv_memory_fraction}: give a number above 0 and up to 1"
            )
        self.cache: KVTree | None = None
        self._engine = engine
        self._kv_fraction = kv_memory_fraction
        self._graphs: dict[int, StepGraphs] = {}  # by batch size
        self._prompt_graphs: PromptGraphs | None = None

    def fresh(
        self, requests: Sequence[Request], config: GenerationConfig, tree: TokenTree
    ) -> RunState:
        """Room for the requests and the tree behind them, and their step's tensors.

        Raises:
            ValueError: they do not fit the memory; nothing was taken.
        """
        engine, num_levels = self._engine, tree.max_depth + 1
        prompts = [request.prompt_ids for request in requests]
        # Two steps of a graph can be in flight when the last token kept is read.
        beyond = tree.num_nodes + (2 * num_levels if engine.cuda_graphs else 0)
        capacities = [_rounded(len(r.prompt_ids) + r.budget + beyond) for r in requests]
        cache = self._cache_for(prompts, capacities, tree.num_nodes, config.is_greedy)
        numbers = tuple(request.number for request in requests)
        if engine.cuda_graphs:
            graphs = self._graphs_for(cache, capacities, config, numbers, num_levels)
            batch, sampler = graphs.batch, graphs.sampler
            sampler.restart(config, numbers)
            stepper: Stepper = graphs.stepper()
        else:
            batch = self._batch_for(cache, len(requests), max(capacities), num_levels)
            sampler = Sampler.build(config, numbers, engine.target.device)
            stepper = EagerStepper(engine, cache, batch, sampler)
        cache.clear()
        return RunState(
            engine, cache, batch, sampler, stepper, self._prompt_graphs, prompts, capacities
        )

    def _graphs_for(
        self,
        cache: KVTree,
        capacities: list[int],
        config: GenerationConfig,
        numbers: tuple[int, ...],
        num_levels: int,
    ) -> StepGraphs:
        """The graphs of this batch size, with their tensors."""
        size = len(capacities)
        graphs = self._graphs.get(size)
        if graphs is None or not graphs.fits(max(capacities), num_levels):
            graphs = self._graphs.pop(size, None)  # free the old ones first
            del graphs
            # Room for more than is asked for: a larger request later means capturing again.
            capacity = max(max(capacities), min(cache.capacity, MIN_GRAPH_CAPACITY_TOKENS))
            levels = max(num_levels, MIN_GRAPH_LEVELS)
            batch = self._batch_for(cache, size, capacity, levels)
            sampler = Sampler.build(config, numbers, self._engine.target.device)
            self._graphs[size] = graphs = StepGraphs(self._engine, cache, batch, sampler)
        return graphs

    def _batch_for(self, cache: KVTree, size: int, capacity: int, num_levels: int) -> Batch:
        return Batch.allocate(
            self._engine.target,
            size,
            num_levels,
            num_pages=-(-capacity // cache.page_size),
            page_size=cache.page_size,
        )

    def _cache_for(
        self, prompts: list[list[int]], capacities: list[int], num_nodes: int, is_greedy: bool
    ) -> KVTree:
        """A KV tree that holds such sequences; a new one ends what ran on the old one."""
        engine, known = self._engine, self.cache
        stored = engine.stored_tokens(capacities, num_shared_tokens(prompts))
        if known is not None and engine.can_hold(known, stored):
            return known
        wanted = stored
        if engine.cuda_graphs:  # room for more than is asked for, where there is
            roomy = [max(stored[0], MIN_GRAPH_CAPACITY_TOKENS), *stored[1:]]
            wanted = roomy if self._fits(roomy, num_nodes, is_greedy) is None else stored
        refusal = self._fits(wanted, num_nodes, is_greedy)
        if refusal is not None:
            raise ValueError(refusal)
        del known
        self.cache = None  # free the old one first, and the graphs that read it
        self._graphs.clear()
        self._prompt_graphs = None
        self.cache = engine.new_cache_for(wanted)
        if engine.cuda_graphs:
            self._prompt_graphs = PromptGraphs(engine, self.cache)
        return self.cache

    def _fits(self, stored: list[int], num_nodes: int, is_greedy: bool) -> str | None:
        """None where sequences of so many tokens fit the free memory, else the refusal."""
        plan = plan_memory(
            self._engine, stored, num_nodes, is_greedy=is_greedy, replaced=self.cache
        )
        fits = plan is None or plan.fits(self._kv_fraction)
        return None if fits or plan is None else plan.refusal(stored, self._kv_fraction)


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // CAPACITY_STEP_TOKENS) * CAPACITY_STEP_TOKENS
