"""Self-generated text: prompts of our own, waves, passages, loops cut, the whole train command."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from specdeft.heads.documents import Documents
from specdeft.heads.medusa import MedusaHeads
from specdeft.heads.prompts import (
    OPENINGS,
    SHORT_KINDS,
    openings,
    passage_prompts,
    short_prompts,
)
from specdeft.heads.sampler import Written
from specdeft.heads.self_generate import (
    GenerationPlan,
    SelfGenerator,
    loop_free_lengths,
    run_lengths,
    self_generate,
)
from specdeft.heads.target import Target, chat_turn
from specdeft.heads.text_store import TextStore
from specdeft.heads.train import main
from specdeft.trees.search import ValuedPaths

from .conftest import make_target

PLAN = GenerationPlan(60, wave_rows=24, long_wave_rows=6, max_answer=70, max_passage=30, greedy=0.2)


def test_prompts_are_seeded_varied_and_filled() -> None:
    prompts = short_prompts(3000, seed=5)
    assert prompts == short_prompts(3000, seed=5)
    assert prompts != short_prompts(3000, seed=6)
    assert len(set(prompts)) > 2000
    assert all("{" not in prompt and prompt.strip() == prompt for prompt in prompts)
    assert len(SHORT_KINDS) >= 9


def test_openings_are_seeded_short_and_half_from_the_list() -> None:
    made = openings(1000, seed=5)
    assert made == openings(1000, seed=5)
    assert made != openings(1000, seed=6)
    assert len(set(OPENINGS)) == len(OPENINGS) > 200
    assert set(made[:500]) <= set(OPENINGS)
    assert all(1 <= len(opening.split()) <= 12 and opening.strip() for opening in made)
    assert len(set(made[500:])) > 200


def test_a_wave_holds_prompts_that_were_begun_and_completed() -> None:
    target = make_target(end_scale=1.3)
    generator = SelfGenerator(target, replace(PLAN, own_prompts=0.25, begun_prompts=0.5))
    before = generator.turn.before
    requests = generator._short_requests(random.Random(0))
    own = [r for r in requests if r.writes_prompt and list(r.ids) == before]
    begun = [r for r in requests if r.writes_prompt and len(r.ids) > len(before)]
    assert (len(own), len(begun), len(requests)) == (6, 12, 24)
    assert all(list(r.ids[: len(before)]) == before for r in begun)
    limits = generator._writer(is_long=False).limits
    assert max(map(limits.positions, requests)) <= generator._writer(is_long=False).num_positions


def test_passage_prompts_hold_their_passage() -> None:
    passages = [f"Passage number {i} speaks about several important things." for i in range(50)]
    for prompt, passage in zip(passage_prompts(passages, 1), passages, strict=True):
        assert passage in prompt
        assert len(prompt) > len(passage)


def written(*answers: list[int]) -> Written:
    longest = max(map(len, answers)) + 2
    tokens = torch.tensor([[7, 7, *row] + [0] * (longest - 2 - len(row)) for row in answers])
    n = len(answers)
    lengths = torch.tensor([len(row) + 2 for row in answers])
    return Written(tokens, torch.full((n,), 2), lengths, torch.arange(n), torch.ones(n).bool())


def test_loops_are_cut_where_they_have_shown_themselves() -> None:
    plain = list(range(10, 70))
    period_3 = [50, 51, *[1, 2, 3] * 20]
    one_token = [9, *[4] * 60]
    short_repeat = [*range(30, 40), *[1, 2, 3] * 4, *range(40, 50)]
    keep = loop_free_lengths(written(plain, period_3, one_token, short_repeat)).tolist()
    # A loop of period p is cut once 24 tokens in a row have come again.
    assert keep == [62, 2 + 2 + 3 + 24, 2 + 1 + 1 + 24, 34]


def test_run_lengths() -> None:
    flags = torch.tensor([[True, True, False, True, True, True]])
    assert run_lengths(flags).tolist() == [[1, 2, 0, 1, 2, 3]]


def test_waves_hold_prompts_and_answers_and_later_ones_read_earlier_ones() -> None:
    target = make_target(end_scale=1.3)
    generator = SelfGenerator(target, PLAN)
    turn = chat_turn(target)
    waves = [generator.next_wave() for _ in range(3)]
    assert len(generator.passages) > 8
    assert len(waves[2]) <= PLAN.long_wave_rows < len(waves[0])
    for wave in waves:
        for i in range(len(wave)):
            span = slice(int(wave.offsets[i]), int(wave.offsets[i + 1]))
            ids, learn = wave.tokens[span].tolist(), wave.learn[span]
            prompt_length = int((~learn).sum())
            assert learn[prompt_length:].all()
            assert ids[: len(turn.before)] == turn.before
            assert ids[prompt_length - len(turn.after) : prompt_length] == turn.after
            assert 4 <= len(ids) - prompt_length <= PLAN.max_answer
    again = SelfGenerator(target, PLAN)
    for wave in waves:
        assert torch.equal(again.next_wave().tokens, wave.tokens)


def test_no_prompt_is_answered_greedily_twice() -> None:
    generator = SelfGenerator(make_target(), replace(PLAN, greedy=1.0))
    first = generator._asked(["w1", "w2", "w1"], random.Random(0))
    again = generator._asked(["w2", "w3"], random.Random(0))
    assert [request.temperature == 0 for request in first] == [True, True, False]
    assert [request.temperature == 0 for request in again] == [False, True]


def test_generation_stops_at_its_count_and_its_time() -> None:
    target = make_target(end_scale=1.3)
    assert len(self_generate(target, PLAN)) >= PLAN.count
    hurried = GenerationPlan(10**6, wave_rows=8, max_answer=10, time_limit_s=1e-6)
    assert 0 < len(self_generate(target, hurried)) <= 8


def test_a_model_without_a_chat_template_is_refused(target: Target) -> None:
    target.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat_turn(target)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    target = make_target(end_scale=1.3)
    target.model.save_pretrained(tmp_path / "tiny")
    target.tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_train_command_end_to_end(tmp_path: Path, model_folder: Path) -> None:
    output = tmp_path / "heads"
    command = [
        *("--model", str(model_folder), "--output", str(output), "--self-generate", "80"),
        *("--wave-rows", "32", "--held-out", "0.2", "--num-heads", "2", "--num-layers", "1"),
        *("--heads-output", "reduced", "--draft-vocab-size", "40", "--batch-rows", "64"),
    ]
    assert main(command) == 0
    heads = MedusaHeads.load(output, hidden_size=16, vocab_size=96)
    assert heads.config.output == "reduced"
    assert ValuedPaths.load(output / "tree_values.json").paths
    record = json.loads((output / "training_record.json").read_text())
    assert record["command"] == ["specdeft", "train", *command]
    assert record["data"]["training"]["learnt_tokens"] > 0
    assert record["environment"]["torch"] == torch.__version__
    assert len(Documents.load(output / "documents.safetensors")) >= 80


def test_the_train_command_reads_text_and_a_config_file(tmp_path: Path, model_folder: Path) -> None:
    data = tmp_path / "data.jsonl"
    words = " ".join(f"w{i}" for i in range(40))
    data.write_text("\n".join(json.dumps({"text": words}) for _ in range(10)), encoding="utf-8")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_heads": 1, "batch_rows": 16}), encoding="utf-8")
    output = tmp_path / "heads"
    arguments = ["--model", str(model_folder), "--output", str(output), "--data", str(data)]
    assert main([*arguments, "--config", str(config), "--max-steps", "3"]) == 0
    assert MedusaHeads.load(output).config.num_heads == 1
    record = json.loads((output / "training_record.json").read_text())
    assert record["training"]["batch_rows"] == 16


def test_the_train_command_says_what_is_wrong(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": 1}\n', encoding="utf-8")
    arguments = ["--model", str(model_folder), "--output", str(tmp_path / "o"), "--data", str(data)]
    assert main(arguments) == 2
    assert "line 1 has none of" in capsys.readouterr().err
    assert not (tmp_path / "o" / "model.safetensors").exists()


def test_a_stopped_generation_goes_on_to_the_same_texts(tmp_path: Path) -> None:
    target = make_target(end_scale=1.3)
    plan = replace(PLAN, count=100)
    whole = self_generate(target, plan)

    def store(resume: bool) -> TextStore:
        return TextStore.open(tmp_path / "waves", asdict(plan), "tiny", resume=resume)

    first = store(resume=False)
    generator = SelfGenerator(target, plan)
    for _ in range(2):
        first.add(generator.next_wave())
    resumed = self_generate(target, plan, store(resume=True))
    assert len(store(resume=True).waves()) > 2
    for name in ("tokens", "learn", "offsets", "temperature"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name))


def test_texts_of_another_plan_are_not_gone_on_with(tmp_path: Path) -> None:
    TextStore.open(tmp_path, asdict(PLAN), "tiny", resume=False)
    with pytest.raises(ValueError, match="another model or plan"):
        TextStore.open(tmp_path, asdict(replace(PLAN, seed=1)), "tiny", resume=True)
    with pytest.raises(ValueError, match="another model or plan"):
        TextStore.open(tmp_path, asdict(PLAN), "other", resume=True)


def test_the_config_a_run_leaves_behind_repeats_it(tmp_path: Path, model_folder: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    command = [
        *("--model", str(model_folder), "--self-generate", "40", "--wave-rows", "32"),
        *("--num-heads", "2", "--num-layers", "1", "--batch-rows", "64", "--held-out", "0.2"),
        *("--seed", "3", "--max-steps", "6"),
    ]
    assert main([*command, "--output", str(first)]) == 0
    assert main(["--config", str(first / "run.json"), "--output", str(second)]) == 0
    for name in ("model.safetensors", "documents.safetensors", "tree_values.json", "log.jsonl"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert (first / "run.json").read_bytes() == (second / "run.json").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "no JSON file"), ("[]", "not a JSON object"), ('{"lerning_rate": 1}', "lerning_rate")],
)
def test_a_config_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(content, encoding="utf-8")
    assert main(["--model", "m", "--output", str(tmp_path / "o"), "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_killed_runs_resume_to_the_same_files(model_folder: Path) -> None:
    """Two kills here; twenty of each phase by the command in the script's first lines."""
    script = Path(__file__).with_name("kill_and_resume.py")
    command = [sys.executable, str(script), "--model", str(model_folder), "--kills", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 of 2 runs differ\n")


def test_waves_of_a_run_killed_once_its_texts_were_joined_are_removed(
    tmp_path: Path, model_folder: Path
) -> None:
    output = tmp_path / "o"
    command = ["--model", str(model_folder), "--output", str(output), "--self-generate", "6"]
    small = ["--wave-rows", "6", "--max-steps", "2", "--batch-rows", "32", "--held-out", "0.2"]
    assert main([*command, *small]) == 0
    (output / "waves" / "0").mkdir(parents=True)
    (output / "waves" / "0" / "wave-00000.safetensors").write_bytes(b"left behind")
    assert main([*command, *small, "--resume"]) == 0
    assert not (output / "waves").exists()


@pytest.mark.parametrize(
    ("more", "cell_size", "sequential"),
    [([], 64, True), (["--cell-size", "24"], 24, True), (["--cell-size", "0"], None, True)]
    + [([option], None, False) for option in ("--parallel", "--no-token-input")],
)
def test_the_kind_of_heads_follows_from_the_options(
    tmp_path: Path, model_folder: Path, more: list[str], cell_size: int | None, sequential: bool
) -> None:
    data = tmp_path / "data.jsonl"
    words = " ".join(f"w{i}" for i in range(40))
    data.write_text("\n".join(json.dumps({"text": words}) for _ in range(10)), encoding="utf-8")
    command = ["--model", str(model_folder), "--data", str(data), "--output", str(tmp_path / "o")]
    assert main([*command, "--max-steps", "2", "--batch-rows", "32", *more]) == 0
    config = MedusaHeads.load(tmp_path / "o").config
    assert (config.cell_size, config.sequential) == (cell_size, sequential)


def test_a_cell_for_parallel_heads_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--model", "m", "--output", str(tmp_path), "--parallel", "--cell-size", "8"]
    assert main(command) == 2
    assert "--cell-size is for sequential heads" in capsys.readouterr().err
