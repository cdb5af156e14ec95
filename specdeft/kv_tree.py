"""The KV tree: where the keys and values of every sequence live.

One pool for all layers, cut into pages. A sequence is a list of pages and a length; sequences that
share a prefix share its full pages (reference counted) and copy the last partial one. With pages as
long as a whole sequence the layout is contiguous: the paged and the unpaged form are one code.
Drafted tokens stand in the scratch slots right after the committed ones (`reserve`), and a commit
keeps the accepted ones (`kernels/commit.py` moves them, `advance` counts them).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVShape:
    """What one token's cache holds: layers, KV heads, head dim."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def num_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values of ``num_tokens`` tokens."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return num_tokens * per_token * dtype.itemsize


class KVCapacityError(ValueError):
    """The pool has too few free pages for what was asked."""


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0


class _Sequences(dict[int, _Sequence]):
    """Sequences by number; an unknown number is bad input."""

    def __missing__(self, sequence: int) -> _Sequence:
        raise ValueError(
            f"the KV tree has no sequence {sequence!r}: it was closed or never opened; open one, "
            "or fork one that is there"
        )


class KVTree:
    """Pages of keys and values and the sequences that own them.

    Attributes:
        keys, values: [L, num_pages * page_size, Hkv, D], the pools; a position's slot is
            page * page_size + offset.
        page_size: tokens per page.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"the KV tree was asked for {num_pages} pages of {page_size} tokens: give at least "
                "1 of each"
            )
        size = (shape.num_layers, num_pages * page_size, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self.page_size = page_size
        self.num_pages = num_pages
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._sequences = _Sequences()
        self._next_id = 0

    @classmethod
    def contiguous(
        cls,
        shape: KVShape,
        *,
        num_sequences: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVTree":
        """The unpaged layout: every sequence owns one page of ``capacity`` tokens."""
        return cls(shape, num_pages=num_sequences, page_size=capacity, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that all pages together hold."""
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        """Of all pages."""
        return self.shape.num_bytes(self.capacity, self.keys.dtype)

    # -- sequences -----------------------------------------------------------------------------

    def open(self) -> int:
        """A new empty sequence; its number is never reused."""
        sequence, self._next_id = self._next_id, self._next_id + 1
        self._sequences[sequence] = _Sequence()
        return sequence

    def fork(self, parent: int) -> int:
        """A new sequence with the committed tokens of ``parent``: full pages are shared, the last
        partial page is copied so that both can grow.

        Raises:
            KVCapacityError: no page is free for the copy; nothing was changed.
        """
        source = self._sequences[parent]
        num_full, num_rest = divmod(source.length, self.page_size)
        shared = source.pages[:num_full]
        copied = self._take_pages(1) if num_rest else []
        for page in shared:
            self._references[page] += 1
        if copied:
            self._copy_page(source.pages[num_full], copied[0], num_rest)
        child = self.open()
        self._sequences[child] = _Sequence([*shared, *copied], source.length)
        return child

    def branch(self, trunk: int, capacities: Sequence[int]) -> list[int]:
        """``trunk`` and forks of it, each with room for so many tokens in all.

        Raises:
            KVCapacityError: too few free pages.
        """
        num_common = self.length(trunk)
        sequences = [trunk, *(self.fork(trunk) for _ in capacities[1:])]
        for sequence, capacity in zip(sequences, capacities, strict=True):
            self.reserve(sequence, capacity - num_common)
        return sequences

    def close(self, sequence: int) -> None:
        """Forget a sequence; pages nobody else shares become free."""
        self._release(self._sequences[sequence].pages)
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        """Committed tokens."""
        return self._sequences[sequence].length

    def num_slots(self, sequence: int) -> int:
        """Slots of its pages: committed tokens and reserved ones."""
        return len(self._sequences[sequence].pages) * self.page_size

    def reserve(self, sequence: int, num_tokens: int) -> None:
        """Make sure that ``num_tokens`` slots stand after the committed ones.

        Raises:
            KVCapacityError: too few free pages; nothing was changed.
        """
        state = self._sequences[sequence]
        needed = -(-(state.length + num_tokens) // self.page_size) - len(state.pages)
        if needed > 0:
            state.pages += self._take_pages(needed)

    def advance(self, sequence: int, num_tokens: int) -> None:
        """Count ``num_tokens`` reserved slots as committed."""
        state = self._sequences[sequence]
        length = state.length + num_tokens
        if num_tokens < 0 or length > len(state.pages) * self.page_size:
            raise ValueError(
                f"cannot commit {num_tokens} tokens after {state.length}: only "
                f"{len(state.pages) * self.page_size - state.length} slots are reserved"
            )
        state.length = length

    def truncate(self, sequence: int, length: int) -> None:
        """Drop the committed tokens from ``length`` on, and the pages they alone needed."""
        state = self._sequences[sequence]
        if not 0 <= length <= state.length:
            raise ValueError(f"cannot cut a sequence of {state.length} tokens to {length}")
        kept = -(-length // self.page_size)
        pages = state.pages[:kept]
        if length % self.page_size and self._references[pages[-1]] > 1:
            (own,) = self._take_pages(1)
            self._copy_page(pages[-1], own, length % self.page_size)
            pages[-1] = own
        dropped = [page for page in state.pages if page not in pages]
        state.pages, state.length = pages, length
        self._release(dropped)

    def clear(self) -> None:
        """Close every sequence."""
        for sequence in list(self._sequences):
            self.close(sequence)

    def own_page(self, sequence: int) -> int:
        """The last page of a sequence, which no other shares.

        Raises:
            ValueError: it has no such page.
        """
        pages = self._sequences[sequence].pages
        if not pages or self._references[pages[-1]] > 1:
            raise ValueError("a sequence without reserved slots of its own has no page of its own")
        return pages[-1]

    # -- what the kernels read -----------------------------------------------------------------

    def page_table(self, sequences: list[int]) -> Tensor:
        """int32 [B, P] page numbers; short rows repeat their last page (lengths bound the use)."""
        rows = [self._sequences[sequence].pages for sequence in sequences]
        width = max((len(row) for row in rows), default=0)
        padded = [row + (row[-1:] or [0]) * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int32).to(self.keys.device)

    def num_shared_tokens(self, sequences: Sequence[int]) -> int:
        """Tokens of the full pages that all of several sequences begin with; 0 for one alone."""
        if len(sequences) < 2:
            return 0
        states = [self._sequences[sequence] for sequence in sequences]
        most = min(state.length for state in states) // self.page_size
        columns = zip(*(state.pages[:most] for state in states), strict=True)
        same = itertools.takewhile(lambda pages: len(set(pages)) == 1, columns)
        return self.page_size * sum(1 for _ in same)

    def slots(self, sequence: int, start: int, stop: int) -> Tensor:
        """int64 [stop - start] pool slots of the positions start..stop-1."""
        position = torch.arange(start, stop)
        pages = torch.tensor(self._sequences[sequence].pages, dtype=torch.int64)
        slots = pages[position // self.page_size] * self.page_size + position % self.page_size
        return slots.to(self.keys.device)

    def run(self, sequence: int, stop: int) -> slice:
        """The pool slots of positions 0..stop-1 as one slice: for sequences within one page.

        Raises:
            ValueError: the positions span several pages.
        """
        if stop > self.page_size:
            raise ValueError(
                f"{stop} tokens span several pages of {self.page_size}: read them by page_table"
            )
        start = self._sequences[sequence].pages[0] * self.page_size
        return slice(start, start + stop)

    # -- the truth of it -----------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError unless pages, references, lengths and the free list agree."""
        counted = [0] * self.num_pages
        for state in self._sequences.values():
            if len(set(state.pages)) != len(state.pages):
                raise AssertionError("a sequence holds a page twice")
            if not 0 <= state.length <= len(state.pages) * self.page_size:
                raise AssertionError("a length lies outside its pages")
            for index, page in enumerate(state.pages):
                counted[page] += 1
                writable = (index + 1) * self.page_size > state.length
                if writable and self._references[page] != 1:
                    raise AssertionError("a page that can be written is shared")
        if counted != self._references:
            raise AssertionError("reference counts differ from the page lists")
        if sorted(self._free) != [page for page in range(self.num_pages) if not counted[page]]:
            raise AssertionError("the free list differs from the unreferenced pages")

    # -- pages ---------------------------------------------------------------------------------

    def _take_pages(self, count: int) -> list[int]:
        if count > len(self._free):
            raise KVCapacityError(
                f"the KV tree needs {count} more pages of {self.page_size} tokens and has "
                f"{len(self._free)} free of {self.num_pages}: close sequences or make it larger"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def _copy_page(self, source: int, target: int, num_tokens: int) -> None:
        start, stop = source * self.page_size, target * self.page_size
        for pool in (self.keys, self.values):
            pool[:, stop : stop + num_tokens] = pool[:, start : start + num_tokens]
