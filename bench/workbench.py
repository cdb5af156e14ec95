"""One model with its heads, loaded once, and the decoders that are measured on it."""

import argparse
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdeft.bench.prompt_set import (
    BUILTIN,
    BenchPrompt,
    PromptSet,
    load_prompts,
    random_prompts,
)
from specdeft.bench.random_model import PREFIX, RANDOM_HEADS, random_heads, random_model
from specdeft.bench.report import FORMATS
from specdeft.bench.run_folder import RunFolder
from specdeft.calibration_cache import cached_values
from specdeft.config import GenerationConfig
from specdeft.decoder import MAX_BATCH_SIZE, SpecDecoder
from specdeft.default_model import DEFAULT_MODELS
from specdeft.heads.medusa import MedusaHeads
from specdeft.loading import (
    LoadedHeads,
    LoadedTarget,
    load_heads,
    load_target,
    pick_device,
    pick_dtype,
)
from specdeft.prompt import encode_prompt
from specdeft.trees.options import listed
from specdeft.trees.request import LookupRequest, TreeRequest
from specdeft.trees.search import ValuedPaths
from specdeft.trees.token_tree import TokenTree

Clock = Callable[[], float]
PLAIN = "plain"


@dataclass(frozen=True)
class Workbench:
    """What every decoder of a run shares: the same weights, heads and clock.

    Attributes:
        model, tokenizer, heads, values, cuda_graphs, compile, lookup, clock: see `SpecDecoder`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    heads: MedusaHeads | None
    values: ValuedPaths | None
    clock: Clock = time.perf_counter
    cuda_graphs: bool | None = None
    compile: bool = False
    lookup: LookupRequest = "auto"

    def decoder(self, tree: str, max_batch_size: int = MAX_BATCH_SIZE) -> SpecDecoder:
        """The decoder of a tree as `parse_trees` names it; "plain" is the one-node tree.

        Raises:
            ValueError: there is no such tree, or the heads cannot fill it.
        """
        return SpecDecoder(
            self.model,
            self.tokenizer,
            self.heads,
            tree=tree_request(tree),
            lookup=self.lookup,
            tree_values=self.values,
            cuda_graphs=self.cuda_graphs,
            compile=self.compile,
            max_batch_size=max_batch_size,
            clock=self.clock,
        )

    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a text."""
        configured = self.model.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return frozenset(
            int(token) for token in [*listed, self.tokenizer.eos_token_id] if token is not None
        )

    def encode(self, prompts: PromptSet, config: GenerationConfig, raw: bool) -> list[list[int]]:
        """Token ids of every prompt's first turn, checked against the model's context.

        Raises:
            ValueError: a prompt (it is named) does not fit, or is a chat for a model without one.
        """
        limit = int(self.model.config.get_text_config().max_position_embeddings)
        encoded: list[list[int]] = []
        for prompt in prompts.prompts:
            try:
                ids = self._encode_one(prompt, raw, config.seed)
                config.token_budget(len(ids), limit)
            except ValueError as error:
                raise ValueError(f"prompt {prompt.id}: {error}") from error
            encoded.append(ids)
        return encoded

    def with_later_turns(
        self, prompts: PromptSet, config: GenerationConfig, raw: bool
    ) -> PromptSet:
        """Every later turn as a prompt of its own, "ID/2" and so on.

        It is asked after the answers that plain decoding gives to the turns before it, so that all
        rows read the same text.

        Raises:
            ValueError: a conversation outgrows the context; its prompt is named.
        """
        decoder = self.decoder(PLAIN)
        expanded: list[BenchPrompt] = []
        with progress(sum(len(p.later_turns) for p in prompts.prompts), "earlier turns") as done:
            for prompt in prompts.prompts:
                expanded.append(prompt)
                messages = prompt.messages
                for number, turn in enumerate(prompt.later_turns, start=2):
                    (ids,) = self.encode(replace(prompts, prompts=(expanded[-1],)), config, raw)
                    answer = decoder.generate(ids, config=config).text
                    messages = (
                        *messages,
                        {"role": "assistant", "content": answer},
                        {"role": "user", "content": turn},
                    )
                    expanded.append(BenchPrompt(f"{prompt.id}/{number}", prompt.kind, messages))
                    done()
        later = len(expanded) - len(prompts.prompts)
        return replace(prompts, prompts=tuple(expanded), num_later_turns=later)

    def _encode_one(self, prompt: BenchPrompt, raw: bool, seed: int) -> list[int]:
        """A lone user's turn is text, which a model without a chat template takes as it is."""
        if prompt.num_random_tokens is not None:
            return self._random_ids(prompt.num_random_tokens, f"{seed} {prompt.id}")
        if len(prompt.messages) == 1 and prompt.messages[0]["role"] == "user":
            return encode_prompt(self.tokenizer, prompt.messages[0]["content"], raw=raw)
        return encode_prompt(self.tokenizer, list(prompt.messages), raw=raw)

    def _random_ids(self, count: int, seed: str) -> list[int]:
        generator = random.Random(seed)
        ends = self.eos_ids()
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        allowed = [token for token in range(vocab_size) if token not in ends]
        return generator.choices(allowed, k=count)


