"""Batches: figures by hand, texts judged against plain decoding alone, a cheat caught."""

import json

import pytest

from specdeft.bench import cli, latency
from specdeft.bench.batches import (
    BatchResult,
    BatchRun,
    batch_figures,
    judge_group,
    parse_batch_sizes,
)
from specdeft.bench.gate import Verdict
from specdeft.bench.run_folder import RunFolder
from specdeft.decoder import SpecDecoder
from tests.bench.test_bench_commands import tiny_bench

SAME, OTHER = Verdict(True, True), Verdict(False, False, 3, 9.0, 1, 9.0)


def result(row: str, size: int, *groups: tuple[float, ...], verdict=SAME, steps=2) -> BatchResult:
    """Each sequence has 5 tokens; a group's numbers are the seconds of its repetitions."""
    runs = [
        [BatchRun(((1, 2, 3, 4, 5),) * size, (steps,) * size, seconds) for seconds in group]
        for group in groups
    ]
    return BatchResult(row, size, runs, [verdict] * size * len(groups))


def test_figures_by_hand():
    results = [
        result("plain", 1, (1.0, 1.0), (3.0, 3.0), steps=4),
        result("16", 1, (0.5, 0.5, 9.0), (1.5, 1.5, 1.5)),
        result("plain", 2, (2.0, 2.0), steps=4),
        result("16", 2, (0.5, 0.7)),
    ]
    plain_1, tree_1, plain_2, tree_2 = batch_figures(results, seed=0)
    assert plain_1["output_throughput"] == 10 / 4.0
    assert tree_1["output_throughput"] == 10 / 2.0
    assert tree_1["speedup_end_to_end_over_plain"]["median"] == 2.0
    assert plain_2["output_throughput"] == 5.0
    assert plain_2["over_batch_1"] == 2.0
    assert tree_2["output_throughput"] == pytest.approx(10 / 0.6)
    assert tree_2["output_throughput_per_sequence"] == pytest.approx(5 / 0.6)
    assert tree_2["speedup_end_to_end_over_plain"]["median"] == pytest.approx(2.0 / 0.6)
    assert plain_1["mean_acceptance_length"] == 1.0
    assert tree_2["mean_acceptance_length"] == 2.0


def test_a_batch_with_another_text_has_no_speed():
    wrong = result("16", 1, (0.1,), verdict=OTHER)
    _, figure = batch_figures([result("plain", 1, (1.0,)), wrong], seed=0)
    assert not figure["has_speed"]
    assert "output_throughput" not in figure


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "give numbers from 1"),
        ("0", "give numbers from 1"),
        ("2,x", "give numbers from 1"),
        ("2,2", "give each number once"),
        ("1,5", "a batch of 5 was asked for and there are 4 prompts"),
    ],
)
def test_sizes_that_cannot_be_had(text, named):
    with pytest.raises(ValueError, match=named):
        parse_batch_sizes(text, 4)


def test_sizes():
    assert parse_batch_sizes(None, 4) == ()
    assert parse_batch_sizes("1, 4", 4) == (1, 4)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    bench = tiny_bench()
    monkeypatch.setattr(latency, "load", lambda _options: bench)
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("Hello", "abc", "x y z")))

    def run(*more: str):
        arguments = ["latency", "--trees", "deft-32", "--baselines", "none", "-r", "2"]
        arguments += ["--prompts", str(path), "--dtype", "float32", "--max-new-tokens", "12"]
        code = cli.main([*arguments, *more, "--output", "json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_through_the_command_line(command, tmp_path):
    more = ["--batch-sizes", "1,2", "--save-result", str(tmp_path / "run")]
    code, data = command(*more)
    assert code == 0
    found = {(row["row"], row["batch_size"]): row for row in data["batches"]}
    assert set(found) == {("plain", 1), ("deft-32", 1), ("plain", 2), ("deft-32", 2)}
    # Three prompts make three batches of one and one whole batch of two.
    assert found["plain", 1]["num_batches"] == 3
    assert found["plain", 2]["num_batches"] == 1
    assert all(row["identical_prompts"] == row["num_prompts"] for row in found.values())
    for row in found.values():
        speed = row["output_throughput"]
        assert row["output_throughput_per_sequence"] == speed / row["batch_size"]
        assert row["over_batch_1"] == speed / found[row["row"], 1]["output_throughput"]
    report = (tmp_path / "run" / "report.md").read_text()
    assert "Batches (end to end)" in report
    # Taken up again, nothing is decoded.
    known = data["batches"]
    code, data = command(*more)
    assert data["batches"] == known


def test_a_decoder_that_mixes_sequences_up_is_caught(command, monkeypatch):
    honest = SpecDecoder.generate

    def generate(self, prompt, **settings):
        results = honest(self, prompt, **settings)
        return results[::-1] if isinstance(results, list) else results

    monkeypatch.setattr(SpecDecoder, "generate", generate)
    code, data = command("--batch-sizes", "2")
    assert code == 1
    assert [row["has_speed"] for row in data["batches"]] == [False, False]
    assert all(row["has_speed"] for row in data["rows"])


def test_batches_are_greedy(command):
    with pytest.raises(ValueError, match="batches are measured at temperature 0"):
        command("--batch-sizes", "2", "--temperature", "0.7")


def test_groups_that_answer_differently_each_time_have_no_speed():
    runs = [BatchRun(((1, 2),), (1,), 1.0), BatchRun(((1, 3),), (1,), 1.0)]
    found = BatchResult("16", 1, [runs])
    judge_group(found, ["p"], {"p": [1]}, {"p": (1, 2)}, RunFolder(None), lambda *_: SAME)
    assert found.problems == ["the batch of prompt p: its repetitions differ"]
    assert not found.has_speed
