"""Memory is planned before it is taken; what does not fit is refused with the figures."""

from typing import Any

import pytest
import torch

import specdeft.memory
from specdeft.attention import KernelChoice
from specdeft.decoder import SpecDecoder
from specdeft.engine import PAGE_SIZE_TOKENS, Engine
from specdeft.memory import free_bytes, plan_memory
from specdeft.model import TargetModel
from specdeft.run_state import RunStates
from specdeft.trees.token_tree import TokenTree
from tests.core.tiny import VOCAB_SIZE, ByteTokenizer, prompt_ids, tiny_model

# 2 x 4 layers x 2 KV heads x 16 x 4 bytes
TOKEN_BYTES = 1024


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


def set_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    monkeypatch.setattr(specdeft.memory, "free_bytes", lambda _device: num_bytes)


def test_the_plan_by_hand(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 10_000_000)
    engine = Engine(TargetModel(model), None, KernelChoice.CPU)
    plan = plan_memory(engine, [256, 512], 64, is_greedy=True, replaced=None)
    assert plan is not None
    # One page of 512 for each on the CPU; the pool really is that large.
    assert plan.kv == 2 * 512 * TOKEN_BYTES == engine.new_cache_for([256, 512]).num_bytes
    # 512 rows of a prompt chunk are more than 2 x 64 nodes; 64 hidden, 96 inner.
    activations = 512 * (6 * 64 + 4 * 96) * 4
    assert plan.scratch == activations + 128 * VOCAB_SIZE * 4
    sampled = plan_memory(engine, [256, 512], 64, is_greedy=False, replaced=None)
    assert sampled is not None
    assert sampled.scratch == plan.scratch + 128 * VOCAB_SIZE * 12
    known = engine.new_cache(100)
    replacing = plan_memory(engine, [256], 64, is_greedy=True, replaced=known)
    assert replacing is not None
    assert replacing.free == 10_000_000 + known.num_bytes


def test_small_pages_keep_a_shared_beginning_once(model: Any) -> None:
    paged = Engine(TargetModel(model), None, KernelChoice.TRITON)
    whole = PAGE_SIZE_TOKENS
    assert paged.stored_tokens([1000, 800], whole + 5) == [1000, 800 - whole]
    on_cpu = Engine(TargetModel(model), None, KernelChoice.CPU)
    assert on_cpu.stored_tokens([1000, 800], whole + 5) == [1000, 800]


def test_what_does_not_fit_is_refused_and_the_decoder_works_on(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    expected = decoder.generate(prompt_ids(5), max_new_tokens=4).token_ids
    set_free(monkeypatch, 0)
    small = SpecDecoder(model, ByteTokenizer())
    with pytest.raises(ValueError, match=r"1 sequence of up to 256 tokens need .* GiB of KV cache"):
        small.generate(prompt_ids(5), max_new_tokens=4)
    # A decoder that has its memory goes on with it, and refuses only what is more.
    assert decoder.generate(prompt_ids(5), max_new_tokens=4).token_ids == expected
    with pytest.raises(ValueError, match=r"2 sequences .* 0.00 GiB are free"):
        decoder.generate(["one", "two"], max_new_tokens=200)
    assert decoder.generate(prompt_ids(5), max_new_tokens=4).token_ids == expected
    set_free(monkeypatch, None)  # not known: not refused
    assert small.generate(prompt_ids(5), max_new_tokens=4).token_ids == expected


def test_the_fraction_decides(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A forward reads no more than a sequence holds, which is less than a chunk here.
    scratch = 256 * (6 * 64 + 4 * 96) * 4 + VOCAB_SIZE * 4
    set_free(monkeypatch, 2 * 256 * TOKEN_BYTES + scratch)
    plain = TokenTree.chain(0)
    enough = SpecDecoder(model, ByteTokenizer(), tree=plain, kv_memory_fraction=0.5)
    enough.generate("x", max_new_tokens=2)
    short = SpecDecoder(model, ByteTokenizer(), tree=plain, kv_memory_fraction=0.49)
    with pytest.raises(ValueError, match=r"kv_memory_fraction 0\.49"):
        short.generate("x", max_new_tokens=2)


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.1, float("nan")])
def test_a_wrong_fraction_is_refused(model: Any, fraction: float) -> None:
    with pytest.raises(ValueError, match="kv_memory_fraction is"):
        RunStates(Engine(TargetModel(model), None, KernelChoice.CPU), fraction)


def test_max_context_bounds_every_sequence(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer(), max_context=20)
    result = decoder.generate(prompt_ids(15), eos_token_ids=())
    assert (result.finish_reason, result.stats.num_new_tokens) == ("context", 5)
    with pytest.raises(ValueError, match="ask for at most 5"):
        decoder.generate(prompt_ids(15), max_new_tokens=6)
    for wrong in (1, 257):
        with pytest.raises(ValueError, match=f"max_context is {wrong}: give 2 to 256"):
            SpecDecoder(model, ByteTokenizer(), max_context=wrong)


def test_this_machine_says_what_is_free() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is None or free > 1 << 20
