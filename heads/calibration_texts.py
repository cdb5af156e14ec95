"""Texts to calibrate on: the target's own answers to prompts that no heads were trained on.

The prompts stand in `calibration_prompts.jsonl`: 62 of nine kinds, written for this project, in the
forms that chat models are asked. Heads trained on self-generated text do far better on more of
that text than on such prompts, so a tree's tau is to be expected from these.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdeft.heads.documents import Documents, join
from specdeft.heads.target import Target, chat_turn

_PROMPTS_FILE = Path(__file__).parent / "calibration_prompts.jsonl"
TEMPERATURES = (0.0, 0.7)
MAX_NEW_TOKENS = 256


def calibration_prompts() -> list[str]:
    """The prompts, kinds in turn, so that the first ones are of many kinds."""
    lines = _PROMPTS_FILE.read_text(encoding="utf-8").splitlines()
    by_kind: dict[str, list[str]] = {}
    for entry in map(json.loads, lines):
        by_kind.setdefault(entry["kind"], []).append(entry["prompt"])
    longest = max(map(len, by_kind.values()))
    return [
        prompts[turn]
        for turn in range(longest)
        for prompts in by_kind.values()
        if turn < len(prompts)
    ]


def calibration_texts(target: Target, max_new_tokens: int = MAX_NEW_TOKENS) -> Documents:
    """The target's answers to the calibration prompts, greedy and sampled."""
    turn = chat_turn(target)
    encoded = target.tokenizer(calibration_prompts(), add_special_tokens=False).input_ids
    prompts = [[*turn.before, *ids, *turn.after] for ids in encoded]
    return join([answers(target, prompts, max_new_tokens, heat) for heat in TEMPERATURES])


@torch.inference_mode()
def answers(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float
) -> Documents:
    """The target's answers by transformers' own generate, all prompts in one left-padded batch."""
    width, stops = max(map(len, prompts)), chat_turn(target).stop_ids
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(0)
    device = target.model.device
    rows = target.model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        pad_token_id=stops[0],
        **how,
    )[:, width:].cpu()
    return _documents(prompts, rows, stops, temperature)


def _documents(
    prompts: Sequence[Sequence[int]], answers: Tensor, stops: list[int], temperature: float
) -> Documents:
    ended = torch.isin(answers, torch.tensor(stops)).int()
    lengths = torch.where(ended.any(1), ended.argmax(1) + 1, answers.shape[1]).tolist()
    whole = [[*p, *row[:n]] for p, row, n in zip(prompts, answers.tolist(), lengths, strict=True)]
    offsets = torch.tensor([0, *map(len, whole)]).cumsum(0)
    learn = torch.ones(int(offsets[-1]), dtype=torch.bool)
    for start, prompt in zip(offsets.tolist(), prompts, strict=False):
        learn[start : start + len(prompt)] = False
    tokens = torch.tensor([token for row in whole for token in row], dtype=torch.int32)
    return Documents(tokens, learn, offsets, torch.full((len(whole),), temperature))
