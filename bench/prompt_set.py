"""Prompts to measure on: the built-in set, a JSON Lines file, or standard input.

A line is an object with `prompt` (text), `messages` (a chat), or `turns` (the user's turns, as
Spec-Bench writes them); `id` or `question_id`, and `kind` or `category`, are taken where present.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILTIN = "builtin"
_BUILTIN_FILE = Path(__file__).parent / "prompts" / "builtin.jsonl"
_CONTENT_KEYS = ("prompt", "messages", "turns")

Message = dict[str, str]


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt.

    Attributes:
        id: unique in its set.
        kind: what sort of task it is; results are also given by kind.
        messages: the chat up to and including the first turn to answer.
        later_turns: the user's further turns, each asked after the answer to the one before.
        num_random_tokens: where set, the prompt is that many random ids instead of a chat.
    """

    id: str
    kind: str
    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()
    num_random_tokens: int | None = None


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run.

    Attributes:
        name: where they came from.
        sha256: of the whole source, before any were left out.
        num_available: prompts in the source.
        prompts: those chosen, in the source's order.
        num_later_turns: how many of them are later turns of the prompt before.
    """

    name: str
    sha256: str
    num_available: int
    prompts: tuple[BenchPrompt, ...]
    num_later_turns: int = 0

    @property
    def rule(self) -> str:
        """How the prompts were chosen, for the report."""
        turns = self.num_later_turns
        first = len(self.prompts) - turns
        later = f", with {turns} later turns as prompts of their own" if turns else ""
        if first == self.num_available:
            return f"all {self.num_available} prompts of {self.name}{later}"
        return (
            f"{first} of the {self.num_available} prompts of {self.name}: round robin "
            "over its kinds in order of first appearance, each kind's prompts in file order" + later
        )


def load_prompts(source: str, num_prompts: int | None = None, default: int = 80) -> PromptSet:
    """Read and choose prompts.

    Args:
        source: "builtin", "-" (standard input) or a file.
        num_prompts: how many, chosen evenly over the kinds; None takes ``default`` of them, or all
            where there are fewer.
        default: see above.

    Raises:
        ValueError: the file is missing, empty, malformed (the line is named), or too short.
    """
    data, name = _read(source)
    prompts = _parse(data, name)
    if num_prompts is None:
        num_prompts = min(default, len(prompts))
    if num_prompts < 1:
        raise ValueError(f"{num_prompts} prompts were asked for: ask for at least 1")
    if num_prompts > len(prompts):
        raise ValueError(
            f"{num_prompts} prompts were asked for and {name} holds {len(prompts)}: ask for at "
            "most that many"
        )
    chosen = choose_evenly(prompts, num_prompts)
    return PromptSet(name, hashlib.sha256(data).hexdigest(), len(prompts), tuple(chosen))


def random_prompts(lengths: Sequence[int], count: int) -> PromptSet:
    """Prompts of random ids, ``count`` of every length; the kind names the length.

    Raises:
        ValueError: a length or the count is below 1.
    """
    if count < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"{count} prompts of {lengths} tokens: ask for at least 1 of each")
    prompts = tuple(
        BenchPrompt(f"{length}-{index}", f"{length} tokens", (), (), length)
        for length in lengths
        for index in range(count)
    )
    name = f"random ids, {', '.join(map(str, lengths))} tokens long"
    return PromptSet(name, hashlib.sha256(name.encode()).hexdigest(), len(prompts), prompts)


def choose_evenly(prompts: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """``count`` prompts, as evenly over the kinds as they allow; no chance is involved.

    Kinds take turns in order of first appearance and give their prompts in order; the chosen ones
    are returned in the order of ``prompts``.
    """
    by_kind: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_kind.setdefault(prompt.kind, []).append(index)
    longest = max(len(indices) for indices in by_kind.values())
    turns = [
        indices[turn]
        for turn in range(longest)
        for indices in by_kind.values()
        if turn < len(indices)
    ]
    return [prompts[index] for index in sorted(turns[:count])]


def _read(source: str) -> tuple[bytes, str]:
    if source == "-":
        return sys.stdin.buffer.read(), "standard input"
    path = _BUILTIN_FILE if source == BUILTIN else Path(source)
    try:
        return path.read_bytes(), BUILTIN if source == BUILTIN else path.name
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"the prompts file {source} cannot be read ({reason.lower()}): give a JSON Lines file, "
            f"{BUILTIN}, or - for standard input"
        ) from error


def _parse(data: bytes, name: str) -> list[BenchPrompt]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text (byte {error.start}): give one JSON object a line"
        ) from error
    prompts: list[BenchPrompt] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _parse_line(line, f"{name}, line {number}", number)
        if prompt.id in line_of:
            raise ValueError(
                f"{name}, line {number}: the id {prompt.id!r} stands in line {line_of[prompt.id]} "
                "already: give every prompt its own"
            )
        line_of[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{name} holds no prompts: give one JSON object a line")
    return prompts


def _parse_line(line: str, where: str, number: int) -> BenchPrompt:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ValueError(
            f"{where}: not valid JSON ({reason}): write one object, like "
            '{"prompt": "Why is the sky blue?"}'
        ) from error
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: a {type(fields).__name__}: write an object with a prompt")
    given = [key for key in _CONTENT_KEYS if key in fields]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ValueError(f"{where}: it must have one of prompt, messages, turns: it has {found}")
    messages, later_turns = _content(given[0], fields[given[0]], where)
    return BenchPrompt(
        id=_first(fields, ("id", "question_id"), str(number)),
        kind=_first(fields, ("kind", "category"), "any"),
        messages=tuple(messages),
        later_turns=tuple(later_turns),
    )


def _content(key: str, value: Any, where: str) -> tuple[list[Message], list[str]]:
    if key == "prompt":
        return [_user(value, where)], []
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {key} is not a list with entries: write at least one")
    if key == "turns":
        turns = [_user(turn, where) for turn in value]
        return turns[:1], [turn["content"] for turn in turns[1:]]
    messages = [_message(entry, where) for entry in value]
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{where}: the chat ends with an answer: end it with the user's turn")
    return messages, []


def _user(text: Any, where: str) -> Message:
    return {"role": "user", "content": _text(text, where)}


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict) or not {"role", "content"} <= set(entry):
        raise ValueError(f"{where}: a message must be an object with role and content")
    return {"role": _text(entry["role"], where), "content": _text(entry["content"], where)}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{where}: {json.dumps(value)[:40]} stands where text must: write a string that is "
            "not empty"
        )
    return value


def _first(fields: Mapping[str, Any], keys: Sequence[str], otherwise: str) -> str:
    return next((str(fields[key]) for key in keys if fields.get(key) is not None), otherwise)
