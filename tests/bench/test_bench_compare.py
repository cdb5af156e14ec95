"""Two saved runs beside each other: paired by prompt, changes beyond noise only."""

import json

import pytest

from specdeft.bench import cli, compare
from specdeft.bench.metrics import Run
from specdeft.bench.run_folder import RunFolder

MANIFEST = {"settings": {}, "prompts": {}, "versions": {"torch": "1"}, "device": "d", "dtype": "f"}


def run(step_s: float, last: int = 4) -> Run:
    times = (1.0, 1.0 + step_s, 1.0 + 2 * step_s)
    return Run((1, 2, 3, last), "length", 3, 2, (1, 0), times, times[-1])


def save(path, steps_s, manifest=MANIFEST, row="tree", last=4):
    with RunFolder(path) as folder:
        folder.open(manifest)
        for prompt, step_s in enumerate(steps_s):
            for repetition in range(2):
                record = {"row": row, "prompt": f"{prompt}", "run": run(step_s, last).to_dict()}
                folder.put(f"{row}|{prompt}|{repetition}", record)
        folder.put("verdict|x", {"identical": True})
    return str(path)


def figures(tmp_path, before, after, **changes):
    a, b = save(tmp_path / "a", before), save(tmp_path / "b", after, **changes)
    report = compare.main([a, b]).report
    return {change["figure"]: change for change in report.data["changes"]}, report


def test_a_faster_step_is_better_and_the_rest_is_unchanged(tmp_path):
    found, report = figures(tmp_path, [0.2, 0.4, 0.6], [0.1, 0.2, 0.3])
    assert found["tpot_ms"]["ratio"] == pytest.approx(0.5)
    assert found["tpot_ms"]["verdict"] == "better"
    assert found["ttft_ms"]["verdict"] == "no change"
    assert found["mean_acceptance_length"]["verdict"] == "no change"
    assert found["tpot_ms"]["before"] == pytest.approx(2 * 400.0 / 3)
    assert report.remarks == ("no text differs",)


def test_noise_is_no_change(tmp_path):
    found, _ = figures(tmp_path, [0.2, 0.4, 0.6, 0.5], [0.22, 0.37, 0.66, 0.45])
    assert found["tpot_ms"]["verdict"] == "no change"


def test_only_shared_prompts_count_and_texts_and_manifests_are_compared(tmp_path):
    manifest = {**MANIFEST, "versions": {"torch": "2"}}
    found, report = figures(tmp_path, [0.2, 0.4], [0.4], manifest=manifest, last=5)
    assert found["tpot_ms"]["num_prompts"] == 1
    assert found["tpot_ms"]["verdict"] == "worse"
    assert report.remarks[0].startswith('versions differs: {"torch": "1"} before')
    assert report.remarks[1] == "tree: 1 of 1 texts differ, first that of prompt 0"


def test_refusals(tmp_path):
    known = save(tmp_path / "a", [0.1])
    with pytest.raises(ValueError, match="holds no run"):
        cli.main(["compare", known, str(tmp_path / "nowhere")])
    other = save(tmp_path / "b", [0.1], row="other")
    with pytest.raises(ValueError, match="no row in common"):
        cli.main(["compare", known, other])


def test_through_the_command_line(tmp_path, capsys):
    known = save(tmp_path / "a", [0.1])
    assert cli.main(["compare", known, known, "--output", "json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert {change["verdict"] for change in changes} == {"no change"}
