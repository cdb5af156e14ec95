"""The measuring of `bench latency`: warm-up, alternating repetitions, limits, and the checks.

A row is checked in four ways before its speed is believed: its counts agree with its ids, its
repetitions give one text, that text is plain decoding's, and a prompt that it has not seen takes it
no longer than one that it has (or it would be reusing what earlier calls left behind).
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from specdeft.bench.analytic import kv_read_bytes_per_step, kv_read_ratio_vs_per_path
from specdeft.bench.baselines import PlannedRow
from specdeft.bench.gate import Verdict
from specdeft.bench.metrics import Run, known_values, ttft_ms
from specdeft.bench.phases import StepPhases, measure_phases
from specdeft.bench.rows import DecoderRow, Row, recorded
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.time_limit import TimeIsUpError, time_limit
from specdeft.bench.workbench import PLAIN, Workbench, progress
from specdeft.config import GenerationConfig
from specdeft.graphs import context_bucket
from specdeft.user_cache import tell

_WARM_UP_TOKENS = 16
_PHASE_TOKENS = 32
# A prompt of the same length that was never seen may not take this many times as long to its first
# token as a repeated one. The quickest of several unseen against the middle of the seen: who reuses
# is slower in each of them, a busy machine only in some.
_REUSE_RATIO = 2.0
_NUM_UNSEEN = 4
_UNSEEN_TOKENS = 8
Judge = Callable[[Sequence[int], tuple[int, ...], tuple[int, ...]], Verdict]


@dataclass
class RowResult:
    """What was measured of one row.

    Attributes:
        name, is_ours: the row's.
        temperature: what it was run at.
        is_sweep: whether other results of the run differ in temperature only.
        kinds: of the prompts.
        kv: analytic figures of the KV cache; empty where the row is not our engine.
        phases_ms: medians over the steps of one text; empty where they were not measured.
        cold_start_s: its first call in this process, which warms it up; None without warm-up.
        runs: [prompt][repetition].
        verdicts: of each prompt's first repetition, against plain decoding.
        problems: why its figures are not to be believed, a clause each.
        fickle: of a row that is not ours, the prompts whose repetitions give different texts.
    """

    name: str
    is_ours: bool
    temperature: float = 0.0
    is_sweep: bool = False
    kinds: tuple[str, ...] = ()
    kv: dict[str, float] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)
    cold_start_s: float | None = None
    runs: list[list[Run]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fickle: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Its name, with the temperature where that tells it from another row."""
        return f"{self.name}, T = {self.temperature:g}" if self.is_sweep else self.name

    @property
    def all_runs(self) -> list[Run]:
        """Of all prompts and repetitions."""
        return [run for runs in self.runs for run in runs]

    @property
    def num_identical(self) -> int:
        """Prompts whose text is plain decoding's, id by id."""
        return sum(verdict.identical for verdict in self.verdicts)

    @property
    def num_passed(self) -> int:
        """Prompts whose text passes the gate."""
        return sum(verdict.passed for verdict in self.verdicts)

    @property
    def has_speed(self) -> bool:
        """Whether its speed is printed. transformers is the yardstick, not a claim of ours."""
        return not self.problems and (not self.is_ours or self.num_passed == len(self.verdicts))


class Amounts(NamedTuple):
    """How much is measured, and when that ends early.

    Attributes:
        repetitions: of a prompt by each of our rows.
        yardstick_repetitions: of rows that are not ours, where that is fewer.
        warm_up: whether first calls are timed apart.
        yardstick_limit_s: after how many seconds a yardstick's first call is given up.
        deadline: a reading of the clock after which no further prompt is begun; one always is.
    """

    repetitions: int
    yardstick_repetitions: int | None = None
    warm_up: bool = True
    yardstick_limit_s: float | None = None
    deadline: float | None = None

    def of(self, row: Row) -> int:
        """Repetitions of a prompt by a row."""
        fewer = self.yardstick_repetitions or self.repetitions
        return self.repetitions if row.is_ours else min(fewer, self.repetitions)


class Measured(NamedTuple):
    """What `measure` found: the rows that were measured, their results in the same order (of as
    many prompts as the time allowed), and of the others why they were given up, by label."""

    rows: list[Row]
    results: list[RowResult]
    given_up: dict[str, str]


