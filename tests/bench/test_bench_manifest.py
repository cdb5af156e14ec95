"""The manifest: no folder of a machine in it, and a commit for copies without git's own folder."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdeft.bench import manifest
from specdeft.bench.prompt_set import load_prompts

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_output", lambda *_command: None)


def test_a_checkout_says_its_own_commit(monkeypatch):
    monkeypatch.delenv(manifest.GIT_VARIABLE, raising=False)
    answers = {"rev-parse": COMMIT, "status": " M bench/cli.py"}
    monkeypatch.setattr(manifest, "_output", lambda *command: answers[command[3]])
    assert manifest.git_state() == {"commit": COMMIT, "modified": True}
    answers["status"] = ""
    monkeypatch.setenv(manifest.GIT_VARIABLE, COMMIT[:12])
    assert manifest.git_state() == {"commit": COMMIT, "modified": False}
    monkeypatch.setenv(manifest.GIT_VARIABLE, "f" * 12)
    with pytest.raises(ValueError, match=f"states {'f' * 12} and the checkout is at {COMMIT}"):
        manifest.git_state()


@pytest.mark.usefixtures("no_checkout")
def test_a_copy_without_git_is_told_its_commit(monkeypatch):
    monkeypatch.delenv(manifest.GIT_VARIABLE, raising=False)
    assert manifest.git_state() is None
    monkeypatch.setenv(manifest.GIT_VARIABLE, COMMIT)
    assert manifest.git_state() == {"commit": COMMIT, "modified": False, "stated": True}
    monkeypatch.setenv(manifest.GIT_VARIABLE, f"{COMMIT}-dirty")
    assert manifest.git_state() == {"commit": COMMIT, "modified": True, "stated": True}


@pytest.mark.usefixtures("no_checkout")
@pytest.mark.parametrize("stated", ["main", "abc", "0123456 ", "g" * 40, "0123456-wild"])
def test_what_is_no_hash_is_refused(monkeypatch, stated):
    monkeypatch.setenv(manifest.GIT_VARIABLE, stated)
    with pytest.raises(ValueError, match="give the hexadecimal hash of a commit"):
        manifest.git_state()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/data/questions.jsonl", "questions.jsonl"),
        ("--save-result=/data/runs/one", "--save-result=one"),
        ("../questions.jsonl", "../questions.jsonl"),
        ("chain-4,16", "chain-4,16"),
        ("--trees=auto", "--trees=auto"),
        ("-", "-"),
    ],
)
def test_absolute_paths_lose_their_folder(given, kept):
    assert manifest.without_folder(given) == kept


@pytest.mark.usefixtures("no_checkout")
def test_a_manifest_names_no_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(manifest.GIT_VARIABLE, raising=False)
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "prompt": "Why?"}\n')
    decoder: Any = SimpleNamespace(
        device=torch.device("cpu"), device_name="CPU (1 threads)", dtype_name="float32"
    )
    settings = {"prompts": str(path), "replay": str(tmp_path / "lengths.json"), "seed": 3}
    found = manifest.describe_run(
        decoder, load_prompts(str(path)), ["bench", "latency", "--prompts", str(path)], settings
    )
    assert str(tmp_path) not in repr(found)
    assert found["command"][-1] == "p.jsonl"
    assert found["settings"] == {"prompts": "p.jsonl", "replay": "lengths.json", "seed": 3}
    assert found["prompts"]["ids"] == ["a"]
    assert len(found["prompts"]["sha256"]) == 64
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
