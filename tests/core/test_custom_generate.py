"""Inside transformers: the same ids as its own greedy generate, and named refusals."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from specdeft.decoder import SpecDecoder
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from tests.core.tiny import VOCAB_SIZE, ByteTokenizer, prompt_ids, tiny_model


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    heads = MedusaHeads(
        HeadsConfig(num_heads=4, num_layers=1, hidden_size=64, vocab_size=VOCAB_SIZE)
    )
    return SpecDecoder(tiny_model("llama"), ByteTokenizer(), heads, tree="deft-32")


def inputs(*lengths: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts."""
    width = max(lengths)
    rows = [prompt_ids(length, seed=length) for length in lengths]
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


@pytest.mark.parametrize("lengths", [(7,), (3, 20), (5, 5, 1)])
def test_greedy_equals_generate_without_us(decoder: SpecDecoder, lengths: tuple[int, ...]) -> None:
    given = inputs(*lengths)
    settings = {"max_new_tokens": 24, "do_sample": False}
    ours = decoder.model.generate(**given, **settings, custom_generate=decoder)
    assert torch.equal(ours, decoder.model.generate(**given, **settings))


def test_sampling_follows_torch_manual_seed(decoder: SpecDecoder) -> None:
    def sample(seed: int) -> list[int]:
        torch.manual_seed(seed)
        settings = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.2, "top_k": 30}
        ids: list[int] = decoder.model.generate(**inputs(7), **settings, custom_generate=decoder)[
            0
        ].tolist()
        return ids

    assert sample(1) == sample(1) != sample(2)


class Custom(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"do_sample": True, "num_return_sequences": 2}, "num_return_sequences=2"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
        ({"min_new_tokens": 3}, "MinLengthLogitsProcessor"),
        ({"logits_processor": LogitsProcessorList([Custom()])}, "Custom"),
    ],
)
def test_what_would_change_the_text_is_refused(
    decoder: SpecDecoder, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decoder.model.generate(**inputs(7), max_new_tokens=4, **settings, custom_generate=decoder)


def test_right_padding_and_foreign_models_are_refused(decoder: SpecDecoder) -> None:
    given = inputs(3, 6)
    flipped = {name: tensor.flip(1) for name, tensor in given.items()}
    with pytest.raises(ValueError, match="left only"):
        decoder.model.generate(**flipped, max_new_tokens=4, custom_generate=decoder)
    with pytest.raises(ValueError, match="another model"):
        tiny_model("llama").generate(**inputs(3), max_new_tokens=4, custom_generate=decoder)
