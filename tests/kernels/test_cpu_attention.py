"""The CPU decode path against float64: lengths around every switch, options, strided pools."""

import pytest
import torch
from torch import Tensor

from specdeft.kernels import cpu
from specdeft.kernels.cpu import TreeBias, prefill_attention_cpu, tree_attention_cpu
from specdeft.kernels.reference import tree_attention_reference, tree_visibility
from tests.kernels.accuracy import allowed_error, relative_error
from tests.kernels.random_trees import ancestors_and_depths, random_parents

SWITCH = cpu.ONE_CALL_CONTEXT


def _pool(num_slots: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V as views of one larger pool whose other slots are NaN: nothing else may be read."""
    pool = torch.full((2, num_slots + 7, kv_heads, dim), float("nan"), dtype=dtype)
    pool[:, 3 : num_slots + 3] = torch.randn(2, num_slots, kv_heads, dim).to(dtype)
    return pool[0, 3 : num_slots + 3], pool[1, 3 : num_slots + 3]


def _compare(
    num_nodes: int,
    num_context: int,
    *,
    shape: tuple[int, int, int] = (6, 2, 16),
    dtype: torch.dtype = torch.float32,
    gain: float = 1.0,
    softcap: float | None = None,
    window: int | None = None,
    sinks: bool = False,
) -> None:
    torch.manual_seed(num_nodes + num_context)
    query_heads, kv_heads, dim = shape
    q = (gain * torch.randn(num_nodes, query_heads, dim)).to(dtype)
    k, v = _pool(num_context + num_nodes, kv_heads, dim, dtype)
    ancestors, depths = ancestors_and_depths(random_parents(num_nodes, seed=num_nodes))
    options = {"softcap": softcap, "sinks": torch.randn(query_heads) if sinks else None}
    visible = tree_visibility(ancestors, num_context, depths=depths, window=window)
    exact, _ = tree_attention_reference(q, k, v, visible, scale=dim**-0.5, **options)
    dense, _ = tree_attention_reference(q, k, v, visible, scale=dim**-0.5, **options, dtype=dtype)
    bias = TreeBias(ancestors, group=query_heads // kv_heads, dtype=dtype, depths=depths)
    out = tree_attention_cpu(
        q, k, v, num_context=num_context, tree_bias=bias, scale=dim**-0.5, window=window, **options
    )
    assert out.dtype == dtype
    assert relative_error(out, exact) <= allowed_error(dense, exact, dtype)


@pytest.mark.parametrize("num_nodes", [1, 2, 17, 64, 65])
@pytest.mark.parametrize(
    "num_context", [0, 1, 511, 512, SWITCH - 1, SWITCH, SWITCH + 1, 2 * SWITCH + 3]
)
def test_every_length_around_the_switches(num_nodes: int, num_context: int) -> None:
    _compare(num_nodes, num_context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(9, 3, 64), (8, 8, 32), (7, 1, 80), (14, 2, 128)])
@pytest.mark.parametrize("num_context", [100, 1500])
def test_dtypes_and_head_groups(
    dtype: torch.dtype, shape: tuple[int, int, int], num_context: int
) -> None:
    _compare(13, num_context, shape=shape, dtype=dtype)


@pytest.mark.parametrize("num_context", [0, 5, 300, 1400])
@pytest.mark.parametrize(
    ("softcap", "window", "sinks"),
    [
        (5.0, None, False),
        (None, 1, False),
        (None, 3, False),
        (None, 300, True),
        (None, 1100, False),
        (None, None, True),
        (5.0, 37, True),
    ],
)
def test_options(num_context: int, softcap: float | None, window: int | None, sinks: bool) -> None:
    for num_nodes in (1, 24):
        _compare(num_nodes, num_context, softcap=softcap, window=window, sinks=sinks)


def test_a_window_that_hides_whole_blocks_of_the_tree() -> None:
    _compare(700, 40, shape=(2, 1, 16), window=2)


@pytest.mark.parametrize("gain", [1e-4, 60.0])
def test_flat_and_extreme_scores(gain: float) -> None:
    _compare(9, 1300, gain=gain)


def test_the_generic_path_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SCORE_BUDGET", 5000)
    _compare(9, 1600, softcap=4.0)


def test_k_and_v_are_not_copied() -> None:
    """Twice the KV memory would show as an allocation of that size: none is made."""
    q = torch.randn(8, 6, 16)
    k, v = _pool(4008, 2, 16, torch.float32)
    ancestors, _ = ancestors_and_depths(random_parents(8, seed=1))
    bias = TreeBias(ancestors, group=3, dtype=torch.float32)
    kwargs = {"num_context": 4000, "tree_bias": bias, "scale": 0.25}
    tree_attention_cpu(q, k, v, **kwargs)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        tree_attention_cpu(q, k, v, **kwargs)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < k.numel() * k.element_size() // 2


@pytest.mark.parametrize("num_context", [0, 1, 700])
@pytest.mark.parametrize("chunk", [1, 63, 130])
@pytest.mark.parametrize(
    ("softcap", "window", "sinks"),
    [(None, None, False), (None, None, True), (None, 50, True), (6.0, None, False), (6.0, 9, True)],
)
def test_prefill_is_causal_attention(
    num_context: int,
    chunk: int,
    softcap: float | None,
    window: int | None,
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "SCORE_BUDGET", 20_000)
    torch.manual_seed(chunk)
    q = torch.randn(chunk, 6, 16)
    k, v = _pool(num_context + chunk, 2, 16, torch.float32)
    options = {"softcap": softcap, "sinks": torch.randn(6) if sinks else None}
    causal = torch.ones(chunk, chunk).tril().bool()
    visible = tree_visibility(causal, num_context, depths=torch.arange(chunk), window=window)
    exact, _ = tree_attention_reference(q, k, v, visible, scale=0.25, **options)
    dense, _ = tree_attention_reference(
        q, k, v, visible, scale=0.25, **options, dtype=torch.float32
    )
    out = prefill_attention_cpu(
        q, k, v, num_context=num_context, scale=0.25, window=window, **options
    )
    assert relative_error(out, exact) <= allowed_error(dense, exact, torch.float32)


def test_equal_work_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert cpu._num_cuts(3, 4096) == 2
    assert cpu._num_cuts(4, 4096) == 1
    assert cpu._num_cuts(3, 600) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert cpu._num_cuts(8, 65536) == 2


def test_bad_input_is_refused_in_one_sentence() -> None:
    q, kv = torch.randn(3, 2, 16), torch.randn(10, 1, 16)
    bias = TreeBias(torch.ones(3, 3).tril().bool(), group=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="3 queries, 10 keys and 8 committed tokens"):
        tree_attention_cpu(q, kv, kv, num_context=8, tree_bias=bias, scale=1.0)
    with pytest.raises(ValueError, match="needs the depth of every node"):
        tree_attention_cpu(q, kv, kv, num_context=7, tree_bias=bias, scale=1.0, window=4)
    with pytest.raises(ValueError, match="bool matrix"):
        TreeBias(torch.ones(3, 3), group=1, dtype=torch.float32)
