"""`specdeft calibrate` as typed: measured once, found by decoders, stale when things change."""

import json
from pathlib import Path

import pytest
import torch

from specdeft import SpecDecoder
from specdeft.calibration_cache import cached_values, calibration_folder
from specdeft.cli import main
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.step_cost import Place
from tests.core.test_generate_command import save_tokenizer
from tests.core.tiny import VOCAB_SIZE, tiny_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved model and, below it, heads; the cache is empty."""
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    save_tokenizer(model, chat=True)
    heads = MedusaHeads(HeadsConfig(2, 1, 64, VOCAB_SIZE))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.2)
    heads.save(model / "heads")
    lines = [{"prompt": "Hello"}, {"turns": ["One", "Two"]}, {"prompt": "abcabcabcabc"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def asked(folder: Path, heads: str = "none") -> list[str]:
    model = ["--model", str(folder / "model"), "--heads", heads, "--dtype", "float32"]
    return [*model, "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "12"]


def test_what_is_measured_is_kept_and_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = str(folder / "model" / "heads")
    assert main(["calibrate", *asked(folder, heads), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    place, longer = report["places"]
    assert (place["num_context"], longer["num_context"]) == (256, 1024)
    sizes = [row["num_nodes"] for row in place["sizes"]]
    assert sizes[0] == 1
    assert set(place["chosen"].values()) <= set(sizes)
    for row in place["sizes"]:
        assert row["step_ms"].keys() == row["tau"].keys() == place["chosen"].keys() == {"0", "0.7"}
        assert min(row["step_ms"].values()) > 0
        assert row["tau"]["0"] >= 1
    # A decoder of these finds the values; one of other heads does not.
    decoder = SpecDecoder.from_pretrained(folder / "model", heads=heads, dtype=torch.float32)
    assert decoder.tree.num_nodes == place["chosen"]["0"]
    assert decoder.heads is not None
    known = cached_values(decoder.model, decoder.heads)
    assert known is not None
    assert known.lookup
    with torch.no_grad():
        decoder.heads.block_bias.add_(1.0)
    assert cached_values(decoder.model, decoder.heads) is None
    # A second run asks the model nothing.
    assert main(["calibrate", *asked(folder, heads)]) == 0
    err = capsys.readouterr().err
    assert "answers" not in err
    assert "measuring" not in err
    assert main(["calibrate", *asked(folder, heads), "--refresh"]) == 0
    assert "answers 3 prompts" in capsys.readouterr().err


def test_without_heads_lookup_is_calibrated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *asked(folder), "--batches", "1,3,4", "--contexts", "1024"]) == 0
    out, err = capsys.readouterr()
    assert "1 sequence, up to 1024 tokens" in out
    assert "4 sequences, up to 1024 tokens" in out  # batches are rounded up
    assert out.count("4 sequences") == 1
    said = "timed at 1024 tokens x 4, which stands for 1024 tokens x 3, 1024 tokens x 4: contexts"
    assert said in err
    assert "stands for 1024 tokens x 1" not in err
    assert out.count("*") >= 2
    decoder = SpecDecoder.from_pretrained(folder / "model", heads=None, dtype=torch.float32)
    known = cached_values(decoder.model, None)
    assert known is not None
    assert known.paths == ()


def test_damaged_values_are_said_and_not_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *asked(folder)]) == 0
    decoder = SpecDecoder.from_pretrained(folder / "model", heads=None, dtype=torch.float32)
    path = calibration_folder(decoder.model, None) / "tree_values.json"
    path.write_text("{")
    capsys.readouterr()
    assert cached_values(decoder.model, None) is None
    assert "run specdeft calibrate again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "cannot be read"),
        (["--num-prompts", "9"], "give 1 to 3"),
        (["--contexts", "none"], "contexts are 'none'"),
        (["--contexts", "+8"], "contexts are '+8': give numbers from 1 with commas"),
        (["--batches", "1,-2"], "batches are '1,-2'"),
        (["--batches", "0"], "batches are '0'"),
        (["--max-new-tokens", "1"], "ask for at least 2"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: list[str], message: str
) -> None:
    assert main(["calibrate", *asked(folder), *changes]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("line", ["[]", "{}", "{", '{"prompt": 3}', '{"turns": []}'])
def test_a_line_that_is_no_prompt_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (folder / "prompts.jsonl").write_text(line)
    assert main(["calibrate", *asked(folder)]) == 2
    assert "prompts.jsonl, line 1: " in capsys.readouterr().err


def test_places_bound_context_and_batch() -> None:
    assert Place.around(5) == Place(256, 1)
    assert Place.around(257) == Place(1024, 1)
    assert Place.around(1025, 3) == Place(4096, 4)
    assert Place.around(10**9, 8) == Place(65536, 8)
