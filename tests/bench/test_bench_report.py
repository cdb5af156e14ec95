"""Reports: one table in every format; run folders: resumed, refused, never half-written."""

import csv
import io
import json
import os
from pathlib import Path

import pytest

from specdeft.bench import cli as bench_cli
from specdeft.bench.baselines import BASELINES
from specdeft.bench.metrics import acceptance
from specdeft.bench.report import FORMATS, Report, Table, as_text
from specdeft.bench.run_folder import RunFolder

TABLE = Table("Speed", ("row", "ms", "note"), (("plain", 12.3456, None), ("a|b", 7, "x")))
REPORT = Report("Title", ("a note",), (TABLE,), ("a remark",), {"rows": [1.25]})
MANIFEST = {"settings": {"a": 1}, "prompts": {}, "versions": {}, "device": "cpu", "dtype": "f"}


def test_text_aligns_numbers_right():
    lines = FORMATS["table"](REPORT).splitlines()
    assert lines[:2] == ["Title", "  a note"]
    start = lines.index("Speed")
    assert lines[start + 1 : start + 5] == [
        "row       ms  note",
        "-----  -----  ----",
        "plain  12.35  -",
        "a|b        7  x",
    ]
    assert lines[-1] == "a remark"


def test_a_table_too_wide_for_the_terminal_is_turned_on_its_side():
    wide = Table("Wide", ("row", "first figure", "second figure"), (("a", 1.5, 20), ("b", 2.5, 3)))
    report = Report("T", (), (wide,))
    assert as_text(report, 40) == as_text(report)
    lines = as_text(report, 30).splitlines()
    assert lines[lines.index("Wide") + 1 :] == [
        "row               a     b",
        "-------------  ----  ----",
        "first figure   1.50  2.50",
        "second figure    20     3",
    ]


def test_markdown_escapes_bars():
    text = FORMATS["md"](REPORT)
    assert "| row | ms | note |\n| --- | ---: | --- |\n" in text
    assert "| a\\|b | 7 | x |" in text
    assert text.endswith("- a remark\n")


def test_csv_and_json_keep_every_digit():
    rows = list(csv.reader(io.StringIO(FORMATS["csv"](REPORT))))
    assert rows == [["row", "ms", "note"], ["plain", "12.3456", ""], ["a|b", "7", "x"]]
    assert json.loads(FORMATS["json"](REPORT)) == {"rows": [1.25]}
    lines = FORMATS["jsonl"](REPORT).splitlines()
    assert json.loads(lines[0]) == {"row": "plain", "ms": 12.3456, "note": None}


def test_json_keeps_lists_of_numbers_on_one_line():
    data = {"steps": [1, 0, 2.5, None], "names": ["a", "[\n 1\n]"], "none": [], "deep": [[1, 2]]}
    text = FORMATS["json"](Report("T", (), (TABLE,), (), data))
    assert '"steps": [1, 0, 2.5, null]' in text
    assert json.loads(text) == data


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="has not 2 cells"):
        Table("t", ("a", "b"), (("x",),))


def test_without_a_folder_records_live_in_memory():
    with RunFolder(None) as folder:
        folder.open(MANIFEST)
        assert folder.get("a") is None
        folder.put("a", {"x": (1, 2)})
        assert folder.get("a") == {"x": [1, 2]}
        folder.save(REPORT)


def test_an_interrupted_run_resumes_and_loses_only_its_torn_line(tmp_path):
    path = tmp_path / "run"
    with RunFolder(path) as folder:
        folder.open(MANIFEST)
        folder.put("a", {"x": 1})
        folder.put("b", {"x": 2})
    records = path / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-5])
    with RunFolder(path) as folder:
        folder.open({**MANIFEST, "started": "later"})
        assert folder.get("a") == {"x": 1}
        assert folder.get("b") is None
        folder.put("b", {"x": 3})
        folder.save(REPORT)
    with RunFolder(path) as folder:
        folder.open(MANIFEST)
        assert folder.get("b") == {"x": 3}
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "records.jsonl",
        "report.html",
        "report.json",
        "report.md",
    ]


def test_another_run_is_not_mixed_in(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.open(MANIFEST)
    with (
        RunFolder(tmp_path) as folder,
        pytest.raises(ValueError, match="holds a run with other settings: give the command"),
    ):
        folder.open({**MANIFEST, "settings": {"a": 2}})


def test_what_is_not_a_run_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text("[]")
    with RunFolder(tmp_path) as folder, pytest.raises(ValueError, match="not the manifest"):
        folder.open(MANIFEST)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file"):
        RunFolder(file / "run")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="cannot be written"):
        RunFolder(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_refused_or_said(tmp_path, monkeypatch):
    class Full:
        def write(self, _text):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    with RunFolder(tmp_path) as folder:
        folder.open(MANIFEST)
        monkeypatch.setattr(folder, "_file", Full())
        with pytest.raises(ValueError, match=r"No space left on device.*goes on where it stopped"):
            folder.put("a", {})
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 3})())
    with pytest.raises(ValueError, match="only 0 MiB are free"):
        RunFolder(tmp_path / "other")


def test_the_rooms_readme_names_what_there_is():
    text = (Path(bench_cli.__file__).parent / "README.md").read_text(encoding="utf-8")
    for name in (*BASELINES, *acceptance([])):
        assert f"`{name}`" in text or name.startswith("num_"), name
    for command in bench_cli.COMMANDS:
        assert f"specdeft bench {command} " in text
