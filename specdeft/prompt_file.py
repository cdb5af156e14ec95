"""Files of prompts: JSON Lines whose lines are objects with one of three contents.

A line has `prompt` (text), `messages` (a chat), or `turns` (the user's turns, as Spec-Bench writes
them); `id` or `question_id`, and `kind` or `category`, are taken where present.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STANDARD_INPUT = "-"
_CONTENT_KEYS = ("prompt", "messages", "turns")

Message = dict[str, str]


class FilePrompt(NamedTuple):
    """One line.

    Attributes:
        id: unique in its file; the line's number where none is given.
        kind: what sort of task it is; "any" where none is given.
        messages: the chat up to and including the first turn to answer.
        later_turns: the user's further turns, each asked after the answer to the one before.
    """

    id: str
    kind: str
    messages: tuple[Message, ...]
    later_turns: tuple[str, ...]

    @property
    def prompt(self) -> str | list[Message]:
        """The first turn as `SpecDecoder.generate` takes it: a lone user's turn is text, which a
        model without a chat template takes as it is."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "user":
            return self.messages[0]["content"]
        return list(self.messages)


def read_source(source: str, otherwise: str) -> tuple[bytes, str]:
    """What a file, or standard input for "-", holds, and what to call it.

    Args:
        source: what was given.
        otherwise: what else could be given, for the error.

    Raises:
        ValueError: there is no such file.
    """
    if source == STANDARD_INPUT:
        return sys.stdin.buffer.read(), "standard input"
    try:
        return Path(source).read_bytes(), Path(source).name
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"the prompts file {source} cannot be read ({reason.lower()}): give a JSON Lines file, "
            f"{otherwise}, or - for standard input"
        ) from error


def parse_prompts(data: bytes, name: str) -> list[FilePrompt]:
    """Every line's prompt.

    Raises:
        ValueError: the data is not UTF-8, empty or malformed; the line is named.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text (byte {error.start}): give one JSON object a line"
        ) from error
    prompts: list[FilePrompt] = []
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


def _parse_line(line: str, where: str, number: int) -> FilePrompt:
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
    return FilePrompt(
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
