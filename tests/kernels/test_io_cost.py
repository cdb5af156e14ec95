"""The accounting against numbers worked out by hand, and against the paper's own total."""

import torch

from specdeft.kernels import io_cost
from specdeft.kernels.baselines.per_path import path_forest
from specdeft.kernels.baselines.prepared import HeadShape
from specdeft.kernels.io_cost import Method
from specdeft.trees.forest import KVForest
from specdeft.trees.partition import build_plan
from specdeft.trees.plan import Partition

SHAPE = HeadShape(8, 2, 64, torch.bfloat16, 0.125)


def _few_shot(prompt: int, branches: int, tokens: int) -> KVForest:
    lengths = [prompt] + [tokens] * branches
    ends = torch.tensor(lengths).cumsum(0).tolist()
    runs = [range(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    return KVForest.from_nodes([-1] + [0] * branches, runs, list(range(1, branches + 1)))


def test_table_12() -> None:
    forest = _few_shot(1000, 4, 10)  # N = 1040, t = 4, sum of N_i = 4040
    expected = {
        Method.NAIVE: (128 * 4040, 0, 6 * 4040),
        Method.PER_PATH: (128 * 4040, 0, 0),
        Method.MEDUSA: (128 * 1040, 4 * 1040, 8 * 4 * 1040),
        Method.SPECINFER: (128 * 1040 * 4, 65, 0),
        Method.DEFT_NODE: (128 * 1040, 0, 0),
        Method.DEFT_FLATTEN: (128 * 1040, 1040, 0),
    }
    for method, numbers in expected.items():
        assert io_cost.paper_elements(method, forest, 64) == numbers


def test_the_papers_total_of_its_b20_run() -> None:
    """1.68 TB of KV for 400 steps of 20 branches below 4,000 tokens, as its counter counts."""
    total = 0
    for step in range(400):
        elements = io_cost.paper_elements(Method.DEFT_FLATTEN, _few_shot(4000, 20, step), 128)
        total += elements.kv * 32 * 2 * 32  # 32 query heads, 2 bytes, 32 layers
    assert round(total / 1e12, 2) == 1.68


def test_floor() -> None:
    floor = io_cost.floor(_few_shot(1000, 4, 10), SHAPE)
    assert floor.num_bytes == 1040 * 2 * 2 * 64 * 2 + 2 * 4 * 8 * 64 * 2
    assert floor.num_flops == 4 * 4040 * 8 * 64
    assert floor.seconds(1e9, 1e30) == floor.num_bytes / 1e9
    assert floor.seconds(1e30, 1e9) == floor.num_flops / 1e9


def test_counted_from_the_plan_sharing_reads_less() -> None:
    forest = _few_shot(4000, 20, 400)
    flatten = build_plan(forest, Partition.FLATTEN, tile_queries=20, chunk_tokens=512)
    paths = path_forest(forest, duplicate=False)
    radix = build_plan(paths, Partition.FLATTEN, tile_queries=1, chunk_tokens=512)
    ours, theirs = (io_cost.plan_bytes(plan, SHAPE) for plan in (flatten, radix))
    token_bytes = 2 * 2 * 64 * 2
    assert ours.kv == 12_000 * token_bytes
    assert theirs.kv == 20 * 4_400 * token_bytes
    assert ours.total == sum(ours)
    assert ours.partials == 2 * flatten.num_partial_rows * 8 * 65 * 4


def test_the_other_methods() -> None:
    forest = _few_shot(1000, 4, 10)
    medusa, sdpa = io_cost.medusa_bytes(forest, SHAPE), io_cost.sdpa_bytes(forest, SHAPE)
    assert medusa.kv == sdpa.kv == 1040 * 2 * 2 * 64 * 2
    assert medusa.masks == 4 * 1040 * 8 * 2
    assert medusa.scores == 4 * 1040 * 8 * 24
    assert sdpa.scores == 0
    specinfer = io_cost.specinfer_bytes(forest, SHAPE, num_splits=2)
    assert specinfer.kv == 4 * medusa.kv
    assert specinfer.masks == 4 * 17 * 2 * 8
    assert io_cost.commit_bytes(32, 4, 8, 128, 2) == 1_048_576
