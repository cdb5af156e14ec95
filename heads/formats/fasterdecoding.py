"""FasterDecoding's Medusa repository: the layout most others follow.

v1.3 (Medusa-1): `medusa_lm_head.pt`, every head with its own output layer. Legacy version 2: the
same without output layers, which are the base model's. Medusa-2: the heads inside the base model's
own files. Its loader reads `medusa_lm_head.pt` and builds as many heads as config.json says.
Sources: https://github.com/FasterDecoding/Medusa, medusa/model/medusa_model.py at 60eeab9.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdeft.heads.formats.content import Content, Source
from specdeft.heads.formats.layout import Layout
from specdeft.heads.formats.parts import HeadParts

LAYOUT = Layout(
    "FasterDecoding (also TGI, TensorRT-LLM's input)",
    block="{head}.{block}.linear.{kind}",
    output="{head}.{block}.weight",
)
MERGED = Layout("merged Medusa-2 model", LAYOUT.block, LAYOUT.output, prefix="medusa_head.")
# Seen in forks: counted from 1, as the position a head predicts, or from 0.
PREFIXED = Layout("heads.N", LAYOUT.block, LAYOUT.output, prefix="heads.", first_heads=(0, 1))


def write(source: Source, parts: HeadParts) -> Content:
    """v1.3: `medusa_lm_head.pt`, which its loader opens by that name."""
    return Content(LAYOUT, "medusa_lm_head.pt", own_outputs(source, parts), config_of(source))


def config_of(source: Source) -> dict[str, Any]:
    """The config that FasterDecoding, TGI and TensorRT-LLM read; the number of heads stands there
    in both spellings.

    It has no `architectures` and no `model_type`: with them TGI takes it for a model of its own.
    """
    heads = source.heads.config
    if not source.base_model:
        raise ValueError(
            "this format names the base model for the engine to load: give its Hugging Face id or "
            "path with --base-model."
        )
    return {
        "base_model_name_or_path": source.base_model,
        "medusa_num_heads": heads.num_heads,
        "num_medusa_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
    }


def own_outputs(source: Source, parts: HeadParts) -> HeadParts:
    """The parts as these readers need them: biases, and an output layer of its own a head.

    Raises:
        ValueError: the heads draft some tokens only, which the layout cannot say.
    """
    if parts.token_ids is not None:
        raise ValueError(
            "these heads draft from a part of the vocabulary, which this format cannot say: use "
            "--to vllm, or train with `--heads-output shared` or `own`."
        )
    whole = with_bias(source.with_output(parts))
    assert whole.output is not None
    return replace(whole, output=whole.output.expand(parts.num_heads, -1, -1))


def with_bias(parts: HeadParts) -> HeadParts:
    """The parts with biases in any case: zeros change nothing, and a missing one is an error."""
    if parts.bias is not None or parts.num_layers == 0:
        return parts
    return replace(parts, bias=parts.weight.new_zeros(parts.weight.shape[:3]))
