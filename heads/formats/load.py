"""Heads from any folder or file: our own format, or another project's, converted."""

from __future__ import annotations

from pathlib import Path

import torch

from specdeft.heads.checkpoint import CONFIG_NAME, load_heads
from specdeft.heads.formats.declared import declared
from specdeft.heads.formats.files import all_finite, read_json
from specdeft.heads.formats.folder import member
from specdeft.heads.formats.parts import TargetSizes, to_heads
from specdeft.heads.formats.reading import read_heads
from specdeft.heads.medusa import MedusaHeads


def load_any_heads(
    path: Path,
    target: TargetSizes = TargetSizes(),  # noqa: B008 - frozen
    *,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
) -> MedusaHeads:
    """Heads ready to draft, frozen.

    Args:
        path: a folder or a file; the format is recognised from what is in it.
        target: what is known of the model; with its output weight, heads whose output layers equal
            it share it.
        dtype: of the result; None keeps that of the file, the widest where there are several.
        device: of the result.

    Raises:
        ValueError: it holds no heads, damaged ones, ones of another model, or in a format with
            something that cannot be represented; the message names it.
    """
    try:
        heads = _own(path, target, dtype) if is_own(path) else _imported(path, target, dtype)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"the heads {path} cannot be read ({reason}): check the file") from error
    for name, tensor in heads.named_parameters():
        if not all_finite(tensor):
            raise ValueError(
                f"{path}: {name} has values too large for {dtype}: load it in bfloat16 or float32."
            )
    return heads.to(device=device).eval().requires_grad_(False)


def stored_dtype(path: Path) -> torch.dtype:
    """The dtype of the heads in their file, the widest where there are several."""
    if is_own(path):
        return load_heads(path, dtype=None).block_weight.dtype
    return read_heads(path).parts.dtype


def _own(path: Path, target: TargetSizes, dtype: torch.dtype | None) -> MedusaHeads:
    return load_heads(
        path, dtype=dtype, hidden_size=target.hidden_size, vocab_size=target.vocab_size
    )


def _imported(path: Path, target: TargetSizes, dtype: torch.dtype | None) -> MedusaHeads:
    found = read_heads(path)
    said = declared(found.config)
    if target.vocab_size is None and (
        found.parts.output is None or found.parts.token_ids is not None
    ):
        target = TargetSizes(target.hidden_size, said.vocab_size, target.output_weight)
    return to_heads(found.parts, target, said.base_model, dtype or found.parts.dtype)


def is_own(path: Path) -> bool:
    """Whether a folder is in the format of `specdeft train`."""
    config = path / CONFIG_NAME
    return path.is_dir() and config.is_file() and "format" in read_json(member(path, config.name))
