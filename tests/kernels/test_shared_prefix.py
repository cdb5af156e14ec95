"""A prefix read once for all sequences, against float64 over each sequence's whole KV."""

import random
from typing import Any

import pytest
import torch

from specdeft.kernels.deft_flatten import allocate_scratch
from specdeft.kernels.launch_shape import MIN_PREFIX_TOKENS, prefix_pays
from tests.kernels.random_trees import random_parents
from tests.kernels.speculation_case import DEVICE, Case

PAGE = 64


def case(num_nodes: int, pages: int, own: list[int | None], **settings: Any) -> Case:
    """Sequences with so many tokens behind a prefix; None is one that has ended."""
    page_size = settings.setdefault("page_size", PAGE)
    lengths = [0 if tokens is None else pages * page_size + tokens for tokens in own]
    return Case(lengths, random_parents(num_nodes, seed=5), prefix_pages=pages, **settings)


@pytest.mark.parametrize("prefix_splits", [1, 2, 5])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("pages", [1, 2, 7])
def test_prefixes_and_splits(pages: int, num_splits: int, prefix_splits: int) -> None:
    case(5, pages, [0, 37, None, 130]).check(num_splits, prefix_splits=prefix_splits)


@pytest.mark.parametrize("num_nodes", [1, 3, 16, 33, 65])
@pytest.mark.parametrize("heads", [(9, 3, 64), (7, 1, 16), (4, 4, 32), (6, 2, 80)])
def test_trees_and_heads(num_nodes: int, heads: tuple[int, int, int]) -> None:
    case(num_nodes, 2, [3, 70], heads=heads, dtype=torch.float16).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [64, 128, 256])
def test_pages_and_types(page_size: int, dtype: torch.dtype) -> None:
    case(6, 2, [page_size - 1, page_size, 1], page_size=page_size, dtype=dtype).check(2)


@pytest.mark.parametrize("seed", range(12))
def test_any_batch(seed: int) -> None:
    draw = random.Random(seed)
    own = [draw.choice([None, draw.randint(0, 150)]) for _ in range(draw.randint(2, 5))]
    held = case(draw.randint(1, 20), draw.randint(1, 4), own)
    held.check(draw.randint(1, 4), prefix_splits=draw.randint(1, 4))


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": torch.tensor([0.5, -1.0])}])
def test_options(options: dict[str, Any]) -> None:
    case(9, 3, [20, None, 0], **options).check(2)


def test_all_sequences_ended_but_one() -> None:
    case(4, 2, [None, None, 5, None]).check()


def test_sequences_read_nothing_before_their_own_tokens() -> None:
    """Only the prefix's own page list leads to it: the tables' first columns may name NaN."""
    held = case(5, 3, [10, 80])
    expected, _ = held.run()
    assert held.pool[:, held.table[0, 0] * PAGE].isfinite().all()
    unused = set(range(held.pool.shape[1] // PAGE)) - set(held.table.flatten().tolist())
    held.table[:, :3] = unused.pop()
    assert held.pool[:, held.table[0, 0] * PAGE].isnan().all()
    out, _ = held.run()
    assert torch.equal(out, expected)


def test_one_launch_serves_every_prefix_and_length() -> None:
    """As in a captured graph: shape, scratch and tensors stay, what they hold changes."""
    shape = case(5, 9, [200] * 3).shape(4, prefix_splits=6)
    scratch = allocate_scratch(shape, batch=3, kv_heads=1, head_dim=16, device=DEVICE)
    for pages, own in ((9, [200, 3, 90]), (1, [0, 5, None]), (4, [1, None, 150])):
        held = case(5, pages, own)
        expected, _ = held.run()
        out, _ = held.run(shape, scratch=scratch, max_context=10_000)
        rows = [row for row, tokens in enumerate(own) if tokens is not None]
        torch.testing.assert_close(out[rows], expected[rows], rtol=1e-5, atol=1e-6)
        again, _ = held.run(shape, scratch=scratch, max_context=10_000)
        assert torch.equal(out, again)


def test_an_empty_prefix_changes_nothing() -> None:
    held = case(5, 2, [10, 80])
    prefix = held.prefix()
    assert prefix is not None
    prefix.num_tokens.zero_()
    out, lse = held.run(prefix=prefix)
    expected, expected_lse = held.run(prefix=None)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-6)


def test_queries_that_do_not_lie_in_one_run() -> None:
    held = case(5, 2, [10, 80])
    expected, _ = held.run()
    held.q = held.q.transpose(0, 1).contiguous().transpose(0, 1)
    out, _ = held.run()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_size": 16}, "pages of 16"),
        ({"page_table": None}, "pages of None"),
        ({"window": 5}, "window 5"),
    ],
)
def test_what_cannot_be_read_once_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case(5, 2, [10, 80]).run(**changed)
    with pytest.raises(ValueError, match="no splits for the prefix"):
        case(5, 2, [10, 80]).run(case(5, 2, [10, 80]).shape(2, prefix_splits=0))


@pytest.mark.parametrize(
    ("num_nodes", "heads", "batch", "pays"),
    [
        (1, (32, 8, 128), 8, True),
        (4, (32, 8, 128), 2, False),  # 16 rows fill a tile, here
        (1, (32, 8, 128), 2, True),
        (16, (9, 3, 64), 8, True),
        (64, (32, 8, 128), 32, False),
        (1, (32, 8, 128), 1, False),
    ],
)
def test_it_pays_where_tiles_are_saved(
    num_nodes: int, heads: tuple[int, int, int], batch: int, pays: bool
) -> None:
    query_heads, kv_heads, head_dim = heads
    known: dict[str, Any] = {
        "batch": batch, "num_nodes": num_nodes, "query_heads": query_heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "dtype": torch.bfloat16, "device": torch.device("cpu"),
    }  # fmt: skip
    assert prefix_pays(page_size=128, num_tokens=4096, **known) == pays
    assert not prefix_pays(page_size=128, num_tokens=MIN_PREFIX_TOKENS - 1, **known)
    assert not prefix_pays(page_size=16, num_tokens=4096, **known)
