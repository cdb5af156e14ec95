"""From prompts to sequences of the KV tree: what they begin with in common is read once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdeft.batch import Batch
from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.sampling import Sampler

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
) -> None:
    """Open a sequence for every prompt, read it, and decide its first token (`Batch.root`).

    Args:
        engine: reads.
        cache: is empty and holds sequences of these capacities.
        batch: its tensors are bound to the new sequences, row by row.
        sampler: how the first tokens are chosen.
        prompts: B of token ids, none of them empty.
        capacities: tokens that each sequence may come to hold, drafted ones included.
    """
    device = engine.target.device
    tensors = [torch.tensor(prompt, dtype=torch.int64).to(device) for prompt in prompts]
    shared = num_shared_tokens(prompts)
    sequences = _open(engine, cache, batch, tensors, shared)
    for sequence, capacity in zip(sequences, capacities, strict=True):
        cache.reserve(sequence, capacity - shared)
    batch.bind(cache, sequences)
    batch.history[:, :shared] = tensors[0][:shared]
    for row, prompt in enumerate(tensors):
        engine.prefill(cache, batch.row(row), prompt[shared:], sampler.row(row))


def _open(
    engine: Engine, cache: KVTree, batch: Batch, prompts: list[Tensor], shared: int
) -> list[int]:
    """A sequence per prompt, all holding the shared tokens."""
    trunk = cache.open()
    if not shared:
        return [trunk, *(cache.open() for _ in prompts[1:])]
    cache.reserve(trunk, shared)
    reader = batch.row(0)
    reader.bind(cache, (trunk,))
    engine.read(cache, reader, prompts[0][:shared])
    return [trunk, *(cache.fork(trunk) for _ in prompts[1:])]
