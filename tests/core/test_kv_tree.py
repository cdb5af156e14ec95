"""The KV tree against a model that copies every sequence: pages, sharing, lengths, contents."""

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdeft.kv_tree import KVCapacityError, KVShape, KVTree

SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=2)
CPU = torch.device("cpu")


def new_tree(num_pages: int = 12, page_size: int = 4) -> KVTree:
    return KVTree(SHAPE, num_pages=num_pages, page_size=page_size, dtype=torch.float32, device=CPU)


def write(cache: KVTree, sequence: int, numbers: list[float]) -> None:
    """Commit one token per number, its keys and values filled with it (values negated)."""
    start = cache.length(sequence)
    cache.reserve(sequence, len(numbers))
    slots = cache.slots(sequence, start, start + len(numbers))
    content = torch.tensor(numbers, dtype=torch.float32)[None, :, None, None].expand(2, -1, 1, 2)
    cache.keys[:, slots] = content
    cache.values[:, slots] = -content
    cache.advance(sequence, len(numbers))


def read(cache: KVTree, sequence: int) -> list[float]:
    slots = cache.slots(sequence, 0, cache.length(sequence))
    keys, values = cache.keys[:, slots], cache.values[:, slots]
    assert torch.equal(keys, -values)
    assert torch.equal(keys[0], keys[1])
    return keys[0, :, 0, 0].tolist()


