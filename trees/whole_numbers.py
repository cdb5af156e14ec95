"""Whole numbers from outside: Python's, numpy's and torch's alike, no truth values, no monsters."""

from __future__ import annotations

import operator
from collections.abc import Iterable

LARGEST = 2**31 - 1  # no count, rank or token id of ours is larger


def whole_number(value: object, what: str) -> int:
    """`value` as a Python int; ValueError names `what` it was to be."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError, ValueError) as error:  # arrays and tensors raise of every kind
        shown = repr(value)
        shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
        raise ValueError(f"{what} is {shown}; give a whole number") from error
    if abs(number) > LARGEST:
        raise ValueError(
            f"{what} is a number of {number.bit_length()} bits; give one up to {LARGEST}"
        )
    return number


def whole_numbers(values: Iterable[object], what: str) -> tuple[int, ...]:
    """Each of `values` as a Python int; ValueError names the first that is none by its index."""
    try:
        listed = list(values)
    except TypeError as error:
        raise ValueError(
            f"{what} is a {type(values).__name__}; give a list of whole numbers"
        ) from error
    return tuple(whole_number(value, f"{what}[{index}]") for index, value in enumerate(listed))


def typed_number(text: str, what: str) -> int:
    """The number that a user typed as decimal digits, however many."""
    if len(text.lstrip("0")) > len(str(LARGEST)):
        raise ValueError(f"{what} is a number of {len(text)} digits; give one up to {LARGEST}")
    return whole_number(int(text), what)
