"""Step times by turns: what is slow for a while changes no ratio; time goes where choices hang."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdeft import engine
from specdeft.attention import KernelChoice
from specdeft.engine import Engine
from specdeft.model import TargetModel
from specdeft.step_cost import (
    BUDGET_S,
    FIRST_ROUNDS,
    LEAST_ROUNDS,
    MOST_IN_A_ROW,
    MOST_ROUNDS,
    STEPS_IN_A_ROW,
    Place,
    StepStand,
    cached_step_ms,
    contenders,
    isotonic,
    known_step_ms,
    measure_step_ms,
    steps_in_a_row,
    undisturbed_ms,
)
from specdeft.trees.token_tree import TokenTree
from specdeft.walk import choose_along
from tests.core.tiny import tiny_model

SIZES = (1, 2, 4, 8, 16)
TREES = {size: TokenTree.chain(0).with_lookup(size - 1) for size in SIZES[1:]}
TREES[1] = TokenTree.chain(0)


@pytest.mark.parametrize(("plain_ms", "tree_ms"), [(0.76, 1.36), (0.76, 1.1), (2.0, 3.4), (5, 7)])
def test_starting_and_waiting_distort_no_ratio_of_replayed_steps(
    plain_ms: float, tree_ms: float
) -> None:
    """On an H200 they take a millisecond: with 8 steps in a row a plain step of 0.76 ms was
    taken for one of 0.9."""
    now_ms = 0.0

    def stand(step_ms: float) -> StepStand:
        def run(_tree: Any) -> None:
            nonlocal now_ms
            # Steps commit tokens: there is room for some only.
            assert lengths.max() < 10 + STEPS_IN_A_ROW
            lengths.add_(1)
            now_ms += step_ms

        lengths = torch.zeros(1, dtype=torch.int32)
        batch: Any = SimpleNamespace(lengths=lengths, counts=torch.zeros(1))
        cache: Any = None
        return StepStand(cache, batch, 10, run, STEPS_IN_A_ROW)

    def clock() -> float:
        nonlocal now_ms
        now_ms += 0.5  # read twice
        return now_ms / 1e3

    tree: Any = None
    num_steps = steps_in_a_row(stand(plain_ms).time_ms(tree, clock, STEPS_IN_A_ROW))
    assert STEPS_IN_A_ROW <= num_steps <= MOST_IN_A_ROW
    found = stand(tree_ms).time_ms(tree, clock, num_steps) / stand(plain_ms).time_ms(
        tree, clock, num_steps
    )
    assert found == pytest.approx(tree_ms / plain_ms, rel=0.01)


class Clocked:
    """An engine whose forwards take what a function of rows and of the time so far says."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, float], float]
    ) -> None:
        model = tiny_model()
        self.now, self.rows = 0.0, Counter[int]()
        forward_of = type(model).forward

        def charged(this: Any, *args: Any, **kwargs: Any) -> Any:
            num_rows = kwargs["input_ids"].shape[1]
            self.rows[num_rows] += 1
            self.now += seconds(num_rows, self.now)
            return forward_of(this, *args, **kwargs)

        monkeypatch.setattr(type(model), "forward", charged)
        self.engine = Engine(TargetModel(model), None, KernelChoice.CPU)

    def measure(self, **settings: Any) -> dict[int, float]:
        place = Place(64)
        return measure_step_ms(self.engine, TREES, lambda: self.now, place, **settings)


