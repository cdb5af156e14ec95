"""The identity report: exact, near tie, different."""

import pytest

from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.identity import IdentityReport, compare
from tests.core.test_rereading import PROMPT, SETTINGS
from tests.core.tiny import VOCAB_SIZE, ByteTokenizer, tiny_model


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    return SpecDecoder(tiny_model("llama"), ByteTokenizer())


def test_the_same_text(decoder: SpecDecoder) -> None:
    plain = decoder.generate(list(PROMPT), config=SETTINGS[0]).token_ids
    report = compare(decoder.engine, PROMPT, plain, plain, SETTINGS[0])
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


def test_a_near_tie_is_described_with_what_it_follows_from() -> None:
    known = IdentityReport(False, 4, 20, 17, 3, 2.5, "bfloat16", limit_ulp=4.25, noise_ulp=0.85)
    assert (known.passed, known.tier) == (True, "near-tie")
    assert known.describe() == (
        "identical to plain decoding: no, from token 4 on; read again by the target, 17 of 20 "
        "tokens are its own choice and 3 within 4.2 ulp (5 times the rounding noise measured, "
        "0.85) of bfloat16 of it (worst 2.5 ulp)"
    )
    unmeasured = IdentityReport(False, 4, 20, 18, 2, 1.0, "bfloat16")
    assert "and 2 within 1 ulp of bfloat16 of it (worst 1.0 ulp)" in unmeasured.describe()
    assert not IdentityReport(False, 4, 20, 17, 2, 9.0, "bfloat16").passed
