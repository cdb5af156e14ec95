"""The options of `specdeft train`, from a command line and from a --config file alike.

Everything that can be refused is refused here, before a model is loaded: a run writes texts for
minutes before it looks at a learning rate.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdeft.heads.joint import check_available
from specdeft.heads.parallel import Processes
from specdeft.heads.sharding import check_processes
from specdeft.heads.trainer import TrainConfig
from specdeft.trees.options import HelpFormatter, Options
from specdeft.trees.whole_numbers import LARGEST

RUN_NAME = "run.json"
DOCUMENTS_NAME = "documents.safetensors"

# The least of what a whole number may be.
_LEAST = {
    "self_generate": 1,
    "wave_rows": 1,
    "max_length": 2,
    "num_heads": 1,
    "num_layers": 0,
    "draft_vocab_size": 1,
    "cell_size": 0,
    "batch_rows": 1,
    "accumulate": 1,
    "epochs": 1,
    "max_steps": 1,
    "evaluate_every": 1,
    "save_every": 1,
    "joint_steps": 1,
    "seed": 0,
}
_MAY_BE_NONE = ("cell_size", "config", "data", "joint", "max_steps", "time_limit_s")
# What written texts follow from: a run goes on with the ones it finds.
_OF_TEXTS = ("model", "data", "self_generate", "wave_rows", "max_length", "seed")


@dataclass(frozen=True)
class Shape:
    """The choices of a HeadsConfig that the target does not fix."""

    num_heads: int = 4
    num_layers: int = 2
    output: str = "shared"
    token_input: bool = True
    projection: bool = True
    sequential: bool = False
    draft_vocab_size: int | None = None
    cell_size: int | None = None


def _parser() -> argparse.ArgumentParser:
    shape, config = Shape(), TrainConfig()
    parser = Options(
        prog="specdeft train",
        description="Train Medusa heads for a frozen Hugging Face causal language model.",
        epilog="Examples:\n"
        "  specdeft train --model Qwen/Qwen3-0.6B --output my-heads\n"
        "  specdeft train --model MODEL --output my-heads --data chats.jsonl\n"
        "  specdeft train --config my-heads/run.json --output again\n"
        'Then: specdeft generate --model MODEL --heads my-heads "..."',
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face id or folder of the target")
    add("--output", type=Path, required=True, help="folder for the heads")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data", type=Path, nargs="+", help="JSON-lines files to learn from")
    data.add_argument(
        "--self-generate",
        type=int,
        default=20_000,
        metavar="N",
        help="texts the target writes for itself",
    )
    add("--wave-rows", type=int, default=256, help="texts written at once")
    add("--max-length", type=int, default=2048, help="tokens kept of a line of --data")
    add("--held-out", type=float, default=0.02, help="share of texts kept for measuring")
    add("--num-heads", type=int, default=shape.num_heads, help="tokens guessed ahead")
    add("--num-layers", type=int, default=shape.num_layers, help="residual blocks of a head")
    add(
        "--heads-output",
        choices=("shared", "own", "reduced"),
        default=shape.output,
        help="output layer: the target's, own ones, or the target's rows of frequent tokens",
    )
    add("--draft-vocab-size", type=int, default=16_384, help="rows with --heads-output reduced")
    add("--parallel", action="store_true", help="Medusa's heads: none sees another one's guess")
    add(
        "--cell-size",
        type=int,
        metavar="WIDTH",
        help="sequential heads are one recurrent cell of so wide gated blocks (0: blocks of each "
        "head's own; default: the hidden size times 2.5)",
    )
    add(
        "--no-token-input",
        action="store_true",
        help="heads do not even see the token just decided (implies --parallel)",
    )
    add("--no-projection", action="store_true", help="no linear map before the output layer")
    add(
        "--loss",
        choices=("hard", "soft"),
        default=config.loss,
        help="learn the tokens that came, or the target's distributions",
    )
    add("--learning-rate", type=float, default=config.learning_rate)
    add("--batch-rows", type=int, default=config.batch_rows, help="positions of a step")
    add(
        "--accumulate",
        type=int,
        default=config.accumulate,
        metavar="PARTS",
        help="work on a step's positions in so many parts, to save memory",
    )
    add("--epochs", type=int, default=config.epochs)
    add("--max-steps", type=int)
    add("--time-limit-s", type=float, help="fit the number of steps into so many seconds")
    add(
        "--evaluate-every",
        type=int,
        default=config.evaluate_every,
        metavar="STEPS",
        help="measure on held-out texts",
    )
    add(
        "--save-every",
        type=int,
        default=config.save_every,
        metavar="STEPS",
        help="keep what --resume goes on from",
    )
    add(
        "--joint",
        choices=("lora", "full"),
        help="afterwards train target and heads together (Medusa-2), the target by low-rank "
        "adapters or as a whole; the new target is written to OUTPUT/target",
    )
    add("--joint-steps", type=int, default=500, metavar="STEPS")
    add(
        "--shard-target",
        action="store_true",
        help="under torchrun: each process holds a part of the target's layers (FSDP), for models "
        "that one device does not hold",
    )
    add("--seed", type=int, default=config.seed)
    add("--resume", action="store_true", help="go on from the state in --output")
    add(
        "--config",
        type=Path,
        help="JSON object with any of these options (dashes as _), such as the run.json of a run",
    )
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with those of a --config file as defaults."""
    parser = _parser()
    only_config = Options(add_help=False, allow_abbrev=False)
    only_config.add_argument("--config", type=Path)
    path = only_config.parse_known_args(arguments)[0].config
    if path is not None:
        given = _read_config(path, known={action.dest for action in parser._actions})
        if given.get("data") is not None:  # argparse does not convert defaults of several values
            given["data"] = _paths(given["data"])
        for action in parser._actions:
            action.required = action.required and action.dest not in given
        parser.set_defaults(**given)
    options = parser.parse_args(arguments)
    _check_values(parser, options)
    return options


