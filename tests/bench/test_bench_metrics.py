"""Every metric against a value worked out by hand on scripted runs."""

import pytest

from specdeft.bench import metrics
from specdeft.bench.metrics import Run


def run(per_step, *, emission_s=None, e2e_s=0.0, ranks=(), nodes=5, depth=3, ids=None) -> Run:
    tokens = 1 + sum(1 + accepted for accepted in per_step)
    times = emission_s or tuple(0.1 * (1 + i) for i in range(1 + len(per_step)))
    return Run(
        token_ids=tuple(range(tokens)) if ids is None else tuple(ids),
        finish_reason="length",
        num_nodes=nodes,
        max_depth=depth,
        per_step_accepted=tuple(per_step),
        emission_s=tuple(times),
        e2e_s=e2e_s or times[-1],
        per_step_ranks=tuple(ranks),
    )


# 6 tokens in 2 steps after the first, and 4 in 3: 5 steps, 3 + 1 accepted of 5 x 4 drafted.
LONG, SHORT = run([3, 0]), run([0, 1, 0])


def test_acceptance_by_hand() -> None:
    found = metrics.acceptance([LONG, SHORT])
    assert found["num_spec_steps"] == 5
    assert found["num_spec_tokens"] == 3
    assert found["num_draft_tokens"] == 20
    assert found["num_accepted_draft_tokens"] == 4
    assert found["num_output_tokens"] == 11
    assert found["mean_acceptance_length"] == pytest.approx(9 / 5)
    assert found["mean_acceptance_length_per_request"] == pytest.approx((5 / 2 + 4 / 3) / 2)
    assert found["accepted_len_excl_bonus"] == pytest.approx(4 / 5)
    assert found["draft_acceptance_rate"] == pytest.approx(0.2)
    assert found["acceptance_histogram"] == [3, 1, 0, 1]
    assert found["per_position_acceptance_rate"] == pytest.approx([2 / 5, 1 / 5, 1 / 5])
    assert found["conditional_acceptance_rate"] == pytest.approx([2 / 5, 1 / 2, 1.0])


def test_conditional_is_unknown_where_nothing_got_that_far() -> None:
    assert metrics.conditional([0, 0, 1], 3) == [pytest.approx(1 / 3), 0.0, None]
    assert metrics.conditional([0, 0], 2) == [0.0, None]


def test_plain_decoding_has_tau_one_and_no_rates() -> None:
    found = metrics.acceptance([run([0, 0, 0], nodes=1, depth=0)])
    assert found["mean_acceptance_length"] == 1.0
    assert found["draft_acceptance_rate"] is None
    assert found["per_position_acceptance_rate"] == []
    assert found["acceptance_histogram"] == [3]


def test_a_text_of_one_token_has_no_tau_and_does_not_disturb_others() -> None:
    assert metrics.mean_acceptance_length([run([])]) is None
    assert metrics.mean_acceptance_length([run([]), LONG]) == pytest.approx(5 / 2)


def test_ranks_by_depth() -> None:
    runs = [run([2, 1, 0], ranks=((0, 2), (1,), ()))]
    assert metrics.rank_table(runs) == [
        pytest.approx([1 / 3, 1 / 3, 0.0]),
        pytest.approx([0.0, 0.0, 1 / 3]),
    ]
    assert metrics.rank_table([run([0])]) == []


def test_repeats() -> None:
    # 4-grams: abab baba abab baba abab -> two distinct of five.
    assert metrics.repeat_rate([1, 2] * 4) == pytest.approx(3 / 5)
    assert metrics.repeat_rate([1, 2, 3, 4, 5]) == 0.0
    assert metrics.repeat_rate([1, 1, 1]) is None
    looping, fresh = run([6], ids=[1, 2] * 4), run([7], ids=range(9))
    assert metrics.is_looping(looping)
    assert not metrics.is_looping(fresh)
    assert metrics.repeat_rate_pooled([looping, fresh]) == pytest.approx(3 / 11)


def test_times_by_hand() -> None:
    # First token after 0.5 s, then 3 tokens and 1 token; the end 0.1 s after the last emission.
    timed = run([2, 0], emission_s=(0.5, 0.8, 1.2), e2e_s=1.3)
    assert metrics.ttft_ms(timed) == 500.0
    assert metrics.e2el_ms(timed) == 1300.0
    assert metrics.tpot_ms(timed) == pytest.approx(800.0 / 4)
    assert metrics.emission_gaps_ms(timed) == pytest.approx([300.0, 400.0])
    assert metrics.output_throughput([timed]) == pytest.approx(5 / 1.3)
    assert metrics.decode_throughput([timed]) == pytest.approx(4 / 0.8)
    assert metrics.tpot_ms(run([])) is None
    silent = run([], emission_s=(0.5,), ids=[1, 2, 3])
    assert not metrics.is_streamed(silent)
    assert metrics.ttft_ms(silent) is None
    assert metrics.tpot_ms(silent) is None
    assert metrics.decode_throughput([silent]) is None
    assert metrics.decode_throughput([silent, timed]) == pytest.approx(4 / 0.8)


