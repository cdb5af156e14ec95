"""The identity report: exact, near tie, different; distances in ulp by hand."""

from typing import Any

import pytest
import torch

from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.identity import compare, distance_from_choice_ulp
from specdeft.sampling import restrict
from specdeft.sampling_edges import edges
from tests.core.tiny import VOCAB_SIZE, ByteTokenizer, prompt_ids, tiny_model

PROMPT = tuple(prompt_ids(6))
SETTINGS = [
    GenerationConfig(max_new_tokens=20, ignore_eos=True),
    GenerationConfig(max_new_tokens=20, ignore_eos=True, temperature=0.7, seed=5),
    GenerationConfig(max_new_tokens=20, ignore_eos=True, temperature=1.5, top_k=30, top_p=0.9),
]


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    return SpecDecoder(tiny_model("llama"), ByteTokenizer())


@pytest.mark.parametrize("config", SETTINGS)
def test_a_plain_text_is_the_targets_own_choice_throughout(
    decoder: SpecDecoder, config: GenerationConfig
) -> None:
    """Read again in one forward, every token is chosen again: the noise is keyed by position."""
    plain = decoder.generate(list(PROMPT), config=config).token_ids
    distance = distance_from_choice_ulp(decoder.engine, PROMPT, plain, config)
    assert distance.shape == (20,)
    assert bool((distance == 0).all())
    third = decoder.generate(list(PROMPT), config=config, sequence=3).token_ids
    assert bool((distance_from_choice_ulp(decoder.engine, PROMPT, third, config, 3) == 0).all())
    report = compare(decoder.engine, PROMPT, plain, plain, config)
    assert (report.tier, report.passed, report.first_difference) == ("exact", True, None)
    assert report.describe() == "identical to plain decoding: yes, token for token"


@pytest.mark.parametrize("config", SETTINGS)
def test_a_changed_token_is_located_and_fails(
    decoder: SpecDecoder, config: GenerationConfig
) -> None:
    plain = decoder.generate(list(PROMPT), config=config).token_ids
    changed = (*plain[:7], (plain[7] + 1) % VOCAB_SIZE, *plain[8:])
    report = compare(decoder.engine, PROMPT, changed, plain, config)
    assert report.first_difference == 7
    assert (report.identical, report.passed, report.tier) == (False, False, "different")
    assert report.num_exact < report.num_tokens == 20
    assert report.worst_ulp > 2
    assert "from token 7 on" in report.describe()


def test_a_text_that_ends_early_differs_where_it_ends(decoder: SpecDecoder) -> None:
    plain = decoder.generate(list(PROMPT), config=SETTINGS[0]).token_ids
    report = compare(decoder.engine, PROMPT, plain[:12], plain, SETTINGS[0])
    assert report.first_difference == 12
    assert not report.identical


@pytest.mark.parametrize(("gap_ulp", "passed"), [(1.0, True), (2.0, True), (3.0, False)])
def test_near_ties_by_hand(
    decoder: SpecDecoder, gap_ulp: float, passed: bool, monkeypatch: Any
) -> None:
    """Best logit 5.0: one ulp of float32 there is 4 x eps."""
    eps = torch.finfo(torch.float32).eps
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3] = 5.0
    logits[0, 8] = 5.0 - gap_ulp * 4 * eps
    monkeypatch.setattr("specdeft.identity._forced_logits", lambda *_: logits)
    config = GenerationConfig(max_new_tokens=1)
    assert distance_from_choice_ulp(decoder.engine, PROMPT, (8,), config).tolist() == [gap_ulp]
    report = compare(decoder.engine, PROMPT, (8,), (3,), config)
    assert report.passed is passed
    assert report.num_near_ties == int(passed)
    assert report.worst_ulp == gap_ulp


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
    monkeypatch.setattr("specdeft.identity._forced_logits", lambda *_: logits)
    monkeypatch.setattr("specdeft.identity.gumbel_noise", lambda *_: noise)
    config = GenerationConfig(max_new_tokens=1, temperature=1.0, **shape)
    # Plain decoding draws 8 where it is kept, else 3; speculation saw the other set.
    drawn, plain = (3, 8) if kept else (8, 3)
    assert compare(decoder.engine, PROMPT, (drawn,), (plain,), config).tier == tier
    far = compare(decoder.engine, PROMPT, (20,), (plain,), config)
    assert far.tier == "different"
