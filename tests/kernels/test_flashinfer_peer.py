"""The FlashInfer peer on a stand-in library that computes what FlashInfer documents, on the CPU.

What is tested is ours: pages, lengths, masks, the split into two parts, the merge's arguments. The
real library is checked against float64 by `specdeft bench attention` before it is timed.
"""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdeft.kernels.baselines.flashinfer import (
    PagedTree,
    draft_mask,
    prepare_cascade,
    prepare_xqa,
)
from specdeft.kernels.baselines.prepared import HeadShape
from specdeft.kernels.reference import tree_attention_reference, tree_visibility
from tests.kernels.accuracy import relative_error
from tests.kernels.random_trees import ancestors_and_depths, random_parents

CPU = torch.device("cpu")
SHAPE = HeadShape(6, 2, 32, torch.float32, 32**-0.5)
HALF = SHAPE._replace(dtype=torch.float16)
PAGE = 16


class _Wrapper:
    """Paged prefill over one sequence: output and base-2 log-sum-exp."""

    def __init__(self, workspace: Tensor, layout: str, *, backend: str) -> None:
        assert (workspace.dtype, layout, backend) == (torch.uint8, "NHD", "fa2")

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options

    def run(self, q: Tensor, pools: tuple[Tensor, Tensor], *, return_lse: bool) -> Any:
        assert return_lse
        queries, offsets, pages, last = (t.tolist() for t in self.arguments[:4])
        assert (queries, offsets) == ([0, q.shape[0]], [0, len(pages)])
        length = (len(pages) - 1) * PAGE + last[0]
        mask = self.options["custom_mask"]
        visible = torch.ones(q.shape[0], length, dtype=torch.bool)
        if mask is not None:
            visible = mask.view(q.shape[0], length)
        k, v = (pool[pages].flatten(0, 1)[:length] for pool in pools)
        out, lse = tree_attention_reference(q, k, v, visible, scale=self.options["sm_scale"])
        return out, lse / math.log(2)


def _merge_state(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp2(lse_a, lse_b)
    weight = [torch.exp2(part - lse)[..., None] for part in (lse_a, lse_b)]
    return a * weight[0] + b * weight[1], lse


def _xqa(q: Tensor, pools: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    (length,) = options["seq_lens"].tolist()
    assert not options["workspace_buffer"].any()
    pages = options["block_tables"][0].tolist()
    k, v = (pool[pages].flatten(0, 1)[:length] for pool in pools)
    visible = torch.ones(q.shape[0], length, dtype=torch.bool)
    if options["mask"] is not None:
        words = options["mask"][0].to(torch.int32)
        bits = (words[:, :, None] >> torch.arange(16)) & 1
        visible[:, length - q.shape[0] :] = bits.flatten(1)[:, : q.shape[0]].bool()
    scale = options["bmm1_scale"]
    return tree_attention_reference(q, k, v, visible, scale=scale)[0].view(1, *q.shape)


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = _Wrapper
    module.merge_state = _merge_state
    module.decode = SimpleNamespace(xqa_batch_decode_with_kv_cache=_xqa)
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("prepare", [prepare_cascade, prepare_xqa])
@pytest.mark.parametrize("num_nodes", [1, 17, 40])
@pytest.mark.parametrize("num_context", [0, 5, 16, 33, 64])
def test_both_ways_are_exact(prepare: Any, num_context: int, num_nodes: int) -> None:
    ancestors, _ = ancestors_and_depths(random_parents(num_nodes, seed=num_nodes))
    total = num_context + num_nodes
    table = torch.randperm(-(-total // PAGE)).int()
    k, v = torch.randn(2, total, 2, 32)
    position = torch.arange(total)
    slot = table[position // PAGE] * PAGE + position % PAGE
    pools = torch.full((2, len(table) * PAGE, 2, 32), float("nan"))
    pools[0, slot], pools[1, slot] = k, v
    q = torch.randn(num_nodes, 6, 32)
    visible = tree_visibility(ancestors, num_context)
    exact, _ = tree_attention_reference(q, k, v, visible, scale=SHAPE.scale)
    shape = SHAPE if prepare is prepare_cascade else HALF
    method = prepare(PagedTree(table, PAGE, num_context, ancestors), shape, CPU)
    assert relative_error(method.run(q, pools[0], pools[1]), exact) < 1e-6


def test_draft_mask_uses_the_top_bit_of_its_words() -> None:
    words = draft_mask(torch.ones(33, 33, dtype=torch.bool).tril())
    assert words.shape == (1, 33, 4)
    assert words.dtype == torch.uint16
    assert words[0, 32].tolist() == [0xFFFF, 0xFFFF, 1, 0]
    assert words[0, 15].tolist() == [0xFFFF, 0, 0, 0]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    tree = PagedTree(torch.zeros(1, dtype=torch.int32), PAGE, 3, torch.ones(1, 1).bool())
    for prepare in (prepare_cascade, prepare_xqa):
        with pytest.raises(ValueError, match="install flashinfer-python"):
            prepare(tree, SHAPE, CPU)


@pytest.mark.usefixtures("_library")
def test_xqa_refuses_what_it_has_not() -> None:
    tree = PagedTree(torch.zeros(1, dtype=torch.int32), 256, 3, torch.ones(1, 1).bool())
    with pytest.raises(ValueError, match="pages of"):
        prepare_xqa(tree, HALF, CPU)
