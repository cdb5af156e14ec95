"""The account that stops drafting where it does not pay, on simulated and adversarial texts."""

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.pacing import LOSS_SHARE, MOST_CREDIT, MOST_PLANNED_TOKENS, Pace

# How many tokens a drafted step emits, by the tokens emitted before it.
Text = Callable[[int], int]


def simulate(num_tokens: int, extra: float, text: Text, lead: int = 0) -> float:
    """Time of a text in plain steps per token, when the host learns what a step brought while
    ``lead`` further ones run."""
    pace = Pace(num_tokens, extra)
    in_flight: deque[tuple[int, float]] = deque()
    reached, spent = 0, 0.0
    while reached < num_tokens:
        unknown = sum(cost for _, cost in in_flight)
        drafts = pace.can_pay(extra + unknown)
        emitted = min(text(reached), num_tokens - reached) if drafts else 1
        cost = extra if drafts else 0.0
        reached += emitted
        spent += 1.0 + cost
        in_flight.append((emitted, cost))
        if len(in_flight) > lead:
            pace.observe(*in_flight.popleft())
    return spent / num_tokens


def nothing(_reached: int) -> int:
    return 1


def guessed(accept: float, depth: int, seed: int) -> Text:
    """Each guess comes true with a fixed chance."""
    rng = random.Random(seed)

    def text(_reached: int) -> int:
        emitted = 1
        while emitted <= depth and rng.random() < accept:
            emitted += 1
        return emitted

    return text


LEADS = pytest.mark.parametrize("lead", [0, 1])


@LEADS
@pytest.mark.parametrize("extra", [0.0, 0.05, 0.3, 0.6])
@pytest.mark.parametrize("num_tokens", [64, 96, 128, 192, 256, 1000, 5000])
def test_a_text_that_nothing_predicts_costs_clearly_less_than_two_percent(
    extra: float, num_tokens: int, lead: int
) -> None:
    assert simulate(num_tokens, extra, nothing, lead) <= 1.013 + 1e-9


@LEADS
@pytest.mark.parametrize("num_tokens", [1, 8, 30])
def test_one_step_is_tried_in_the_shortest_text(num_tokens: int, lead: int) -> None:
    lost = simulate(num_tokens, 0.5, nothing, lead) * num_tokens - num_tokens
    assert lost == pytest.approx(0.5)


@LEADS
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_text_costs_more_than_the_overdraft(data: st.DataObject, lead: int) -> None:
    """Also one that pays first and then never again, or by turns, or just enough to be tried on."""
    num_tokens = data.draw(st.integers(1, 400), label="tokens")
    extra = data.draw(st.floats(0.0, 3.0), label="extra")
    script = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=40), label="emissions")
    turns = data.draw(st.booleans(), label="by turns")
    steps = iter(script * 400 if turns else script)
    taken = simulate(num_tokens, extra, lambda _reached: next(steps, 1), lead)
    lost = taken * num_tokens - num_tokens
    assert lost <= max(LOSS_SHARE * num_tokens, extra) + 1e-9


@LEADS
@pytest.mark.parametrize("num_tokens", [64, 192, 1000])
def test_gains_are_given_back_in_part_only(num_tokens: int, lead: int) -> None:
    """The second half of a text that was predictable and is no more."""

    def text(reached: int) -> int:
        return 4 if reached < num_tokens // 2 else 1

    half = num_tokens // 2
    first = half / 4 * 1.5
    second = simulate(num_tokens, 0.5, text, lead) * num_tokens - first
    assert second <= num_tokens - half + MOST_CREDIT + LOSS_SHARE * num_tokens + 1.5


@pytest.mark.parametrize("extra", [0.05, 0.3, 0.6])
def test_a_predictable_text_is_drafted_to_its_end(extra: float) -> None:
    tau = sum(0.65**depth for depth in range(5))
    for seed in range(20):
        taken = simulate(256, extra, guessed(0.65, 4, seed))
        assert taken <= 1.12 * (1 + extra) / tau


def test_a_text_that_turns_unpredictable_is_noticed_and_tried_again() -> None:
    pace, extra = Pace(2000), 0.5
    for _ in range(200):
        pace.observe(3.0, extra)
    steps = 0
    while pace.can_pay(extra):
        pace.observe(1.0, extra)
        steps += 1
    assert steps < 80
    plain = 0
    while not pace.can_pay(extra):
        pace.observe(1.0, 0.0)
        plain += 1
    assert plain < 60


def test_a_long_request_may_end_early() -> None:
    assert Pace(10**6).overdraft == LOSS_SHARE * MOST_PLANNED_TOKENS


def test_a_tree_that_costs_nothing_more_is_always_used() -> None:
    pace = Pace(planned_tokens=10)
    for _ in range(100):
        assert pace.can_pay(0.0)
        pace.observe(1.0, 0.0)
