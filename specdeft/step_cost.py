"""C(n): what a whole step costs on this device with a tree of n nodes, measured.

Draft, forward, acceptance and commit are timed together, as they run in a generation; sampled steps
apart from greedy ones, since noise over the vocabulary costs more the deeper a tree is. Sizes take
turns, so that a slow moment of a shared machine falls on all of them, and the lower quartile of
their times stands for a step that nothing disturbed, compared with plain steps of the same rounds.
Sizes that no request would choose are soon left out: the seconds are spent where the choice hangs.
"""

import hashlib
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import specdeft
from specdeft.batch import Batch
from specdeft.config import GenerationConfig
from specdeft.engine import Engine
from specdeft.kv_tree import KVTree
from specdeft.sampling import Sampler
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.atomic import write_text_atomic
from specdeft.trees.token_tree import TokenTree
from specdeft.user_cache import cache_root, tell

FIRST_ROUNDS = 3  # over all sizes, a warming one before them; then over those that can win
LEAST_ROUNDS, MOST_ROUNDS = 5, 40
BUDGET_S = 6.0  # of all rounds but the warming one: short steps are timed more often
CAN_WIN = 0.85  # of the most tokens per time that any size brings
STEPS_IN_A_ROW = 8  # replayed graphs: the host reads a step late, so it must not wait for each
# The first launch finds an idle device, and the last is waited for: together about a millisecond.
ROW_MS, MOST_IN_A_ROW = 40.0, 48
CONTEXTS = (256, 1024, 4096, 16384, 65536)
METHOD = 5  # raised with what a step does or how it is timed
SAMPLED_AT = 0.7  # temperature: any other takes the same time
MOST_READ_TOKENS = 256  # of a stand-in text; the rest of the context is empty cache


class Place(NamedTuple):
    """Where a step's time is measured: committed tokens of each sequence, and sequences."""

    num_context: int = CONTEXTS[0]
    num_sequences: int = 1

    @classmethod
    def around(cls, num_context: int, num_sequences: int = 1) -> "Place":
        """The place that stands for a context and a batch: the smallest of a few that holds them;
        batches are rounded up to powers of two."""
        fitting = [context for context in CONTEXTS if context >= num_context]
        rounded = 1 << max(num_sequences - 1, 0).bit_length()
        return cls(fitting[0] if fitting else CONTEXTS[-1], rounded)


USUAL_PLACE = Place()


def measure_step_ms(
    engine: Engine,
    trees: Mapping[int, TokenTree],
    clock: Callable[[], float],
    place: Place = USUAL_PLACE,
    expected: Sequence[Mapping[int, float]] = (),
    *,
    sampled: bool = False,
) -> dict[int, float]:
    """Milliseconds of an undisturbed step by tree size, made non-decreasing.

    Args:
        engine: whose steps are timed.
        trees: by number of nodes.
        clock: seconds.
        place: with how many committed tokens and sequences; the cache holds no real text beyond
            the first tokens, which changes no step's time.
        expected: tokens a step by size, for each kind of request to come; sizes that none of them
            would choose are timed a few times only.
        sampled: whether tokens are drawn among all of the vocabulary; else the likeliest are taken.
    """
    stand = StepStand.build(engine, list(trees.values()), place, sampled=sampled)
    tensors = {size: engine.load_tree(tree) for size, tree in sorted(trees.items())}
    rounds: list[dict[int, float]] = []
    num_steps = stand.in_a_row

    def time_round(sizes: Sequence[int]) -> float:
        rounds.append({size: stand.time_ms(tensors[size], clock, num_steps) for size in sizes})
        return num_steps * sum(rounds[-1].values()) / 1e3

    time_round(list(tensors))  # warms up
    num_steps = stand.steps_together(tensors[min(tensors)], clock)
    rounds.clear()
    spent_s = sum(time_round(list(tensors)) for _ in range(FIRST_ROUNDS))
    sizes = contenders(undisturbed_ms(rounds), expected)
    while len(rounds) < MOST_ROUNDS and (spent_s < BUDGET_S or len(rounds) < LEAST_ROUNDS):
        spent_s += time_round(sizes)
    found_ms = undisturbed_ms(rounds)
    counts = [sum(size in times for times in rounds) for size in found_ms]
    return dict(zip(found_ms, isotonic(list(found_ms.values()), counts), strict=True))


