"""What a running step reads and writes: static tensors on the device, one set per generation.

The lengths live here, on the device, so that a step can be replayed from a CUDA graph without the
host knowing them; the KV tree's own counts follow when the host has read what was emitted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdeft.kv_tree import KVTree
from specdeft.model import TargetModel


@dataclass(eq=False)
class Batch:
    """B sequences between two steps; every tensor keeps its storage for the whole generation.

    Attributes:
        sequences: the B sequences of the KV tree.
        root: [B] int64, the token decided last, not yet in the cache.
        hidden: [B, hidden], the hidden state that decided it.
        lengths: [B] int32, committed tokens.
        page_table: [B, P] int32, pages that hold every position the generation can reach.
        emitted: [B, E] int64 and counts: [B] int64, tokens of the last step: the first counts[b]
            entries of row b.
        history: [B, C] int64, tokens by position: the committed ones, then the root at position
            lengths[b]; what stands behind it means nothing.
    """

    sequences: tuple[int, ...]
    root: Tensor
    hidden: Tensor
    lengths: Tensor
    page_table: Tensor
    emitted: Tensor
    counts: Tensor
    history: Tensor

    @classmethod
    def empty(
        cls, target: TargetModel, cache: KVTree, sequences: tuple[int, ...], num_levels: int
    ) -> "Batch":
        """Buffers for sequences whose pages are reserved, before their prefill.

        Args:
            target: whose device and sizes they have.
            cache: the KV tree.
            sequences: B sequences of it.
            num_levels: most tokens a step can emit (E).
        """
        device, count = target.device, len(sequences)
        page_table = cache.page_table(list(sequences))
        # One more than the pages hold: the root is not in them yet.
        num_positions = page_table.shape[1] * cache.page_size + 1
        return cls(
            sequences=sequences,
            root=torch.zeros(count, dtype=torch.int64, device=device),
            hidden=torch.zeros(count, target.hidden_size, dtype=target.dtype, device=device),
            lengths=torch.zeros(count, dtype=torch.int32, device=device),
            page_table=page_table,
            emitted=torch.zeros(count, num_levels, dtype=torch.int64, device=device),
            counts=torch.zeros(count, dtype=torch.int64, device=device),
            history=torch.zeros(count, num_positions, dtype=torch.int64, device=device),
        )

    def record(self, positions: Tensor, tokens: Tensor) -> None:
        """Write tokens [B, E] to the history at positions [B, E], both int64; past its end they
        are dropped into its last place, which no sequence that goes on reaches."""
        last = self.history.shape[1] - 1
        self.history.scatter_(1, positions.clamp(max=last), tokens)

    def restart(self, cache: KVTree, sequences: tuple[int, ...]) -> None:
        """Use the same tensors for other sequences, B as before, before their prefill."""
        self.sequences = sequences
        self.lengths.zero_()
        self.page_table.copy_(cache.page_table(list(sequences)))

    @property
    def size(self) -> int:
        """B."""
        return len(self.sequences)
