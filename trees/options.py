"""Command-line options whose mistakes are one sentence, and whose help keeps its lines."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

_NUMBER = re.compile(r"argument (?P<name>.+?): invalid (?P<kind>int|float) value: (?P<value>.*)")
_KINDS = {"int": "a whole number", "float": "a number"}
_MOST = 200  # characters of a message: what was typed may be a whole file


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