def steps_in_a_row(step_ms: float) -> int:
    """How many replayed steps are timed together: enough to make little of what starting and
    waiting take, which would favour the trees whose steps are long."""
    return min(max(STEPS_IN_A_ROW, math.ceil(ROW_MS / max(step_ms, 0.1))), MOST_IN_A_ROW)


def undisturbed_ms(rounds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The lower quartile of every size's times, from its ratio to that of the smallest size over
    the same rounds: others on the machine only ever add, and a slow minute slows both."""
    smallest = min(rounds[0])
    plain = _lower_quartile([times[smallest] for times in rounds])
    found = {}
    for size in sorted(rounds[0]):
        pairs = [(times[size], times[smallest]) for times in rounds if size in times]
        own, beside = (_lower_quartile(times) for times in zip(*pairs, strict=True))
        found[size] = plain * own / beside
    return found


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


def contenders(step_ms: Mapping[int, float], expected: Sequence[Mapping[int, float]]) -> list[int]:
    """The sizes between which a choice can still fall, the smallest one always; all of them where
    nothing is expected."""
    near = {min(step_ms), *(step_ms if not expected else ())}
    for taus in expected:
        speed = {size: taus[size] / step_ms[size] for size in step_ms}
        near |= {size for size in speed if speed[size] >= CAN_WIN * max(speed.values())}
    return sorted(near)


@dataclass(frozen=True)
class StepStand:
    """Static memory that steps are timed on, and how a step is run there.

    Attributes:
        cache, batch: of the sequences, each with ``num_context`` committed tokens.
        run: one step of a tree.
        in_a_row: for how many steps there is room.
    """

    cache: KVTree
    batch: Batch
    num_context: int
    run: Callable[[TreeTensors], None]
    in_a_row: int

    @classmethod
    def build(
        cls,
        engine: Engine,
        trees: Sequence[TokenTree],
        place: Place,
        *,
        sampled: bool = False,
        num_shared: int = 0,
    ) -> "StepStand":
        """Take the memory for steps of any of the trees.

        Args:
            engine: whose steps are timed.
            trees: one of them at least.
            place: where; less context where the model's own is shorter.
            sampled: see `measure_step_ms`.
            num_shared: first tokens that all sequences have in common, fewer than the context.
        """
        num_levels = 1 + max(tree.max_depth for tree in trees)
        room = cls.room(engine, trees)
        num_context = min(place.num_context, max(engine.target.max_context - room, 1))
        capacities = [num_context + room] * place.num_sequences
        cache = engine.new_cache_for(engine.stored_tokens(capacities, num_shared))
        trunk = cache.open()
        cache.reserve(trunk, capacities[0])
        cache.advance(trunk, num_shared)
        sequences = tuple(cache.branch(trunk, capacities))
        batch = Batch.empty(engine.target, cache, sequences, num_levels)
        config = GenerationConfig(temperature=SAMPLED_AT if sampled else 0.0)
        sampler = Sampler.build(config, (0,) * len(sequences), engine.target.device)
        generator = torch.Generator().manual_seed(0)
        num_read = min(num_context - num_shared, MOST_READ_TOKENS)
        prompt = torch.randint(engine.target.vocab_size, (num_read,), generator=generator)
        for row, sequence in enumerate(sequences):
            engine.prefill(cache, batch.row(row), prompt.to(engine.target.device), sampler.row(row))
            cache.advance(sequence, num_context - num_shared - num_read)
        run = _runner(engine, cache, batch, sampler, num_context + room)
        return cls(cache, batch, num_context, run, _in_a_row(engine))

    @staticmethod
    def room(engine: Engine, trees: Sequence[TokenTree]) -> int:
        """Slots that steps of the trees need behind the committed tokens of a sequence."""
        num_levels = 1 + max(tree.max_depth for tree in trees)
        return max(tree.num_nodes for tree in trees) + _in_a_row(engine) * num_levels

    def steps_together(self, tree: TreeTensors, clock: Callable[[], float]) -> int:
        """How many steps of a tree, which ran before, are timed together."""
        if self.in_a_row == 1:
            return 1
        return steps_in_a_row(self.time_ms(tree, clock, self.in_a_row))

    def time_ms(self, tree: TreeTensors, clock: Callable[[], float], num_steps: int) -> float:
        """Milliseconds of one of so many steps, their tokens read as generations read them."""
        self.batch.lengths.fill_(self.num_context)
        _settled = self.batch.lengths.tolist()
        began = clock()
        for index in range(num_steps):
            if index and index % self.in_a_row == 0:  # there is room for so many steps
                self.batch.lengths.fill_(self.num_context)
            self.run(tree)
        _tokens = self.batch.counts.tolist()  # waits for the steps
        return (clock() - began) * 1e3 / num_steps


def _in_a_row(engine: Engine) -> int:
    return STEPS_IN_A_ROW if engine.cuda_graphs else 1


def _runner(
    engine: Engine, cache: KVTree, batch: Batch, sampler: Sampler, capacity: int
) -> Callable[[TreeTensors], None]:
    """A step as generations run it: replayed where graphs are used, else eager."""
    if not engine.cuda_graphs:
        return lambda tree: engine.step(cache, batch, tree, sampler)
    from specdeft.graphs import StepGraphs, context_bucket

    graphs, bucket = StepGraphs(engine, cache, batch, sampler), context_bucket(capacity)
    return lambda tree: graphs.run(tree, bucket)


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence in weighted least squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, own in zip(values, weights, strict=True):
        mean, weight, count = value, own, 1
        while blocks and blocks[-1][0] > mean:
            before, its_weight, its_count = blocks.pop()
            mean = (mean * weight + before * its_weight) / (weight + its_weight)
            weight, count = weight + its_weight, count + its_count
        blocks.append((mean, weight, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


def cached_step_ms(
    engine: Engine,
    trees: Mapping[int, TokenTree],
    clock: Callable[[], float],
    place: Place = USUAL_PLACE,
    expected: Sequence[Mapping[int, float]] = (),
    *,
    sampled: bool = False,
    refresh: bool = False,
) -> dict[int, float]:
    """`measure_step_ms`, remembered for this model, heads, device and versions.

    A file that cannot be read is measured again and replaced; one that cannot be written is not
    kept: the times are a help, not a result.
    """
    known = known_step_ms(engine, trees, place, sampled=sampled)
    if known and not refresh:
        return known
    key = _key(engine, trees, place, sampled=sampled)
    path = _path(key)
    tell(
        f"measuring the step time of tree sizes on this device{', sampling' if sampled else ''} "
        "(some seconds, then remembered)"
    )
    step_ms = measure_step_ms(engine, trees, clock, place, expected, sampled=sampled)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps({"key": key, "step_ms": step_ms}, indent=1) + "\n")
    except OSError:
        pass
    return step_ms


def known_step_ms(
    engine: Engine, trees: Mapping[int, TokenTree], place: Place, *, sampled: bool = False
) -> dict[int, float]:
    """The times that `cached_step_ms` would read; none where it would measure."""
    known = _read(_path(_key(engine, trees, place, sampled=sampled)))
    # A file that somebody or some fault changed is measured again.
    is_whole = known.keys() == trees.keys() and all(0 < ms < math.inf for ms in known.values())
    return known if is_whole else {}


def _path(key: Mapping[str, str | int]) -> Path:
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_root() / "step_cost" / f"{digest}.json"


def _read(path: Path) -> dict[int, float]:
    """The times in a file; none where it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {int(size): float(step_ms) for size, step_ms in content["step_ms"].items()}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        return {}


def _key(
    engine: Engine, trees: Mapping[int, TokenTree], place: Place, *, sampled: bool
) -> dict[str, str | int]:
    """Everything a step's time depends on that can change between two runs."""
    target, device = engine.target, engine.target.device
    cuda = device.type == "cuda"
    heads = engine.heads
    return {
        "model": target.config.to_json_string(use_diff=False),
        "heads": repr(heads.config) if heads else "",
        "place": f"{place.num_context} tokens, {place.num_sequences} sequences",
        "trees": ",".join(tree.content_hash for tree in trees.values()),
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor(),
        "host": platform.node(),
        "dtype": str(target.dtype),
        "steps": f"graphs={engine.cuda_graphs} compiled={target.is_compiled}",
        "tokens": "sampled" if sampled else "greedy",
        "threads": torch.get_num_threads(),
        "method": METHOD,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "specdeft": specdeft.__version__,
    }
