"""The frozen target as training sees it: a stock Hugging Face model and its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_PLACE = "\u2042place\u2042"  # stands for the user's text while the template is cut around it


class Target(NamedTuple):
    """A loaded model with its tokenizer; nothing in it asks for gradients."""

    model: Any
    tokenizer: Any
    name: str

    @property
    def hidden_size(self) -> int:
        """Width of the hidden state the heads read."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    def check_output_layer(self) -> None:
        """ValueError unless the heads' losses can read the output layer's weight."""
        layer = self.model.get_output_embeddings()
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            raise ValueError(
                f"the output layer of {self.name} ({type(layer).__name__}) is quantised: load the "
                "model with that layer left out of the quantisation"
            )

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer."""
        return int(self.model.get_output_embeddings().weight.shape[0])


class Turn(NamedTuple):
    """Token ids around a user's text: before it, from its end on (that begins with an end-of-turn
    token), and the tokens that end an answer."""

    before: list[int]
    after: list[int]
    stop_ids: list[int]


def load_model(
    path: str | Path, name: str, *, known: str = "", **arguments: Any
) -> tuple[Any, Any]:
    """A stock model and its tokenizer, every weight of it from its files.

    Args:
        path: what transformers loads; name: what the user called it.
        known: other names that could have been given, for the message.
        arguments: passed to `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ValueError: it cannot be loaded, or some of its weights are missing and would be random.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model, report = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, **arguments
        )
    except Exception as error:  # transformers and its file readers raise of every kind
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"the model {name!r} cannot be loaded ({reason}): give {known}a Hugging Face id or a "
            "local folder"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"the model {name!r} lacks {len(missing)} weights ({missing[0]} and so on), which "
            "would be random: get its files again"
        )
    return model, tokenizer


def default_device() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> torch.dtype:
    """bf16 on a GPU, fp32 on the CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def load_target(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    label: str = "",
) -> Target:
    """Load and freeze a model; by default in bf16 on a GPU if there is one, else fp32 on the CPU.

    Raises ValueError as `load_model` does."""
    device = device or default_device()
    dtype = dtype or default_dtype(device)
    model, tokenizer = load_model(name, name, dtype=dtype)
    frozen = model.to(device).eval().requires_grad_(False)
    return Target(frozen, tokenizer, label or Path(name).name)


def chat_turn(target: Target) -> Turn:
    """Cut the chat template around the user's text; ValueError if there is no usable template."""
    tokenizer = target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{target.name} has no chat template, so it cannot write its own prompts: "
            "train from a file of texts instead."
        )
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACE}], tokenize=False, add_generation_prompt=True
    )
    if shown.count(_PLACE) != 1:
        raise ValueError(f"The chat template of {target.name} does not show the user's text once.")
    before, after = (
        list(tokenizer(part, add_special_tokens=False).input_ids) for part in shown.split(_PLACE)
    )
    stops = target.model.generation_config.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if not stops:
        raise ValueError(f"{target.name} names no end-of-text token in its generation config.")
    return Turn(before, after, list(stops))
