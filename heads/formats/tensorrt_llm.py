"""TensorRT-LLM: its converter reads FasterDecoding's names and writes checkpoints with its own.

Biases are required by the converter. Its checkpoints are `rank0.safetensors` .., one file for each
rank of a tensor-parallel group, every tensor of the heads split along dimension 0.
Source: https://github.com/NVIDIA/TensorRT-LLM, tensorrt_llm/models/medusa/weight.py.
"""

from __future__ import annotations

from specdeft.heads.formats import fasterdecoding
from specdeft.heads.formats.content import Content, Source
from specdeft.heads.formats.layout import Layout
from specdeft.heads.formats.parts import HeadParts

CHECKPOINT = Layout(
    "TensorRT-LLM checkpoint",
    block="{head}.medusa_layers.{block}.linear.{kind}",
    output="{head}.lm_head.weight",
    prefix="medusa_heads.",
)


def write(source: Source, parts: HeadParts) -> Content:
    """What its converter reads: FasterDecoding's names, as safetensors."""
    parts = fasterdecoding.own_outputs(source, parts)
    config = fasterdecoding.config_of(source)
    return Content(fasterdecoding.LAYOUT, "medusa_lm_head.safetensors", parts, config)
