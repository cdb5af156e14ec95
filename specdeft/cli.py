"""The command line: `specdeft COMMAND`. Commands are imported when they are run, not before."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TextIO

import specdeft
from specdeft.trees.options import Options

_COMMANDS = {
    "generate": ("specdeft.generate_command", "continue a prompt, streamed; --compare checks it"),
    "train": ("specdeft.train_command", "train draft heads for a model from its own text"),
    "export": ("specdeft.export_command", "write heads for vLLM, TGI, TensorRT-LLM, or to publish"),
    "calibrate": ("specdeft.calibrate_command", "measure drafts and step times for --tree auto"),
    "tree": ("specdeft.tree_command", "draw token trees, find the best ones, compare them"),
    "bench": ("specdeft.bench.cli", "measure acceptance, identity and speed"),
}
_PACKAGE = Path(specdeft.__file__).parent
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0, or 2 for bad input (one sentence on standard error), 130 for Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = Options(
        prog="specdeft",
        description="Your model's tokens sooner, unchanged: speculative decoding with token trees.",
        epilog="specdeft COMMAND --help explains a command. Start with: "
        'specdeft generate --compare "Why is the sky blue?"',
    )
    parser.add_argument("--version", action="version", version=f"specdeft {specdeft.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_module, summary) in _COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    known, _rest = parser.parse_known_args(arguments[:1])
    module, _summary = _COMMANDS[known.command]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show
            run: Callable[[Sequence[str]], int | None] = import_module(module).main
            return run(arguments[1:]) or 0
    except KeyboardInterrupt:
        print("\nspecdeft: interrupted", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) went away: not an error, and nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"specdeft: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_INPUT


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A notice of ours as one line, without the place in the code that it comes from."""
    if issubclass(category, UserWarning) and _PACKAGE in Path(filename).parents:
        text = f"specdeft: {message}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)
