"""A tiny random target with a word tokenizer, shared by the tests of this room."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdeft.heads.target import Target

VOCAB_SIZE = 96
HIDDEN_SIZE = 16
END = 2
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def tokenizer() -> Any:
    """Words w0.. are tokens; unknown words are token 0."""
    words = ["<u>", "<s>", "<e>", "user", "assistant", "system", "⁂place⁂"]
    words += [f"w{i}" for i in range(VOCAB_SIZE - len(words))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<u>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<u>", eos_token="<e>")
    made.chat_template = TEMPLATE
    return made


def target(seed: int = 0, end_bias: float = 1.0) -> Target:
    """A random two-layer Llama with grouped heads; `end_bias` makes the end token likelier."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=END,
        bos_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.get_input_embeddings().weight[END] *= end_bias
    model.generation_config.eos_token_id = END
    return Target(model, tokenizer(), "tiny")