def _paths(values: Any) -> list[Path]:
    if not (isinstance(values, list) and values and all(isinstance(one, str) for one in values)):
        raise ValueError(f"--data is {values!r}: give a list of files")
    return [Path(one) for one in values]


def _read_config(path: Path, known: set[str]) -> dict[str, Any]:
    content = _read_json(path, "--config")
    if unknown := sorted(set(content) - known):
        raise ValueError(
            f"--config {path} has {unknown}: give an object with options of `train` as names"
        )
    return content


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{what} {path} is no JSON file ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{what} {path} is not a JSON object: give an object with options of `train` as names"
        )
    return content


def as_config(options: argparse.Namespace) -> dict[str, Any]:
    """What --config reads; where to write and whether to go on are the next run's own affair."""
    left_out = ("config", "output", "resume")
    return {
        name: [str(x) for x in value] if isinstance(value, list) else value
        for name, value in sorted(vars(options).items())
        if name not in left_out
    }


def _check_values(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """ValueError names the first option whose value, typed or read, is none that it can take."""
    for action in parser._actions:
        name, wanted = action.dest, ""
        if not hasattr(options, name) or (name in _MAY_BE_NONE and getattr(options, name) is None):
            continue
        value = getattr(options, name)
        if name in _LEAST and not (type(value) is int and _LEAST[name] <= value <= LARGEST):
            wanted = f"give a whole number from {_LEAST[name]}"
        elif name in ("learning_rate", "time_limit_s") and not _is_number(value, above=0):
            wanted = "give a number above 0"
        elif name == "held_out" and not (_is_number(value, above=-1) and 0 <= float(value) < 1):
            wanted = "give a share of the texts from 0 up to, but not, 1"
        elif action.const is True and not isinstance(value, bool):
            wanted = "give true or false"
        elif action.choices is not None and value not in action.choices:
            wanted = f"choose from {', '.join(action.choices)}"
        elif name == "model" and not (isinstance(value, str) and value):
            wanted = "give a Hugging Face id or a folder"
        elif name == "output" and not isinstance(value, Path):
            wanted = "give a folder"
        if wanted:
            raise ValueError(f"--{name.replace('_', '-')} is {value!r}: {wanted}")


def _is_number(value: object, above: float) -> bool:
    return type(value) in (int, float) and above < value < math.inf  # type: ignore[operator]


def check_run(options: argparse.Namespace, group: Processes) -> None:
    """Refuse what does not go together or is not there, before a model is loaded."""
    if options.cell_size and (options.parallel or options.no_token_input):
        raise ValueError("--cell-size is for sequential heads: leave out one of the options")
    if options.joint:
        check_available(options.joint)
        if group.size > 1:
            raise ValueError("--joint trains in one process: leave out torchrun")
    if options.shard_target:
        check_processes(group)
    for path in options.data or ():
        if not path.is_file():
            raise ValueError(f"--data {path} is no file: give JSON-lines files")
    if options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output {options.output} is a file: give a folder")
    if options.resume:
        _check_same_texts(options)


def _check_same_texts(options: argparse.Namespace) -> None:
    """A run that goes on must be about the texts that are there."""
    path = options.output / RUN_NAME
    if not (path.is_file() and (options.output / DOCUMENTS_NAME).is_file()):
        return
    before, now = _read_json(path, "the run.json"), as_config(options)
    for name in _OF_TEXTS:
        if name in before and json.loads(json.dumps(now[name])) != before[name]:
            raise ValueError(
                f"--resume finds texts that were made with --{name.replace('_', '-')} "
                f"{before[name]} and is told {now[name]}: repeat that command, or leave out "
                "--resume to start anew"
            )
