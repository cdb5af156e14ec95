"""Every metric of the benchmark, each defined once. Pure functions of what was recorded.

Names are those of vLLM's per-request schema where it has them. A step is one forward of the target
after the prompt. The first token of a text comes from the prompt's forward, so a text of n tokens
holds n - 1 tokens of steps. Tokens are counted by their ids, up to the end of the text.
"""

import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NGRAM = 4
# From this repeat rate on a text counts as looping: three tokens in ten only continue 4-grams that
# the text holds already. Prose repeats under 5 %, lists and tables up to 20 %.
LOOPING_REPEAT_RATE = 0.3
NUM_RESAMPLES = 2000
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Run:
    """One generation as it was observed.

    Attributes:
        token_ids: the new ids; an end-of-text id that ended the text is the last.
        finish_reason: "eos", "stop" or "length".
        num_nodes: nodes of the token tree, the root included; 1 is plain decoding.
        max_depth: deepest level of the tree: the most drafted tokens one step can accept.
        per_step_accepted: drafted tokens kept in each step, the bonus token excluded.
        emission_s: seconds from the call to each piece that brought tokens, the first included.
        e2e_s: seconds from the call to the end.
        per_step_ranks: the ranks of the accepted nodes in each step; empty if not observed.
        max_memory_allocated: most bytes that torch held on the GPU meanwhile; None on a CPU.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    num_nodes: int
    max_depth: int
    per_step_accepted: tuple[int, ...]
    emission_s: tuple[float, ...]
    e2e_s: float
    per_step_ranks: tuple[tuple[int, ...], ...] = ()
    max_memory_allocated: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """For a file; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Run":
        """Inverse of `to_dict`, from JSON's lists."""
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        ranks = tuple(tuple(step) for step in fields["per_step_ranks"])
        return cls(**{**fields, **lists, "per_step_ranks": ranks})

    def check(self, max_new_tokens: int | None, eos_ids: frozenset[int]) -> str | None:
        """What is wrong with the counts, or None: a run that cheats is not measured."""
        tokens = len(self.token_ids)
        if max_new_tokens is not None and tokens > max_new_tokens:
            return f"{tokens} tokens were counted where {max_new_tokens} were allowed"
        past = next((i for i, t in enumerate(self.token_ids[:-1]) if t in eos_ids), None)
        if past is not None:
            return f"{tokens - 1 - past} tokens were counted past the end of the text"
        explained = 1 + sum(1 + accepted for accepted in self.per_step_accepted)
        if self.per_step_accepted and explained != tokens:
            return f"the steps explain {explained} tokens and {tokens} were counted"
        if any(accepted > self.max_depth for accepted in self.per_step_accepted):
            return f"a step kept more drafted tokens than its tree is deep ({self.max_depth})"
        return None


# ---- acceptance


def acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """The acceptance metrics of several runs with one tree, by the names users look for."""
    steps = [accepted for run in runs for accepted in run.per_step_accepted]
    num_drafted = sum(len(run.per_step_accepted) * (run.num_nodes - 1) for run in runs)
    max_depth = max((run.max_depth for run in runs), default=0)
    per_request = [tau for run in runs if (tau := mean_acceptance_length([run])) is not None]
    return {
        "num_requests": len(runs),
        "num_output_tokens": sum(len(run.token_ids) for run in runs),
        "num_spec_steps": len(steps),
        "num_spec_tokens": max_depth,
        "num_draft_tokens": num_drafted,
        "num_accepted_draft_tokens": sum(steps),
        "mean_acceptance_length": mean_acceptance_length(runs),
        "mean_acceptance_length_per_request": statistics.fmean(per_request)
        if per_request
        else None,
        "accepted_len_excl_bonus": statistics.fmean(steps) if steps else None,
        "draft_acceptance_rate": sum(steps) / num_drafted if num_drafted else None,
        "acceptance_histogram": histogram(steps, max_depth),
        "per_position_acceptance_rate": survival(steps, max_depth),
        "conditional_acceptance_rate": conditional(steps, max_depth),
        "repeat_rate": repeat_rate_pooled(runs),
        "num_looping": sum(is_looping(run) for run in runs),
    }


def mean_acceptance_length(runs: Sequence[Run]) -> float | None:
    """tau: tokens a step, the bonus included, every step weighing the same; None without steps."""
    num_steps = sum(len(run.per_step_accepted) for run in runs)
    num_tokens = sum(1 + accepted for run in runs for accepted in run.per_step_accepted)
    return num_tokens / num_steps if num_steps else None


