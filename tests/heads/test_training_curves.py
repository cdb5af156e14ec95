"""The curves of a run: read from its log, drawn as a PNG."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdeft.heads import curves

ENTRIES = [
    {"step": 0, "loss": 3.0, "lr": 0.1, "per_head": [1.0, 2.0], "gradient_norm": 1.0},
    {"step": 20, "loss": 2.0, "lr": 0.1, "per_head": [0.5, 1.5], "gradient_norm": 1.0},
    {"step": 20, "held_out": {"top1": [0.4, 0.3], "tau": {"4": 1.5, "8": 1.7}}},
]


def log_in(folder: Path) -> None:
    text = "".join(json.dumps(entry) + "\n" for entry in ENTRIES)
    (folder / curves.LOG_NAME).write_text(text, encoding="utf-8")


def test_a_log_is_read_into_lines(tmp_path: Path) -> None:
    log_in(tmp_path)
    read = curves.read_log(tmp_path / curves.LOG_NAME)
    assert read.loss == {"head 0": [(0, 1.0), (20, 0.5)], "head 1": [(0, 2.0), (20, 1.5)]}
    assert read.top1 == {"head 0": [(20, 0.4)], "head 1": [(20, 0.3)]}
    assert read.tau == {"4 nodes": [(20, 1.5)], "8 nodes": [(20, 1.7)]}


def test_a_png_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log_in(tmp_path)
    path = curves.draw(tmp_path)
    assert path is not None
    assert path.name == "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 10_000


def test_without_matplotlib_nothing_is_drawn_and_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_in(tmp_path)
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    assert curves.main([str(tmp_path)]) == 1
    assert "pip install 'specdeft[bench]'" in capsys.readouterr().out
    assert not (tmp_path / curves.CURVES_NAME).exists()
