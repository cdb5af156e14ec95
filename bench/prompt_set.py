"""Prompts to measure on: the built-in set, a JSON Lines file, or standard input (`prompt_file`)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdeft.prompt_file import Message, parse_prompts, read_source

BUILTIN = "builtin"
_BUILTIN_FILE = Path(__file__).parent / "prompts" / "builtin.jsonl"


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
    prompts = [BenchPrompt(*line) for line in parse_prompts(data, name)]
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
    if source == BUILTIN:
        return _BUILTIN_FILE.read_bytes(), BUILTIN
    return read_source(source, BUILTIN)
