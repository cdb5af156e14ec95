"""Training texts as token ids: one flat array, cut into documents, with a mask of the tokens to
learn.

A document is one conversation. Documents are batched by length, never packed into one row: no head
can look across a border, and no attention mask is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdeft.heads.formats.files import listed, open_tensors
from specdeft.trees.atomic import write_atomic


@dataclass(frozen=True)
class Documents:
    """`tokens` int32 and `learn` bool (the assistant's tokens) are flat; document i is
    `offsets[i]:offsets[i+1]` of both; `temperature` float32: how its answer was drawn."""

    tokens: Tensor
    learn: Tensor
    offsets: Tensor
    temperature: Tensor

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each document, int64."""
        return self.offsets[1:] - self.offsets[:-1]

    def select(self, index: Tensor) -> Documents:
        """The documents `index` (int64), in that order."""
        starts, lengths = self.offsets[:-1][index], self.lengths[index]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
        flat = within + starts.repeat_interleave(lengths)
        return Documents(self.tokens[flat], self.learn[flat], offsets, self.temperature[index])

    def split(self, held_out: float, seed: int) -> tuple[Documents, Documents]:
        """(training, held-out) documents, at random."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        count = min(len(self) - 1, max(1, round(held_out * len(self))))
        return self.select(order[count:].sort().values), self.select(order[:count].sort().values)

    def padded(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens int64 [B,S], learn bool [B,S], lengths int64 [B]) of some documents, padded on
        the right with token 0; what lies past a length is never read as a value."""
        picked = self.select(index)
        lengths = picked.lengths
        inside = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        tokens = torch.zeros(inside.shape, dtype=torch.int64)
        learn = torch.zeros(inside.shape, dtype=torch.bool)
        tokens[inside] = picked.tokens.to(torch.int64)
        learn[inside] = picked.learn
        return tokens, learn, lengths

    def batches(self, max_tokens: int) -> list[Tensor]:
        """Document indices, sorted by length, in batches of at most `max_tokens` padded tokens."""
        order = self.lengths.argsort(stable=True)
        lengths = self.lengths[order].tolist()
        batches, start = [], 0
        for stop, length in enumerate(lengths):
            if stop > start and (stop + 1 - start) * length > max_tokens:
                batches.append(order[start:stop])
                start = stop
        return [*batches, order[start:]] if lengths else []

    def save(self, path: Path) -> None:
        """Write as safetensors, atomically."""
        content = {
            "tokens": self.tokens.to(torch.int32),
            "learn": self.learn.to(torch.uint8),
            "offsets": self.offsets,
            "temperature": self.temperature,
        }
        write_atomic(path, lambda temporary: save_file(content, temporary))

    @classmethod
    def load(cls, path: Path) -> Documents:
        """Read what `save` wrote; ValueError says what is wrong with the file."""
        stored = open_tensors(path)
        names = [field.name for field in fields(cls)]
        if set(names) != set(stored):
            raise ValueError(f"{path} holds {listed(stored)}, no texts: write them again.")
        tokens, learn, offsets, temperature = (stored[name]() for name in names)
        whole = (
            {tokens.dtype, offsets.dtype} <= {torch.int32, torch.int64}
            and tokens.dim() == offsets.dim() == 1
            and tokens.shape == learn.shape
            and learn.dtype in (torch.bool, torch.uint8)
            and temperature.shape == (len(offsets) - 1,)
            and temperature.dtype == torch.float32
            and bool((temperature >= 0).all() and temperature.isfinite().all())
            and int(offsets[0]) == 0
            and int(offsets[-1]) == len(tokens)
            and bool((offsets.diff() >= 0).all())
            and bool((tokens >= 0).all())
        )
        if not whole:
            raise ValueError(f"{path} holds texts that do not add up: write them again.")
        return cls(tokens, learn.bool(), offsets, temperature)


def from_lists(
    ids: Sequence[Sequence[int]],
    learn: Sequence[Sequence[bool]],
    temperature: Sequence[float] | None = None,
) -> Documents:
    """Documents out of lists of token ids and as long lists of flags."""
    lengths = torch.tensor([0, *map(len, ids)], dtype=torch.int64)
    flat = torch.tensor([t for row in ids for t in row], dtype=torch.int32)
    flags = torch.tensor([f for row in learn for f in row], dtype=torch.bool)
    if flat.shape != flags.shape:
        raise ValueError("ids and learn differ in length: give one flag for every token.")
    heat = torch.zeros(len(ids)) if temperature is None else torch.tensor(list(temperature))
    return Documents(flat, flags, lengths.cumsum(0), heat)


def join(parts: Sequence[Documents]) -> Documents:
    """All documents of `parts`, in order."""
    lengths = torch.cat([torch.zeros(1, dtype=torch.int64), *(part.lengths for part in parts)])
    return Documents(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.learn for part in parts]),
        lengths.cumsum(0),
        torch.cat([part.temperature for part in parts]),
    )


def read_jsonl(path: Path, tokenizer: Any, max_length: int) -> Documents:
    """Documents from a JSON-lines file; a line holds `messages` (role and content), `prompt` and
    `response`, or `text`. Only what the assistant says is learnt (of `text`: everything)."""
    ids, learn = [], []
    for number, entry in _entries(path):
        tokens, flags = _encode(entry, tokenizer, f"{path}, line {number}")
        ids.append(tokens[:max_length])
        learn.append(flags[:max_length])
    if not any(any(row) for row in learn):
        raise ValueError(f"{path} holds nothing to learn from: no line has an assistant's answer.")
    return from_lists(ids, learn)


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}.") from error
                yield number, entry


def _encode(entry: dict[str, Any], tokenizer: Any, where: str) -> tuple[list[int], list[bool]]:
    if "text" in entry:
        tokens = list(tokenizer(entry["text"]).input_ids)
        return tokens, [True] * len(tokens)
    if "prompt" in entry and "response" in entry:
        messages = [
            {"role": "user", "content": entry["prompt"]},
            {"role": "assistant", "content": entry["response"]},
        ]
    elif "messages" in entry:
        messages = entry["messages"]
    else:
        raise ValueError(
            f"{where} has none of messages, prompt with response, text: add one of them."
        )
    tokens, flags = [], []
    # The template is applied turn by turn and spans are taken from it: searching the text for the
    # answer finds the wrong place when an answer repeats.
    for count, message in enumerate(messages, start=1):
        said = message["role"] == "assistant"
        shown = _render(tokenizer, messages[: count - 1], generation=True) if said else tokens
        if said and shown[: len(tokens)] == tokens:
            flags += [False] * (len(shown) - len(tokens))
            tokens = shown
        whole = _render(tokenizer, messages[:count], generation=False)
        if whole[: len(tokens)] != tokens:
            raise ValueError(
                f"{where}: the chat template rewrites earlier turns; give text instead."
            )
        flags += [said] * (len(whole) - len(tokens))
        tokens = whole
    return tokens, flags


def _render(tokenizer: Any, messages: Sequence[Any], *, generation: bool) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=generation
    )
    return list(tokenizer(text, add_special_tokens=False).input_ids)
