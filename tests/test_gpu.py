"""The theorem on the accelerator: kernels, CUDA graphs and compilation change no token (fp32).

Run there: python -m pytest tests/test_gpu.py -m gpu
"""

import gc
from typing import Any

import pytest
import torch

from specdeft.decoder import SpecDecoder
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from tests.core.tiny import (
    FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    ByteTokenizer,
    DeviceScriptedHeads,
    prompt_ids,
    tiny_model,
)
from tests.test_lossless import SCRIPTS, SETTINGS, TREES

pytestmark = pytest.mark.gpu
NUM_TOKENS = 40


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def on_gpu(family: str) -> Any:
    return tiny_model(family).to("cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_speculative_equals_plain_and_the_cpu(family: str, cuda_graphs: bool) -> None:
    if family == "gpt-oss" and cuda_graphs:
        pytest.skip("gpt-oss routes its experts on the host, which no CUDA graph can hold")
    on_cpu = SpecDecoder(tiny_model(family), ByteTokenizer())
    model = on_gpu(family)
    plain_decoder = SpecDecoder(model, ByteTokenizer(), cuda_graphs=cuda_graphs)
    names = list(TREES)
    for index, settings in enumerate(SETTINGS):
        prompt = prompt_ids((WINDOW - 1, WINDOW + 1, 3 * WINDOW)[index])
        request = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **settings}
        plain = plain_decoder.generate(prompt, **request)
        assert plain.token_ids == on_cpu.generate(prompt, **request).token_ids
        for offset, script in enumerate(SCRIPTS.values()):
            tree, path = TREES[names[(2 * index + offset) % len(names)]]
            heads = DeviceScriptedHeads(plain.token_ids, path, script, "cuda")
            decoder = SpecDecoder(model, ByteTokenizer(), heads, tree=tree, cuda_graphs=cuda_graphs)
            decoder.generate(prompt, **request)  # captures, which runs the script ahead
            heads.reset()
            result = decoder.generate(prompt, **request)
            assert result.token_ids == plain.token_ids
            if script == [5]:
                assert result.stats.tau > len(path) * 0.8


def test_compiled_equals_eager() -> None:
    model = on_gpu("llama")
    heads = MedusaHeads(
        HeadsConfig(num_heads=4, num_layers=1, hidden_size=64, vocab_size=VOCAB_SIZE)
    ).to("cuda")
    request = {"max_new_tokens": NUM_TOKENS, "temperature": 0.7}
    plain = SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(9), **request)
    for graphs in (False, True):
        decoder = SpecDecoder(
            model, ByteTokenizer(), heads, tree="deft-64", cuda_graphs=graphs, compile=True
        )
        assert decoder.generate(prompt_ids(9), **request).token_ids == plain.token_ids


def test_a_graphed_step_never_waits_for_the_device() -> None:
    model = on_gpu("llama")
    decoder = SpecDecoder(model, ByteTokenizer())
    decoder.generate(prompt_ids(9), max_new_tokens=60)
    stream = decoder.stream(prompt_ids(9), max_new_tokens=60, ignore_eos=True)
    next(stream)  # the prefill reads its token; the steps must not
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _piece in stream:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stream.result is not None
    assert stream.result.stats.num_new_tokens == 60


def test_a_graph_keeps_the_tree_it_was_captured_with() -> None:
    """The tree of a single request is dropped after it; the graph must not read freed memory."""
    decoder = SpecDecoder(on_gpu("llama"), ByteTokenizer())
    first = decoder.plain(prompt_ids(9), max_new_tokens=30)
    gc.collect()
    # Take over whatever was freed, with numbers that no tree holds.
    junk = [torch.full((size,), 1 << 40, device="cuda") for size in (1, 2, 8, 64, 512) * 50]
    assert decoder.plain(prompt_ids(9), max_new_tokens=30).token_ids == first.token_ids
    assert len(junk) == 250
