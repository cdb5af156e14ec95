"""Prompts filled up to the length of a graph: read as if alone; graphs are stood for by calls."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specdeft import prompt_graphs
from specdeft import prompts as prompts_module
from specdeft.attention import KernelChoice
from specdeft.batch import Batch
from specdeft.config import GenerationConfig
from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.model import TargetModel
from specdeft.prompt_graphs import PADDED_TOKENS, PromptGraphs, padded_tokens
from specdeft.prompts import read_prompts
from specdeft.sampling import Sampler
from tests.core.tiny import prompt_ids, tiny_model


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A capture runs what it is given; a replay runs it again and writes what came out first."""
    names: list[str] = []

    def capture(run: Any, _pool: Any, name: str) -> Any:
        output = run()

        def replay() -> None:
            for known, fresh in zip(output, run(), strict=True):
                known.copy_(fresh)

        names.append(name)
        return SimpleNamespace(replay=replay), output

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(prompt_graphs, "capture", capture)
    # Interpreted kernels are slow.
    monkeypatch.setattr(prompt_graphs, "PADDED_TOKENS", (4, 8))
    return names


def stand(family: str, dtype: torch.dtype = torch.float32) -> tuple[Engine, KVTree]:
    engine = Engine(TargetModel(tiny_model(family).to(dtype)), None, KernelChoice.TRITON)
    return engine, engine.new_cache_for([512, 512])


def begin(engine: Engine, cache: KVTree, num_tokens: int) -> Batch:
    """A sequence with so many slots, which hold anything."""
    sequence = cache.open()
    cache.reserve(sequence, num_tokens)
    slots = cache.slots(sequence, 0, num_tokens)
    cache.keys[:, slots] = cache.values[:, slots] = torch.nan
    return Batch.empty(engine.target, cache, (sequence,), 1)


@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_a_prompt_is_read_as_if_it_were_not_filled_up(family: str, captures: list[str]) -> None:
    engine, cache = stand(family)
    graphs = PromptGraphs(engine, cache)
    for num_tokens, behind in ((3, 2), (5, 4)):
        prompt = torch.tensor(prompt_ids(num_tokens + behind))
        outputs, kept = [], []
        for reader in (None, graphs):
            batch = begin(engine, cache, 256)
            for part in (prompt[:num_tokens], prompt[num_tokens:]):
                output = engine.read(cache, batch, part, reader)
                outputs.append([tensor.clone() for tensor in output])
            sequence = batch.sequences[0]
            assert cache.length(sequence) == batch.lengths.item() == num_tokens + behind
            slots = cache.slots(sequence, 0, num_tokens + behind)
            kept.append((cache.keys[:, slots], cache.values[:, slots], batch.history.clone()))
            cache.clear()
        for alone, replayed in zip(outputs[:2], outputs[2:], strict=True):
            for exact, found in zip(alone, replayed, strict=True):
                assert exact.shape == found.shape
                torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
        for exact, found in zip(*kept, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    # Up to 4 and up to 8 at the beginning, up to 4 behind other tokens.
    assert len(captures) == 3


def test_prompts_behind_a_common_beginning(
    monkeypatch: pytest.MonkeyPatch, captures: list[str]
) -> None:
    """First tokens as without graphs; the beginning is read once, and nothing is overwritten."""
    engine, _ = stand("llama")
    trunk = prompt_ids(6, seed=99)
    prompts = [trunk + prompt_ids(length, seed=length) for length in (1, 5, 3)]
    monkeypatch.setattr(prompts_module, "MIN_SHARED_TOKENS", 5)
    roots = []
    for with_graphs in (False, True):
        cache = engine.new_cache_for([128] * 3)
        graphs = PromptGraphs(engine, cache) if with_graphs else None
        batch = Batch.allocate(engine.target, 3, 1, num_pages=1, page_size=cache.page_size)
        config = GenerationConfig(temperature=0.8, seed=3)
        sampler = Sampler.build(config, (0, 1, 2), engine.target.device)
        read_prompts(engine, cache, batch, sampler, prompts, [128] * 3, graphs)
        cache.check_invariants()
        roots.append(batch.root.tolist())
        assert batch.lengths.tolist() == [len(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            assert batch.history[row, : len(prompt)].tolist() == prompt
    assert roots[0] == roots[1]
    assert captures


def test_only_what_leaves_the_slots_is_filled_up() -> None:
    assert padded_tokens(1, 0) == padded_tokens(64, 0) == padded_tokens(13, 140) == 64
    assert padded_tokens(65, 0) == padded_tokens(100, 100) == 128
    assert padded_tokens(100, 150) is None  # 250 and one more leave 106 slots
    assert padded_tokens(513, 250) is None
    assert padded_tokens(PADDED_TOKENS[-1] + 1, 0) is None
    for num_tokens in range(1, PADDED_TOKENS[-1] + 1):
        assert padded_tokens(num_tokens, 0) is not None  # every prompt at its beginning


def test_no_filling_leaves_what_is_reserved(captures: list[str]) -> None:
    engine, cache = stand("llama")
    batch = begin(engine, cache, 2)
    cache.truncate(batch.sequences[0], 0)
    with pytest.raises(RuntimeError, match="has 0 slots reserved"):
        PromptGraphs(engine, cache).read(batch, torch.tensor(prompt_ids(2)), 0)
    assert not captures


def test_short_memory_is_said_once_and_the_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch, captures: list[str]
) -> None:
    def capture(*_arguments: Any, **_settings: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("short")

    monkeypatch.setattr(prompt_graphs, "capture", capture)
    engine, cache = stand("llama")
    graphs = PromptGraphs(engine, cache)
    prompt = torch.tensor(prompt_ids(3))
    exact = engine.read(cache, begin(engine, cache, 256), prompt)
    with pytest.warns(RuntimeWarning, match="no memory is left to capture a prompt of 4 tokens"):
        found = engine.read(cache, begin(engine, cache, 256), prompt, graphs)
    assert torch.equal(found.logits, exact.logits)
    assert graphs.read(begin(engine, cache, 256), prompt, 0) is None  # and not said again
    assert not captures