def histogram(steps: Sequence[int], max_depth: int) -> list[int]:
    """Entry a counts the steps that kept a drafted tokens; max_depth + 1 entries."""
    counts = Counter(steps)
    return [counts[accepted] for accepted in range(max_depth + 1)]


def survival(steps: Sequence[int], max_depth: int) -> list[float]:
    """Share of the steps that kept a token at depth d, for d = 1..max_depth."""
    return [_share(steps, depth, len(steps)) for depth in range(1, max_depth + 1)]


def conditional(steps: Sequence[int], max_depth: int) -> list[float | None]:
    """Share of the steps that kept depth d among those that kept depth d - 1; None without any."""
    rates: list[float | None] = []
    for depth in range(1, max_depth + 1):
        opportunities = sum(accepted >= depth - 1 for accepted in steps)
        rates.append(_share(steps, depth, opportunities) if opportunities else None)
    return rates


def rank_table(runs: Sequence[Run]) -> list[list[float]]:
    """[depth - 1][rank]: share of the steps that kept the node of this rank at this depth.

    A rank below 0 is not known and in no column."""
    num_steps = sum(len(run.per_step_accepted) for run in runs)
    counts: Counter[tuple[int, int]] = Counter(
        (depth, rank)
        for run in runs
        for ranks in run.per_step_ranks
        for depth, rank in enumerate(ranks)
        if rank >= 0
    )
    depths = 1 + max((depth for depth, _ in counts), default=-1)
    widths = 1 + max((rank for _, rank in counts), default=-1)
    return [[counts[d, r] / num_steps for r in range(widths)] for d in range(depths)]


def repeat_rate(token_ids: Sequence[int]) -> float | None:
    """Share of a text's 4-grams that occurred in it before; None when it is shorter than one."""
    repeated, total = _count_repeats(token_ids)
    return repeated / total if total else None


def repeat_rate_pooled(runs: Sequence[Run]) -> float | None:
    """`repeat_rate` over all 4-grams of several texts, each looked up in its own text."""
    counted = [_count_repeats(run.token_ids) for run in runs]
    total = sum(count for _, count in counted)
    return sum(repeated for repeated, _ in counted) / total if total else None


def is_looping(run: Run) -> bool:
    """Whether the text repeats itself so much that it flatters speculation."""
    rate = repeat_rate(run.token_ids)
    return rate is not None and rate >= LOOPING_REPEAT_RATE


def _share(steps: Sequence[int], depth: int, of: int) -> float:
    return sum(accepted >= depth for accepted in steps) / of if of else 0.0


def _count_repeats(token_ids: Sequence[int]) -> tuple[int, int]:
    seen: set[tuple[int, ...]] = set()
    total = max(len(token_ids) - NGRAM + 1, 0)
    for start in range(total):
        seen.add(tuple(token_ids[start : start + NGRAM]))
    return total - len(seen), total


# ---- time


def is_streamed(run: Run) -> bool:
    """Whether it is known when the first token came; not so where all came in one piece."""
    return len(run.emission_s) > 1 or len(run.token_ids) <= 1


def ttft_ms(run: Run) -> float | None:
    """Time to the first token; None where the text came in one piece."""
    return run.emission_s[0] * 1e3 if is_streamed(run) else None


def e2el_ms(run: Run) -> float:
    """End to end."""
    return run.e2e_s * 1e3


def tpot_ms(run: Run) -> float | None:
    """Time per output token after the first: (e2e - ttft) / (n - 1); None for one token, or where
    the text came in one piece."""
    first, later = ttft_ms(run), len(run.token_ids) - 1
    return (e2el_ms(run) - first) / later if first is not None and later > 0 else None


def emission_gaps_ms(run: Run) -> list[float]:
    """What a streaming reader waits between two emissions, however many tokens each brings."""
    return [
        (later - earlier) * 1e3
        for earlier, later in zip(run.emission_s, run.emission_s[1:], strict=False)
    ]


def output_throughput(runs: Sequence[Run]) -> float:
    """Tokens per second end to end, pooled: all tokens over all time."""
    return sum(len(run.token_ids) for run in runs) / sum(run.e2e_s for run in runs)


def decode_throughput(runs: Sequence[Run]) -> float | None:
    """Tokens per second after the first token, pooled; None where no run has more than one."""
    streamed = [run for run in runs if is_streamed(run)]
    tokens = sum(len(run.token_ids) - 1 for run in streamed)
    seconds = sum(run.e2e_s - run.emission_s[0] for run in streamed)
    return tokens / seconds if tokens and seconds > 0 else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest order statistics."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def known_values(figure: Callable[[Run], float | None], runs: Sequence[Run]) -> list[float]:
    """A figure of every run that has it."""
    return [value for run in runs if (value := figure(run)) is not None]


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """mean, median, std (of the sample), p50, p90, p95, p99; None without values."""
    if not values:
        return None
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        **{f"p{percent}": percentile(values, percent) for percent in PERCENTILES},
    }


