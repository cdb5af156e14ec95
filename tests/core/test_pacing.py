"""The account that stops drafting where it does not pay, on simulated texts."""

import random

import pytest

from specdeft.pacing import Pace


def simulate(pace: Pace, num_tokens: int, accept: float, depth: int, seed: int = 0) -> float:
    """Time of a text in plain steps per token: each guess comes true with a fixed chance."""
    rng = random.Random(seed)
    emitted, spent = 0, 0.0
    while emitted < num_tokens:
        drafting = pace.drafting
        step = 1
        while drafting and step <= depth and rng.random() < accept:
            step += 1
        spent += pace.cost if drafting else 1.0
        emitted += step
        pace.observe(step, drafting)
    return spent / emitted


@pytest.mark.parametrize("cost", [1.0, 1.05, 1.3, 1.8, 3.0])
@pytest.mark.parametrize("num_tokens", [128, 256, 1000, 5000])
def test_a_text_that_nothing_predicts_costs_two_percent_at_most(
    cost: float, num_tokens: int
) -> None:
    # One step can be under way when the account runs out.
    limit = 1.02 + (cost - 1) / num_tokens
    assert simulate(Pace(cost, num_tokens), num_tokens, 0.0, 4) <= limit


@pytest.mark.parametrize("cost", [1.05, 1.3, 1.6])
def test_a_predictable_text_is_drafted_to_its_end(cost: float) -> None:
    for seed in range(20):
        taken = simulate(Pace(cost, 256), 256, 0.65, 4, seed)
        tau = sum(0.65**depth for depth in range(5))
        assert taken <= 1.12 * cost / tau


def test_a_text_that_turns_unpredictable_is_noticed_and_tried_again() -> None:
    pace = Pace(1.5, 2000)
    for _ in range(200):
        pace.observe(3.0, True)
    steps = 0
    while pace.drafting:
        pace.observe(1.0, True)
        steps += 1
    assert steps < 80
    plain = 0
    while not pace.drafting:
        pace.observe(1.0, False)
        plain += 1
    assert plain < 400
