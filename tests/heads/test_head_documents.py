"""Documents: cutting, padding, batching by length, files, and loss masks from chat templates."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdeft.heads.documents import Documents, from_lists, join, read_jsonl
from specdeft.heads.target import Target


def make() -> Documents:
    return from_lists(
        [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]],
        [[False, True, True], [True], [False, False, True, True], [False, True]],
        [0.0, 0.7, 0.0, 0.9],
    )


def lists(documents: Documents) -> list[list[int]]:
    ends = documents.offsets.tolist()
    return [documents.tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]


def test_select_keeps_order_mask_and_temperature() -> None:
    picked = make().select(torch.tensor([2, 0]))
    assert lists(picked) == [[5, 6, 7, 8], [1, 2, 3]]
    assert picked.learn.tolist() == [False, False, True, True, False, True, True]
    assert picked.temperature.tolist() == [0.0, 0.0]


def test_padded_marks_lengths() -> None:
    tokens, learn, lengths = make().padded(torch.tensor([0, 3]))
    assert tokens.tolist() == [[1, 2, 3], [9, 10, 0]]
    assert learn.tolist() == [[False, True, True], [False, True, False]]
    assert lengths.tolist() == [3, 2]


@pytest.mark.parametrize("max_tokens", [1, 4, 6, 100])
def test_batches_hold_every_document_once_within_the_budget(max_tokens: int) -> None:
    documents = make()
    batches = documents.batches(max_tokens)
    assert sorted(i for batch in batches for i in batch.tolist()) == [0, 1, 2, 3]
    for batch in batches:
        padded = len(batch) * int(documents.lengths[batch].max())
        assert padded <= max_tokens or len(batch) == 1


def test_split_is_a_partition() -> None:
    first, second = make().split(0.25, seed=3)
    assert len(first) == 3
    assert len(second) == 1
    assert sorted(lists(first) + lists(second)) == sorted(lists(make()))


def test_join_and_file_round_trip(tmp_path: Path) -> None:
    both = join([make(), make()])
    assert lists(both) == lists(make()) * 2
    both.save(tmp_path / "d.safetensors")
    again = Documents.load(tmp_path / "d.safetensors")
    for name in ("tokens", "learn", "offsets", "temperature"):
        assert torch.equal(getattr(again, name), getattr(both, name))


def write(path: Path, *entries: object) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n", encoding="utf-8")
    return path


def test_only_the_assistant_is_learnt_even_when_answers_repeat(
    tmp_path: Path, target: Target
) -> None:
    turns = [("user", "w1 w2"), ("assistant", "w5"), ("user", "w5"), ("assistant", "w5 w6")]
    path = write(tmp_path / "a", {"messages": [{"role": r, "content": c} for r, c in turns]})
    documents = read_jsonl(path, target.tokenizer, 100)
    words = target.tokenizer.convert_ids_to_tokens(documents.tokens.tolist())
    learnt = [w for w, flag in zip(words, documents.learn.tolist(), strict=True) if flag]
    assert learnt == ["w5", "<e>", "w5", "w6", "<e>"]
    assert words.count("w5") == 3


def test_prompt_with_response_equals_messages_and_text_is_learnt_whole(
    tmp_path: Path, target: Target
) -> None:
    path = write(
        tmp_path / "a",
        {"prompt": "w1", "response": "w2 w3"},
        {
            "messages": [
                {"role": "user", "content": "w1"},
                {"role": "assistant", "content": "w2 w3"},
            ]
        },
        {"text": "w7 w8"},
    )
    documents = read_jsonl(path, target.tokenizer, 100)
    first, second, third = lists(documents)
    assert first == second
    assert documents.learn[-2:].all()
    assert len(third) == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [({"question": "w1"}, "line 1 has none of"), ({"messages": []}, "nothing to learn")],
)
def test_bad_lines_are_named(tmp_path: Path, target: Target, entry: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_jsonl(write(tmp_path / "a", entry), target.tokenizer, 100)


def test_broken_json_names_the_line(tmp_path: Path, target: Target) -> None:
    path = tmp_path / "a"
    path.write_text('{"text": "w1"}\n\n{oops\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 3 is not JSON"):
        read_jsonl(path, target.tokenizer, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": torch.tensor([0, 3, 4, 8, 11])}, "do not add up"),
        ({"offsets": torch.tensor([0, 4, 3, 8, 10])}, "do not add up"),
        ({"offsets": torch.tensor([1, 3, 4, 8, 10])}, "do not add up"),
        ({"offsets": torch.zeros(0, dtype=torch.int64)}, "do not add up"),
        ({"tokens": torch.full((10,), -1, dtype=torch.int32)}, "do not add up"),
        ({"tokens": torch.zeros(10)}, "do not add up"),
        ({"learn": torch.ones(9, dtype=torch.uint8)}, "do not add up"),
        ({"temperature": torch.zeros(3)}, "do not add up"),
        ({"more": torch.zeros(1)}, "no texts"),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor], message: str
) -> None:
    path = tmp_path / "d.safetensors"
    make().save(path)
    assert lists(Documents.load(path)) == lists(make())
    save_file({**load_file(path), **changes}, path)
    with pytest.raises(ValueError, match=message):
        Documents.load(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        Documents.load(path)
