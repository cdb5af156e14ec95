"""From prompts to sequences of the KV tree: what they begin with in common is read once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specdeft.batch import Batch
from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.sampling import Sampler

if TYPE_CHECKING:
    from specdeft.prompt_graphs import PromptGraphs

# Fewer common tokens are read faster than a sequence is forked.
MIN_SHARED_TOKENS = 32


def num_shared_tokens(prompts: Sequence[list[int]]) -> int:
    """How many first tokens the prompts have in common, 0 where it is not worth sharing them;
    every prompt keeps at least one token behind them."""
    if len(prompts) < 2:
        return 0
    shortest, longest = min(prompts), max(prompts)  # in the order of words, as in a dictionary
    limit = min(len(prompt) for prompt in prompts) - 1
    pairs = zip(shortest[:limit], longest[:limit], strict=False)
    common = next((place for place, (a, b) in enumerate(pairs) if a != b), limit)
    return common if common >= MIN_SHARED_TOKENS else 0


def read_prompts(
    engine: Engine,
    cache: KVTree,
    batch: Batch,
    sampler: Sampler,
    prompts: Sequence[list[int]],
    capacities: Sequence[int],
    graphs: "PromptGraphs | None" = None,
) -> None:
    """Open a sequence for every prompt, read it, and decide its first token (`Batch.root`).

    Args:
        engine: reads.
        cache: is empty and holds sequences of these capacities.
        batch: its tensors are bound to the new sequences, row by row.
        sampler: how the first tokens are chosen.
        prompts: B of token ids, none of them empty.
        capacities: tokens that each sequence may come to hold, drafted ones included.
        graphs: of the cache; see `Engine.read`.
    """
    device = engine.target.device
    tensors = [torch.tensor(prompt, dtype=torch.int64).to(device) for prompt in prompts]
    shared = num_shared_tokens(prompts)
    trunk = cache.open()
    cache.reserve(trunk, capacities[0])
    if shared:
        reader = batch.row(0)
        reader.bind(cache, (trunk,))
        engine.read(cache, reader, tensors[0][:shared], graphs)
    batch.bind(cache, cache.branch(trunk, capacities))
    batch.history[:, :shared] = tensors[0][:shared]
    for row, prompt in enumerate(tensors):
        engine.prefill(cache, batch.row(row), prompt[shared:], sampler.row(row), graphs)
