"""Short prompts as CUDA graphs: one for each padded length, replayed for prompts up to that length.

Read eagerly, a prompt of some hundred tokens waits for the host to launch every layer, 25 to 50 ms
whatever the model's size. In a graph it takes what the device needs. Tokens behind the prompt's
last fill up the length: they come after all others, so no token sees them, and what they leave in
the cache stands in scratch slots.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.attention import make_attention
from specdeft.batch import Batch
from specdeft.capturing import capture
from specdeft.engine import CAPACITY_STEP_TOKENS, Engine
from specdeft.graphs import context_bucket
from specdeft.kv_tree import KVTree
from specdeft.model import LayerAttention, TargetOutput

# Beyond the longest, the device is busy longer than the host launches.
PADDED_TOKENS = (64, 128, 256, 512, 768, 1024)


class _Key(NamedTuple):
    num_tokens: int  # padded
    max_context: int  # a bound on the committed tokens; 0 where there are none


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: TargetOutput  # the memory that a replay writes
    attention: LayerAttention  # holds the masks that a replay reads


def padded_tokens(num_tokens: int, num_before: int) -> int | None:
    """To how many tokens a chunk of a prompt is filled up behind others; None where no graph is
    used: it is too long for one, or leaves the slots that the shortest generation has there (one
    token more). What a tree has room for beyond those is not asked: one prompt is always read
    alike, or rounding would part texts.
    """
    length = next((length for length in PADDED_TOKENS if num_tokens <= length), None)
    least = num_before + num_tokens + 1
    num_slots = -(-least // CAPACITY_STEP_TOKENS) * CAPACITY_STEP_TOKENS - num_before
    return length if length is not None and length <= num_slots else None


class PromptGraphs:
    """The captured prompt chunks of one KV tree, for any of its sequences."""

    def __init__(self, engine: Engine, cache: KVTree) -> None:
        """Args: what reads; the cache that the graphs write, whose storage must not move."""
        self._engine = engine
        self._cache = cache
        # What the graphs read: a sequence's place is copied here before a replay.
        self._place = Batch.allocate(
            engine.target, 1, 1, num_pages=cache.num_pages, page_size=cache.page_size
        )
        device = engine.target.device
        self._tokens = torch.zeros(1, PADDED_TOKENS[-1], dtype=torch.int64, device=device)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._graphs: dict[_Key, _Captured | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def read(self, batch: Batch, tokens: Tensor, num_before: int) -> TargetOutput | None:
        """One chunk [T] int64 of the one sequence of ``batch``, behind ``num_before`` tokens.

        Does not wait. Returns the last token's logits and hidden state, which the next call may
        overwrite; None where the chunk is to be read without a graph.

        Raises:
            ValueError: the model does something that no graph can hold.
        """
        num_padded = padded_tokens(len(tokens), num_before)
        if num_padded is None:
            return None
        num_slots = self._cache.num_slots(batch.sequences[0]) - num_before
        if num_padded > num_slots:
            raise RuntimeError(f"a prompt of {num_padded} tokens has {num_slots} slots reserved")
        place = self._place
        width = batch.page_table.shape[1]
        place.page_table[:, :width] = batch.page_table
        place.lengths.fill_(num_before)
        self._tokens[:, : len(tokens)] = tokens
        self._last.fill_(len(tokens) - 1)
        key = _Key(num_padded, context_bucket(num_before) if num_before else 0)
        if key not in self._graphs:
            self._graphs[key] = self._captured(key)
        captured = self._graphs[key]
        if captured is None:
            return None
        captured.graph.replay()
        return captured.output

    def _captured(self, key: _Key) -> _Captured | None:
        """Captured, or None where memory is too short for it, which is said."""
        attention = make_attention(
            self._engine.kernels, self._cache, self._place, key.num_tokens, None, key.max_context
        )
        try:
            graph, output = capture(
                lambda: self._forward(key.num_tokens, attention),
                self._pool,
                type(self._engine.target.model).__name__,
            )
        except torch.cuda.OutOfMemoryError:
            warnings.warn(
                f"no memory is left to capture a prompt of {key.num_tokens} tokens: it is read "
                "without a CUDA graph, which is slower; use a lower kv_memory_fraction",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return _Captured(graph, output, attention)

    @torch.inference_mode()
    def _forward(self, num_tokens: int, attention: LayerAttention) -> TargetOutput:
        target = self._engine.target
        offsets = torch.arange(num_tokens, device=target.device)
        positions = self._place.lengths.to(torch.int64)[:, None] + offsets
        return target.forward(
            self._tokens[:, :num_tokens],
            # Those of the filling can lie past the last position: any valid one will do there.
            positions.clamp(max=target.max_context - 1),
            attention,
            rows=self._last,
        )