def tree_request(tree: str) -> TreeRequest:
    """From a tree's name on the command line to what a decoder takes."""
    chain = re.fullmatch(r"chain-(\d+)", tree)
    if chain:
        return TokenTree.chain(int(chain[1]))
    return TokenTree.chain(0) if tree == PLAIN else tree


def parse_trees(text: str) -> tuple[str, ...]:
    """Names of trees from a list with commas.

    Raises:
        ValueError: it is empty or repeats one.
    """
    trees = listed(text)
    if not trees:
        raise ValueError("no tree was given: give names with commas, like chain-4,16,64")
    if len(set(trees)) < len(trees):
        raise ValueError(f"a tree is named twice in {text}: name each once")
    return trees


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Numbers from a list with commas; `GenerationConfig` checks their range.

    Raises:
        ValueError: one is not a number, or the list is empty or repeats one.
    """
    try:
        temperatures = tuple(map(float, listed(text)))
    except ValueError as error:
        raise ValueError(
            f"temperatures are {text!r}: give numbers with commas, like 0,0.7"
        ) from error
    if not temperatures or len(set(temperatures)) < len(temperatures):
        raise ValueError(f"temperatures are {text!r}: give each number once, like 0,0.7")
    return temperatures


@dataclass(frozen=True)
class Amount:
    """How much a command does where the options do not say."""

    num_prompts: int
    max_new_tokens: int
    repetitions: int = 1


QUICK = Amount(num_prompts=3, max_new_tokens=48, repetitions=2)


def add_options(parser: argparse.ArgumentParser, usual: Amount) -> None:
    """The options that all commands on prompts share; ``usual`` is this command's."""
    add_model_options(parser)
    _add_work_options(parser, usual)
    add_result_options(parser)
    parser.set_defaults(usual=usual)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that `load` reads."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default=next(iter(DEFAULT_MODELS)), help="name, id, folder, or random:llama-3-8b"
    )
    model.add_argument("--heads", default="auto", help="folder, auto, none, or random")
    model.add_argument(
        "--lookup",
        default="auto",
        choices=("auto", "on", "off"),
        help="lookup chains in trees of a size: where they pay, always, never",
    )
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    model.add_argument("--device", default="auto", help="auto, cpu or cuda")
    model.add_argument("--threads", type=int, help="CPU threads; torch's own choice if not given")
    model.add_argument("--compile", action="store_true", help="torch.compile our forwards (CUDA)")
    model.add_argument("--no-cuda-graphs", action="store_true", help="run our steps eagerly (CUDA)")


def _add_work_options(parser: argparse.ArgumentParser, usual: Amount) -> None:
    work = parser.add_argument_group("work")
    work.add_argument(
        "--quick",
        action="store_true",
        help=f"a first answer: {QUICK.num_prompts} prompts, {QUICK.max_new_tokens} tokens, "
        f"{QUICK.repetitions} repetitions where not given",
    )
    work.add_argument(
        "--prompts", default=BUILTIN, help=f"JSON Lines file, {BUILTIN}, or - (stdin)"
    )
    work.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"how many, evenly over kinds; up to {usual.num_prompts} if not given",
    )
    work.add_argument(
        "--turns",
        default="first",
        choices=("first", "all"),
        help="all: later turns are prompts too, after plain decoding's answers",
    )
    work.add_argument("--raw", action="store_true", help="do not use the chat template")
    work.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"{usual.max_new_tokens} if not given"
    )
    work.add_argument("--ignore-eos", action="store_true", help="go on past the end of the text")
    work.add_argument(
        "--input-len", metavar="N,N", help="prompts of so many random ids instead, commas"
    )
    work.add_argument(
        "--output-len", type=int, metavar="N", help="the same as --max-new-tokens N --ignore-eos"
    )
    work.add_argument("--seed", type=int, default=0, help="of sampling and random prompts")


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Where the report goes, and what is kept."""
    result = parser.add_argument_group("result")
    result.add_argument("--output", default="table", choices=list(FORMATS), help="to stdout")
    result.add_argument(
        "--save-result", metavar="FOLDER", help="keep records and report; resumes a stopped run"
    )
    result.add_argument(
        "--plots", action="store_true", help="PNG files in the folder, too (needs matplotlib)"
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse, and fill in the amounts that were not given.

    Raises:
        ValueError: options contradict each other.
    """
    options = parser.parse_args(arguments)
    amount = QUICK if options.quick else options.usual
    if options.output_len is not None:
        if options.max_new_tokens is not None:
            raise ValueError("--output-len and --max-new-tokens were both given: give one")
        options.max_new_tokens, options.ignore_eos = options.output_len, True
    if options.max_new_tokens is None:
        options.max_new_tokens = amount.max_new_tokens
    if getattr(options, "repetitions", 1) is None:
        options.repetitions = amount.repetitions
    options.default_num_prompts = amount.num_prompts
    return options


