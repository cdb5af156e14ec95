"""What a config.json says about heads, in every project's spelling."""

from __future__ import annotations

from typing import Any, NamedTuple

_HEADS = ("medusa_num_heads", "num_medusa_heads", "num_heads")
_LAYERS = ("medusa_num_layers", "num_medusa_layers", "num_hidden_layers")


class Declared(NamedTuple):
    """None for what is not said; counts may be wrong, or no numbers at all."""

    num_heads: Any
    num_layers: Any
    base_model: str
    vocab_size: int | None


def declared(config: dict[str, Any]) -> Declared:
    """The facts of a config: of vLLM, of TGI and FasterDecoding, of TensorRT-LLM, or in the
    `medusa` block of ModelOpt's."""
    block = config.get("medusa")
    content = block if isinstance(block, dict) else config
    # In a base model's config these two are the attention heads' and the decoder layers' numbers.
    plain = config.get("model_type") == "medusa"
    heads, layers = (
        next((content[key] for key in keys[: None if plain else 2] if key in content), None)
        for keys in (_HEADS, _LAYERS)
    )
    base, size = config.get("base_model_name_or_path"), config.get("vocab_size")
    return Declared(
        num_heads=heads,
        num_layers=layers,
        base_model=base if isinstance(base, str) else "",
        vocab_size=size if type(size) is int else None,
    )
