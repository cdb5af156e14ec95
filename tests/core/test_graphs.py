"""What capturing a step holds to that no GPU is needed for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdeft.attention import KernelChoice
from specdeft.engine import Engine
from specdeft.graphs import StepGraphs
from specdeft.kernels.launch_shape import MIN_PREFIX_TOKENS, SharedPrefix


def test_a_shared_prefix_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for a step, however long the prefix is: one with it and one without."""
    captured: list[int] = []
    monkeypatch.setattr(StepGraphs, "_captured", lambda *_arguments: captured.append(1))
    shape = SimpleNamespace(num_kv_heads=2, head_dim=64)
    target: Any = SimpleNamespace(
        num_query_heads=4, shape=shape, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    steps = object.__new__(StepGraphs)
    steps.engine = Engine(target, None, KernelChoice.TRITON)
    steps.cache = SimpleNamespace(page_size=128)  # type: ignore[assignment]
    steps.sampler = SimpleNamespace(rule="greedy")  # type: ignore[assignment]
    steps._graphs = {}
    tree: Any = SimpleNamespace(num_nodes=1, tree=SimpleNamespace(content_hash="root"))
    counts = []
    for num_shared in (0, 128, MIN_PREFIX_TOKENS, 4096, 0, 2048):
        prefix = SharedPrefix(torch.zeros(1), torch.zeros(4))
        steps.batch = SimpleNamespace(size=8, prefix=prefix, num_shared=num_shared)  # type: ignore[assignment]
        steps.graph(tree, 8192)
        counts.append(len(captured))
    assert counts == [1, 1, 2, 2, 2, 2]
    steps.batch.prefix = None
    assert not steps.engine.reads_prefix_once(steps.cache, steps.batch, 1)
