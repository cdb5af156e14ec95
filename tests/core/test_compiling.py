"""Compiled steps: the same text, and a form per kind of layer and tree size, not per layer.

Traced by torch.compile for real; what it would generate code from is run as it is, which is quick.
"""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from specdeft.decoder import SpecDecoder
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from tests.core.tiny import VOCAB_SIZE, ByteTokenizer, hf_greedy, prompt_ids, tiny_model


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts the forms that are traced."""
    torch._dynamo.reset()
    counting, compile_ = CompileCounter(), torch.compile

    def traced(function: Any, **settings: Any) -> Any:
        return compile_(function, **settings, backend=counting)

    monkeypatch.setattr(torch, "compile", traced)
    yield counting
    torch._dynamo.reset()


def heads(sequential: bool) -> MedusaHeads:
    config = HeadsConfig(
        num_heads=2,
        num_layers=1,
        hidden_size=64,
        vocab_size=VOCAB_SIZE,
        token_input=True,
        sequential=sequential,
    )
    return MedusaHeads(config)


# Kinds of layers; the draft, the decision, what it leaves, rotation and last norm: a form each.
@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("qwen2-window", 2), ("phi3", 1)])
def test_a_form_per_kind_of_layer_not_per_layer(family: str, kinds: int, counter: Any) -> None:
    model, prompt = tiny_model(family), prompt_ids(9)
    request: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.7, "ignore_eos": True}
    expected = SpecDecoder(model, ByteTokenizer()).plain(prompt, **request)
    assert counter.frame_count == 0
    decoder = SpecDecoder(
        model, ByteTokenizer(), heads(sequential=True), tree="chain-1", lookup="off", compile=True
    )
    # The last step needs no drafts, and has them all the same: another size would be compiled.
    assert decoder.generate(prompt, **request).token_ids == expected.token_ids
    assert counter.frame_count == kinds + 5
    before = counter.frame_count
    assert decoder.generate(prompt, **request).token_ids == expected.token_ids
    assert counter.frame_count == before  # nothing is traced again
    # The stock model is itself around it.
    assert hf_greedy(model, prompt, 4) == hf_greedy(tiny_model(family), prompt, 4)


def test_batches_compile_too(counter: Any) -> None:
    model = tiny_model("llama")
    prompts = [torch.tensor(prompt_ids(length)) for length in (3, 9, 5)]
    decoder = SpecDecoder(
        model, ByteTokenizer(), heads(sequential=False), tree="chain-1", lookup="off", compile=True
    )
    results = decoder.generate(prompts, max_new_tokens=6, ignore_eos=True)
    plain = SpecDecoder(model, ByteTokenizer())
    expected = [plain.plain(prompt, max_new_tokens=6, ignore_eos=True) for prompt in prompts]
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert counter.frame_count > 0


def test_a_model_without_a_list_of_layers_is_named() -> None:
    model = tiny_model("llama")
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no list of 3 layers .*compile=Fal"):
        SpecDecoder(model, ByteTokenizer(), compile=True)
