"""vLLM's draft model of method "medusa".

One linear layer a block, with biases if the config says so; output layers apart from the blocks,
lm_heads.0 for all heads with `original_lm_head`; a `token_map` lists a draft vocabulary.
Its loader skips names it does not know without a word, so a file in another layout drafts noise.
Sources: https://github.com/vllm-project/vllm, vllm/model_executor/models/medusa.py at 01dbb08 and
vllm/transformers_utils/configs/medusa.py at 4bb77b3.
"""

from __future__ import annotations

from dataclasses import replace

from specdeft.heads.formats.content import Content, Source
from specdeft.heads.formats.layout import Layout
from specdeft.heads.formats.parts import HeadParts

SHARED = "original_lm_head"  # in the config: one output layer for all heads

LAYOUT = Layout(
    "vLLM",
    block="blocks.{head}.layers.{block}.{kind}",
    output="lm_heads.{head}.weight",
    optional_prefix="medusa_heads.",
    token_map="token_map",
    shares_output=True,
)


def write(source: Source, parts: HeadParts) -> Content:
    """`model.safetensors`; one output layer and a draft vocabulary are said as such."""
    parts = source.with_output(parts)
    assert parts.output is not None
    if parts.num_layers == 0:  # then the output layers are all that says how many heads there are
        parts = replace(parts, output=parts.output.expand(parts.num_heads, -1, -1))
    assert parts.output is not None
    heads = source.heads.config
    # No other key may hold "num" beside "heads" or "layers": vLLM takes it for these two.
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": heads.draft_vocab_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "medusa_fc_bias": parts.bias is not None,
        SHARED: parts.output.shape[0] == 1,
    }
    if source.base_model:
        config["base_model_name_or_path"] = source.base_model
    return Content(LAYOUT, "model.safetensors", parts, config)
