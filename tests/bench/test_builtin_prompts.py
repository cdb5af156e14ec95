"""The built-in prompts: eight kinds of ten, and the long ones long."""

import json
from collections import Counter
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "bench" / "prompts" / "builtin.jsonl"
KINDS = ("chat", "code", "extraction", "translation", "maths", "reasoning", "qa", "summary")


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]


def test_eight_kinds_of_ten(rows):
    assert Counter(row["kind"] for row in rows) == dict.fromkeys(KINDS, 10)
    assert all(set(row) == {"id", "kind", "prompt"} for row in rows)


def test_no_id_and_no_prompt_twice(rows):
    for field in ("id", "prompt"):
        assert max(Counter(row[field] for row in rows).values()) == 1


def test_summaries_are_of_long_passages(rows):
    lengths = [len(row["prompt"].split()) for row in rows if row["kind"] == "summary"]
    assert min(lengths) > 300
    assert max(lengths) < 900
