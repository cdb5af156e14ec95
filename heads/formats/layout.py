"""How a project names the tensors of its heads, written once and used to read and to write.

Letters of a template: `{head}` from 0, `{block}` from 0, `{kind}` weight or bias. With n residual
blocks the output layer of the projects that number it is block n.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# What training frameworks put before every name.
_WRAPPERS = re.compile(r"(?:(?:module|model|base_model)\.)*")
_NUMBER = r"(?:0|[1-9]\d?)"  # two digits: a hundred heads are no heads


class Place(NamedTuple):
    """What one tensor is: part "weight" or "bias" of a block, "output" (block: the number in its
    name, 0 where there is none), or "scale" of another."""

    part: str
    head: int
    block: int


@dataclass(frozen=True)
class Layout:
    """One project's names.

    Attributes:
        name: for people.
        block, output: templates of the two kinds of tensors.
        prefix: stands before every tensor of the heads; where it is not empty, other names belong
            to the base model and are left alone.
        optional_prefix: may stand there too.
        scales: the float8 scales that go with quantised tensors, by suffix.
        token_map: the tensor that lists a draft vocabulary, if the project has one.
        shares_output: a single output layer, head 0's, is that of all heads.
        first_heads: the number the first head may have.
    """

    name: str
    block: str
    output: str
    prefix: str = ""
    optional_prefix: str = ""
    scales: tuple[str, ...] = ()
    token_map: str | None = None
    shares_output: bool = False
    first_heads: tuple[int, ...] = (0,)

    def block_name(self, head: int, block: int, kind: str) -> str:
        """The name of a block's weight or bias."""
        return self.prefix + self.block.format(head=head, block=block, kind=kind)

    def output_name(self, head: int, num_blocks: int) -> str:
        """The name of a head's output layer."""
        return self.prefix + self.output.format(head=head, block=num_blocks)

    def canonical(self, place: Place) -> str:
        """The name of what is at a place, without what wrappers put before it."""
        if place.part == "output":
            return self.output_name(place.head, place.block)
        return self.block_name(place.head, place.block, place.part)

    def place(self, name: str) -> Place | None:
        """What the tensor `name` is, or None if this project does not know it."""
        bare = self._bare(name)
        for pattern, kind in self._patterns:
            if found := pattern.fullmatch(bare):
                groups = found.groupdict()
                part = kind or groups["kind"]
                return Place(part, int(groups["head"]), int(groups.get("block") or 0))
        return None

    def owns(self, name: str) -> bool:
        """Whether a tensor must belong to the heads, known or not."""
        return self._bare(name).startswith(self.prefix)

    def is_token_map(self, name: str) -> bool:
        """Whether it is the list of a draft vocabulary."""
        return self.token_map is not None and self._bare(name) == self.token_map

    def _bare(self, name: str) -> str:
        bare = name[_WRAPPERS.match(name).end() :]  # type: ignore[union-attr]
        return bare.removeprefix(self.optional_prefix)

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        block, output = (_pattern(self.prefix + text) for text in (self.block, self.output))
        patterns = [(re.compile(block), ""), (re.compile(output), "output")]
        stems = [block.replace(r"(?P<kind>weight|bias)", ""), output.removesuffix("weight")]
        return patterns + [
            (re.compile(stem + scale), "scale") for stem in stems for scale in self.scales
        ]


def _pattern(template: str) -> str:
    text = re.escape(template)
    for letter, values in (("head", _NUMBER), ("block", _NUMBER), ("kind", "weight|bias")):
        text = text.replace(re.escape(f"{{{letter}}}"), f"(?P<{letter}>{values})")
    return text
