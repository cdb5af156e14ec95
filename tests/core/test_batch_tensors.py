"""The static tensors of a batch: bound, seen row by row, cut down, and a row taken out."""

import pytest
import torch

from specdeft.batch import Batch
from specdeft.kv_tree import KVTree
from specdeft.model import TargetModel
from tests.core.tiny import tiny_model

PAGE = 16


@pytest.fixture
def bound() -> tuple[KVTree, Batch]:
    """Three sequences of 20, 3 and 0 tokens; the first two begin in one page."""
    target = TargetModel(tiny_model("llama"))
    cache = KVTree(
        target.shape, num_pages=12, page_size=PAGE, dtype=torch.float32, device=target.device
    )
    trunk = cache.open()
    cache.reserve(trunk, PAGE)
    cache.advance(trunk, PAGE)
    first, second, third = trunk, cache.fork(trunk), cache.open()
    for sequence, room in ((first, 24), (second, 40), (third, 5)):
        cache.reserve(sequence, room)
    cache.advance(first, 4)
    batch = Batch.allocate(target, 3, 2, num_pages=5, page_size=PAGE)
    batch.bind(cache, (first, second, third))
    return cache, batch


def test_bound_rows_know_pages_and_lengths(bound: tuple[KVTree, Batch]) -> None:
    cache, batch = bound
    assert batch.lengths.tolist() == [20, 16, 0]
    assert batch.active.tolist() == [1, 1, 1]
    assert batch.size == 3
    table = batch.page_table
    assert table[0, 0] == table[1, 0]  # the shared page
    assert set(table[0, 1:].tolist()).isdisjoint(table[1, 1:].tolist())
    assert len(set(table[2].tolist())) == 1  # its only page, repeated
    assert table.shape == (3, 5)
    cache.check_invariants()


def test_what_all_rows_share_is_known_apart(bound: tuple[KVTree, Batch]) -> None:
    cache, batch = bound
    assert batch.prefix is not None
    assert batch.num_shared == batch.prefix.num_tokens.item() == 0
    pages, storage = batch.page_table[0].clone(), batch.prefix.pages.data_ptr()
    first, second, third = batch.sequences
    batch.bind(cache, (first, second, cache.fork(first)))
    assert batch.num_shared == batch.prefix.num_tokens.item() == PAGE
    assert batch.prefix.pages[0] == pages[0]
    assert batch.prefix.pages.data_ptr() == storage
    batch.retire(0, cache.own_page(first))  # its table is gone, what it shared is not
    assert batch.prefix.pages[0] == pages[0]
    rest = batch.select([1, 2])
    assert rest.prefix is batch.prefix
    assert rest.num_shared == PAGE
    assert batch.row(1).prefix is None
    batch.bind(cache, (first, second, third))
    assert batch.num_shared == batch.prefix.num_tokens.item() == 0


def test_a_row_is_a_view_and_a_selection_a_copy(bound: tuple[KVTree, Batch]) -> None:
    _cache, batch = bound
    batch.row(1).root.fill_(7)
    assert batch.root.tolist() == [0, 7, 0]
    chosen = batch.select([2, 1])
    assert chosen.sequences == (batch.sequences[2], batch.sequences[1])
    assert chosen.root.tolist() == [0, 7]
    chosen.root.fill_(1)
    chosen.lengths.fill_(9)
    assert batch.root.tolist() == [0, 7, 0]
    assert batch.lengths.tolist() == [20, 16, 0]


def test_a_retired_row_can_reach_nothing_but_its_own_page(bound: tuple[KVTree, Batch]) -> None:
    cache, batch = bound
    before = batch.page_table.clone()
    page = cache.own_page(batch.sequences[1])
    assert page not in batch.page_table[0].tolist()
    batch.retire(1, page)
    assert batch.page_table[1].tolist() == [page] * 5
    assert torch.equal(batch.page_table[0], before[0])
    # A step adds to every length and keeps only those of rows that go on.
    batch.lengths.add_(torch.tensor([2, 2, 2])).mul_(batch.active)
    assert batch.lengths.tolist() == [22, 0, 2]


def test_rebinding_forgets_what_was_retired(bound: tuple[KVTree, Batch]) -> None:
    cache, batch = bound
    batch.retire(0, cache.own_page(batch.sequences[0]))
    batch.bind(cache, batch.sequences)
    assert batch.active.tolist() == [1, 1, 1]
    assert batch.lengths.tolist() == [20, 16, 0]


def test_a_sequence_without_pages_of_its_own_says_so(bound: tuple[KVTree, Batch]) -> None:
    cache, _batch = bound
    trunk = cache.open()
    with pytest.raises(ValueError, match="no page of its own"):
        cache.own_page(trunk)
    cache.reserve(trunk, PAGE)
    cache.advance(trunk, PAGE)
    child = cache.fork(trunk)
    with pytest.raises(ValueError, match="no page of its own"):
        cache.own_page(child)
