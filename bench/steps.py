"""`specdeft bench steps`: what one step costs, by tree, context and batch.

Draft, forward over the tree, acceptance and commit, together, as generations run them: replayed
from graphs on a GPU, many in a row, eagerly elsewhere. The cache is full of random numbers, so no
text is needed and none is judged; tokens are not counted. Trees take turns, A B .. B A.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from specdeft.bench.manifest import describe
from specdeft.bench.report import Finished, Report, Table
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import (
    PLAIN,
    Workbench,
    add_model_options,
    add_result_options,
    load,
    parse_trees,
    progress,
    settings_of,
)
from specdeft.config import GenerationConfig
from specdeft.engine import Engine
from specdeft.memory import DEFAULT_KV_FRACTION, plan_memory
from specdeft.step_cost import Place, StepStand
from specdeft.trees.options import HelpFormatter, Options, whole_numbers
from specdeft.trees.token_tree import TokenTree

_PROMPTS = {"source": "none: a cache of seeded random numbers"}


class StepTime(NamedTuple):
    """A tree at a place: milliseconds of its steps, a timing each, and whether tokens that all
    sequences begin with were read once for all of them."""

    tree: str
    num_nodes: int
    place: Place
    times_ms: list[float]
    prefix_once: bool

    @property
    def ms(self) -> float:
        """The median."""
        return statistics.median(self.times_ms)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft bench steps",
        description="Time whole steps: draft, forward over the tree, acceptance and commit.",
        epilog="Example:\n"
        "  specdeft bench steps --model random:llama-3-8b --heads random --dtype bfloat16 \\\n"
        "    --compile --trees deft-64 --context 4608 --shared 4096 --batch-sizes 1,8",
        formatter_class=HelpFormatter,
    )
    options.add_argument("--trees", default="auto", help="names, sizes or files, commas")
    options.add_argument(
        "--context", default="1024", metavar="N,N", help="committed tokens of each sequence"
    )
    options.add_argument("--batch-sizes", default="1", metavar="N,N", help="sequences of a step")
    options.add_argument(
        "--shared", type=int, default=0, metavar="N", help="tokens that all of them begin with"
    )
    options.add_argument("-r", "--repetitions", type=int, default=7, metavar="N", help="timings")
    options.add_argument("--seed", type=int, default=0, help="of the numbers in the cache")
    add_model_options(options)
    add_result_options(options)
    return options


def main(arguments: Sequence[str]) -> Finished:
    """Run the command.

    Raises:
        ValueError: an option is malformed, or a place does not fit the model.
    """
    options = parser().parse_args(arguments)
    names = [name for name in parse_trees(options.trees) if name != PLAIN]
    contexts = whole_numbers(options.context, "contexts", "1024,8192")
    sizes = whole_numbers(options.batch_sizes, "batch sizes", "1,8")
    GenerationConfig(seed=options.seed)  # refuses what no generator takes
    if options.repetitions < 1:
        raise ValueError(f"repetitions is {options.repetitions}: give at least 1")
    if not 0 <= options.shared < min(contexts):
        raise ValueError(
            f"--shared is {options.shared}: give 0 or more, and less than the shortest context "
            f"({min(contexts)})"
        )
    folder = RunFolder(options.save_result, plots=options.plots)
    bench = load(options)
    trees = {name: bench.decoder(name).tree for name in (PLAIN, *names)}
    decoder = bench.decoder(PLAIN)
    manifest = describe(
        decoder.device,
        decoder.dtype_name,
        _PROMPTS,
        ["bench", "steps", *arguments],
        settings_of(options),
    )
    places = [Place(context, size) for context in contexts for size in sizes]
    _check_room(decoder.engine, list(trees.values()), places, options.shared)
    found: list[StepTime] = []
    with folder, progress(len(places), "steps", "place") as done:
        folder.open(manifest)
        for place in places:
            record = folder.get(_key(place))
            if record is None:
                record = _measured(bench, decoder.engine, trees, place, options)
                folder.put(_key(place), record)
            found += [StepTime(place=place, **entry) for entry in record["trees"]]
            done()
        report = make_report(found, manifest)
        folder.save(report)
    return Finished(report, options.output)


def _check_room(
    engine: Engine, trees: Sequence[TokenTree], places: Sequence[Place], num_shared: int
) -> None:
    """Refuse, before any step is timed, places that the model or the memory does not hold."""
    room = StepStand.room(engine, trees)
    longest = max(place.num_context for place in places)
    if longest + room > engine.target.max_context:
        raise ValueError(
            f"the model's context of {engine.target.max_context} tokens does not hold {longest} "
            f"and the {room} of steps behind them: give a smaller --context"
        )
    num_nodes = max(tree.num_nodes for tree in trees)
    for place in places:
        capacities = [place.num_context + room] * place.num_sequences
        stored = engine.stored_tokens(capacities, num_shared)
        plan = plan_memory(engine, stored, num_nodes, is_greedy=True, replaced=None)
        if plan is not None and not plan.fits(DEFAULT_KV_FRACTION):
            raise ValueError(
                f"{place.num_sequences} sequences of {place.num_context} tokens do not fit the "
                "memory that is free: give smaller --batch-sizes or a smaller --context"
            )


def _key(place: Place) -> str:
    return f"{place.num_context}|{place.num_sequences}"


def _measured(
    bench: Workbench,
    engine: Engine,
    trees: dict[str, TokenTree],
    place: Place,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All trees at one place, in turns."""
    stand = StepStand.build(engine, list(trees.values()), place, num_shared=options.shared)
    generator = torch.Generator(stand.cache.keys.device).manual_seed(options.seed)
    for pool in (stand.cache.keys, stand.cache.values):
        pool.normal_(generator=generator)
    tensors = {name: engine.load_tree(tree) for name, tree in trees.items()}
    counts = {}
    for name, tree in tensors.items():
        stand.time_ms(tree, bench.clock, stand.in_a_row)  # captures and compiles
        counts[name] = stand.steps_together(tree, bench.clock)
    times: dict[str, list[float]] = {name: [] for name in trees}
    for repetition in range(options.repetitions):
        for name in list(trees)[:: 1 if repetition % 2 == 0 else -1]:
            times[name].append(stand.time_ms(tensors[name], bench.clock, counts[name]))
    entries = [
        {
            "tree": name,
            "num_nodes": tree.num_nodes,
            "times_ms": times[name],
            "prefix_once": engine.reads_prefix_once(stand.cache, stand.batch, tree.num_nodes),
        }
        for name, tree in trees.items()
    ]
    return {"trees": entries}