class Copies(RuleBasedStateMachine):
    """Random opens, forks, writes, cuts and closes; every sequence equals its own copy."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = new_tree()
        self.copies: dict[int, list[float]] = {}
        self.next_number = 1.0

    def pick(self, index: int) -> int:
        return sorted(self.copies)[index % len(self.copies)]

    @rule()
    def open(self) -> None:
        self.copies[self.cache.open()] = []

    @precondition(lambda self: self.copies)
    @rule(index=st.integers(0, 99), count=st.integers(0, 9))
    def append(self, index: int, count: int) -> None:
        sequence = self.pick(index)
        numbers = [self.next_number + i for i in range(count)]
        try:
            write(self.cache, sequence, numbers)
        except KVCapacityError:
            return
        self.next_number += count
        self.copies[sequence] += numbers

    @precondition(lambda self: self.copies)
    @rule(index=st.integers(0, 99))
    def fork(self, index: int) -> None:
        sequence = self.pick(index)
        try:
            self.copies[self.cache.fork(sequence)] = list(self.copies[sequence])
        except KVCapacityError:
            return

    @precondition(lambda self: self.copies)
    @rule(index=st.integers(0, 99), share=st.floats(0, 1))
    def truncate(self, index: int, share: float) -> None:
        sequence = self.pick(index)
        length = int(share * len(self.copies[sequence]))
        try:
            self.cache.truncate(sequence, length)
        except KVCapacityError:
            return
        del self.copies[sequence][length:]

    @precondition(lambda self: self.copies)
    @rule(index=st.integers(0, 99))
    def close(self, index: int) -> None:
        sequence = self.pick(index)
        self.cache.close(sequence)
        del self.copies[sequence]

    @invariant()
    def equals_the_copies(self) -> None:
        self.cache.check_invariants()
        for sequence, copy in self.copies.items():
            assert read(self.cache, sequence) == copy


Copies.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCopies = Copies.TestCase


def test_a_fork_shares_full_pages_and_copies_the_partial_one() -> None:
    cache = new_tree(num_pages=4)
    parent = cache.open()
    write(cache, parent, [1, 2, 3, 4, 5])
    child = cache.fork(parent)
    table = cache.page_table([parent, child])
    assert table[0, 0] == table[1, 0]
    assert table[0, 1] != table[1, 1]
    write(cache, child, [9])
    write(cache, parent, [6])
    assert read(cache, parent) == [1, 2, 3, 4, 5, 6]
    assert read(cache, child) == [1, 2, 3, 4, 5, 9]


def test_refusals_change_nothing() -> None:
    cache = new_tree(num_pages=2)
    sequence = cache.open()
    write(cache, sequence, [1, 2, 3, 4, 5])
    with pytest.raises(KVCapacityError, match="needs 2 more pages of 4 tokens and has 0 free of 2"):
        cache.reserve(sequence, 10)
    with pytest.raises(KVCapacityError):
        cache.fork(sequence)
    with pytest.raises(ValueError, match="cannot commit 9 tokens after 5: only 3 slots"):
        cache.advance(sequence, 9)
    with pytest.raises(ValueError, match="cannot cut a sequence of 5 tokens to 6"):
        cache.truncate(sequence, 6)
    with pytest.raises(ValueError, match="span several pages"):
        cache.run(sequence, 5)
    cache.check_invariants()
    assert read(cache, sequence) == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="at least 1 of each"):
        new_tree(num_pages=0)


def test_the_contiguous_layout_is_one_page_a_sequence() -> None:
    cache = KVTree.contiguous(SHAPE, num_sequences=2, capacity=8, dtype=torch.float32, device=CPU)
    first, second = cache.open(), cache.open()
    write(cache, first, [1, 2])
    write(cache, second, [3])
    run = cache.run(first, 8)
    assert run.stop - run.start == 8
    assert cache.keys[0, run][:2, 0, 0].tolist() == [1, 2]
    with pytest.raises(KVCapacityError):
        cache.reserve(first, 7)


@pytest.mark.parametrize(
    "breach",
    [
        lambda cache, sequence: cache._references.__setitem__(0, 7),
        lambda cache, sequence: cache._free.append(cache._sequences[sequence].pages[0]),
        lambda cache, sequence: cache._sequences[sequence].pages.append(
            cache._sequences[sequence].pages[0]
        ),
        lambda cache, sequence: setattr(cache._sequences[sequence], "length", 99),
    ],
)
def test_the_invariant_check_can_fail(breach: object) -> None:
    cache = new_tree()
    sequence = cache.open()
    write(cache, sequence, [1, 2, 3])
    breach(cache, sequence)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        cache.check_invariants()


def test_bytes() -> None:
    assert KVShape(30, 3, 64).num_bytes(1, torch.bfloat16) == 23040


@pytest.mark.parametrize("number", [7, -1, True, None, "0"])
def test_unknown_sequences_are_named(number: Any) -> None:
    cache = new_tree()
    sequence = cache.open()
    write(cache, sequence, [1.0, 2.0])
    cache.close(sequence)
    for use in (
        lambda: cache.length(number),
        lambda: cache.fork(number),
        lambda: cache.close(number),
        lambda: cache.reserve(number, 1),
        lambda: cache.advance(number, 0),
        lambda: cache.truncate(number, 0),
        lambda: cache.page_table([number]),
        lambda: cache.slots(number, 0, 0),
        lambda: cache.run(number, 1),
        lambda: cache.length(sequence),
    ):
        with pytest.raises(ValueError, match="has no sequence"):
            use()
    cache.check_invariants()


def test_full_pages_that_all_sequences_share() -> None:
    cache = new_tree(page_size=4)
    trunk, other = cache.open(), cache.open()
    write(cache, trunk, [1.0] * 10)
    write(cache, other, [1.0] * 10)  # the same tokens, on pages of its own
    first, second = cache.fork(trunk), cache.fork(trunk)
    assert cache.num_shared_tokens([trunk, first, second]) == 8  # the last partial page is copied
    assert cache.num_shared_tokens([first, trunk]) == 8
    assert cache.num_shared_tokens([trunk, other]) == 0
    assert cache.num_shared_tokens([trunk, first, other]) == 0
    assert cache.num_shared_tokens([trunk]) == 0
    cache.truncate(second, 7)
    assert cache.num_shared_tokens([trunk, first, second]) == 4
    assert cache.num_shared_tokens([trunk, first]) == 8
    with pytest.raises(ValueError, match="no sequence 99"):
        cache.num_shared_tokens([trunk, 99])


@pytest.mark.parametrize("num_common", [0, 3, 4, 9])
def test_branches_share_the_trunk_and_have_room_of_their_own(num_common: int) -> None:
    cache = new_tree(num_pages=12, page_size=4)
    trunk = cache.open()
    cache.reserve(trunk, 12)
    write(cache, trunk, [float(number) for number in range(1, num_common + 1)])
    sequences = cache.branch(trunk, [12, 10, 16])
    cache.check_invariants()
    assert sequences[0] == trunk
    assert [cache.num_slots(sequence) for sequence in sequences] == [12, 12, 16]
    assert cache.num_shared_tokens(sequences) == num_common // 4 * 4
    for sequence in sequences:
        assert read(cache, sequence) == read(cache, trunk)