@dataclass(frozen=True)
class Task:
    """What was asked for, checked, before a model is loaded."""

    prompts: PromptSet
    folder: RunFolder
    config: GenerationConfig

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> "Task":
        """Check the options that need no model.

        Raises:
            ValueError: one cannot be honoured.
        """
        config = GenerationConfig(
            max_new_tokens=options.max_new_tokens, seed=options.seed, ignore_eos=options.ignore_eos
        )
        folder = RunFolder(options.save_result, plots=options.plots)
        return cls(_prompts(options), folder, config)


def prepare(task: Task, bench: Workbench, options: argparse.Namespace) -> Task:
    """The task with its later turns, if they were asked for."""
    if options.turns == "first":
        return task
    prompts = bench.with_later_turns(task.prompts, task.config, options.raw)
    return replace(task, prompts=prompts)


def _prompts(options: argparse.Namespace) -> PromptSet:
    if options.input_len is None:
        return load_prompts(options.prompts, options.num_prompts, options.default_num_prompts)
    if options.prompts != BUILTIN:
        raise ValueError("--prompts and --input-len were both given: give one")
    try:
        lengths = list(map(int, listed(options.input_len)))
    except ValueError as error:
        raise ValueError(
            f"input lengths are {options.input_len!r}: give numbers with commas, like 256,1024"
        ) from error
    if not lengths:
        raise ValueError("no input length was given: give numbers with commas, like 256,1024")
    return random_prompts(lengths, options.num_prompts or 1)


def load(options: argparse.Namespace) -> Workbench:
    """Load the model and heads the options name.

    Raises:
        ValueError: they are not there, or do not fit each other.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"threads is {options.threads}: give at least 1")
        torch.set_num_threads(options.threads)
    if options.model.startswith(PREFIX):
        device = pick_device(options.device)
        model, tokenizer = random_model(options.model, pick_dtype(options.dtype, device), device)
        loaded = LoadedTarget(model, tokenizer, options.model)
    else:
        loaded = load_target(options.model, dtype=options.dtype, device=options.device)
    heads, shipped = _load_heads(options.heads, loaded) or (None, None)
    return Workbench(
        loaded.model,
        loaded.tokenizer,
        heads,
        cached_values(loaded.model, heads) or shipped,
        cuda_graphs=False if options.no_cuda_graphs else None,
        compile=options.compile,
        lookup=options.lookup,
    )


def _load_heads(heads: str, loaded: LoadedTarget) -> LoadedHeads | None:
    if heads == RANDOM_HEADS:
        return LoadedHeads(random_heads(loaded.model), None)
    return load_heads(None if heads == "none" else heads, loaded)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide the figures: two parts of one run must share them."""
    free = {"output", "save_result", "default_num_prompts", "usual", "quick", "output_len", "plots"}
    free |= {"time_limit", "yardstick_limit", "no_phases"}
    settings = {key: value for key, value in vars(options).items() if key not in free}
    for key in ("model", "heads", "prompts"):
        # A folder is the same folder from wherever the command is given.
        if key in settings and Path(str(settings[key])).exists():
            settings[key] = Path(str(settings[key])).name
    return settings


@contextmanager
def progress(total: int, what: str, unit: str = "text") -> Iterator[Callable[[], None]]:
    """A bar on standard error with the time left; calling what it gives means one more is done."""
    # A log file gets a line every ten seconds instead of one bar that is drawn over.
    interval_s = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(total=total, desc=what, unit=unit, dynamic_ncols=True, mininterval=interval_s) as bar:

        def done() -> None:
            bar.update()

        yield done
