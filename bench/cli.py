"""`specdeft bench COMMAND`: each command is imported when it is run."""

import argparse
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
    "steps": "whole steps by tree, context and batch, a shared beginning included",
    "attention": "tree attention on a GPU, beside other methods and the floor",
    "workload": "few-shot, reasoning and speculative trees end to end, DeFT beside per-path",
    "compare": "what changed between two saved runs, beyond noise",
}

_QUESTIONS = """\
questions, and what answers them:
  Does speculation pay here?          specdeft bench latency --quick
  On my model and my prompts?         specdeft bench latency --model ID --heads DIR --prompts FILE
  Which tree, at which temperature?   specdeft bench latency --trees auto,16,64 --temperature 0,0.7
  With long prompts? In batches?      ... --input-len 256,4096 --output-len 128 --batch-sizes 1,4,8
  What does one step cost where?      specdeft bench steps --context 1024,8192 --batch-sizes 1,8
  How far is it from the best case?   ... --baselines transformers,oracle,random
  Where do the drafts fail?           specdeft bench acceptance
  Is the text really the same?        specdeft bench identity --dtype float32
  Did my change help?                 --save-result A, then B, then: specdeft bench compare A B

how to read a report:
  tau       tokens a step, the bonus token included: 1 is plain decoding, 2 halves the steps
  tpot ms   time per token after the first; x plain is plain decoding's over the row's
  [a, b]    95 % interval of the ratio over prompts: one that holds 1 says nothing
  identical texts that are plain decoding's to the last token; a row of ours that fails this
            (in 16 bits: by more than near ties) gets no speed, and the exit code is 1

--output json or csv is for programs, --save-result FOLDER keeps everything with an HTML report.
specdeft bench COMMAND --help explains a command."""

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
        epilog=_QUESTIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