def make_report(found: Sequence[StepTime], manifest: dict[str, Any]) -> Report:
    """A row for every tree and place; ratios to the plain step there, and to one sequence."""
    settings = manifest["settings"]
    data: list[dict[str, Any]] = []
    for one in found:
        data.append(
            {
                "tree": one.tree,
                "num_nodes": one.num_nodes,
                "num_context_tokens": one.place.num_context,
                "num_sequences": one.place.num_sequences,
                "step_ms": one.ms,
                "fastest_ms": min(one.times_ms),
                "slowest_ms": max(one.times_ms),
                "over_plain": _ratio(one, found, tree=PLAIN, size=one.place.num_sequences),
                "over_one_sequence": _ratio(one, found, tree=one.tree, size=1),
                "shared_read": _shared_read(one) if settings["shared"] else "",
            }
        )
    rows = tuple(tuple(figures.values()) for figures in data)
    titles = ("tree", "nodes", "context", "sequences", "ms", "fastest", "slowest")
    columns = (*titles, "x plain", "x one sequence", "shared read")
    return Report(
        title=f"Whole steps, {manifest['dtype']}, {manifest['device']}",
        notes=(
            f"{settings['repetitions']} timings in turns, median; a cache of random numbers, "
            f"{settings['shared']} tokens of the context common to all sequences",
            "x plain, x one sequence: the step's time over that of a plain step of the same "
            "sequences, and over the same tree's step of one sequence",
        ),
        tables=(Table("Steps", columns, rows),),
        data={"manifest": manifest, "rows": data},
    )


def _shared_read(one: StepTime) -> str:
    return "once" if one.prefix_once else "by each"


def _ratio(one: StepTime, found: Sequence[StepTime], *, tree: str, size: int) -> float | None:
    """Over another tree or batch at the same context; None where that was not measured."""
    place = Place(one.place.num_context, size)
    other = next((it for it in found if it.tree == tree and it.place == place), None)
    return None if other is None else one.ms / other.ms
