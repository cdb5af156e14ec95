"""The chunk a prompt begins with: torch's causal attention where it does, our kernels elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specdeft.attention import (
    FirstChunkAttention,
    KernelChoice,
    TritonAttention,
    chain_words,
    make_attention,
)
from specdeft.batch import Batch
from specdeft.engine import Engine
from specdeft.kernels.reference import tree_attention_reference
from specdeft.kv_tree import KVShape, KVTree
from specdeft.model import AttentionOptions, TargetModel
from specdeft.trees.token_tree import TokenTree
from tests.core.tiny import FAMILIES, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_TOKENS, QUERY_HEADS, KV_HEADS, DIM, SCALE = 9, 4, 2, 16, 0.3
PLAIN = AttentionOptions(SCALE, None, None, None)


def begin(dtype: torch.dtype, num_before: int = 0) -> tuple[KVTree, Batch]:
    """A cache with one sequence of so many tokens."""
    cache = KVTree(
        KVShape(1, KV_HEADS, DIM),
        num_pages=4,
        page_size=16,
        dtype=dtype,
        device=DEVICE,
    )
    sequence = cache.open()
    cache.reserve(sequence, num_before + NUM_TOKENS)
    cache.advance(sequence, num_before)
    target: Any = SimpleNamespace(device=DEVICE, hidden_size=4, dtype=dtype)
    return cache, Batch.empty(target, cache, (sequence,), 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 4])
def test_every_way_gives_causal_attention(dtype: torch.dtype, window: int | None) -> None:
    cache, batch = begin(dtype)
    attention = make_attention(KernelChoice.TRITON, cache, batch, NUM_TOKENS, None)
    assert isinstance(attention, FirstChunkAttention)
    q = torch.randn(1, QUERY_HEADS, NUM_TOKENS, DIM).to(DEVICE, dtype).transpose(1, 2)
    k, v = (
        torch.randn(1, KV_HEADS, NUM_TOKENS, DIM).to(DEVICE, dtype).transpose(1, 2) for _ in "kv"
    )
    out = attention.attend(0, q, k, v, PLAIN._replace(window=window))
    visible = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool, device=DEVICE).tril()
    if window is not None:
        visible &= ~torch.ones_like(visible).tril(-window)
    exact, _ = tree_attention_reference(q[0], k[0], v[0], visible, scale=SCALE)
    assert out.shape == q.shape
    error = (out[0].double() - exact).norm() / exact.norm()
    assert error < 4 * torch.finfo(dtype).eps
    # Keys and values stand in the cache for what comes behind.
    slots = cache.slots(batch.sequences[0], 0, NUM_TOKENS)
    assert torch.equal(cache.keys[0, slots], k[0])
    assert torch.equal(cache.values[0, slots], v[0])


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 128, 200])
def test_the_words_of_a_chunk_are_those_of_a_chain(num_tokens: int) -> None:
    expected = TokenTree.chain(num_tokens - 1).mask_words()
    words = chain_words(num_tokens, torch.device("cpu"))
    assert words.dtype == expected.dtype
    assert torch.equal(words, expected)
    assert words.is_contiguous()


def test_a_chunk_behind_others_takes_our_kernels() -> None:
    cache, batch = begin(torch.float16, num_before=5)
    attention = make_attention(KernelChoice.TRITON, cache, batch, NUM_TOKENS, None)
    assert type(attention) is TritonAttention


@pytest.mark.parametrize(
    ("dtype", "sees_all", "first"),
    [(torch.float16, True, 8192), (torch.float16, False, 512), (torch.float32, True, 512)],
)
@pytest.mark.parametrize("num_tokens", [1, 512, 8192, 8193, 9000])
def test_the_first_chunk_is_long_where_it_is_fused(
    dtype: torch.dtype, sees_all: bool, first: int, num_tokens: int
) -> None:
    target: Any = SimpleNamespace(device=torch.device("cpu"), dtype=dtype, sees_all=sees_all)
    engine, tokens = Engine(target, None, KernelChoice.TRITON), torch.arange(num_tokens)
    chunks = engine.chunks(tokens, 0)
    assert torch.equal(torch.cat(chunks), tokens)
    assert len(chunks[0]) == min(first, num_tokens)
    assert all(0 < len(chunk) <= 512 for chunk in chunks[1:])
    behind = engine.chunks(tokens, 5)
    assert torch.equal(torch.cat(behind), tokens)
    assert len(behind) == -(-num_tokens // 512)


def test_models_that_look_back_less_far_are_known() -> None:
    seen = {family: TargetModel(tiny_model(family)).sees_all for family in FAMILIES}
    narrow = {"qwen2-window", "mistral-window", "gemma2", "gpt-oss"}
    assert seen == {family: family not in narrow for family in FAMILIES}
