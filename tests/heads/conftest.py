"""Fixtures of this room: tiny random targets with a word tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from specdeft.heads.target import Target

VOCAB_SIZE = 96
END = 2
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def word_tokenizer() -> Any:
    """Words w0 .. are tokens of their own; any other word is token 0."""
    words = ["<u>", "<s>", "<e>", "user", "assistant", "system"]
    words += [f"w{i}" for i in range(VOCAB_SIZE - len(words))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<u>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<u>", eos_token="<e>")
    made.chat_template = TEMPLATE
    return made


def make_target(family: str = "llama", seed: int = 0, end_scale: float = 1.0) -> Target:
    """A random two-layer model with grouped heads; `end_scale` makes the end token likelier."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": END,
        "bos_token_id": 1,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "max_position_embeddings": 256,
    }
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=24))
    model = model.eval().requires_grad_(False)
    model.get_input_embeddings().weight[END] *= end_scale
    model.generation_config.eos_token_id = END
    return Target(model, word_tokenizer(), "tiny")


@pytest.fixture
def target() -> Target:
    """A tiny random Llama."""
    return make_target()
