"""Every compared method gives the exact answer on the same forests, CPU form where it has one."""

import pytest
import torch

from specdeft.kernels.baselines.dense_mask import prepare_medusa, prepare_sdpa
from specdeft.kernels.baselines.per_path import duplicated, path_forest, prepare_plan
from specdeft.kernels.baselines.prepared import HeadShape, Prepared
from specdeft.kernels.baselines.query_bitmask import prepare_specinfer
from specdeft.kernels.reference import tree_attention_reference
from specdeft.trees.forest import KVForest
from specdeft.trees.mask import mask_words_from_ancestors
from specdeft.trees.partition import build_plan
from specdeft.trees.plan import Partition
from tests.kernels.accuracy import relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = HeadShape(6, 2, 32, torch.float32, 32**-0.5)


def _forest(*, scattered: bool) -> KVForest:
    """A prompt of 150 tokens, two branches, and a small token tree below each."""
    lengths = [150, 20, 1, 1, 1, 33, 1, 1]
    parents = [-1, 0, 1, 2, 1, 0, 5, 5]
    slots = torch.randperm(400) if scattered else torch.arange(9, 400)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    runs = [slots[end - n : end].tolist() for n, end in zip(lengths, ends, strict=True)]
    return KVForest.from_nodes(parents, runs, [1, 2, 3, 4, 5, 6, 7])


def _prepare(name: str, forest: KVForest) -> Prepared:
    if name == "sdpa":
        return prepare_sdpa(forest, SHAPE, DEVICE)
    if name == "medusa":
        return prepare_medusa(forest, SHAPE, DEVICE)
    if name == "specinfer":
        words = mask_words_from_ancestors(forest.visible())
        return prepare_specinfer(forest, words, SHAPE, DEVICE)
    if name in ("radix", "flash-decoding"):
        paths = path_forest(forest, duplicate=name == "flash-decoding")
        plan = build_plan(paths, Partition.FLATTEN, tile_queries=1, chunk_tokens=64)
        return prepare_plan(name, plan, SHAPE, DEVICE)
    plan = build_plan(forest, Partition(name), tile_queries=4, chunk_tokens=64)
    return prepare_plan(name, plan, SHAPE, DEVICE)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "name", ["sdpa", "medusa", "specinfer", "radix", "flash-decoding", "flatten", "node-chunk"]
)
def test_every_method_is_exact(name: str, scattered: bool) -> None:
    forest = _forest(scattered=scattered)
    q = torch.randn(forest.num_queries, 6, 32)
    k, v = torch.randn(2, 400, 2, 32)
    used = forest.slots.long()
    exact, _ = tree_attention_reference(q, k[used], v[used], forest.visible(), scale=SHAPE.scale)
    method = _prepare(name, forest)
    assert method.name == name
    pools = [duplicated(forest, p) if name == "flash-decoding" else p for p in (k, v)]
    out = method.run(q.to(DEVICE), pools[0].to(DEVICE), pools[1].to(DEVICE))
    assert relative_error(out, exact) < 1e-6


def test_path_forest_repeats_what_is_shared() -> None:
    forest = _forest(scattered=True)
    paths = path_forest(forest, duplicate=False)
    assert paths.num_tokens.tolist() == forest.path_lengths().tolist()
    assert set(paths.slots.tolist()) == set(forest.slots.tolist())
