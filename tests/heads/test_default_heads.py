"""The command that made the shipped heads, on a tiny model: everything from nothing, on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdeft.heads import default_heads
from specdeft.heads.medusa import MedusaHeads
from specdeft.trees.search import ValuedPaths

from .conftest import make_target


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    target = make_target(end_scale=1.3)
    target.model.save_pretrained(tmp_path / "tiny")
    target.tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_heads_from_nothing_and_what_they_are_worth(tmp_path: Path, model_folder: Path) -> None:
    questions, output = tmp_path / "questions.jsonl", tmp_path / "heads"
    entries = [{"category": "ab"[i % 2], "turns": [f"w{i} w{i + 1}"]} for i in range(6)]
    questions.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    command = [
        *("--model", str(model_folder), "--name", "tiny", "--output", str(output)),
        *("--deadline-s", "10", "--reserve-s", "2", "--count", "60", "--wave-rows", "24"),
        *("--long-wave-rows", "6", "--max-answer", "30", "--max-passage", "30"),
        *("--batch-rows", "256", "--draft-vocab-size", "48", "--held-out", "0.2"),
        *("--questions", str(questions), "--question-tokens", "12"),
    ]
    assert default_heads.main(command) == 0
    heads = MedusaHeads.load(output, hidden_size=16, vocab_size=96)
    first = default_heads.candidates(48)[0].shape
    assert heads.config.num_heads == first.num_heads == 5
    assert heads.config.cell_size == first.cell_size
    assert ValuedPaths.load(output / "tree_values.json").paths
    record = json.loads((output / "training_record.json").read_text())
    assert record["command"] == ["default_heads", *command]
    assert record["result"]["steps"] >= 20
    assert 1 <= record["questions"]["greedy"]["tau"]["8"] <= 6
    assert set(record["questions"]["greedy"]["by_category"]) == {"a", "b"}
    stages = [stage["at_s"] for stage in record["stages"].values()]
    assert stages == sorted(stages)
