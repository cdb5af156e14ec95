"""Heads of any project's format, recognised by the names of their tensors.

Numbers of heads and blocks are counted from the tensors (published configs are wrong about them);
unknown and missing names are errors, and so are wrong shapes, dtypes and values.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdeft.heads.formats import modelopt, vllm
from specdeft.heads.formats.declared import declared
from specdeft.heads.formats.files import (
    FLOATS,
    INTEGERS,
    Tensors,
    all_finite,
    open_tensors,
    read_json,
)
from specdeft.heads.formats.folder import folder_tensors, member
from specdeft.heads.formats.inventory import Shape, counted, notice, recognise, sorted_out
from specdeft.heads.formats.layout import Layout
from specdeft.heads.formats.parts import HeadParts

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ANY = -1  # a size that only the file knows


class Found(NamedTuple):
    """Heads as they stand in a file: their layout, their tensors, and the config beside them."""

    layout: Layout
    parts: HeadParts
    config: dict[str, Any]


def read_heads(path: Path) -> Found:
    """The heads in a folder or a file of any known format.

    Raises:
        ValueError: there are none, they are not whole, or something is in them that no format has.
    """
    if not path.exists():
        raise ValueError(
            f"{path} holds no heads: there is nothing of that name; give a folder written by "
            "`specdeft train`, or a folder or file of heads in another project's format."
        )
    if path.is_dir():
        config = path / "config.json"
        content = read_json(member(path, config.name)) if config.is_file() else {}
        return _found(path, folder_tensors(path), content)
    return _found(path, open_tensors(path), {})


def _found(path: Path, tensors: Tensors, config: dict[str, Any]) -> Found:
    layout = recognise(path, tensors)
    names = sorted_out(path, layout, tensors)
    shape = counted(path, layout, names)
    tensor = _Reader(path, layout, tensors, names.by_canonical)
    parts = HeadParts(
        *tensor.blocks(shape),
        tensor.outputs(shape),
        None if names.token_map is None else tensor.token_ids(names.token_map),
    )
    parts = _of_draft_vocabulary(path, parts)
    _compare(path, config, layout, parts)
    return Found(layout, parts, config)


class _Reader(NamedTuple):
    """Reads and checks the tensors of a file whose names are known."""

    path: Path
    layout: Layout
    tensors: Tensors
    names: dict[str, str]

    def blocks(self, shape: Shape) -> tuple[Tensor, Tensor | None]:
        """(weight [n, K, H, H], bias [n, K, H] or None) of the residual blocks."""
        H = self._hidden_size(shape)
        if shape.num_blocks == 0:
            return torch.zeros(0, len(shape.heads), H, H), None

        def stacked(kind: str, size: tuple[int, ...]) -> Tensor:
            rows = [
                self._float(self.layout.block_name(head, block, kind), size)
                for block in range(shape.num_blocks)
                for head in shape.heads
            ]
            return torch.stack(rows).view(shape.num_blocks, len(shape.heads), *size)

        return stacked("weight", (H, H)), stacked("bias", (H,)) if shape.bias else None

    def outputs(self, shape: Shape) -> Tensor | None:
        """[K or 1, R, H], or None."""
        if not shape.outputs:
            return None
        names = [self.layout.output_name(head, shape.num_blocks) for head in shape.outputs]
        first = self._float(names[0], (_ANY, self._hidden_size(shape)))
        return torch.stack([first, *(self._float(name, tuple(first.shape)) for name in names[1:])])

    def token_ids(self, name: str) -> Tensor:
        """int64 [R], each token once."""
        ids = self.tensors[name]()
        if ids.dtype not in INTEGERS or ids.dim() != 1 or ids.numel() == 0:
            raise ValueError(
                f"{self.path}: {name} has the shape {tuple(ids.shape)} and dtype {ids.dtype}: it "
                "must be a list of token ids."
            )
        ids = ids.to(torch.int64)
        if int(ids.min()) < 0 or len(ids.unique()) < len(ids):
            raise ValueError(f"{self.path}: {name} must list token ids from 0 on, each once.")
        return ids.clone()

    def _hidden_size(self, shape: Shape) -> int:
        layout, head = self.layout, shape.heads[0]
        name = (
            layout.block_name(head, 0, "weight")
            if shape.num_blocks
            else layout.output_name(head, 0)
        )
        tensor = self.tensors[self.names[name]]()
        if tensor.dim() != 2 or tensor.numel() == 0:
            raise ValueError(
                f"{self.path}: {self.names[name]} has the shape {tuple(tensor.shape)}: it must be "
                "a matrix."
            )
        return int(tensor.shape[1])

    def _float(self, canonical: str, shape: tuple[int, ...]) -> Tensor:
        name = self.names[canonical]
        tensor = self.tensors[name]()
        sizes = zip(tensor.shape, shape, strict=False)
        if tensor.dim() != len(shape) or any(b not in (a, _ANY) for a, b in sizes):
            wanted = str(shape).replace(str(_ANY), "any")
            raise ValueError(
                f"{self.path}: {name} has the shape {tuple(tensor.shape)} where {wanted} belongs: "
                "these heads are damaged or of several models."
            )
        if tensor.dtype in _FLOAT8:
            tensor = torch.mul(tensor.float(), self._scale(name))
        elif tensor.dtype not in FLOATS:
            raise ValueError(
                f"{self.path}: {name} has the dtype {tensor.dtype}: give float16, bfloat16, "
                "float32, float64, or float8 with its scale."
            )
        elif self._scale_name(name) in self.tensors:
            raise ValueError(
                f"{self.path}: {name} has a scale but is {tensor.dtype}, no quantised dtype: which "
                "of the two is wrong cannot be told, so export the heads again."
            )
        if not all_finite(tensor):
            raise ValueError(f"{self.path}: {name} holds NaN or infinity: these heads are damaged.")
        return tensor

    def _scale_name(self, name: str) -> str:
        return name.removesuffix("weight") + modelopt.WEIGHT_SCALE

    def _scale(self, name: str) -> Tensor:
        scale_name = self._scale_name(name)
        if not name.endswith("weight") or scale_name not in self.tensors:
            raise ValueError(f"{self.path}: {name} is float8 and {scale_name} is missing.")
        scale = self.tensors[scale_name]().float()
        if scale.numel() != 1 or not bool(torch.isfinite(scale).all()) or not bool(scale > 0):
            raise ValueError(
                f"{self.path}: {scale_name} must be one positive number, the scale of the tensor."
            )
        return scale.reshape(())


def _of_draft_vocabulary(path: Path, parts: HeadParts) -> HeadParts:
    """The output rows of the draft vocabulary, where the file has one and whole output layers."""
    ids, output = parts.token_ids, parts.output
    if ids is None:
        return parts
    rows = 0 if output is None else output.shape[1]
    if output is not None and rows > len(ids) and rows > int(ids.max()):
        return replace(parts, output=output.index_select(1, ids))
    if rows != len(ids):
        raise ValueError(
            f"{path}: token_map lists {len(ids)} tokens but the output layers have {rows} rows: "
            "export the heads again."
        )
    return parts


def _compare(path: Path, config: dict[str, Any], layout: Layout, parts: HeadParts) -> None:
    """Say where the config and the tensors differ; the tensors are right."""
    said = declared(config)
    wrong = [
        f"{what} {value!r} for {have}"
        for what, value, have in (
            ("heads", said.num_heads, parts.num_heads),
            ("residual blocks", said.num_layers, parts.num_layers),
        )
        if value is not None and value != have
    ]
    if wrong:
        notice(f"{path}: config.json says {' and '.join(wrong)} in the file: the file is followed.")
    if layout is vllm.LAYOUT and config and parts.output is not None:
        _check_sharing(path, bool(config.get(vllm.SHARED)), parts)
    if parts.bias is None and parts.num_layers and layout is not vllm.LAYOUT:
        notice(f"{path} has no biases: they are taken as zeros.")


def _check_sharing(path: Path, said: bool, parts: HeadParts) -> None:
    assert parts.output is not None
    if said != (parts.output.shape[0] == 1) and parts.num_heads > 1:
        raise ValueError(
            f"{path}: config.json says {vllm.SHARED} {str(said).lower()} but there are "
            f"{parts.output.shape[0]} output layers for {parts.num_heads} heads: set it right, "
            "after looking which was meant."
        )
