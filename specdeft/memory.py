"""Memory planned before it is taken: what a generation needs, beside what the device has left."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.prompt_graphs import PADDED_TOKENS

DEFAULT_KV_FRACTION = 0.9
# What the device holds beside tensors: kernels, the libraries' workspaces.
LIBRARY_BYTES = 256 << 20


class MemoryPlan(NamedTuple):
    """Bytes of one generation.

    kv: the KV tree. scratch: the largest forward's activations and logits, the graphs' included.
    free: what the device has left for both, the model and its heads being there.
    """

    kv: int
    scratch: int
    free: int

    def fits(self, kv_fraction: float) -> bool:
        """Whether the KV tree takes no more than its share of what the scratch leaves."""
        return self.kv <= kv_fraction * (self.free - self.scratch)

    def refusal(self, capacities: Sequence[int], kv_fraction: float) -> str:
        """What does not fit, and what to ask for instead."""
        longest = max(capacities)
        return (
            f"{_count(len(capacities), 'sequence')} of up to {longest} tokens need "
            f"{_gib(self.kv)} of KV cache and {_gib(self.scratch)} of scratch, and "
            f"{_gib(self.free)} are free (kv_memory_fraction {kv_fraction:g}): ask for fewer new "
            "tokens or prompts at a time, or set max_context"
        )


def plan_memory(
    engine: Engine,
    capacities: Sequence[int],
    num_nodes: int,
    *,
    is_greedy: bool,
    replaced: KVTree | None,
) -> MemoryPlan | None:
    """What sequences of so many tokens need; None where the free memory is not known.

    Args:
        engine: whose model runs.
        capacities: tokens that each sequence may come to hold.
        num_nodes: of the token tree.
        is_greedy: sampling keeps the logits in float32 beside themselves.
        replaced: the KV tree that is given back first.
    """
    free = free_bytes(engine.target.device)
    if free is None:
        return None
    page = engine.page_size_for(capacities)
    num_slots = sum(-(-capacity // page) * page for capacity in capacities)
    given_back = 0 if replaced is None else replaced.num_bytes
    return MemoryPlan(
        kv=engine.target.shape.num_bytes(num_slots, engine.target.dtype),
        scratch=_scratch_bytes(engine, len(capacities) * num_nodes, max(capacities), is_greedy),
        free=free + given_back,
    )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where it cannot be known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(torch.cuda.mem_get_info(device)[0] + unused - LIBRARY_BYTES, 0)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    known = dict(line.split(":", 1) for line in lines)
    return int(known["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in known else None


def _scratch_bytes(engine: Engine, num_rows: int, longest: int, is_greedy: bool) -> int:
    """Activations of the wider of a step and a prompt chunk, and a step's logits."""
    target = engine.target
    inner = int(getattr(target.config, "intermediate_size", 0) or 4 * target.hidden_size)
    chunk = max(engine.chunk_tokens, engine.first_chunk_tokens)
    rows = max(num_rows, min(chunk, longest))
    if engine.cuda_graphs:  # a graph's memory is its own
        rows += min(PADDED_TOKENS[-1], longest)
    activations = rows * (6 * target.hidden_size + 4 * inner) * target.dtype.itemsize
    # Scores, noise and their sum in float32 where tokens are drawn.
    logits = num_rows * target.vocab_size * (target.dtype.itemsize + (0 if is_greedy else 12))
    return activations + logits


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
