"""Rows of other packages: transformers assisted and compiled, rivals where installed."""

import argparse
from types import SimpleNamespace

import pytest

from specdeft.bench import baselines
from specdeft.bench.baselines import make_rows
from specdeft.bench.rivals import RIVALS, RivalRow
from specdeft.bench.rows import DecoderRow
from specdeft.config import GenerationConfig
from tests.bench.test_bench_commands import tiny_bench
from tests.core.tiny import EOS_ID, prompt_ids, tiny_model

CONFIG = GenerationConfig(max_new_tokens=24, ignore_eos=True)


def test_assisted_generation_gives_the_same_text_in_fewer_steps(monkeypatch):
    bench = tiny_bench()
    # The target assists itself: whatever it drafts is right.
    loaded = SimpleNamespace(model=tiny_model("llama"))
    monkeypatch.setattr(baselines, "load_target", lambda *_names, **_settings: loaded)
    options = argparse.Namespace(assistant="itself")
    assisted, plain = make_rows((), ("transformers-assisted",), bench, options)
    run = assisted.run(prompt_ids(7), CONFIG)
    assert run.token_ids == plain.run(prompt_ids(7), CONFIG).token_ids
    assert len(run.per_step_accepted) < 20
    assert not assisted.is_ours


def test_the_compiled_form_is_measured_on_cuda_only():
    with pytest.raises(ValueError, match="measured on CUDA only: leave it out on a CPU"):
        make_rows((), ("transformers-compiled",), tiny_bench(), argparse.Namespace())


@pytest.mark.parametrize("name", RIVALS)
def test_an_installed_rival_gives_plain_decodings_text(name):
    pytest.importorskip(name, reason=f"pip install {name}")
    bench = tiny_bench()
    prompt = prompt_ids(7) * 3
    plain = DecoderRow("plain", bench).run(prompt, CONFIG)
    rival = RivalRow(name, bench)
    run = rival.run(prompt, CONFIG)
    assert run.token_ids == plain.token_ids
    assert run.e2e_s > 0
    # It stops where we stop.
    end = plain.token_ids[9]
    bench.model.generation_config.eos_token_id = [EOS_ID, end]
    stopping = GenerationConfig(max_new_tokens=24)
    expected = DecoderRow("plain", bench).run(prompt, stopping)
    assert RivalRow(name, bench).run(prompt, stopping).token_ids == expected.token_ids
    assert len(expected.token_ids) == 1 + plain.token_ids.index(end)
    with pytest.raises(ValueError, match="compared at temperature 0"):
        rival.run(prompt, GenerationConfig(temperature=1.0))
