"""Batches: how speed grows with the sequences that are decoded together.

Prompts are taken in their order in groups of each size; every row decodes every group, A B .. B A
over the repetitions, and each text must be the one that plain decoding gave alone. Greedy only: in
a list each sequence has noise of its own, which a text decoded alone has not.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdeft.bench.gate import Verdict
from specdeft.bench.latency_measure import Judge
from specdeft.bench.metrics import bootstrap_median
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import PLAIN, Workbench, progress
from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.trees.options import whole_numbers


@dataclass(frozen=True)
class BatchRun:
    """One group decoded once: ids by prompt, steps of the longest, seconds in all."""

    token_ids: tuple[tuple[int, ...], ...]
    num_steps: tuple[int, ...]
    e2e_s: float

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(map(len, self.token_ids))


@dataclass
class BatchResult:
    """One row at one batch size.

    Attributes:
        row, size: which. runs: [group][repetition].
        verdicts: of every text against plain decoding alone.
        problems: why its figures are not to be believed.
    """

    row: str
    size: int
    runs: list[list[BatchRun]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def has_speed(self) -> bool:
        """Whether its speed may be shown."""
        return not self.problems and all(verdict.passed for verdict in self.verdicts)


def parse_batch_sizes(text: str | None, num_prompts: int) -> tuple[int, ...]:
    """Sizes from a list with commas; none where the option was not given.

    Raises:
        ValueError: one is no number from 1, is named twice, or has too few prompts.
    """
    if text is None:
        return ()
    sizes = whole_numbers(text, "batch sizes", "1,4,8")
    if max(sizes) > num_prompts:
        raise ValueError(
            f"a batch of {max(sizes)} was asked for and there are {num_prompts} prompts: give "
            "--num-prompts of at least the largest batch"
        )
    return sizes


def measure_batches(
    trees: Sequence[str],
    sizes: Sequence[int],
    bench: Workbench,
    config: GenerationConfig,
    encoded: Mapping[str, list[int]],
    solo: Mapping[str, tuple[int, ...]],
    folder: RunFolder,
    repetitions: int,
    judge_text: Judge,
) -> list[BatchResult]:
    """Plain decoding and every tree at every size; what the folder holds is not run again.

    Args:
        encoded: the prompts' ids by prompt id.
        solo: the ids that plain decoding gave to each prompt alone.
        judge_text: compares ids with those, for one prompt.
    """
    prompt_ids = list(encoded)
    results: list[BatchResult] = []
    total = sum(len(prompt_ids) // size for size in sizes) * (1 + len(trees)) * repetitions
    with progress(total, "batches", "batch") as done:
        for size in sizes:
            groups = [
                prompt_ids[start : start + size]
                for start in range(0, len(prompt_ids) - size + 1, size)
            ]
            rows = {
                tree: BatchResult(tree, size)
                for tree in (PLAIN, *(tree for tree in trees if tree != PLAIN))
            }
            decoders = _Decoders(bench, size, config)
            for group in groups:
                prompts = [encoded[prompt] for prompt in group]
                for result in rows.values():
                    result.runs.append([])
                for repetition in range(repetitions):
                    turn = list(rows.values())
                    for result in turn if repetition % 2 == 0 else reversed(turn):
                        key = f"batch|{result.row}|{size}|{group[0]}|{repetition}"
                        record = folder.get(key)
                        if record is None:
                            record = asdict(decoders.run(result.row, prompts))
                            folder.put(key, record)
                        result.runs[-1].append(_from_record(record))
                        done()
                for result in rows.values():
                    judge_group(result, group, encoded, solo, folder, judge_text)
            results += rows.values()
    return results


class _Decoders:
    """A decoder a row for one batch size, made and warmed up when it is first needed."""

    def __init__(self, bench: Workbench, size: int, config: GenerationConfig) -> None:
        self._bench, self._size, self._config = bench, size, config
        self._decoders: dict[str, SpecDecoder] = {}

    def run(self, row: str, prompts: list[list[int]]) -> BatchRun:
        """Decode one group."""
        clock = self._bench.clock
        if row not in self._decoders:
            self._decoders[row] = self._bench.decoder(row, max_batch_size=self._size)
            self._decoders[row].generate(prompts, config=self._config)
        began = clock()
        results = self._decoders[row].generate(prompts, config=self._config)
        e2e_s = clock() - began
        return BatchRun(
            tuple(result.token_ids for result in results),
            tuple(result.stats.num_steps for result in results),
            e2e_s,
        )


def _from_record(record: Mapping[str, Any]) -> BatchRun:
    return BatchRun(
        tuple(tuple(ids) for ids in record["token_ids"]),
        tuple(record["num_steps"]),
        record["e2e_s"],
    )


def judge_group(
    result: BatchResult,
    group: Sequence[str],
    encoded: Mapping[str, list[int]],
    solo: Mapping[str, tuple[int, ...]],
    folder: RunFolder,
    judge_text: Judge,
) -> None:
    """Compare a group's texts with plain decoding's, and its repetitions with each other."""
    runs = result.runs[-1]
    if any(run.token_ids != runs[0].token_ids for run in runs):
        result.problems.append(f"the batch of prompt {group[0]}: its repetitions differ")
    for place, prompt in enumerate(group):
        key = f"verdict|batch|{result.row}|{result.size}|{prompt}"
        record = folder.get(key)
        if record is None:
            ids = runs[0].token_ids[place]
            record = asdict(judge_text(encoded[prompt], ids, solo[prompt]))
            folder.put(key, record)
        result.verdicts.append(Verdict(**record))


# ---- figures


def batch_figures(results: Sequence[BatchResult], seed: int) -> list[dict[str, Any]]:
    """Of every row and size: tokens a second in all and for each sequence, ratios, tau."""
    plain = {result.size: result for result in results if result.row == PLAIN}
    speed_alone = {result.row: throughput(result) for result in results if result.size == 1}
    return [
        _figures(result, plain[result.size], speed_alone.get(result.row), seed)
        for result in results
    ]


def _figures(
    result: BatchResult, plain: BatchResult, alone: float | None, seed: int
) -> dict[str, Any]:
    known: dict[str, Any] = {
        "row": result.row,
        "batch_size": result.size,
        "num_batches": len(result.runs),
        "identical_prompts": sum(verdict.identical for verdict in result.verdicts),
        "num_prompts": len(result.verdicts),
        "has_speed": result.has_speed,
        "problems": result.problems,
        "mean_acceptance_length": _tau(result),
    }
    if result.has_speed:
        speed = throughput(result)
        known["output_throughput"] = speed
        known["output_throughput_per_sequence"] = speed / result.size
        known["over_batch_1"] = speed / alone if alone else None
        ratios = [
            median_time_per_token(slow) / median_time_per_token(fast)
            for slow, fast in zip(plain.runs, result.runs, strict=True)
        ]
        low, high = bootstrap_median(ratios, seed)
        known["speedup_end_to_end_over_plain"] = {
            "median": statistics.median(ratios),
            "low": low,
            "high": high,
        }
    return known


def throughput(result: BatchResult) -> float:
    """Tokens a second: all tokens over the sum of the groups' median times, prompts included."""
    tokens = sum(runs[0].num_tokens for runs in result.runs)
    return tokens / sum(statistics.median(run.e2e_s for run in runs) for runs in result.runs)


def median_time_per_token(runs: Sequence[BatchRun]) -> float:
    """Seconds, over the repetitions of one group."""
    return statistics.median(run.e2e_s / run.num_tokens for run in runs)


def _tau(result: BatchResult) -> float | None:
    """Tokens a step of a sequence, the bonus included; the first token comes from the prompt."""
    first = [runs[0] for runs in result.runs]
    steps = sum(sum(run.num_steps) for run in first)
    tokens = sum(run.num_tokens - len(run.token_ids) for run in first)
    return tokens / steps if steps else None
