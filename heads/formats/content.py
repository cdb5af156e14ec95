"""What a format's writer gets, and what it makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from specdeft.heads.formats.express import target_rows
from specdeft.heads.formats.layout import Layout
from specdeft.heads.formats.parts import HeadParts
from specdeft.heads.medusa import MedusaHeads


class Source(NamedTuple):
    """Heads to write.

    Attributes:
        heads: ours.
        output_layer: the target's, where it is known.
        base_model: the target's Hugging Face id or path, as the other engine is to find it.
        tokenizer: the target's, saved beside the heads; None leaves it out.
    """

    heads: MedusaHeads
    output_layer: nn.Module | None
    base_model: str
    tokenizer: Any = None

    def with_output(self, parts: HeadParts) -> HeadParts:
        """The parts with an output layer in any case: the target's, once, if they had none."""
        if parts.output is not None:
            return parts
        return replace(parts, output=target_rows(self.heads, self.output_layer)[None])


@dataclass(frozen=True)
class Content:
    """The file of a format: its tensors as `parts` under the names of `layout`, and its config."""

    layout: Layout
    file: str
    parts: HeadParts
    config: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, none sharing memory with another, in a fixed order."""
        parts, layout = self.parts, self.layout
        heads = [
            (head, block) for head in range(parts.num_heads) for block in range(parts.num_layers)
        ]
        content = {layout.block_name(*at, "weight"): parts.weight[at[1], at[0]] for at in heads}
        if parts.bias is not None:
            content |= {layout.block_name(*at, "bias"): parts.bias[at[1], at[0]] for at in heads}
        for head, rows in enumerate(parts.output if parts.output is not None else ()):
            content[layout.output_name(head, parts.num_layers)] = rows
        if parts.token_ids is not None:
            assert layout.token_map is not None
            content[layout.token_map] = parts.token_ids
        return {name: content[name].clone() for name in sorted(content)}
