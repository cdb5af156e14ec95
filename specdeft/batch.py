"""What a running step reads and writes: static tensors on the device, one set per generation.

The lengths live here, on the device, so that a step can be replayed from a CUDA graph without the
host knowing them; the KV tree's own counts follow when the host has read what was emitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdeft.kernels.launch_shape import SharedPrefix
from specdeft.kv_tree import KVTree
from specdeft.model import TargetModel


@dataclass(eq=False)
class Batch:
    """B sequences between two steps; every tensor keeps its storage for the whole generation.

    Attributes:
        sequences: the B sequences of the KV tree.
        num_shared: tokens of the full pages that all of them begin with.
        prefix: those pages and that number for kernels that read them once; None for one sequence,
            which has nobody to share them with.
        root: [B] int64, the token decided last, not yet in the cache.
        hidden: [B, hidden], the hidden state that decided it.
        lengths: [B] int32, committed tokens.
        active: [B] int32, 1 where a sequence goes on, 0 once it has ended.
        page_table: [B, P] int32, pages that hold every position the generation can reach.
        emitted: [B, E] int64 and counts: [B] int64, tokens of the last step: the first counts[b]
            entries of row b.
        history: [B, C] int64, tokens by position: the committed ones, then the root at position
            lengths[b]; what stands behind it means nothing.
    """

    sequences: tuple[int, ...]
    num_shared: int
    prefix: SharedPrefix | None
    root: Tensor
    hidden: Tensor
    lengths: Tensor
    active: Tensor
    page_table: Tensor
    emitted: Tensor
    counts: Tensor
    history: Tensor

    @classmethod
    def allocate(
        cls, target: TargetModel, size: int, num_levels: int, *, num_pages: int, page_size: int
    ) -> "Batch":
        """Tensors for any ``size`` sequences of up to ``num_pages`` pages, bound to none yet.

        Args:
            target: whose device and sizes they have.
            size: B.
            num_levels: most tokens a step can emit (E).
            num_pages: P.
            page_size: tokens per page.
        """
        device = target.device
        return cls(
            sequences=(),
            num_shared=0,
            prefix=None
            if size == 1
            else SharedPrefix(
                torch.zeros(1, dtype=torch.int32, device=device),
                torch.zeros(num_pages, dtype=torch.int32, device=device),
            ),
            root=torch.zeros(size, dtype=torch.int64, device=device),
            hidden=torch.zeros(size, target.hidden_size, dtype=target.dtype, device=device),
            lengths=torch.zeros(size, dtype=torch.int32, device=device),
            active=torch.ones(size, dtype=torch.int32, device=device),
            page_table=torch.zeros(size, num_pages, dtype=torch.int32, device=device),
            emitted=torch.zeros(size, num_levels, dtype=torch.int64, device=device),
            counts=torch.zeros(size, dtype=torch.int64, device=device),
            # One more than the pages hold: the root is not in them yet.
            history=torch.zeros(size, num_pages * page_size + 1, dtype=torch.int64, device=device),
        )

    @classmethod
    def empty(
        cls, target: TargetModel, cache: KVTree, sequences: tuple[int, ...], num_levels: int
    ) -> "Batch":
        """Tensors for sequences of ``cache`` whose pages are reserved, before their prefill."""
        batch = cls.allocate(
            target,
            len(sequences),
            num_levels,
            num_pages=cache.page_table(list(sequences)).shape[1],
            page_size=cache.page_size,
        )
        batch.bind(cache, sequences)
        return batch

    def bind(self, cache: KVTree, sequences: Sequence[int]) -> None:
        """Use these tensors for B sequences of ``cache``, as far as they are read."""
        self.sequences = tuple(sequences)
        table = cache.page_table(list(sequences))
        self.page_table[:, : table.shape[1]] = table
        self.page_table[:, table.shape[1] :] = table[:, -1:]
        lengths = [cache.length(sequence) for sequence in sequences]
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.active.fill_(1)
        self.num_shared = cache.num_shared_tokens(sequences)
        if self.prefix is not None:
            self.prefix.num_tokens.fill_(self.num_shared)
            self.prefix.pages[: table.shape[1]] = table[0]

    def row(self, index: int) -> "Batch":
        """One bound sequence as a batch of its own, on the same storage."""
        return Batch(
            self.sequences[index : index + 1],
            0,
            None,
            *(tensor[index : index + 1] for tensor in self._tensors()),
        )

    def select(self, rows: Sequence[int]) -> "Batch":
        """Some of the sequences as a batch of their own, copied."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.root.device)
        return Batch(
            tuple(self.sequences[row] for row in rows),
            self.num_shared,  # fewer sequences share no less
            self.prefix,
            *(tensor.index_select(0, index) for tensor in self._tensors()),
        )

    def retire(self, row: int, page: int) -> None:
        """A sequence that ended: from the next step on it has no tokens to attend to, and writes
        what it still computes to ``page``, which must be its own. Does not wait."""
        self.page_table[row].fill_(page)
        self.active[row].fill_(0)
        self.lengths[row].fill_(0)

    def record(self, positions: Tensor, tokens: Tensor) -> None:
        """Write tokens [B, E] to the history at positions [B, E], both int64; past its end they
        are dropped into its last place, which no sequence that goes on reaches."""
        last = self.history.shape[1] - 1
        self.history.scatter_(1, positions.clamp(max=last), tokens)

    @property
    def size(self) -> int:
        """B."""
        return self.root.shape[0]

    def _tensors(self) -> tuple[Tensor, ...]:
        """All tensors with a row for each sequence, in the order of the fields."""
        return (
            self.root,
            self.hidden,
            self.lengths,
            self.active,
            self.page_table,
            self.emitted,
            self.counts,
            self.history,
        )