def measure(
    rows: Sequence[Row],
    bench: Workbench,
    config: GenerationConfig,
    encoded: dict[str, list[int]],
    folder: RunFolder,
    amounts: Amounts,
    *,
    judge_text: Judge,
    is_sweep: bool = False,
) -> Measured:
    """Time every row on every prompt; what the folder holds is not run again.

    Args:
        rows: what is timed; one is called "plain".
        encoded: the prompts' ids by prompt id.
        judge_text: compares a row's ids with plain decoding's, for one prompt.
        is_sweep: the run has other temperatures, too.
    """
    pairs = [(row, RowResult(row.name, row.is_ours, config.temperature, is_sweep)) for row in rows]
    total = len(encoded) * sum(amounts.of(row) for row in rows)
    with progress(total, "latency") as done:
        calls = _warm_up_calls(bench, config, list(encoded.values()))
        is_complete = all(_is_complete(pairs, prompt, folder, amounts) for prompt in encoded)
        if amounts.warm_up and not is_complete:
            for row, result in pairs:
                _warm_up(row, result, bench, calls, folder, amounts)
        reasons = {result.label: folder.get(_given_up_key(result)) for _, result in pairs}
        given_up = {label: found["why"] for label, found in reasons.items() if found}
        pairs = [(row, result) for row, result in pairs if result.label not in given_up]
        for _, result in pairs:
            known = folder.get(f"cold|{result.label}")
            result.cold_start_s = known["s"] if known else None
        for number, (prompt_id, ids) in enumerate(encoded.items()):
            is_late = amounts.deadline is not None and bench.clock() > amounts.deadline
            if number and is_late and not _is_complete(pairs, prompt_id, folder, amounts):
                break
            for _, result in pairs:
                result.runs.append([])
            for repetition in range(amounts.repetitions):
                for row, result in pairs if repetition % 2 == 0 else reversed(pairs):
                    if repetition >= amounts.of(row):
                        continue
                    key = _key(result, prompt_id, repetition)
                    measure_one = partial(_measured, row, ids, config)
                    run = recorded(folder, key, result.label, prompt_id, measure_one)
                    result.runs[-1].append(run)
                    done()
            results = [result for _, result in pairs]
            _judge_prompt(results, bench, config, prompt_id, ids, judge_text, folder)
    return Measured([row for row, _ in pairs], [result for _, result in pairs], given_up)


def _is_complete(
    pairs: Sequence[tuple[Row, RowResult]], prompt_id: str, folder: RunFolder, amounts: Amounts
) -> bool:
    """Whether the folder holds all of one prompt."""
    return all(
        folder.get(_key(result, prompt_id, repetition)) is not None
        for row, result in pairs
        if folder.get(_given_up_key(result)) is None
        for repetition in range(amounts.of(row))
    )


def _key(result: RowResult, prompt_id: str, repetition: int) -> str:
    return f"{result.label}|{prompt_id}|{repetition}"


def _given_up_key(result: RowResult) -> str:
    return f"given up|{result.label}"


def _warm_up_calls(
    bench: Workbench, config: GenerationConfig, encoded: Sequence[Sequence[int]]
) -> list[tuple[Sequence[int], GenerationConfig]]:
    """On a GPU every context bucket is visited in full length, the longest first, so that nothing
    is captured or compiled anew later; on a CPU a few tokens are enough."""
    if bench.model.device.type == "cuda":
        longest = {context_bucket(len(ids)): ids for ids in sorted(encoded, key=len)}
        return [(ids, config) for ids in reversed(longest.values())]
    return [(encoded[0], _short(config, _WARM_UP_TOKENS))]


def _warm_up(
    row: Row,
    result: RowResult,
    bench: Workbench,
    calls: Sequence[tuple[Sequence[int], GenerationConfig]],
    folder: RunFolder,
    amounts: Amounts,
) -> None:
    """The first call is timed apart. A yardstick that fails in it, or does not end, is given up,
    aloud, and stays so where the run is resumed: ours are measured all the same."""
    if folder.get(_given_up_key(result)) is not None:
        return
    began = bench.clock()
    if row.is_ours:
        row.run(*calls[0])
    else:
        why = _why_not(row, calls[0], amounts.yardstick_limit_s)
        if why:
            tell(f"{result.label} is given up: {why}")
            folder.put(_given_up_key(result), {"why": why})
            return
    if folder.get(f"cold|{result.label}") is None:  # of a resumed run: its first start
        folder.put(f"cold|{result.label}", {"s": bench.clock() - began})
    for call in calls[1:] or calls:
        row.run(*call)


def _why_not(
    row: Row, call: tuple[Sequence[int], GenerationConfig], limit_s: float | None
) -> str | None:
    """Why a row's first call did not end well; None where it did."""
    try:
        with time_limit(limit_s):
            row.run(*call)
    except TimeIsUpError:
        return f"its first call had not ended after {limit_s:g} s"
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return f"its first call failed, {type(error).__name__}: {first_line}"
    return None


