"""Texts read again: distances in ulp by hand, the noise of rounding, tokens that are far off."""

from typing import Any

import pytest
import torch

from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.identity import compare
from specdeft.rereading import LEAST_CONTROL_TOKENS, Rereader, at_once, one_by_one
from specdeft.sampling import restrict
from specdeft.sampling_edges import edges
from tests.core.tiny import VOCAB_SIZE, ByteTokenizer, prompt_ids, tiny_model

PROMPT = tuple(prompt_ids(6))
SETTINGS = [
    GenerationConfig(max_new_tokens=20, ignore_eos=True),
    GenerationConfig(max_new_tokens=20, ignore_eos=True, temperature=0.7, seed=5),
    GenerationConfig(max_new_tokens=20, ignore_eos=True, temperature=1.5, top_k=30, top_p=0.9),
]
ULP = 4 * torch.finfo(torch.float32).eps  # of float32 between 4 and 8


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    return SpecDecoder(tiny_model("llama"), ByteTokenizer())


@pytest.fixture(scope="module")
def in_16_bits() -> SpecDecoder:
    """Every step reads five tokens; lookup drafts them, seldom rightly."""
    return SpecDecoder(tiny_model("llama", dtype=torch.bfloat16), ByteTokenizer(), tree="lookup-4")


@pytest.mark.parametrize("config", SETTINGS)
def test_a_plain_text_is_the_targets_own_choice_throughout(
    decoder: SpecDecoder, config: GenerationConfig
) -> None:
    """Read again in one forward, every token is chosen again: the noise is keyed by position."""
    rereader = Rereader(decoder.engine, config)
    plain = decoder.plain(list(PROMPT), config=config).token_ids
    distance = rereader.distance_ulp(PROMPT, plain)
    assert distance.shape == (20,)
    assert bool((distance == 0).all())
    third = decoder.plain(list(PROMPT), config=config, sequence=3).token_ids
    assert bool((rereader.distance_ulp(PROMPT, third, 3) == 0).all())


# ---- in 16 bits


@pytest.mark.parametrize("config", SETTINGS)
@pytest.mark.parametrize("length", [1, 6, 70])
def test_one_by_one_is_plain_decodings_own_arithmetic(
    in_16_bits: SpecDecoder, config: GenerationConfig, length: int
) -> None:
    """To the last bit: every token of a plain text is the best one, by no matter how little."""
    prompt = tuple(prompt_ids(length))
    plain = in_16_bits.plain(list(prompt), config=config).token_ids
    logits = one_by_one(in_16_bits.engine, [*prompt, *plain[:-1]], len(plain))
    rereader = Rereader(in_16_bits.engine, config)
    distance = rereader._distance_ulp(logits, length, plain, 0, 0.0)
    assert distance.tolist() == [0.0] * 20


def test_the_two_readings_differ_by_rounding_alone(in_16_bits: SpecDecoder) -> None:
    tokens = prompt_ids(100)
    few, many = (read(in_16_bits.engine, tokens, 90) for read in (one_by_one, at_once))
    assert few.shape == many.shape == (90, VOCAB_SIZE)
    assert not torch.equal(few, many)
    assert float((few - many).abs().max()) < 0.05 * float(few.abs().max())


@pytest.mark.parametrize("config", SETTINGS)
def test_honest_texts_pass_and_a_token_with_a_clear_margin_does_not(
    in_16_bits: SpecDecoder, config: GenerationConfig
) -> None:
    rereader = Rereader(in_16_bits.engine, config)
    for number in range(5):
        prompt = tuple(prompt_ids(6 + number))
        plain = in_16_bits.plain(list(prompt), config=config).token_ids
        honest = in_16_bits.generate(list(prompt), config=config).token_ids
        assert rereader.read(prompt, plain, plain).num_far == 0
        assert rereader.read(prompt, honest, plain).num_far == 0
        limit = max(1.0, 5 * rereader.noise_ulp(prompt, plain))
        # The token whose margin is closest above twice the limit: neither noise nor blatant.
        margin = margins(rereader, prompt, plain)
        margin = margin.masked_fill(margin < 2 * limit, float("inf"))
        assert margin.isfinite().any()
        at, wrong = divmod(int(margin.argmin()), VOCAB_SIZE)
        cheated = (*plain[:at], wrong, *plain[at + 1 :])
        reading = rereader.read(prompt, cheated, plain)
        assert float(reading.distance_ulp[at]) > reading.limit_ulp == limit
        assert reading.num_far >= 1
        report = compare(in_16_bits.engine, prompt, cheated, plain, config)
        assert (report.tier, report.limit_ulp) == ("different", limit)


