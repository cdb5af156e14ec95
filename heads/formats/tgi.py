"""Text Generation Inference: FasterDecoding's names in `medusa_lm_head.safetensors`.

It tries heads with output layers of their own first; without them it takes heads of one block that
share the base model's. Biases are required. The tokenizer is read from this folder.
Source: https://github.com/huggingface/text-generation-inference,
server/text_generation_server/layers/medusa.py at 91560ed.
"""

from __future__ import annotations

from specdeft.heads.formats import fasterdecoding
from specdeft.heads.formats.content import Content, Source
from specdeft.heads.formats.parts import HeadParts


def write(source: Source, parts: HeadParts) -> Content:
    """With one block and the target's output layer the file holds the blocks alone."""
    config = fasterdecoding.config_of(source)
    if parts.num_layers == 1 and parts.output is None and parts.token_ids is None:
        parts = fasterdecoding.with_bias(parts)
    else:
        parts = fasterdecoding.own_outputs(source, parts)
    return Content(fasterdecoding.LAYOUT, "medusa_lm_head.safetensors", parts, config)
