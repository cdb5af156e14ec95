"""Our heads in the terms that other formats share, or the reason why they cannot be said in them.

A projection P before the output layer W is folded into it: W (P x) = (W P) x, one product in
float32, rounded once to the heads' dtype. Sequential heads and heads that read the root token have
no counterpart in any of the formats.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdeft.heads.formats.parts import HeadParts
from specdeft.heads.medusa import HeadsConfig, MedusaHeads

RETRAIN = "train heads for other engines with `specdeft train --no-token-input`"


def to_parts(heads: MedusaHeads, output_layer: nn.Module | None) -> HeadParts:
    """The heads on the CPU in their own dtype; `output` is None where it is the target's layer.

    Args:
        heads: any; their parameters share one dtype.
        output_layer: the target's, needed to fold a projection into it.

    Raises:
        ValueError: the formats cannot say what these heads do, or the layer is needed and missing.
    """
    check_expressible(heads.config)
    output: Tensor | None = heads.output_weight
    if heads.projection is not None:
        rows = output if output is not None else target_rows(heads, output_layer)
        output = _folded(rows.expand(heads.config.num_heads, -1, -1), heads.projection)
    bias = heads.block_bias if bool(heads.block_bias.any()) else None
    return HeadParts(
        _plain(heads.block_weight),
        None if bias is None else _plain(bias),
        None if output is None else _plain(output),
        None if heads.draft_ids is None else _plain(heads.draft_ids),
    )


def _folded(rows: Tensor, projection: Tensor) -> Tensor:
    """[K, R, H]: the output rows [K, R, H] times the projections [K, H, H]."""
    # One head at a time: the float32 copies of all would be the largest thing in memory.
    folded = [(w.float() @ p.float()).to(p.dtype) for w, p in zip(rows, projection, strict=True)]
    return torch.stack(folded)


def check_expressible(config: HeadsConfig) -> None:
    """Raise ValueError for heads whose guesses depend on tokens, which no format can say."""
    if config.sequential:
        raise ValueError(
            "these heads are sequential (each reads the token before its guess) and other engines "
            f"have parallel heads only: {RETRAIN}."
        )
    if config.token_input:
        raise ValueError(
            f"these heads read the token just decided and those of other engines do not: {RETRAIN}."
        )


def target_rows(heads: MedusaHeads, output_layer: nn.Module | None) -> Tensor:
    """The rows [R or V, H] of the target's output layer that the heads use, in their dtype.

    Raises:
        ValueError: the layer is not given, is another model's, or has a bias.
    """
    if output_layer is None:
        raise ValueError(
            "these heads use the target's output layer, which this format must hold or have "
            "folded into it: name the target with --model."
        )
    bias = getattr(output_layer, "bias", None)
    if isinstance(bias, Tensor) and bool(bias.any()):
        raise ValueError(
            "the target's output layer has a bias, which no format has a place for: train heads "
            "with an output layer of their own (`--heads-output own`)."
        )
    rows = heads.output_rows(output_layer)
    expected = (heads.config.num_logits, heads.config.hidden_size)
    if tuple(rows.shape) != expected:
        raise ValueError(
            f"the target's output layer gives rows of the shape {tuple(rows.shape)} and the heads "
            f"call for {expected}: name the model that they were trained on."
        )
    return _plain(rows.to(heads.block_weight.dtype))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