def latency(runs: Sequence[Run]) -> dict[str, Any]:
    """The time metrics of several runs, by the names users look for."""
    return {
        "ttft_ms": summary(known_values(ttft_ms, runs)),
        "tpot_ms": summary(known_values(tpot_ms, runs)),
        "itl_ms": summary([gap for run in runs for gap in emission_gaps_ms(run)]),
        "e2el_ms": summary([e2el_ms(run) for run in runs]),
        "output_throughput": output_throughput(runs),
        "decode_throughput": decode_throughput(runs),
    }


def request_figures(runs: Sequence[Run], *, is_timed: bool = True) -> dict[str, Any]:
    """One request by vLLM's names for it: what its drafts did, and the medians of its times.

    Args:
        runs: its repetitions; their texts are one text.
        is_timed: times may be shown.
    """
    first = runs[0]
    figures: dict[str, Any] = {
        "num_output_tokens": len(first.token_ids),
        "finish_reason": first.finish_reason,
        "num_spec_steps": len(first.per_step_accepted),
        "num_spec_tokens": first.max_depth,
        "num_draft_tokens": len(first.per_step_accepted) * (first.num_nodes - 1),
        "num_accepted_draft_tokens": sum(first.per_step_accepted),
        "per_step_accepted": list(first.per_step_accepted),
    }
    if is_timed:
        for name, figure in (("ttft_ms", ttft_ms), ("tpot_ms", tpot_ms), ("e2el_ms", e2el_ms)):
            values = known_values(figure, runs)
            figures[name] = statistics.median(values) if values else None
    return figures


# ---- ratios


@dataclass(frozen=True)
class Speedup:
    """How much faster one row is than another over the same prompts.

    Attributes:
        median: of the per-prompt ratios.
        low, high: ends of the 95 % bootstrap interval of that median, prompts resampled.
        pooled: all time of the one over all time of the other, per token.
        per_prompt: the ratios.
    """

    median: float
    low: float
    high: float
    pooled: float
    per_prompt: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


def speedup(
    baseline: Sequence[Sequence[Run]], row: Sequence[Sequence[Run]], seed: int = 0
) -> Speedup | None:
    """The speed-up of decoding (after the first token); [prompt][repetition] on both sides.

    A prompt's ratio is that of the medians over its repetitions of the time per token. Prompts for
    which a side has only one token are left out; None when none is left.
    """
    pairs = [
        (slow, fast)
        for slow_runs, fast_runs in zip(baseline, row, strict=True)
        if (slow := _median_tpot(slow_runs)) and (fast := _median_tpot(fast_runs))
    ]
    if not pairs:
        return None
    ratios = [slow / fast for slow, fast in pairs]
    low, high = bootstrap_median(ratios, seed)
    pooled = _pooled_tpot(baseline) / _pooled_tpot(row)
    return Speedup(statistics.median(ratios), low, high, pooled, tuple(ratios))


def speedup_end_to_end(
    baseline: Sequence[Sequence[Run]], row: Sequence[Sequence[Run]], seed: int = 0
) -> Speedup:
    """As `speedup`, of the time per token with the prompt's forward included."""
    ratios = [
        _median_time_per_token(slow) / _median_time_per_token(fast)
        for slow, fast in zip(baseline, row, strict=True)
    ]
    low, high = bootstrap_median(ratios, seed)
    flat = [[run for runs in side for run in runs] for side in (baseline, row)]
    pooled = output_throughput(flat[1]) / output_throughput(flat[0])
    return Speedup(statistics.median(ratios), low, high, pooled, tuple(ratios))


def bootstrap_median(values: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % percentile interval of the median, values resampled with replacement."""
    generator = random.Random(seed)
    medians = [
        statistics.median(generator.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)
    ]
    return percentile(medians, 2.5), percentile(medians, 97.5)


def _median_tpot(runs: Sequence[Run]) -> float | None:
    times = [tpot for run in runs if (tpot := tpot_ms(run))]
    return statistics.median(times) if times else None


def _pooled_tpot(by_prompt: Sequence[Sequence[Run]]) -> float:
    runs = [run for runs in by_prompt for run in runs if is_streamed(run)]
    return sum(run.e2e_s - run.emission_s[0] for run in runs) / sum(
        len(run.token_ids) - 1 for run in runs
    )


def _median_time_per_token(runs: Sequence[Run]) -> float:
    return statistics.median(run.e2e_s / len(run.token_ids) for run in runs)
