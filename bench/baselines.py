"""The rows beside our trees, by name: yardsticks, and the ceiling and the floor of our engine."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdeft.bench.drafts import PlannedHeads, read_accept_lengths
from specdeft.bench.metrics import Run
from specdeft.bench.reference_rows import TRANSFORMERS, TransformersRow
from specdeft.bench.rivals import RIVALS, RivalRow, find_rival
from specdeft.bench.rows import DecoderRow, Row
from specdeft.bench.workbench import PLAIN, Workbench, tree_request
from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.heads.eight_bit import product_for
from specdeft.loading import load_target
from specdeft.trees.named import NAMED_TREES, named_tree
from specdeft.trees.token_tree import TokenTree

# As transformers' documentation suggests.
_LOOKUP_TOKENS = 10
_MOST_PASSES = 6  # each agrees with its plan up to the next near tie that turns, at least
USUAL = GenerationConfig()


class PlannedRow(DecoderRow):
    """Our engine with drafts that follow a plan; see `drafts`."""

    def __init__(
        self,
        kind: str,
        tree: str,
        bench: Workbench,
        plain: DecoderRow,
        lengths: Sequence[Sequence[int]] | None = None,
        config: GenerationConfig = USUAL,
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Args: "oracle", "random" or "replay"; the tree's name; what it runs on; the row that
        gives the continuation; for a replay, the lengths of its texts; what is generated, for
        which "auto" chooses; the prompts' ids, which take the replay's texts in turn (any other
        prompt takes the first)."""
        if bench.heads:
            shape = bench.decoder(tree).tree_of(config, num_prompt_tokens=1).head_tree
        else:
            shape = _tree_without_heads(tree)
        self._heads = PlannedHeads(
            shape,
            bench.model.get_output_embeddings().weight.shape[0],
            plain.decoder.device,
            int(bench.model.config.get_text_config().max_position_embeddings),
            bench.heads,
            product_for(plain.decoder.device, compiled=bench.compile),
        )
        heads: Any = self._heads
        decoder = SpecDecoder(
            bench.model,
            bench.tokenizer,
            heads,
            tree=shape,
            lookup="off",
            cuda_graphs=bench.cuda_graphs,
            compile=bench.compile,
            clock=bench.clock,
        )
        super().__init__(f"{kind}({tree})", bench, decoder)
        self._plain = plain
        fixed = {"oracle": [[shape.max_depth]], "random": [[0]]}
        lengths = lengths or fixed[kind]
        # By place, not by turn: a warm-up or a resumed run takes the prompts in another order.
        self._lengths = {tuple(ids): lengths[at % len(lengths)] for at, ids in enumerate(prompts)}
        self._first_lengths = lengths[0]
        self._texts: dict[tuple[tuple[int, ...], GenerationConfig], tuple[int, ...]] = {}

    def run(self, prompt_ids: Sequence[int], config: GenerationConfig) -> Run:
        """Generate; the continuation is found first, outside the measured time."""
        key = (tuple(prompt_ids), config)
        is_new = key not in self._texts
        if is_new:
            self._texts[key] = self._plain.run(prompt_ids, config).token_ids
        lengths = self._lengths.get(key[0], self._first_lengths)

        def planned() -> Run:
            self._heads.plan(self._texts[key], lengths)
            return super(PlannedRow, self).run(prompt_ids, config)

        if is_new and self.decoder.device.type == "cuda":
            # Capturing a graph runs its step, which takes the plan forward: capture beforehand.
            planned()
        if is_new and self.decoder.engine.target.dtype != torch.float32:
            # Where rounding turns a near tie, this row's text parts from plain decoding's, and
            # drafts of that one would be wrong from there on: plan its own, once that stands.
            for _ in range(_MOST_PASSES):
                text = planned().token_ids
                if text == self._texts[key]:
                    break
                self._texts[key] = text
        return planned()


def _tree_without_heads(tree: str) -> TokenTree:
    """A tree by name or file; a number of nodes needs calibrated heads."""
    request = tree_request(tree)
    if isinstance(request, TokenTree):
        return request
    if tree in NAMED_TREES:
        return named_tree(tree)
    if Path(tree).suffix == ".json":
        return TokenTree.load(tree)
    raise ValueError(
        f"the tree {tree!r} needs calibrated heads and there are none: name one of chain-N, "
        f"{', '.join(NAMED_TREES)}, or give a JSON file"
    )