def test_a_machine_that_slows_down_changes_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as slow from the fourth round on, and every eighth forward stalls."""
    true_ms = {1: 10.0, 2: 11.0, 4: 12.0, 8: 16.0, 16: 30.0}
    calls = [0]

    def seconds(num_rows: int, now: float) -> float:
        calls[0] += 1
        stall = 0.05 if calls[0] % 8 == 0 else 0.0
        return true_ms.get(num_rows, 1.0) * (1e-3 if now < 0.4 else 3e-3) + stall

    measured = Clocked(monkeypatch, seconds).measure()
    for size in SIZES:
        assert measured[size] / measured[1] == pytest.approx(true_ms[size] / 10.0, rel=0.03)


def test_sizes_that_cannot_win_are_timed_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch, lambda num_rows, _now: 0.01 + 0.001 * num_rows)
    taus = {1: 1.0, 2: 1.5, 4: 2.2, 8: 2.8, 16: 2.9}  # by time 91, 125, 157, 156, 112
    measured = clocked.measure(expected=[taus])
    assert clocked.rows[4] == clocked.rows[8] == clocked.rows[1] == 1 + MOST_ROUNDS
    assert clocked.rows[2] == clocked.rows[16] == 1 + FIRST_ROUNDS
    assert measured == pytest.approx({size: 10.0 + size for size in SIZES})


def test_the_time_is_bounded_and_a_slow_step_is_still_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocked = Clocked(monkeypatch, lambda num_rows, _now: 0.01 * num_rows)
    clocked.measure()
    assert BUDGET_S <= clocked.now < BUDGET_S + 3 * 0.01 * sum(SIZES) + 0.01 * 64
    slow = Clocked(monkeypatch, lambda num_rows, _now: 1.0 * num_rows)
    slow.measure()
    assert all(slow.rows[size] == 1 + LEAST_ROUNDS for size in SIZES)


def test_contenders() -> None:
    step_ms = {1: 10.0, 8: 15.0, 16: 20.0, 64: 90.0}
    long, short = {1: 1.0, 8: 2.4, 16: 3.3, 64: 4.5}, {1: 1.0, 8: 1.6, 16: 1.7, 64: 1.8}
    assert contenders(step_ms, [long]) == [1, 8, 16]
    assert contenders(step_ms, [short]) == [1, 8]
    assert contenders(step_ms, [short, long]) == [1, 8, 16]
    assert contenders(step_ms, [dict.fromkeys(step_ms, 1.0)]) == [1]
    assert contenders(step_ms, []) == [1, 8, 16, 64]


def test_sampled_steps_are_timed_and_kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path))
    clocked = Clocked(monkeypatch, lambda num_rows, _now: 0.01 + 0.001 * num_rows)
    choose = choose_along

    def dear(*inputs: Any) -> torch.Tensor:
        clocked.now += 0.002 * inputs[3].num_levels
        return choose(*inputs)

    monkeypatch.setattr(engine, "choose_along", dear)
    place = Place(64)
    for sampled, per_level in ((False, 0.0), (True, 2.0)):
        assert not known_step_ms(clocked.engine, TREES, place, sampled=sampled)
        found = cached_step_ms(clocked.engine, TREES, lambda: clocked.now, place, sampled=sampled)
        assert found == pytest.approx({size: 10.0 + (1 + per_level) * size for size in SIZES})
        assert known_step_ms(clocked.engine, TREES, place, sampled=sampled) == found
    assert len(list((tmp_path / "step_cost").iterdir())) == 2


@pytest.mark.parametrize("seed", range(10))
def test_a_busy_machine_changes_no_ratio_much(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every second forward waits for others, longer than it takes."""
    true_ms, draw = {1: 10.0, 2: 11.0, 4: 12.0, 8: 16.0, 16: 30.0}, random.Random(seed)

    def seconds(num_rows: int, _now: float) -> float:
        wait = draw.uniform(0.005, 0.04) if draw.random() < 0.5 else draw.uniform(0, 2e-4)
        return true_ms.get(num_rows, 1.0) * 1e-3 + wait

    measured = Clocked(monkeypatch, seconds).measure()
    for size in SIZES:
        assert measured[size] / measured[1] == pytest.approx(true_ms[size] / 10.0, rel=0.03)


def test_sizes_are_compared_over_the_rounds_that_they_share() -> None:
    rounds = [{1: 10.0, 4: 15.0}, {1: 10.0, 4: 90.0}, {1: 25.0, 4: 16.0}]
    assert undisturbed_ms(rounds) == pytest.approx({1: 10.0, 4: 15.0})
    slower = [{1: 30.0}] * 20
    assert undisturbed_ms([*rounds, *slower]) == pytest.approx({1: 30.0, 4: 45.0})


@pytest.mark.parametrize("seed", range(20))
def test_isotonic_is_the_nearest_rising_sequence(seed: int) -> None:
    torch.manual_seed(seed)
    values, weights = torch.randn(6).tolist(), (0.5 + torch.rand(6)).tolist()
    best = isotonic(values, weights)
    assert best == sorted(best)

    def distance(other: list[float]) -> float:
        terms = zip(weights, values, other, strict=True)
        return sum((w * (a - b) ** 2 for w, a, b in terms), start=0.0)

    for _ in range(200):
        other = sorted((torch.tensor(best) + 0.2 * torch.randn(6)).tolist())
        assert distance(best) <= distance(other) + 1e-6
    assert isotonic([1.0, 5.0, 2.0], [1, 1, 9]) == pytest.approx([1.0, 2.3, 2.3])
