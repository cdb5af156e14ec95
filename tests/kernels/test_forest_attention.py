"""The forest kernels against float64 for every partition, on forests that have no easy shape.

The expected result comes from the forest's dense visibility, not from the plan, and for shared
prefixes also from the sequences written out one by one.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specdeft.kernels.forest_attention import allocate_forest_scratch, forest_attention
from specdeft.trees.forest import KVForest
from specdeft.trees.partition import build_plan
from specdeft.trees.plan import Partition
from tests.kernels.accuracy import allowed_error, reference, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARTITIONS = pytest.mark.parametrize(
    ("partition", "chunk"),
    [
        (Partition.NODE, None),
        (Partition.NODE_CHUNK, 48),
        (Partition.FLATTEN, 64),
        (Partition.FLATTEN, 100),
        (Partition.FLATTEN, 4096),
    ],
    ids=["node", "node-chunk-48", "flatten-64", "flatten-100", "flatten-all"],
)


def _forest(lengths: list[int], parents: list[int], queries: list[int], seed: int) -> KVForest:
    """Slots drawn from a pool twice as large as needed, in no order."""
    order = torch.randperm(2 * sum(lengths) + 1, generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor(lengths).cumsum(0).tolist()
    slots = [order[end - n : end].tolist() for n, end in zip(lengths, ends, strict=True)]
    return KVForest.from_nodes(parents, slots, queries)


def _random_forest(num_nodes: int, seed: int, longest: int = 60) -> KVForest:
    draw = random.Random(seed)
    parents = [-1] + [draw.randrange(-1, node) for node in range(1, num_nodes)]
    lengths = [draw.randrange(0, longest) for _ in parents]
    queries = [draw.randrange(num_nodes) for _ in range(num_nodes)]
    return _forest(lengths, parents, queries, seed)


def _check(
    forest: KVForest,
    partition: Partition,
    chunk: int | None,
    *,
    heads: tuple[int, int, int] = (2, 1, 16),
    tile_queries: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    **options: Any,
) -> None:
    torch.manual_seed(1)
    plan = build_plan(forest, partition, tile_queries=tile_queries, chunk_tokens=chunk)
    pool = torch.full((2, 2 * forest.total_tokens + 1, *heads[1:]), float("nan"), dtype=dtype)
    used = forest.slots.long()
    pool[:, used] = torch.randn(2, forest.total_tokens, *heads[1:]).to(dtype)
    q = torch.randn(forest.num_queries, heads[0], heads[2]).to(dtype)
    visible = forest.visible()
    arguments = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in options.items()}
    if window is not None:
        distance = forest.query_positions()[:, None] - forest.token_positions()[None, :]
        visible = visible & (distance < window)
        arguments |= {
            "window": window,
            "token_positions": forest.token_positions().to(DEVICE),
            "query_positions": forest.query_positions().to(DEVICE),
        }
    k_pool, v_pool = pool.to(DEVICE)
    scale = heads[2] ** -0.5
    out, lse = forest_attention(
        q.to(DEVICE), k_pool, v_pool, plan.to(DEVICE), scale=scale, **arguments
    )
    expected: dict[str, Any] = {
        "q": q, "k": pool[0, used], "v": pool[1, used], "visible": visible,
        "scale": heads[2] ** -0.5, **options,
    }  # fmt: skip
    exact, exact_lse = reference(DEVICE, **expected)
    dense, _ = reference(DEVICE, dtype, **expected)
    assert relative_error(out, exact) <= allowed_error(dense, exact, dtype)
    seen = exact_lse > float("-inf")
    assert torch.equal(lse.cpu() > float("-inf"), seen)
    assert relative_error(lse.cpu()[seen], exact_lse[seen]) < 1e-6


@PARTITIONS
@pytest.mark.parametrize("seed", range(4))
def test_random_forests(partition: Partition, chunk: int | None, seed: int) -> None:
    _check(_random_forest(12, seed), partition, chunk)


@PARTITIONS
def test_few_shot_tree(partition: Partition, chunk: int | None) -> None:
    branches = 20
    forest = _forest(
        [300] + [17] * branches, [-1] + [0] * branches, list(range(1, branches + 1)), seed=5
    )
    _check(forest, partition, chunk, heads=(4, 2, 32))


@PARTITIONS
@pytest.mark.parametrize("num_queries", [1, 63, 64, 65, 130])
def test_many_queries_of_one_head_use_several_words(
    partition: Partition, chunk: int | None, num_queries: int
) -> None:
    parents = [-1] + [0] * num_queries
    forest = _forest([90] + [1] * num_queries, parents, list(range(1, num_queries + 1)), seed=2)
    dtype = torch.float16  # larger tiles than float32's: fewer programs to interpret
    _check(forest, partition, chunk, heads=(1, 1, 16), tile_queries=128, dtype=dtype)


@pytest.mark.parametrize("heads", [(9, 3, 64), (7, 1, 16), (4, 4, 48), (6, 2, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_head_groups_and_types(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    _check(_random_forest(9, 3), Partition.FLATTEN, 64, heads=heads, dtype=dtype, tile_queries=4)


@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"sinks": True}, {"window": 1}, {"window": 50}]
)
def test_options(options: dict[str, Any]) -> None:
    sinks = {"sinks": torch.randn(2)} if options.pop("sinks", False) else {}
    for partition, chunk in ((Partition.NODE, None), (Partition.FLATTEN, 64)):
        _check(_random_forest(10, 7), partition, chunk, **options, **sinks)


def test_a_query_that_sees_nothing_and_an_empty_forest() -> None:
    forest = _forest([0, 5], [-1, -1], [0, 1], seed=1)
    _check(forest, Partition.FLATTEN, 64)
    empty = _forest([0], [-1], [0], seed=1)
    q = torch.randn(1, 2, 16, device=DEVICE)
    pool = torch.full((1, 1, 16), float("nan"), device=DEVICE)
    plan = build_plan(empty, Partition.FLATTEN, tile_queries=4, chunk_tokens=64).to(DEVICE)
    out, lse = forest_attention(q, pool, pool, plan, scale=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))


def test_partitions_agree_and_repeat_in_bits() -> None:
    forest = _random_forest(15, 11)
    q = torch.randn(forest.num_queries, 2, 16, device=DEVICE)
    k, v = torch.randn(2, 2 * forest.total_tokens + 1, 1, 16, device=DEVICE)
    results: list[Tensor] = []
    for partition, chunk in ((Partition.NODE, None), (Partition.FLATTEN, 64)):
        plan = build_plan(forest, partition, tile_queries=8, chunk_tokens=chunk).to(DEVICE)
        scratch = allocate_forest_scratch(plan, query_heads=2, head_dim=16, device=DEVICE)
        first, _ = forest_attention(q, k, v, plan, scale=0.25, scratch=scratch)
        again, _ = forest_attention(q, k, v, plan, scale=0.25, scratch=scratch)
        assert torch.equal(first, again)
        results.append(first)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_bad_input_is_refused_in_one_sentence() -> None:
    forest = _forest([5], [-1], [0], seed=1)
    plan = build_plan(forest, Partition.FLATTEN, tile_queries=4, chunk_tokens=64)
    q, pool = torch.randn(1, 2, 16), torch.randn(11, 1, 16)
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match="a window needs positions"):
            forest_attention(q, pool, pool, plan, scale=1.0, window=4)
        with pytest.raises(ValueError, match="scale is -1"):
            forest_attention(q, pool, pool, plan, scale=-1.0)
    with pytest.raises(ValueError, match="3 queries on cpu do not fit a plan of 1"):
        forest_attention(q.expand(3, 2, 16), pool, pool, plan, scale=1.0)