@dataclass(frozen=True)
class Request:
    """What baselines are built from.

    Attributes:
        bench, plain: what rows run on, and plain decoding on it.
        trees, options: as on the command line.
        config: what is generated.
        prompts: the ids of each.
    """

    bench: Workbench
    plain: DecoderRow
    trees: tuple[str, ...]
    options: argparse.Namespace
    config: GenerationConfig
    prompts: Sequence[Sequence[int]]


def _transformers(request: Request) -> list[Row]:
    return [TransformersRow(request.bench)]


def _lookup(request: Request) -> list[Row]:
    settings = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
    return [TransformersRow(request.bench, "transformers-lookup", settings)]


def _compiled(request: Request) -> list[Row]:
    if request.plain.decoder.device.type != "cuda":
        raise ValueError("transformers-compiled is measured on CUDA only: leave it out on a CPU")
    settings = {"cache_implementation": "static"}
    return [TransformersRow(request.bench, "transformers-compiled", settings)]


def _assisted(request: Request) -> list[Row]:
    name = request.options.assistant
    model = request.bench.model
    loaded = load_target(name, dtype=model.dtype, device=request.plain.decoder.device)
    return [TransformersRow(request.bench, "transformers-assisted", assistant=loaded.model)]


def _rival(name: str) -> Callable[[Request], list[Row]]:
    return lambda request: [RivalRow(name, request.bench)]


def _planned(kind: str) -> Callable[[Request], list[Row]]:
    def build(request: Request) -> list[Row]:
        lengths = _accept_lengths(request.options) if kind == "replay" else None
        rows: dict[TokenTree, Row] = {}
        # What "auto" chooses may be asked for by its size as well: one row is enough.
        for tree in sorted(request.trees, key="auto".__eq__):
            row = PlannedRow(
                kind, tree, request.bench, request.plain, lengths, request.config, request.prompts
            )
            rows.setdefault(row.decoder.tree, row)
        return list(rows.values())

    return build


BASELINES: dict[str, Callable[[Request], list[Row]]] = {
    TRANSFORMERS: _transformers,
    "transformers-lookup": _lookup,
    "transformers-compiled": _compiled,
    "transformers-assisted": _assisted,
    "oracle": _planned("oracle"),
    "random": _planned("random"),
    "replay": _planned("replay"),
    "economize": _rival("economize"),
    "flashspec": _rival("flashspec"),
}


def parse_baselines(text: str) -> tuple[str, ...]:
    """Names of baselines from a list with commas; "none" is no name.

    Raises:
        ValueError: there is no such baseline; the valid ones are listed.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip() not in ("", "none"))
    for name in names:
        if name not in BASELINES and ":" not in name:
            raise ValueError(
                f"there is no baseline {name!r}: give none, {', '.join(BASELINES)}, or a rival's "
                "package.module:function"
            )
    return tuple(dict.fromkeys(names))


def check_baselines(names: Sequence[str], options: argparse.Namespace) -> None:
    """Refuse what cannot be run, before a model is loaded.

    Raises:
        ValueError: a rival is not installed, or an option that a baseline needs was not given.
    """
    for name in names:
        if name not in BASELINES or name in RIVALS:
            find_rival(name)
    if "replay" in names:
        _accept_lengths(options)
    if "transformers-assisted" in names and options.assistant is None:
        raise ValueError("transformers-assisted needs a model that drafts: give --assistant NAME")


def _accept_lengths(options: argparse.Namespace) -> list[list[int]]:
    if options.replay is None:
        raise ValueError("replay needs recorded accept lengths: give --replay FILE")
    return read_accept_lengths(options.replay)


def runs_sampled(name: str) -> bool:
    """Whether a baseline can be compared above temperature 0: only with our noise."""
    return name in ("oracle", "random", "replay")


def make_rows(
    trees: tuple[str, ...],
    baselines: Sequence[str],
    bench: Workbench,
    options: argparse.Namespace,
    config: GenerationConfig = USUAL,
    prompts: Sequence[Sequence[int]] = (),
) -> list[Row]:
    """The rows of a run in order: yardsticks, plain decoding, our trees, planned drafts.

    Args as in `Request`.

    Raises:
        ValueError: a tree or a baseline cannot be run here.
    """
    plain = DecoderRow(PLAIN, bench)
    ours = [DecoderRow(tree, bench) for tree in trees if tree != PLAIN]
    request = Request(bench, plain, trees, options, config, prompts)
    beside = [row for name in baselines for row in BASELINES.get(name, _rival(name))(request)]
    references = [row for row in beside if not row.is_ours]
    return [*references, plain, *ours, *(row for row in beside if row.is_ours)]
