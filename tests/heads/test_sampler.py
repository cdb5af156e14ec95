"""Writing texts in waves: equal to transformers' own generate, forced prompts, ends, shrinking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdeft.heads.sampler import Limits, Request, TextWriter, Written, sample
from specdeft.heads.target import Target, chat_turn

from .conftest import END, make_target


def texts(written: Written) -> dict[int, list[int]]:
    rows = zip(written.request.tolist(), written.tokens, written.length.tolist(), strict=True)
    return {number: row[:length].tolist() for number, row, length in rows}


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]


def writer(model: Any, rows: int, positions: int = 96, **changes: Any) -> TextWriter:
    limits = Limits([END], [1, 4], **{"max_answer": 20, **changes})
    return TextWriter(model, rows, positions, limits, seed=0)


@pytest.mark.parametrize("masked", [False, True])
def test_greedy_texts_equal_generate(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(end_scale=2.0)
    asked = prompts(9, 14)
    made = writer(target.model, 9, stop_fraction=0.0)
    if masked:  # the form that is captured on a GPU, run plainly
        advance = made._advance

        def rounded(rows: int, _: int, *, masked: bool) -> None:
            advance(rows, made.num_positions, masked=not masked)

        monkeypatch.setattr(made, "_advance", rounded)
    for _ in range(2):  # a second wave in the same buffers
        written = texts(made.write([Request(ids, 0.0) for ids in asked]))
        for number, ids in enumerate(asked):
            expected = target.model.generate(
                torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=END
            )[0]
            assert written[number] == expected.tolist()
    assert target.model.config._attn_implementation == "sdpa"


def test_rows_that_end_early_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(end_scale=4.0)
    asked = prompts(16, 5)
    made = writer(target.model, 16, positions=140, max_answer=80, stop_fraction=0.0)
    alive = []
    shrink = made._shrink

    def watched(living: Tensor, count: int) -> None:
        shrink(living, count)
        alive.append(made.alive)

    monkeypatch.setattr(made, "_shrink", watched)
    written = texts(made.write([Request(ids, 0.0) for ids in asked]))
    assert alive
    for number, ids in enumerate(asked):
        expected = target.model.generate(
            torch.tensor([ids]), max_new_tokens=80, do_sample=False, pad_token_id=END
        )[0].tolist()
        assert written[number] == expected


def test_the_model_writes_its_own_prompts() -> None:
    target = make_target(end_scale=2.0)
    turn = chat_turn(target)
    assert turn.after[0] == END
    limits = Limits(turn.stop_ids, turn.after[1:], max_answer=10, max_written_prompt=12)
    made = TextWriter(target.model, 24, 64, limits, seed=1)
    written = made.write([Request(turn.before, 1.0, writes_prompt=True)] * 24)
    rows = list(texts(written).values())
    assert len(rows) > 12
    for row, prompt_length in zip(rows, written.prompt_length.tolist(), strict=True):
        prompt = row[:prompt_length]
        assert prompt[: len(turn.before)] == turn.before
        assert prompt[-len(turn.after) :] == turn.after
        assert len(prompt) <= len(turn.before) + 12 + len(turn.after)
        assert END not in prompt[len(turn.before) : -len(turn.after)]
        assert len(row) - prompt_length <= 10
    for row, finished in zip(rows, written.finished.tolist(), strict=True):
        assert finished == (row[-1] == END)


def test_sliding_window_beyond_reach_is_refused() -> None:
    target = make_target("mistral")
    with pytest.raises(ValueError, match="attends to 24"):
        writer(target.model, 1).write([Request([5, 6, 7], 0.0)])


def test_too_long_and_too_many_requests_are_refused(target: Target) -> None:
    made = writer(target.model, 2, positions=64)
    with pytest.raises(ValueError, match="3 texts"):
        made.write([Request([5], 0.0)] * 3)
    with pytest.raises(ValueError, match="positions"):
        made.write([Request([5] * 60, 0.0)])


def test_sample_follows_the_distribution_and_the_floor() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -4.0]).repeat(40_000, 1)
    ones = torch.ones(len(logits))
    drawn = sample(logits, ones, 0 * ones, torch.Generator().manual_seed(0))
    shares = drawn.bincount(minlength=4) / len(drawn)
    # Four standard deviations of a share near 1/2 over 40,000 draws.
    torch.testing.assert_close(shares, logits[0].softmax(0), atol=0.01, rtol=0)
    cut = sample(logits, ones, 0.2 * ones, torch.Generator().manual_seed(0))
    assert set(cut.tolist()) == {0, 1}
    greedy = sample(logits, 0 * ones, 0 * ones, torch.Generator().manual_seed(0))
    assert set(greedy.tolist()) == {0}
