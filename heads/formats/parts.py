"""Medusa heads between formats: their tensors, stacked, with nothing of any project's names.

Shapes: n residual blocks, K heads, H hidden size, R rows of an output layer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from specdeft.heads.medusa import HeadsConfig, MedusaHeads, OutputKind

# Vocabularies that differ by less are one vocabulary padded differently (to a multiple of 64 or
# 128, or by an added token); by more, the heads are another model's.
MAX_PADDING = 128


@dataclass(frozen=True)
class HeadParts:
    """What every format can say.

    Attributes:
        weight: [n, K, H, H] of the residual blocks.
        bias: [n, K, H], or None where the format has none (they are zeros).
        output: [K, R, H]; [1, R, H] where all heads share one; None where it is the target's.
        token_ids: int64 [R], the draft vocabulary, or None for the whole one.
    """

    weight: Tensor
    bias: Tensor | None
    output: Tensor | None
    token_ids: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The widest of the floating-point tensors'."""
        tensors = [x for x in (self.weight, self.bias, self.output) if x is not None and len(x)]
        return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))

    @property
    def num_heads(self) -> int:
        """K."""
        return int(self.weight.shape[1])

    @property
    def num_layers(self) -> int:
        """n."""
        return int(self.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.weight.shape[2])


@dataclass(frozen=True)
class TargetSizes:
    """What is known of the model the heads are for.

    Attributes:
        hidden_size, vocab_size: None where unknown.
        output_weight: [V, H] of its output layer, to see whether the heads share it.
    """

    hidden_size: int | None = None
    vocab_size: int | None = None
    output_weight: Tensor | None = None


def to_heads(
    parts: HeadParts, target: TargetSizes, base_model: str, dtype: torch.dtype
) -> MedusaHeads:
    """Parallel heads without projection, on the CPU, in `dtype`, not yet frozen.

    Raises:
        ValueError: they are for another model, or the file does not say for how many tokens.
    """
    parts, vocab_size = _fitted(parts, target)
    parts = replace(parts, output=None if parts.output is None else parts.output.to(dtype))
    output, kind = parts.output, _output_kind(parts, target.output_weight)
    config = HeadsConfig(
        num_heads=parts.num_heads,
        num_layers=parts.num_layers,
        hidden_size=parts.hidden_size,
        vocab_size=vocab_size,
        output=kind,
        draft_vocab_size=None if parts.token_ids is None else len(parts.token_ids),
        base_model=base_model,
    )
    with torch.device("meta"):
        empty = None if parts.token_ids is None else torch.zeros(len(parts.token_ids))
        heads = MedusaHeads(config, empty)
    bias = torch.zeros(parts.weight.shape[:3]) if parts.bias is None else parts.bias
    state = {"block_weight": parts.weight.to(dtype), "block_bias": bias.to(dtype)}
    if kind == "own":
        assert output is not None
        state["output_weight"] = output.expand(parts.num_heads, -1, -1).contiguous()
    if parts.token_ids is not None:
        state["draft_ids"] = parts.token_ids
    heads.load_state_dict(state, strict=True, assign=True)
    return heads


def _fitted(parts: HeadParts, target: TargetSizes) -> tuple[HeadParts, int]:
    """The parts for a vocabulary of the target's size, and that size."""
    if target.hidden_size not in (None, parts.hidden_size):
        raise ValueError(
            f"These heads are for hidden size {parts.hidden_size} but the model has "
            f"{target.hidden_size}: use heads trained on this model."
        )
    if parts.output is None or parts.token_ids is not None:
        size = target.vocab_size
        if size is None:
            raise ValueError(
                "These heads do not say how large the vocabulary is: load them with their model, "
                "or give its vocab_size."
            )
        if parts.token_ids is not None and int(parts.token_ids.max()) >= size:
            raise ValueError(
                f"These heads draft token {int(parts.token_ids.max())} but the model has a "
                f"vocabulary of {size}: use heads trained on this model."
            )
        return parts, size
    rows = int(parts.output.shape[1])
    size = rows if target.vocab_size is None else target.vocab_size
    if rows == size:
        return parts, size
    if abs(rows - size) >= MAX_PADDING:
        raise ValueError(
            f"These heads are for a vocabulary of {rows} but the model has {size}: use heads "
            "trained on this model."
        )
    kept = min(rows, size)
    warnings.warn(
        f"The heads have {rows} output rows and the model {size}: taken for padding, so the first "
        f"{kept} tokens are drafted; check that both have the same tokenizer.",
        stacklevel=2,
    )
    ids = torch.arange(kept) if kept < size else None
    return replace(parts, output=parts.output[:, :kept], token_ids=ids), size


def _output_kind(parts: HeadParts, target_output: Tensor | None) -> OutputKind:
    if parts.output is None:
        return "shared"
    if target_output is None:
        return "own"
    rows = target_output.detach()
    if parts.token_ids is not None:
        rows = rows.index_select(0, parts.token_ids.to(rows.device))
    same = all(torch.equal(head.to(rows), rows) for head in parts.output)
    if not same:
        return "own"
    return "shared" if parts.token_ids is None else "reduced"
