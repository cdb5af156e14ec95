"""The identity report: exact, near tie, different; distances in ulp by hand."""

from typing import Any

import pytest
import torch

from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.identity import compare, distance_from_choice_ulp
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
