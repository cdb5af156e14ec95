"""Prompts: the three formats, the rule of choice, and one sentence for each mistake."""

import io
import json
from types import SimpleNamespace

import pytest

from specdeft.bench.prompt_set import BenchPrompt, choose_evenly, load_prompts


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(path)


def test_three_formats(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    source = write(
        tmp_path / "p.jsonl",
        {"id": "a", "kind": "chat", "prompt": "Why?"},
        "",
        {"messages": chat},
        {"question_id": 81, "category": "writing", "turns": ["First", "Second"]},
    )
    first, second, third = load_prompts(source).prompts
    assert first == BenchPrompt("a", "chat", ({"role": "user", "content": "Why?"},))
    assert second == BenchPrompt("3", "any", tuple(chat))
    assert third.id == "81"
    assert third.kind == "writing"
    assert third.messages == ({"role": "user", "content": "First"},)
    assert third.later_turns == ("Second",)


def test_standard_input(monkeypatch):
    data = b'{"prompt": "Hello"}\n'
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    found = load_prompts("-")
    assert found.name == "standard input"
    assert len(found.prompts) == 1


def test_the_choice_is_even_over_kinds_and_keeps_the_order():
    kinds = "aaaabbc"
    prompts = [BenchPrompt(f"{i}", kind, ()) for i, kind in enumerate(kinds)]
    assert [p.id for p in choose_evenly(prompts, 3)] == ["0", "4", "6"]
    assert [p.id for p in choose_evenly(prompts, 5)] == ["0", "1", "4", "5", "6"]
    assert choose_evenly(prompts, 7) == prompts


def test_the_rule_is_said(tmp_path):
    lines = [{"prompt": f"p{i}", "kind": f"{i % 2}"} for i in range(4)]
    source = write(tmp_path / "p.jsonl", *lines)
    assert load_prompts(source).rule == "all 4 prompts of p.jsonl"
    assert load_prompts(source, 2).rule.startswith("2 of the 4 prompts of p.jsonl: round robin")
    assert len(load_prompts(source, default=3).prompts) == 3


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: a list"),
        ({"id": 1}, "line 2: it must have one of prompt, messages, turns: it has none"),
        ({"prompt": "a", "turns": ["b"]}, "it has prompt and turns"),
        ({"prompt": " "}, "line 2: "),
        ({"prompt": 3}, "3 stands where text must"),
        ({"turns": []}, "turns is not a list with entries"),
        ({"turns": ["a", 1]}, "1 stands where text must"),
        ({"messages": [{"role": "user"}]}, "an object with role and content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "ends with an answer"),
        ({"id": "first", "prompt": "again"}, "stands in line 1 already"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, named):
    source = write(tmp_path / "p.jsonl", {"id": "first", "prompt": "ok"}, line)
    with pytest.raises(ValueError, match="line 2") as caught:
        load_prompts(source)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_empty_and_binary_files(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.jsonl cannot be read \(no such file"):
        load_prompts(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl", "", "  "))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_prompts(str(binary))


def test_too_many_or_too_few_asked(tmp_path):
    source = write(tmp_path / "p.jsonl", {"prompt": "a"})
    with pytest.raises(ValueError, match="holds 1"):
        load_prompts(source, 2)
    with pytest.raises(ValueError, match="at least 1"):
        load_prompts(source, 0)
