"""NVIDIA ModelOpt: the heads inside a model's safetensors files, often in float8 with scales.

A float8 tensor times its `weight_scale` is the weight; `input_scale` is for float8 activations,
which we do not use.
"""

from __future__ import annotations

from specdeft.heads.formats.fasterdecoding import LAYOUT as _PLAIN
from specdeft.heads.formats.layout import Layout

WEIGHT_SCALE, INPUT_SCALE = "weight_scale", "input_scale"

LAYOUT = Layout(
    "ModelOpt",
    _PLAIN.block,
    _PLAIN.output,
    prefix="medusa_heads.",
    scales=(WEIGHT_SCALE, INPUT_SCALE),
)