def margins(rereader: Rereader, prompt: tuple[int, ...], plain: tuple[int, ...]) -> torch.Tensor:
    """By how much each token [T, V] lies below the best one, in ulp, read one by one."""
    logits = one_by_one(rereader.engine, [*prompt, *plain[:-1]], len(plain))
    columns = [
        rereader._distance_ulp(logits, len(prompt), (token,) * len(plain), 0, 0.0)
        for token in range(VOCAB_SIZE)
    ]
    return torch.stack(columns, dim=1)


# ---- by hand: best logit 5.0, tokens 3 and 8 the two best


def by_hand(gaps_ulp: list[float]) -> torch.Tensor:
    logits = torch.zeros(len(gaps_ulp), VOCAB_SIZE)
    logits[:, 3] = 5.0
    logits[:, 8] = 5.0 - torch.tensor(gaps_ulp) * ULP
    return logits


def readings(monkeypatch: Any, few: list[float], many: list[float]) -> None:
    """Gaps of the control (as many tokens as PROMPT has), then that of the one token read."""
    for name, gaps in (("one_by_one", few), ("at_once", many)):
        control, text = by_hand(gaps[:-1]), by_hand(gaps[-1:])

        def read(_engine: Any, _tokens: Any, num_last: int, control=control, text=text) -> Any:
            return {len(control): control, 1: text}[num_last].clone()

        monkeypatch.setattr(f"specdeft.rereading.{name}", read)


CONFIG = GenerationConfig(max_new_tokens=1)
QUIET = [9.0] * 6
# The three smallest gaps change by 1, -1 and 0: a deviation of 0.816. The others do not count.
CONTROL_FEW, CONTROL_MANY = [4, 6, 5, 90, 80, 70], [5, 5, 5, 20, 180, 70]
NOISE = (2 / 3) ** 0.5


@pytest.mark.parametrize(
    ("few", "many", "distance", "limit", "passed"),
    [
        ([*QUIET, 3.0], [*QUIET, 1.0], 1.0, 1.0, True),  # the logits' rounding explains it
        ([*QUIET, 3.0], [*QUIET, 3.0], 3.0, 1.0, False),  # without noise nothing does
        ([*QUIET, 0.0], [*QUIET, 3.0], 0.0, 1.0, True),  # plain decoding would choose it
        ([*CONTROL_FEW, 4.0], [*CONTROL_MANY, 4.0], 4.0, 5 * NOISE, True),
        ([*CONTROL_FEW, 5.0], [*CONTROL_MANY, 4.0], 5.0, 5 * NOISE, False),
        ([*CONTROL_FEW, 4.0], [*CONTROL_MANY, 5.0], 4.0, 5 * NOISE, True),
    ],
)
def test_near_ties_by_hand(
    decoder: SpecDecoder,
    few: list[float],
    many: list[float],
    distance: float,
    limit: float,
    passed: bool,
    monkeypatch: Any,
) -> None:
    readings(monkeypatch, few, many)
    reading = Rereader(decoder.engine, CONFIG).read(PROMPT, (8,), (3,))
    assert reading.distance_ulp.tolist() == [distance]
    assert reading.limit_ulp == pytest.approx(limit)
    assert (reading.num_far == 0) is passed
    report = compare(decoder.engine, PROMPT, (8,), (3,), CONFIG)
    assert report.passed is passed
    assert report.num_near_ties == int(0 < distance <= limit)
    assert report.worst_ulp == distance
    assert (report.noise_ulp is None) == (many[-1] <= 1.0)


@pytest.mark.parametrize(
    ("num_prompt", "num_plain", "expected"),
    [
        (6, 100, (105, 100)),  # the whole text
        (90, 10, (99, LEAST_CONTROL_TOKENS)),  # and of its prompt, where that is short
        (6, 1, (6, 6)),  # as far as there is one
    ],
)
def test_the_control_is_plain_decodings_text_and_measured_once(
    decoder: SpecDecoder,
    num_prompt: int,
    num_plain: int,
    expected: tuple[int, int],
    monkeypatch: Any,
) -> None:
    asked: list[tuple[int, int]] = []

    def read(_engine: Any, tokens: Any, num_last: int) -> torch.Tensor:
        asked.append((len(tokens), num_last))
        return by_hand([9.0] * num_last)

    monkeypatch.setattr("specdeft.rereading.one_by_one", read)
    monkeypatch.setattr("specdeft.rereading.at_once", read)
    rereader = Rereader(decoder.engine, CONFIG)
    for _ in range(2):
        assert rereader.noise_ulp((1,) * num_prompt, (3,) * num_plain) == 0.0
    assert asked == [expected] * 2


