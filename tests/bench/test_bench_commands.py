"""The commands on a tiny random model, and the latency harness on scripted rows and clock."""

import argparse
import dataclasses
import io
import itertools
import json
import re
import sys
from typing import Any

import pytest
import torch

from specdeft.bench import acceptance, cli, identity, latency, latency_measure, latency_report
from specdeft.bench.baselines import PlannedRow, make_rows
from specdeft.bench.gate import Verdict, judge
from specdeft.bench.latency_measure import Amounts, Measured
from specdeft.bench.metrics import Run
from specdeft.bench.phases import StepPhases
from specdeft.bench.prompt_set import load_prompts
from specdeft.bench.reference_rows import TransformersRow
from specdeft.bench.rows import DecoderRow
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import Workbench, parse_temperatures, parse_trees
from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.rereading import Rereader
from specdeft.trees.token_tree import TokenTree
from tests.core.tiny import EOS_ID, VOCAB_SIZE, ByteTokenizer, hf_greedy, prompt_ids, tiny_model


def tiny_bench(dtype: torch.dtype = torch.float32, **heads_fields: Any) -> Workbench:
    torch.manual_seed(0)
    config = HeadsConfig(
        num_heads=4, num_layers=1, hidden_size=64, vocab_size=VOCAB_SIZE, **heads_fields
    )
    heads = MedusaHeads(config).to(dtype)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model: Any = tiny_model("llama", dtype=dtype)
    tokenizer: Any = ByteTokenizer()
    # Every reading a millisecond later: a busy machine must not decide what a check finds.
    readings = itertools.count()
    return Workbench(model, tokenizer, heads, None, lambda: next(readings) * 1e-3)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Workbench:
    """The commands load this instead of a model from disk."""
    known = tiny_bench()
    for command in (identity, acceptance, latency):
        monkeypatch.setattr(command, "load", lambda _options: known)
    return known


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello there", "kind": "a"}\n{"prompt": "abc", "kind": "b"}\n')
    return ["--prompts", str(path), "--max-new-tokens", "20", "--dtype", "float32"]


# ---- commands end to end


def test_identity(bench, prompts, capsys, tmp_path):
    trees = ["--trees", "chain-4,deft-32"]
    folder = tmp_path / "run"
    arguments = ["identity", *trees, *prompts, "--output", "json", "--save-result", str(folder)]
    assert cli.main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    compared = {(row["row"], row["temperature"]): row for row in data["rows"]}
    assert set(compared) == {
        ("chain-4", 0.0),
        ("deft-32", 0.0),
        ("transformers", 0.0),
        ("chain-4", 0.7),
        ("deft-32", 0.7),
    }
    for row in data["rows"]:
        assert row["identical_prompts"] == row["passed_prompts"] == row["num_prompts"] == 2
    assert compared["deft-32", 0.0]["mean_acceptance_length"] > 1.0
    assert compared["deft-32", 0.0]["num_nodes"] == 32
    # The finished folder answers without running anything.
    bench.model.forward = None
    assert cli.main(arguments) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rows"] == data["rows"]
    assert "| chain-4 |" in (folder / "report.md").read_text()


def test_identity_fails_where_a_text_differs(bench, prompts, capsys, monkeypatch):
    honest = DecoderRow.run

    def dishonest(self, ids, config):
        run = honest(self, ids, config)
        if self.name != "chain-4":
            return run
        wrong = (run.token_ids[3] + 1) % VOCAB_SIZE
        changed = (*run.token_ids[:3], wrong, *run.token_ids[4:])
        return Run(**{**run.to_dict(), "token_ids": changed})

    monkeypatch.setattr(DecoderRow, "run", dishonest)
    assert cli.main(["identity", "--trees", "chain-4", "--temperatures", "0", *prompts]) == 1
    out = capsys.readouterr().out
    assert "chain-4, T = 0, prompt 1: token 3 of 20 differs" in out
    assert re.search(r"the two tokens \d+\.\d ulp apart; \d+ tokens beyond a near tie", out)