def test_a_request_by_hand() -> None:
    first = run([2, 0], emission_s=(0.5, 0.8, 1.2), e2e_s=1.3)
    slower = run([2, 0], emission_s=(0.7, 1.0, 1.4), e2e_s=1.9)
    found = metrics.request_figures([first, slower])
    assert found == {
        "num_output_tokens": 5,
        "finish_reason": "length",
        "num_spec_steps": 2,
        "num_spec_tokens": 3,
        "num_draft_tokens": 2 * 4,
        "num_accepted_draft_tokens": 2,
        "per_step_accepted": [2, 0],
        "ttft_ms": pytest.approx(600.0),
        "tpot_ms": pytest.approx((200.0 + 300.0) / 2),
        "e2el_ms": pytest.approx(1600.0),
    }
    assert "ttft_ms" not in metrics.request_figures([first], is_timed=False)


def test_the_time_metrics_of_several_runs_by_hand() -> None:
    fast = run([2, 0], emission_s=(0.5, 0.8, 1.2), e2e_s=1.3)
    slow = run([0], emission_s=(0.7, 1.5), e2e_s=1.5)
    found = metrics.latency([fast, slow])
    assert found["ttft_ms"]["mean"] == pytest.approx(600.0)
    assert found["ttft_ms"]["p90"] == pytest.approx(500.0 + 0.9 * 200.0)
    assert found["tpot_ms"]["median"] == pytest.approx((200.0 + 800.0) / 2)
    assert found["itl_ms"]["mean"] == pytest.approx((300.0 + 400.0 + 800.0) / 3)
    assert found["itl_ms"]["p50"] == pytest.approx(400.0)
    assert found["e2el_ms"]["std"] == pytest.approx(200.0 / 2**0.5)
    assert found["output_throughput"] == pytest.approx(7 / 2.8)
    assert found["decode_throughput"] == pytest.approx(5 / 1.6)


def test_percentiles_interpolate() -> None:
    assert metrics.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert metrics.percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert metrics.percentile([7.0], 99) == 7.0
    known = metrics.summary([1.0, 2.0, 3.0])
    assert known is not None
    assert (known["mean"], known["median"], known["std"]) == (2.0, 2.0, 1.0)
    assert metrics.summary([]) is None


def test_speedup_is_the_median_of_the_prompts_ratios() -> None:
    def timed(decode_s: float) -> Run:
        return run([0, 0], emission_s=(1.0, 1.0 + decode_s / 2, 1.0 + decode_s))

    slow = [[timed(2.0), timed(2.0)], [timed(2.0)], [timed(9.0)]]
    fast = [[timed(1.0), timed(1.0)], [timed(2.0)], [timed(3.0)]]
    found = metrics.speedup(slow, fast)
    assert found is not None
    assert found.per_prompt == pytest.approx((2.0, 1.0, 3.0))
    assert found.median == pytest.approx(2.0)
    assert (found.low, found.high) == pytest.approx((1.0, 3.0))
    assert found.pooled == pytest.approx(15.0 / 7.0)
    whole = metrics.speedup_end_to_end(slow, fast)
    assert whole.per_prompt == pytest.approx((3 / 2, 1.0, 10 / 4))


def test_the_repetition_that_was_disturbed_does_not_count() -> None:
    def timed(decode_s: float) -> Run:
        return run([0], emission_s=(1.0, 1.0 + decode_s))

    disturbed = [[timed(2.0), timed(50.0), timed(2.0)]]
    found = metrics.speedup(disturbed, [[timed(1.0)] * 3])
    assert found is not None
    assert found.median == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("cheat", "named"),
    [
        (run([1, 1], ids=range(9)), "the steps explain 5 tokens and 9 were counted"),
        (run([1, 1], ids=[1, 2, 99, 3, 4]), "2 tokens were counted past the end"),
        (run([5, 5]), "13 tokens were counted where 10 were allowed"),
        (run([4]), "more drafted tokens than its tree is deep"),
    ],
)
def test_a_run_that_cheats_is_caught(cheat: Run, named: str) -> None:
    problem = cheat.check(10, frozenset({99}))
    assert problem is not None
    assert named in problem


def test_an_honest_run_passes() -> None:
    assert run([1, 1], ids=[1, 2, 3, 4, 99]).check(10, frozenset({99})) is None
    assert run([]).check(10, frozenset()) is None


def test_a_run_survives_its_file() -> None:
    import json

    known = run([2, 0], ranks=((0, 1), ()))
    assert Run.from_dict(json.loads(json.dumps(known.to_dict()))) == known
