"""What a generation is asked to do: every default lives here, every value is checked once."""

import operator
from dataclasses import dataclass
from typing import SupportsFloat

from specdeft.trees.whole_numbers import whole_numbers

DEFAULT_MAX_NEW_TOKENS = 256
LOWEST_TEMPERATURE = 1e-6
HIGHEST_TEMPERATURE = 1e6


@dataclass(frozen=True)
class GenerationConfig:
    """One request's settings.

    Attributes:
        max_new_tokens: most tokens to emit, at least 1; None is 256, or what the context leaves.
        temperature: 0 is greedy; above 0 logits are divided by it and a token is drawn.
        top_k: draw among the ``top_k`` likeliest tokens only; None is all of them.
        top_p: draw among the smallest set of likeliest tokens holding this probability; 1 is all.
        seed: of the noise; the same seed gives the same text whatever the tree (design, section 4).
        stop: strings that end the text; the text and ids are cut before the first match.
        ignore_eos: go on to ``max_new_tokens`` past an end-of-text token (for measuring).
        eos_token_ids: the tokens that end a text; None is the model's and the tokenizer's.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        stop = self.stop or ()
        stop = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
        object.__setattr__(self, "stop", stop)
        _whole(self, "max_new_tokens", 1, None, optional=True)
        _whole(self, "top_k", 1, None, optional=True)
        _whole(self, "seed", 0, 2**63)
        if self.eos_token_ids is not None:
            given = self.eos_token_ids
            ends = given if hasattr(given, "__iter__") else (given,)
            object.__setattr__(self, "eos_token_ids", whole_numbers(ends, "eos_token_ids"))
        truth(self.ignore_eos, "ignore_eos")
        _number(self, "temperature")
        _number(self, "top_p")
        # `not (x >= 0)` also refuses NaN.
        if not (0.0 <= self.temperature <= HIGHEST_TEMPERATURE):
            raise ValueError(
                f"temperature is {self.temperature}: give 0 for greedy decoding or a number up to "
                f"{HIGHEST_TEMPERATURE:g}"
            )
        if not (0.0 < self.top_p <= 1.0):
            raise ValueError(
                f"top_p is {self.top_p}: it must be above 0 and at most 1 (1 keeps every token)"
            )
        if any(not isinstance(text, str) or not text for text in stop):
            raise ValueError(
                f"stop is {self.stop!r}: every stop string must be text of at least one character"
            )

    def token_budget(self, num_prompt_tokens: int, max_context: int) -> int:
        """Most tokens that this prompt may be followed by.

        Raises:
            ValueError: the prompt fills the context, or what was asked does not fit behind it.
        """
        room = max_context - num_prompt_tokens
        if room < 1:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens and the model's context holds "
                f"{max_context}: shorten it to leave room for new tokens"
            )
        if self.max_new_tokens is None:
            return min(DEFAULT_MAX_NEW_TOKENS, room)
        if self.max_new_tokens > room:
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and max_new_tokens={self.max_new_tokens} "
                f"exceed the model's context of {max_context}: ask for at most {room}"
            )
        return self.max_new_tokens

    def is_cut(self, budget: int) -> bool:
        """Whether such a `token_budget` was set by the context's end, and not as asked."""
        return self.max_new_tokens is None and budget < DEFAULT_MAX_NEW_TOKENS

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise; so it is at a temperature so low
        that logits divided by it leave float32, where nothing but the likeliest is ever drawn."""
        return self.temperature < LOWEST_TEMPERATURE


def _whole(
    config: GenerationConfig, name: str, least: int, end: int | None, optional: bool = False
) -> None:
    """Check a whole number (numpy's too) of at least ``least`` and below ``end``."""
    value = getattr(config, name)
    if value is None and optional:
        return
    allowed = f"of at least {least}" if end is None else f"from {least} to {end - 1}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} is {value!r}: give a whole number {allowed}") from error
    if number < least or (end is not None and number >= end):
        raise ValueError(f"{name} is {value!r}: give a whole number {allowed}")
    object.__setattr__(config, name, number)


def _number(config: GenerationConfig, name: str) -> None:
    value = getattr(config, name)
    if isinstance(value, bool | str) or not isinstance(value, SupportsFloat):
        raise ValueError(f"{name} is {value!r}: give a number")
    object.__setattr__(config, name, float(value))


def truth(value: object, what: str) -> bool:
    """`value` if it is True or False: a text like "no" would count as true.

    Raises:
        ValueError: it is neither; ``what`` it was to be is named.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}: give True or False")
    return value