def test_acceptance(bench, prompts, capsys):
    assert cli.main(["acceptance", "--trees", "deft-64", *prompts, "--output", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    greedy, sampled = data["rows"]
    assert (greedy["temperature"], sampled["temperature"]) == (0.0, 0.7)
    assert set(greedy["by_kind"]) == {"a", "b"}
    steps = sum(greedy["acceptance_histogram"])
    assert steps == greedy["num_spec_steps"]
    assert steps * greedy["mean_acceptance_length"] == pytest.approx(2 * 19)
    assert greedy["num_draft_tokens"] == steps * 63
    assert data["manifest"]["settings"]["trees"] == "deft-64"


@pytest.mark.parametrize("output", ["table", "md", "csv", "jsonl"])
def test_latency(bench, prompts, capsys, output):
    arguments = ["latency", "--trees", "chain-2", "-r", "2", *prompts, "--output", output]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("transformers", "plain", "chain-2", "2/2"))


def test_at_a_temperature_transformers_is_left_out(bench, prompts, capsys):
    arguments = ["latency", "--trees", "chain-2", "-r", "1", "--temperature", "0.7", *prompts]
    assert cli.main([*arguments, "--output", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["row"] for row in rows] == ["plain", "chain-2"]
    assert all(row["identical_prompts"] == 2 for row in rows)


def test_a_sweep_of_temperatures_compares_each_with_its_own_plain(bench, prompts, capsys, tmp_path):
    arguments = ["latency", "--trees", "chain-2", "-r", "2", "--temperature", "0,0.7", *prompts]
    arguments += ["--output", "json", "--save-result", str(tmp_path / "run")]
    assert cli.main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["row"] for row in rows] == [
        "transformers, T = 0",
        "plain, T = 0",
        "chain-2, T = 0",
        "plain, T = 0.7",
        "chain-2, T = 0.7",
    ]
    assert all(row["identical_prompts"] == 2 for row in rows)
    greedy, sampled = rows[1], rows[3]
    assert greedy["speedup_over_plain"]["median"] == sampled["speedup_over_plain"]["median"] == 1.0
    assert "speedup_over_transformers" in rows[2]
    assert "speedup_over_transformers" not in rows[4]
    assert rows[2]["requests"] != rows[4]["requests"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f"Gaps between emissions, T = {t}" in page for t in ("0", "0.7"))
    # Taken up again, nothing is run twice and nothing is mixed up.
    bench.model.forward = None
    assert cli.main([*arguments[:-4], *arguments[-4:]]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][4]["requests"] == rows[4]["requests"]


def test_random_prompts_of_given_lengths(bench, capsys):
    arguments = ["latency", "--trees", "chain-2", "--input-len", "5,40", "--output-len", "9"]
    assert cli.main([*arguments, "-r", "1", "--dtype", "float32", "--output", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    tree = data["rows"][-1]
    assert tree["num_output_tokens"] == 18
    assert set(tree["by_kind"]) == {"5 tokens", "40 tokens"}
    context = (5 + 40) / 2 + 4
    assert tree["kv_analytic"]["num_context_tokens"] == pytest.approx(context, abs=1)
    assert tree["kv_analytic"]["kv_read_ratio_vs_per_path"] == 1.0


def test_a_random_model_with_replayed_acceptance(capsys, tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text('{"accept_lengths": [[3, 1], [5]]}')
    arguments = ["latency", "--model", "random:llama-tiny", "--heads", "random", "--trees"]
    arguments += ["deft-32", "--baselines", "replay", "--replay", str(lengths), "-r", "1"]
    arguments += ["--input-len", "6,9", "--output-len", "21", "--dtype", "float32"]
    assert cli.main([*arguments, "--device", "cpu", "--output", "json"]) == 0
    rows = {row["row"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    replayed = rows["replay(deft-32)"]
    assert replayed["identical_prompts"] == 2
    # 20 tokens after the first: 3 + 1 five times over, and 5 four times.
    assert replayed["by_kind"]["6 tokens"]["mean_acceptance_length"] == pytest.approx(2.0)
    assert replayed["by_kind"]["9 tokens"]["mean_acceptance_length"] == pytest.approx(5.0)
    assert rows["deft-32"]["mean_acceptance_length"] < 1.5
    with pytest.raises(ValueError, match="there is no shape 'x': give random: and llama-3-8b"):
        cli.main(["latency", "--model", "random:x", "--input-len", "3"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["latency", "--trees", "nowhere"], "there is no tree 'nowhere'"),
        (["latency", "--trees", ""], "no tree was given"),
        (["latency", "--trees", "chain-2,chain-2"], "named twice"),
        (["latency", "--trees", "16"], "not calibrated"),
        (["latency", "--trees", "chain-9"], "9"),
        (["latency", "--temperature", "0,0"], "give each number once"),
        (["latency", "--temperature", "0,-1"], "temperature is -1"),
        (["latency", "-r", "0"], "repetitions is 0"),
        (["latency", "--yardstick-repetitions", "0"], "yardstick-repetitions is 0"),
        (["latency", "--baselines", "magic"], "there is no baseline 'magic': give none, trans"),
        (["latency", "--trees", "chain-2", "--baselines", "replay"], "give --replay FILE"),
        (
            ["latency", "--trees", "chain-2", "--baselines", "transformers-assisted"],
            "give --assistant NAME",
        ),
        (
            ["latency", "--trees", "chain-2", "--baselines", "nowhere.at:all"],
            "the rival nowhere.at:all cannot be imported (No module named 'nowhere'): pip install",
        ),
        (["latency", "--trees", "chain-2", "--baselines", "json:all"], "has no function 'all'"),
        (["latency", "--output-len", "3"], "--output-len and --max-new-tokens"),
        (["latency", "--input-len", "3"], "--prompts and --input-len"),
        (["identity", "--temperatures", "warm"], "give numbers with commas"),
        (["identity", "--temperatures", "-1"], "temperature is -1"),
        (["acceptance", "--num-prompts", "3"], "holds 2"),
        (["acceptance", "--trees", "chain-2", "--max-new-tokens", "5000"], "prompt 1: "),
    ],
)
def test_bad_input_is_one_sentence(bench, prompts, arguments, named):
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        cli.main([arguments[0], *prompts, *arguments[1:]])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "cuda"], "CUDA was asked for and torch sees no GPU here"),
        (["--baselines", "economize"], "the rival economize cannot be imported"),
        (["--baselines", "nowhere.at:all"], "pip install nowhere"),
        (["--baselines", "replay", "--replay", "nowhere.json"], "nowhere.json cannot be read"),
        (["--baselines", "transformers-assisted"], "give --assistant NAME"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--save-result", "{file}/run"], "is a file: give --save-result a folder"),
        (["--plots"], "--plots has nowhere to go"),
        (["--threads", "0"], "threads is 0: give at least 1"),
        (["--batch-sizes", "99"], "a batch of 99 was asked for"),
        (["--model", "random:gpt"], "there is no shape 'gpt'"),
    ],
)
def test_what_cannot_be_had_is_refused_before_a_model_is_built(
    monkeypatch, tmp_path, arguments, named
):
    """Through the real loading: nothing is monkeypatched but that building a model is a failure."""

    def build(*_arguments: Any, **_settings: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("specdeft.bench.random_model.AutoModelForCausalLM.from_config", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "economize", None)  # not installed, whatever the machine has
    file = tmp_path / "file"
    file.write_text("")
    arguments = [part.format(file=file) for part in arguments]
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        cli.main(["latency", "--model", "random:llama-tiny", "--trees", "chain-2", *arguments])
    assert "\n" not in str(caught.value)


def test_an_interrupted_run_goes_on_where_it_stopped(bench, prompts, capsys, tmp_path, monkeypatch):
    arguments = ["latency", "--trees", "chain-2", "--baselines", "none", "-r", "3", *prompts]
    arguments += ["--output", "json", "--save-result", str(tmp_path / "run")]
    honest, calls = DecoderRow.run, list[str]()

    def run(self, ids, config):
        calls.append(self.name)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return honest(self, ids, config)

    monkeypatch.setattr(DecoderRow, "run", run)
    stop_at = 9  # two calls a row warm up: the fifth measured text is interrupted
    with pytest.raises(KeyboardInterrupt):
        cli.main(arguments)
    kept = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert sum('"row"' in line for line in kept) == 4
    assert not (tmp_path / "run" / "report.json").exists()
    calls.clear()
    stop_at = 0
    assert cli.main(arguments) == 0
    # 2 rows, 2 prompts, 3 repetitions, of which 4 were kept; 4 to warm up, 8 a row for reuse.
    assert len(calls) == 12 - 4 + 4 + 2 * 8
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["num_requests"] == 2 for row in rows)
    # A finished run says again what it said, the cold start included, and runs nothing.
    calls.clear()
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows
    assert all(row["cold_start_s"] > 0 for row in rows)
    assert calls == []
    assert (tmp_path / "run" / "records.jsonl").read_text().splitlines()[: len(kept)] == kept


def test_trees_of_more_heads_are_rows_of_their_own(bench, prompts, capsys, tmp_path):
    other = tiny_bench(sequential=True, token_input=True).heads
    assert other is not None
    other.save(tmp_path / "other")
    arguments = ["--trees", "chain-2", "--more-heads", str(tmp_path / "other"), *prompts]
    more = ["--baselines", "none", "-r", "1", "--output", "json"]
    assert cli.main(["latency", *arguments, *more]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["row"] for row in rows] == ["plain", "chain-2", "chain-2 [other]"]
    assert all(row["identical_prompts"] == 2 for row in rows)
    assert rows[2]["phases_ms"].keys() == rows[1]["phases_ms"].keys()
    assert cli.main(["acceptance", *arguments, "--output", "json"]) == 0
    trees = [row["tree"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert trees == ["chain-2", "chain-2 [other]"] * 2
    with pytest.raises(ValueError, match="give folders with different names"):
        cli.main(["latency", *prompts, "--more-heads", f"a/x,{tmp_path}/x"])


def test_lookups_are_kept_without_ranks(bench, prompts, capsys, monkeypatch):
    """A chain copied from the text may be deeper than there are heads."""
    copied = dataclasses.replace(bench, lookup="on")
    monkeypatch.setattr(acceptance, "load", lambda _options: copied)
    arguments = ["acceptance", "--trees", "deft-32", *prompts, "--output", "json"]
    assert cli.main(arguments) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        shares = [sum(depth) for depth in row["acceptance_by_depth_and_rank"]]
        assert all(
            share <= survived + 1e-9
            for share, survived in zip(shares, row["per_position_acceptance_rate"], strict=False)
        )


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert "Does speculation pay here?" in out
    assert all(name in out for name in cli.COMMANDS)
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        shown = capsys.readouterr().out
        assert f"specdeft bench {command}" in shown
        assert "--output" in shown


def test_lists_of_trees_and_temperatures():
    assert parse_trees(" chain-4, 16,") == ("chain-4", "16")
    assert parse_temperatures("0,0.7") == (0.0, 0.7)


# ---- turns


class ChatTokenizer(ByteTokenizer):
    """Roles are letters; the text of a chat is its turns."""

    chat_template = "roles"

    def apply_chat_template(self, messages, **_settings):
        text = "".join(f"{message['role'][0]}:{message['content']}" for message in messages)
        return self(f"{text}a:")


def test_later_turns_are_asked_after_plain_answers(tmp_path):
    known = tiny_bench()
    tokenizer: Any = ChatTokenizer()
    bench = Workbench(known.model, tokenizer, known.heads, None)
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "x", "kind": "k", "turns": ["Hi", "More"]}\n{"prompt": "Bye"}\n')
    config = GenerationConfig(max_new_tokens=8, ignore_eos=True)
    prompts = bench.with_later_turns(load_prompts(str(path)), config, False)
    assert [prompt.id for prompt in prompts.prompts] == ["x", "x/2", "2"]
    assert prompts.rule.endswith("with 1 later turns as prompts of their own")
    first, second, _ = bench.encode(prompts, config, False)
    answer = DecoderRow("plain", bench).run(first, config).token_ids
    text = f"u:Hia:{tokenizer.decode(answer, skip_special_tokens=True)}u:Morea:"
    assert second == tokenizer(text)["input_ids"]


def test_turns_and_standard_input_through_the_command_line(monkeypatch, capsys):
    known = tiny_bench()
    tokenizer: Any = ChatTokenizer()
    bench = dataclasses.replace(known, tokenizer=tokenizer)
    monkeypatch.setattr(latency, "load", lambda _options: bench)
    lines = b'{"id": "x", "turns": ["Hi", "More", "Yet"]}\n{"id": "y", "prompt": "Bye"}\n'
    arguments = ["latency", "--prompts", "-", "--turns", "all", "--trees", "chain-2", "-r", "1"]
    arguments += ["--baselines", "none", "--max-new-tokens", "6", "--dtype", "float32"]
    monkeypatch.setattr("sys.stdin", argparse.Namespace(buffer=io.BytesIO(lines)))
    assert cli.main([*arguments, "--output", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["manifest"]["prompts"]["source"] == "standard input"
    assert data["manifest"]["prompts"]["ids"] == ["x", "x/2", "x/3", "y"]
    assert all(row["num_requests"] == row["identical_prompts"] == 4 for row in data["rows"])


def test_a_sweep_over_contexts_is_drawn(bench, capsys, tmp_path):
    arguments = ["latency", "--trees", "chain-2", "--input-len", "5,40,90", "--output-len", "9"]
    arguments += ["-r", "1", "--dtype", "float32", "--save-result", str(tmp_path / "run")]
    assert cli.main(arguments) == 0
    assert "Speed against context" in (tmp_path / "run" / "report.html").read_text()
    table = capsys.readouterr().out
    assert all(f"{length} tokens" in table for length in (5, 40, 90))


# ---- rows


def test_a_row_sees_what_the_decoder_reports():
    bench = tiny_bench()
    row = DecoderRow("deft-64", bench)
    config = GenerationConfig(max_new_tokens=30, ignore_eos=True)
    run = row.run(prompt_ids(7), config)
    result = row.decoder.generate(prompt_ids(7), config=config)
    assert run.token_ids == result.token_ids
    assert len(run.per_step_accepted) == result.stats.num_steps
    counts = [run.per_step_accepted.count(a) for a in range(len(result.stats.acceptance_histogram))]
    assert tuple(counts) == result.stats.acceptance_histogram
    assert len(run.emission_s) == 1 + result.stats.num_steps
    assert list(run.emission_s) == sorted(run.emission_s)
    assert run.e2e_s >= run.emission_s[-1]
    assert run.check(30, frozenset()) is None


def test_transformers_is_itself_and_leaves_the_model_alone():
    bench = tiny_bench()
    bench.model.generation_config.repetition_penalty = 1.5
    known = bench.model.generation_config
    config = GenerationConfig(max_new_tokens=25)
    run = TransformersRow(bench).run(prompt_ids(7), config)
    assert bench.model.generation_config is known
    known.repetition_penalty = 1.0
    assert list(run.token_ids) == hf_greedy(bench.model, prompt_ids(7), 25)
    assert len(run.emission_s) == len(run.token_ids)
    with pytest.raises(ValueError, match="temperature 0 only"):
        TransformersRow(bench).run([1], GenerationConfig(temperature=1.0))


def test_both_sides_obey_the_same_end():
    bench = tiny_bench()
    config = GenerationConfig(max_new_tokens=30)
    free = DecoderRow("plain", bench).run(prompt_ids(7), config)
    stop_at = free.token_ids[9]
    bench.model.generation_config.eos_token_id = [EOS_ID, stop_at]
    for ignore_eos in (False, True):
        config = GenerationConfig(max_new_tokens=30, ignore_eos=ignore_eos)
        texts = {
            row.run(prompt_ids(7), config).token_ids
            for row in make_rows(("deft-32",), ("transformers",), bench, argparse.Namespace())
        }
        assert len(texts) == 1
        (text,) = texts
        assert len(text) == (30 if ignore_eos else 1 + free.token_ids.index(stop_at))


def test_the_gate_in_sixteen_bits_lets_near_ties_pass_and_nothing_else():
    bench = tiny_bench(torch.bfloat16)
    row = DecoderRow("plain", bench)
    config = GenerationConfig(max_new_tokens=12)
    prompt = prompt_ids(6)
    plain = row.run(prompt, config).token_ids
    rereader = Rereader(row.decoder.engine, config)
    assert judge(rereader, prompt, plain, plain) == Verdict(True, True)
    wrong = (*plain[:5], (plain[5] + 1) % VOCAB_SIZE, *plain[6:])
    verdict = judge(rereader, prompt, wrong, plain)
    assert not verdict.passed
    assert verdict.first_difference == 5
    assert verdict.margin_ulp is not None
    assert verdict.margin_ulp > 2
    shorter = judge(rereader, prompt, plain[:8], plain)
    assert shorter.first_difference == 8
    assert shorter.margin_ulp is None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_planned_drafts_follow_their_own_text_where_rounding_parts_it(temperature):
    """Plain decoding's text is another one here from the fourth token on, as after a near tie."""
    bench = tiny_bench(torch.bfloat16)
    config = GenerationConfig(max_new_tokens=30, temperature=temperature, ignore_eos=True)
    plain = DecoderRow("plain", bench)
    honest = plain.run

    def parted(prompt, config) -> Run:
        run = honest(prompt, config)
        other = tuple((token + 1) % VOCAB_SIZE for token in run.token_ids[3:])
        return dataclasses.replace(run, token_ids=(*run.token_ids[:3], *other))

    expected = honest(prompt_ids(7), config).token_ids
    plain.run = parted  # type: ignore[method-assign, assignment]
    oracle = PlannedRow("oracle", "chain-2", bench, plain).run(prompt_ids(7), config)
    assert set(oracle.per_step_accepted[:-1]) == {2}
    random = PlannedRow("random", "deft-32", bench, plain).run(prompt_ids(7), config)
    assert set(random.per_step_accepted) == {0}
    # What is planned decides nothing: the text is the target's own.
    assert oracle.token_ids[:3] == random.token_ids[:3] == expected[:3]
    assert oracle.token_ids[3] == expected[3]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("fields", [{}, {"sequential": True, "token_input": True}])
def test_planned_drafts_accept_as_planned_and_change_nothing(temperature, fields):
    bench = tiny_bench(**fields)
    config = GenerationConfig(max_new_tokens=31, ignore_eos=True, temperature=temperature)
    plain = DecoderRow("plain", bench)
    text = plain.run(prompt_ids(7), config).token_ids
    oracle = PlannedRow("oracle", "chain-2", bench, plain).run(prompt_ids(7), config)
    random = PlannedRow("random", "deft-32", bench, plain).run(prompt_ids(7), config)
    replay = PlannedRow("replay", "deft-32", bench, plain, [[2, 0, 1]])
    first, second = replay.run(prompt_ids(7), config), replay.run(prompt_ids(7), config)
    assert oracle.token_ids == random.token_ids == first.token_ids == second.token_ids == text
    assert oracle.per_step_accepted == (2,) * 10
    assert set(random.per_step_accepted) == {0}
    assert first.per_step_accepted == second.per_step_accepted == (2, 0, 1) * 5


def test_replayed_lengths_go_by_the_place_of_a_prompt_not_by_the_order_of_runs():
    """A warm-up takes the longest prompt first, a resumed run one from the middle."""
    bench = tiny_bench()
    config = GenerationConfig(max_new_tokens=13, ignore_eos=True)
    prompts = [prompt_ids(7), prompt_ids(30), prompt_ids(9)]
    plain, lengths = DecoderRow("plain", bench), [[1], [0]]
    replay = PlannedRow("replay", "chain-4", bench, plain, lengths, config, prompts)
    for place in (1, 2, 0, 1):
        accepted = replay.run(prompts[place], config).per_step_accepted
        assert set(accepted) == set(lengths[place % 2])
    assert set(replay.run(prompt_ids(8), config).per_step_accepted) == {1}


def test_planned_drafts_have_the_tree_that_auto_takes_for_the_request(monkeypatch):
    def tree_of(_decoder, config, num_prompt_tokens):
        return TokenTree.chain(config.max_new_tokens // 16).with_lookup(num_prompt_tokens)

    monkeypatch.setattr(SpecDecoder, "tree_of", tree_of)
    for num_tokens, num_nodes in ((16, 2), (32, 3)):
        config = GenerationConfig(max_new_tokens=num_tokens)
        rows = make_rows(("chain-4",), ("oracle",), tiny_bench(), argparse.Namespace(), config)
        oracle = rows[-1]
        assert isinstance(oracle, DecoderRow)
        assert oracle.decoder.tree == TokenTree.chain(num_nodes - 1)


def test_prompt_lookup_of_transformers_gives_the_same_text():
    bench = tiny_bench()
    config = GenerationConfig(max_new_tokens=30, ignore_eos=True)
    (row, plain) = make_rows((), ("transformers-lookup",), bench, argparse.Namespace())
    run = row.run(prompt_ids(7) * 2, config)
    assert run.token_ids == plain.run(prompt_ids(7) * 2, config).token_ids
    assert not row.is_ours


def load_rival(model, _tokenizer):
    """A rival by the protocol: transformers' text, two tokens at a time."""

    def generate(ids, max_new_tokens, eos_ids):
        assert eos_ids == [EOS_ID]
        text = hf_greedy(model, ids, max_new_tokens)
        yield from (text[start : start + 2] for start in range(0, len(text), 2))

    return generate


def load_silent_rival(model, _tokenizer):
    return lambda ids, max_new_tokens, _eos_ids: iter([hf_greedy(model, ids, max_new_tokens)])


def test_rivals_by_the_protocol(bench, prompts, capsys):
    names = f"{__name__}:load_rival,{__name__}:load_silent_rival"
    arguments = ["latency", "--trees", "chain-2", "-r", "1", "--baselines", names, *prompts]
    assert cli.main([*arguments, "--output", "json"]) == 0
    streamed, silent, *_ = json.loads(capsys.readouterr().out)["rows"]
    assert streamed["identical_prompts"] == silent["identical_prompts"] == 2
    assert streamed["mean_acceptance_length"] == 2.0
    assert streamed["tpot_ms"]["median"] >= 0
    assert silent["ttft_ms"] is None
    assert silent["tpot_ms"] is None
    assert silent["speedup_over_plain"] is None
    assert silent["speedup_end_to_end_over_plain"]["median"] > 0


# ---- the latency harness on a scripted clock


class Scripted:
    """A row whose tokens take a given time on a clock that only it moves."""

    def __init__(self, name: str, clock: list[float], ms: float, calls: list[str]) -> None:
        self.name = name
        self.is_ours = name != "transformers"
        self.ids: tuple[int, ...] = (1, 2, 3, 4)
        self.is_fickle = False
        self._clock, self._ms, self._calls = clock, ms, calls

    def run(self, prompt_ids, config) -> Run:
        self._calls.append(self.name)
        if self.is_fickle:
            self.ids = self.ids[::-1]
        times = [self._ms / 1e3 * (1 + index) for index in range(len(self.ids))]
        self._clock[0] += times[-1]
        steps = (0,) * (len(self.ids) - 1)
        return Run(self.ids, "length", 1, 0, steps, tuple(times), times[-1])


def scripted(*ms: float) -> tuple[list[Scripted], Workbench, list[str]]:
    clock, calls = [0.0], list[str]()
    rows = [
        Scripted(name, clock, each, calls)
        for name, each in zip(("transformers", "plain", "tree"), ms, strict=True)
    ]
    known = tiny_bench()
    return rows, Workbench(known.model, known.tokenizer, None, None, lambda: clock[0]), calls


def exact(_prompt, token_ids, plain_ids) -> Verdict:
    return Verdict(token_ids == plain_ids, token_ids == plain_ids)


def measured(rows, bench, folder=None, *, judge_text=exact, **changes) -> Measured:
    amounts = Amounts(**{"repetitions": 2, **changes})
    config = GenerationConfig(max_new_tokens=4)
    folder = RunFolder(None) if folder is None else folder
    return latency_measure.measure(
        rows, bench, config, {"p": [5], "q": [6]}, folder, amounts, judge_text=judge_text
    )


def measure(rows, bench, **changes):
    return measured(rows, bench, **changes).results


def test_repetitions_alternate_and_ratios_are_paired():
    rows, bench, calls = scripted(30.0, 20.0, 10.0)
    results = measure(rows, bench)
    assert calls[:6] == ["transformers", "transformers", "plain", "plain", "tree", "tree"]
    assert calls[6:12] == ["transformers", "plain", "tree", "tree", "plain", "transformers"]
    assert [result.cold_start_s for result in results] == pytest.approx([0.12, 0.08, 0.04])
    known = latency_report.figures(results[2], {"plain": results[1]}, 0, lossy=False)
    assert known["speedup_over_plain"]["median"] == pytest.approx(2.0)
    assert known["ttft_ms"]["median"] == pytest.approx(10.0)
    assert known["tpot_ms"]["median"] == pytest.approx(10.0)
    assert known["itl_ms"]["p99"] == pytest.approx(10.0)
    assert known["median_tokens_per_second"] == pytest.approx(100.0)


def test_yardsticks_may_have_fewer_repetitions():
    rows, bench, calls = scripted(30.0, 20.0, 10.0)
    results = measure(rows, bench, repetitions=5, yardstick_repetitions=2, warm_up=False)
    assert [len(result.runs[0]) for result in results] == [2, 5, 5]
    assert (calls.count("transformers"), calls.count("tree")) == (4, 10)
    known = latency_report.figures(results[2], {"transformers": results[0]}, 0, lossy=False)
    assert known["speedup_over_transformers"]["median"] == pytest.approx(3.0)


@pytest.mark.parametrize("lossy", [False, True])
def test_a_row_with_another_text_has_no_speed(lossy):
    rows, bench, _ = scripted(30.0, 20.0, 10.0)
    rows[2].ids = (1, 2, 9, 4)
    results = measure(rows, bench)
    assert not results[2].has_speed
    report = latency_report.make_report(results, manifest(), [], lossy=lossy)
    row = report.tables[0].rows[2]
    assert ("10.0" in str(row)) == lossy
    assert row[0] == ("tree (lossy)" if lossy else "tree")
    assert any("LOSSY" in remark for remark in report.remarks) == lossy


def test_a_row_that_counts_past_the_end_or_changes_its_mind_has_no_speed():
    rows, bench, _ = scripted(30.0, 20.0, 10.0)
    rows[2].ids = (1, EOS_ID, 3, 4)
    results = measure(rows, bench, judge_text=lambda *_: Verdict(True, True))
    assert results[2].problems[0] == "prompt p: 2 tokens were counted past the end of the text"
    rows, bench, _ = scripted(30.0, 20.0, 10.0)
    rows[2].is_fickle = True
    results = measure(rows, bench)
    assert "its repetitions give different texts" in results[2].problems[0]


def test_a_yardstick_that_changes_its_mind_keeps_its_speed_and_is_named():
    """transformers' compiled texts do; its time is no claim of ours."""
    rows, bench, _ = scripted(30.0, 20.0, 10.0)
    rows[0].is_fickle = True
    results = measure(rows, bench)
    assert results[0].has_speed
    results[1].phases_ms = dict.fromkeys(StepPhases._fields, 1.0) | {"idle": -0.5}
    report = latency_report.make_report(results, manifest(), [], lossy=False)
    assert report.tables[0].rows[0][0] == "transformers"
    assert "30.0" in str(report.tables[0].rows[0])
    assert "transformers: its repetitions give different texts at 2 of 2 prompts" in report.remarks
    assert any(remark.startswith("phases: idle is below zero") for remark in report.remarks)


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_row_that_reuses_earlier_calls_has_no_speed(is_cached):
    rows, bench, _ = scripted(30.0, 20.0, 10.0)
    honest = rows[2].run
    seen: set[tuple[int, ...]] = set()

    def cached(prompt_ids, config) -> Run:
        rows[2]._ms = 1.0 if tuple(prompt_ids) in seen else 10.0
        seen.add(tuple(prompt_ids))
        return honest(prompt_ids, config)

    if is_cached:
        rows[2].run = cached  # type: ignore[method-assign]
    config = GenerationConfig(max_new_tokens=4)
    encoded = {"p": [5, 6, 7, 8]}
    folder = RunFolder(None)
    found = latency_measure.measure(
        rows, bench, config, encoded, folder, Amounts(3), judge_text=exact
    )
    result = found.results[2]
    latency_measure.check_reuse(rows[2], result, encoded["p"], config, folder)
    assert result.has_speed != is_cached
    said = "takes 10 ms to its first token and one seen before 1: earlier calls are reused"
    assert any(said in problem for problem in result.problems) == is_cached


@pytest.mark.parametrize(
    ("seen", "unseen", "is_blamed"),
    [
        ([10, 2, 9, 11], [8, 12, 9, 10], False),  # one quick moment of a busy machine
        ([9, 9, 9, 9], [9, 40, 50, 60], False),
        ([2, 2, 3, 9], [8, 9, 8, 30], True),
    ],
)
def test_a_busy_machine_is_not_blamed_for_reuse(seen, unseen, is_blamed):
    rows, bench, _ = scripted(30.0, 20.0, 10.0)
    result = measure(rows, bench)[2]
    folder = RunFolder(None)
    folder.put("unseen|tree", {"seen": seen, "unseen": unseen})
    latency_measure.check_reuse(rows[2], result, [5], GenerationConfig(), folder)
    assert bool(result.problems) == is_blamed


def hang(_prompt_ids, _config) -> Run:
    while True:  # as a compiler that finds no end
        pass


def fail(_prompt_ids, _config) -> Run:
    raise RuntimeError("no kernel image\nand more")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (hang, "its first call had not ended after 0.2 s"),
        (fail, "its first call failed, RuntimeError: no kernel image"),
    ],
)
def test_a_yardstick_that_hangs_or_fails_is_given_up_aloud(run, why, capsys, tmp_path):
    rows, bench, calls = scripted(30.0, 20.0, 10.0)
    rows[0].run = run  # type: ignore[method-assign]
    with RunFolder(tmp_path / "run") as folder:
        folder.open(manifest())
        found = measured(rows, bench, folder, yardstick_limit_s=0.2)
    assert [result.name for result in found.results] == ["plain", "tree"]
    assert [row.name for row in found.rows] == ["plain", "tree"]
    assert found.given_up == {"transformers": why}
    assert f"transformers is given up: {why}" in capsys.readouterr().err
    report = latency_report.make_report(
        found.results, manifest(), [], given_up=found.given_up, lossy=False
    )
    assert f"transformers: not measured, {why}" in report.remarks
    assert report.data["given_up"] == found.given_up
    # A resumed run measures nothing anew, the row that hangs least of all.
    calls.clear()
    with RunFolder(tmp_path / "run") as folder:
        folder.open(manifest())
        assert measured(rows, bench, folder, yardstick_limit_s=0.2).given_up == found.given_up
    assert calls == []


def test_a_row_of_ours_that_fails_ends_the_run():
    rows, bench, _ = scripted(30.0, 20.0, 10.0)
    rows[2].run = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="no kernel image"):
        measure(rows, bench)


def test_after_the_time_limit_no_prompt_is_begun_and_the_rest_is_measured_later(tmp_path):
    rows, bench, calls = scripted(30.0, 20.0, 10.0)
    with RunFolder(tmp_path / "run") as folder:
        folder.open(manifest())
        found = measured(rows, bench, folder, deadline=0.1)  # warming up takes 0.48 s
        assert [len(result.runs) for result in found.results] == [1, 1, 1]
        report = latency_report.make_report(found.results, manifest(), [], lossy=False)
        assert "the time limit ended the run after 1 of 2 prompts" in report.remarks
    calls.clear()
    with RunFolder(tmp_path / "run") as folder:
        folder.open(manifest())
        again = measured(rows, bench, folder, warm_up=False)
    assert calls == ["transformers", "plain", "tree", "tree", "plain", "transformers"]
    assert [result.runs[0] for result in again.results] == [r.runs[0] for r in found.results]
    report = latency_report.make_report(again.results, manifest(), [], lossy=False)
    assert not any("time limit" in remark for remark in report.remarks)


def test_the_yardstick_keeps_its_speed_and_its_difference_is_said():
    rows, bench, _ = scripted(30.0, 20.0, 10.0)
    rows[0].ids = (1, 2, 9, 4)
    results = measure(rows, bench)
    assert results[0].has_speed
    report = latency_report.make_report(results, manifest(), [], lossy=False)
    assert report.remarks[0].startswith("transformers: 0 of 2 texts")


def manifest() -> dict[str, Any]:
    options = argparse.Namespace(
        max_new_tokens=4, repetitions=2, no_warmup=False, temperature="0", seed=0
    )
    return {
        "dtype": "float32",
        "device": "CPU",
        "prompts": {"rule": "2 prompts", "ids": ["p", "q"]},
        "versions": {},
        "machine": {"threads": 1},
        "settings": vars(options),
    }
