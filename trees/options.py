"""Command-line options whose mistakes are one sentence, and whose help keeps its lines."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

_NUMBER = re.compile(r"argument (?P<name>.+?): invalid (?P<kind>int|float) value: (?P<value>.*)")
_KINDS = {"int": "a whole number", "float": "a number"}
_MOST = 200  # characters of a message: what was typed may be a whole file


def listed(text: str) -> tuple[str, ...]:
    """The parts of a list with commas, without the space around them; empty ones are left out."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def whole_numbers(text: str, what: str, example: str) -> tuple[int, ...]:
    """Whole numbers from 1 from a list with commas.

    Args:
        text: the list.
        what: its name in the plural, for the error.
        example: a good one, for the error.

    Raises:
        ValueError: it is empty, names a number twice, or one of its parts is no such number.
    """
    parts = listed(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{what} are {text!r}: give numbers from 1 with commas, like {example}")
    numbers = tuple(map(int, parts))
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{what} are {text!r}: give each number once, like {example}")
    return numbers


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples; shows defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # Not `in`: 0 equals False, and says something.
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


class Options(argparse.ArgumentParser):
    """argparse's parser, without the usage lines that hide what was wrong."""

    def error(self, message: str) -> NoReturn:
        """Print one sentence with the remedy and exit with code 2."""
        if found := _NUMBER.fullmatch(message):
            message = f"{found['name']} takes {_KINDS[found['kind']]}, not {found['value']}"
        message = " ".join(message.split())
        if len(message) > _MOST:
            message = message[:_MOST] + " ..."
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")