# ---- edges of top-k and top-p: four tokens of 0.4, 0.3, 0.2, 0.1

SHARES = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


@pytest.mark.parametrize(
    ("top_k", "top_p", "slack", "sure", "possible"),
    [
        (None, 1.0, 0.1, [1, 1, 1, 1], [1, 1, 1, 1]),
        (2, 1.0, 0.1, [1, 1, 0, 0], [1, 1, 0, 0]),
        (2, 1.0, 0.5, [1, 0, 0, 0], [1, 1, 1, 0]),  # 0.3 and 0.2 are 0.41 apart
        (None, 0.65, 0.01, [1, 1, 0, 0], [1, 1, 0, 0]),
        (None, 0.7001, 0.01, [1, 1, 0, 0], [1, 1, 1, 0]),  # 0.7 before the third
        (None, 0.6999, 0.01, [1, 1, 0, 0], [1, 1, 1, 0]),
        (None, 0.05, 0.3, [0, 0, 0, 0], [1, 1, 0, 0]),  # either of the first two is the first
        (2, 0.6, 0.0, [1, 1, 0, 0], [1, 1, 0, 0]),  # 0.57 of what top-k leaves
    ],
)
def test_edges_by_hand(
    top_k: int | None, top_p: float, slack: float, sure: list[int], possible: list[int]
) -> None:
    found = edges(SHARES, torch.tensor([[slack]]), top_k, top_p)
    assert found.sure.int().tolist() == [sure]
    assert found.possible.int().tolist() == [possible]


@pytest.mark.parametrize("shape", [{"top_k": 5}, {"top_p": 0.4}, {"top_k": 9, "top_p": 0.6}])
def test_without_slack_the_sets_are_those_that_are_drawn_among(shape: dict[str, Any]) -> None:
    scores = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).double() * 3
    kept = restrict(scores, shape.get("top_k"), shape.get("top_p", 1.0)).isfinite()
    found = edges(scores, torch.zeros(50, 1), shape.get("top_k"), shape.get("top_p", 1.0))
    assert torch.equal(found.possible, kept)
    assert torch.equal(found.sure, kept)


@pytest.mark.parametrize(("gap_ulp", "tier"), [(1.0, "near-tie"), (3.0, "different")])
@pytest.mark.parametrize("shape", [{"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("kept", [True, False])
def test_a_token_near_an_edge_is_a_near_tie(
    decoder: SpecDecoder,
    gap_ulp: float,
    tier: str,
    shape: dict[str, Any],
    kept: bool,
    monkeypatch: Any,
) -> None:
    """Tokens 8 and 9 are next to each other at the edge of the set, and the noise is for 8 by far:
    it is drawn where it is inside. Logits of 4 to 8: one ulp of float32 is 4 x eps."""
    step = gap_ulp * 4 * torch.finfo(torch.float32).eps
    logits = torch.full((1, VOCAB_SIZE), -9.0)
    logits[0, 3], logits[0, 8], logits[0, 9] = 6.0, 5.0, 5.0
    logits[0, 9 if kept else 8] -= step
    if "top_p" in shape:  # 3 holds less than half, and the higher of 8 and 9 fills it up
        logits[0, 3] = 5.5
    noise = torch.zeros(1, 1, VOCAB_SIZE)
    noise[..., 8] = 9.0
    for name in ("one_by_one", "at_once"):
        monkeypatch.setattr(f"specdeft.rereading.{name}", lambda *_: logits)
    monkeypatch.setattr(Rereader, "noise_ulp", lambda *_: 0.4)
    monkeypatch.setattr("specdeft.rereading.gumbel_noise", lambda *_: noise)
    config = GenerationConfig(max_new_tokens=1, temperature=1.0, **shape)
    # Plain decoding draws 8 where it is kept, else 3; speculation saw the other set.
    drawn, plain = (3, 8) if kept else (8, 3)
    assert compare(decoder.engine, PROMPT, (drawn,), (plain,), config).tier == tier
    far = compare(decoder.engine, PROMPT, (20,), (plain,), config)
    assert far.tier == "different"
