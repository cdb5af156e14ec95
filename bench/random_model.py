"""Models of random weights in the shape of known ones: speed without the weights.

A step costs what it costs whatever the weights are, so the latency of a large model can be measured
where its weights are not at hand; acceptance is then replayed (`drafts`). The text is meaningless,
but it is decided: the output layer holds the embeddings in shifted order, so that each token calls
for one certain next token, far ahead of all others. Entirely random weights leave the logits so
close that 16-bit rounding decides them, and no two ways to compute them give one text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import GenerationConfig as TheirConfig

from specdeft.heads.medusa import HeadsConfig, MedusaHeads

PREFIX = "random:"
RANDOM_HEADS = "random"
_NUM_HEADS = 4
_SHIFT = 401  # from a token to the next
_LAYER_SHARE = 0.125  # of what the layers would add to the residual stream
_FIRST_ID = 3  # ids below are the end of text and what else tokenizers keep there

_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
    "llama-tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
}


class ByteTokenizer:
    """Bytes as ids, any id as text: enough for a model whose text means nothing."""

    eos_token_id = 0
    chat_template: str | None = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Ids of the text's bytes."""
        return {"input_ids": [byte + _FIRST_ID for byte in text.encode()]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Every id as its number."""
        kept = [token for token in token_ids if not (skip_special_tokens and token == 0)]
        return "".join(f"<{int(token)}>" for token in kept)


def random_model(
    name: str, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[PreTrainedModel, Any]:
    """A model and a tokenizer by "random:SHAPE".

    Raises:
        ValueError: there is no such shape; the valid ones are listed.
    """
    shape = name.removeprefix(PREFIX)
    if shape not in _SHAPES:
        raise ValueError(f"there is no shape {shape!r}: give {PREFIX} and {', '.join(_SHAPES)}")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama", **_SHAPES[shape], bos_token_id=1, eos_token_id=0, pad_token_id=2
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not config.tie_word_embeddings:
        _decide(model)
    model.generation_config = TheirConfig(eos_token_id=0, pad_token_id=2)
    return model.eval(), ByteTokenizer()


@torch.no_grad()
def _decide(model: Any) -> None:
    """Let the embedding of a token outweigh what the layers add to it, and follow from it."""
    hidden = model.config.hidden_size
    embedding = model.get_input_embeddings().weight.normal_()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_LAYER_SHARE)
        layer.mlp.down_proj.weight.mul_(_LAYER_SHARE)
    output = model.get_output_embeddings().weight
    output[_FIRST_ID:] = embedding[_FIRST_ID:].roll(_SHIFT, dims=0) / hidden**0.5
    output[:_FIRST_ID] = 0.0  # the text never ends by itself


def random_heads(model: PreTrainedModel) -> MedusaHeads:
    """Heads of random weights that fit a model: their cost, not their drafts."""
    output_layer: Any = model.get_output_embeddings()
    config = HeadsConfig(
        num_heads=_NUM_HEADS,
        num_layers=1,
        hidden_size=model.config.get_text_config().hidden_size,
        vocab_size=output_layer.weight.shape[0],
    )
    heads = MedusaHeads(config).to(dtype=model.dtype, device=output_layer.weight.device)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return heads.eval()