def _measured(row: Row, ids: Sequence[int], config: GenerationConfig) -> Run:
    with _peak_memory() as peak:
        run = row.run(ids, config)
    return replace(run, max_memory_allocated=peak())


@contextmanager
def _peak_memory() -> Iterator[Callable[[], int | None]]:
    """What torch held at most on the GPU inside; None without one."""
    if not torch.cuda.is_initialized():
        yield lambda: None
        return
    torch.cuda.reset_peak_memory_stats()
    yield torch.cuda.max_memory_allocated


def _judge_prompt(
    results: Sequence[RowResult],
    bench: Workbench,
    config: GenerationConfig,
    prompt_id: str,
    ids: Sequence[int],
    judge_text: Judge,
    folder: RunFolder,
) -> None:
    """The gate for one prompt: the counts are right, the text is repeatable and plain's."""
    plain_ids = next(row for row in results if row.name == PLAIN).runs[-1][0].token_ids
    eos_ids = frozenset[int]() if config.ignore_eos else bench.eos_ids()
    for result in results:
        runs = result.runs[-1]
        problem = runs[0].check(config.max_new_tokens, eos_ids) if result.is_ours else None
        if any(run.token_ids != runs[0].token_ids for run in runs):
            if result.is_ours:
                problem = "its repetitions give different texts"
            else:
                result.fickle.append(prompt_id)
        if problem:
            result.problems.append(f"prompt {prompt_id}: {problem}")
        key = f"verdict|{result.label}|{prompt_id}"
        record = folder.get(key)
        if record is None:
            record = asdict(judge_text(ids, runs[0].token_ids, plain_ids))
            folder.put(key, record)
        result.verdicts.append(Verdict(**record))


def kv_figures(
    row: Row, result: RowResult, encoded: Sequence[Sequence[int]], config: GenerationConfig
) -> dict[str, float]:
    """Of a step in the middle of the mean text."""
    if not isinstance(row, DecoderRow):
        return {}
    texts = [
        len(ids) + len(runs[0].token_ids) // 2
        for ids, runs in zip(encoded, result.runs, strict=True)
    ]
    context = round(statistics.fmean(texts))
    target, tree = row.decoder.engine.target, row.decoder.tree_of(config, max(map(len, encoded)))
    return {
        "num_context_tokens": context,
        "kv_read_bytes_per_step": kv_read_bytes_per_step(target.shape, target.dtype, tree, context),
        "kv_read_ratio_vs_per_path": kv_read_ratio_vs_per_path(tree, context),
    }


def phase_figures(
    row: Row,
    result: RowResult,
    ids: Sequence[int],
    config: GenerationConfig,
    folder: RunFolder,
) -> dict[str, float]:
    """Medians over the steps of the first text; empty for rows that are not our trees."""
    if not isinstance(row, DecoderRow) or isinstance(row, PlannedRow):
        return {}
    key = f"phases|{result.label}"
    known = folder.get(key)
    if known is None:
        # The tree of the whole request: "auto" takes another one for a short one.
        tree = row.decoder.tree_of(config, len(ids))
        steps = measure_phases(row.bench, tree, ids, _short(config, _PHASE_TOKENS))
        known = {
            name: statistics.median(getattr(step, name) for step in steps)
            for name in StepPhases._fields
            if steps
        }
        folder.put(key, known)
    return known


def check_reuse(
    row: Row,
    result: RowResult,
    ids: Sequence[int],
    config: GenerationConfig,
    folder: RunFolder,
) -> None:
    """Whether the first prompt's time to the first token was earned anew in every repetition."""
    key = f"unseen|{result.label}"
    known = folder.get(key)
    if known is None:
        known = {"seen": [], "unseen": []}
        for turn in range(1, 1 + _NUM_UNSEEN):
            # One after the other, so that a slow moment of the machine falls on both.
            first = ids[0] - turn if ids[0] >= turn else ids[0] + turn
            pair = {"seen": list(ids), "unseen": [first, *ids[1:]]}
            for which, prompt in pair.items():
                run = row.run(prompt, _short(config, _UNSEEN_TOKENS))
                known[which] += known_values(ttft_ms, [run])
        folder.put(key, known)
    if not known["seen"] or not known["unseen"]:
        return
    unseen, seen = min(known["unseen"]), statistics.median(known["seen"])
    if unseen > _REUSE_RATIO * seen:
        result.problems.append(
            f"a prompt not seen before takes {unseen:.3g} ms to its first token and one seen "
            f"before {seen:.3g}: earlier calls are reused"
        )


def _short(config: GenerationConfig, num_tokens: int) -> GenerationConfig:
    return replace(config, max_new_tokens=min(config.max_new_tokens or num_tokens, num_tokens))
