"""`specdeft bench COMMAND`: each command is imported when it is run."""

import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from specdeft.bench.report import FORMATS, Finished, as_text
from specdeft.trees.options import Options

COMMANDS = {
    "identity": "is the text that of plain decoding, token for token",
    "acceptance": "tokens a step (tau), by depth and rank, with repeats beside it",
    "latency": "time to first token, per token and end to end, beside plain decoding",
    "attention": "tree attention on a GPU, beside other methods and the floor",
    "workload": "few-shot, reasoning and speculative trees end to end, DeFT beside per-path",
    "compare": "what changed between two saved runs, beyond noise",
}

Command = Callable[[Sequence[str]], Finished]


def main(arguments: Sequence[str]) -> int:
    """Run one command and print its report.

    Returns:
        0, or 1 where a check failed.

    Raises:
        ValueError: bad input; nothing was measured.
    """
    parser = Options(
        prog="specdeft bench",
        description="Measure speculative decoding on this machine: in one process, with the same "
        "weights, beside plain decoding and transformers generate.",
        epilog="specdeft bench COMMAND --help explains a command. Start with: "
        "specdeft bench latency --quick",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    known, _rest = parser.parse_known_args(list(arguments[:1]))
    run: Command = import_module(f"specdeft.bench.{known.command}").main
    finished = run(arguments[1:])
    sys.stdout.write(_rendered(finished))
    sys.stdout.flush()
    return finished.exit_code


def _rendered(finished: Finished) -> str:
    """On a terminal a table is fitted to its width; in a pipe it is as wide as it is."""
    if finished.output == "table" and sys.stdout.isatty():
        return as_text(finished.report, shutil.get_terminal_size().columns)
    return FORMATS[finished.output](finished.report)
