"""Decoders that cheat, run through the whole command: each is caught, and gets no speed.

The cheats are put into the real decoder: it is the harness that has to notice.
"""

import json
from typing import Any

import pytest
import torch

from specdeft import accept as accept_module
from specdeft import engine as engine_module
from specdeft.accept import Acceptance
from specdeft.bench import cli, latency
from specdeft.bench.workbench import Workbench
from specdeft.decoder import SpecDecoder
from specdeft.engine import Engine
from specdeft.model import TargetModel
from specdeft.tree_tensors import TreeTensors
from tests.bench.test_bench_commands import tiny_bench

TREE = "chain-2"


@pytest.fixture(params=[torch.float32])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    """A clock that work moves: a forward takes 10 ms and a look at the clock 1 us."""
    known, now = tiny_bench(request.param), [0.0]

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    honest = TargetModel.forward

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        now[0] += 1e-2
        return honest(self, *arguments, **settings)

    monkeypatch.setattr(TargetModel, "forward", forward)
    found = Workbench(known.model, known.tokenizer, known.heads, None, clock)
    monkeypatch.setattr(latency, "load", lambda _options: found)
    return found


@pytest.fixture
def run(bench, capsys, tmp_path):
    """Run the command; its exit code and the tree's row."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Hello there"}\n{"prompt": "abc"}\n')

    def latency_row(*more: str) -> tuple[int, dict[str, Any]]:
        arguments = ["latency", "--trees", TREE, "--baselines", "none", "-r", "2"]
        arguments += ["--prompts", str(path), "--dtype", "float32", "--max-new-tokens", "20"]
        code = cli.main([*arguments, *more, "--output", "json"])
        rows = {row["row"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        assert rows["plain"]["has_speed"]
        return code, rows[TREE]

    return latency_row


def assert_caught(code: int, row: dict[str, Any]) -> None:
    assert code == 1
    assert not row["has_speed"]
    assert not {"tpot_ms", "median_tokens_per_second", "speedup_over_plain"} & set(row)


in_both = pytest.mark.parametrize("bench", [torch.float32, torch.bfloat16], indirect=True)


@in_both
def test_an_honest_decoder_is_believed(run):
    code, row = run()
    assert code == 0
    assert row["has_speed"]
    assert row["problems"] == []
    # Seven forwards give at least what plain decoding's need one each for.
    assert row["speedup_over_plain"]["median"] >= 0.99


@in_both
def test_one_that_skips_verification(run, monkeypatch):
    honest = accept_module.accept

    def accept(tokens: torch.Tensor, chosen: torch.Tensor, tree: TreeTensors) -> Acceptance:
        if tree.num_nodes > 1:
            # Whatever was drafted is called the target's own choice.
            chosen = torch.cat([tokens[:, 1:], chosen[:, -1:]], dim=1)
        return honest(tokens, chosen, tree)

    monkeypatch.setattr(engine_module, "accept", accept)
    code, row = run()
    assert row["mean_acceptance_length"] > 2.5
    assert row["identical_prompts"] == 0
    assert_caught(code, row)


def test_one_that_goes_on_past_the_end(bench, run, monkeypatch):
    code, row = run()
    prompt = bench.tokenizer("Hello there")["input_ids"]
    text = bench.decoder("plain").generate(prompt, max_new_tokens=20).token_ids
    end = text[9]
    bench.model.generation_config.eos_token_id = [96, end]
    honest = SpecDecoder._eos_ids

    def eos_ids(self, config: Any) -> frozenset[int]:
        return frozenset() if self.tree.num_nodes > 1 else honest(self, config)

    monkeypatch.setattr(SpecDecoder, "_eos_ids", eos_ids)
    code, row = run()
    past = 20 - (text.index(end) + 1)
    assert f"prompt 1: {past} tokens were counted past the end of the text" in row["problems"]
    assert_caught(code, row)


def test_one_that_reuses_a_warmed_cache(run, monkeypatch):
    """The prompt's forward is skipped where the prompt was seen: its cache is put back instead."""
    honest, warmed = Engine.prefill, dict[tuple[int, ...], tuple[torch.Tensor, ...]]()

    def prefill(self, cache: Any, batch: Any, prompt: Any, sampler: Any, *graphs: Any) -> None:
        # Speculation only: plain decoding stays the honest baseline.
        key = tuple(prompt.tolist())
        is_ours = batch.emitted.shape[1] > 1
        if is_ours and key in warmed:
            keys, values, root, hidden = warmed[key]
            count = len(key)
            cache.keys[:, :count], cache.values[:, :count] = keys, values
            cache.advance(batch.sequences[0], count)
            batch.lengths += count
            batch.root.copy_(root)
            batch.hidden.copy_(hidden)
            batch.emitted[:, 0] = root
            batch.counts.fill_(1)
            return
        honest(self, cache, batch, prompt, sampler, *graphs)
        if is_ours:
            count = len(key)
            kept = (cache.keys[:, :count], cache.values[:, :count], batch.root, batch.hidden)
            warmed[key] = tuple(tensor.clone() for tensor in kept)

    monkeypatch.setattr(Engine, "prefill", prefill)
    code, row = run()
    assert warmed
    assert row["identical_prompts"] == 2
    assert any("earlier calls are reused" in problem for problem in row["problems"])
    assert_caught(code, row)


def test_lossy_shows_a_caught_row_only_with_its_mark(run, monkeypatch):
    honest = accept_module.accept

    def accept(tokens: torch.Tensor, chosen: torch.Tensor, tree: TreeTensors) -> Acceptance:
        if tree.num_nodes > 1:
            chosen = torch.cat([tokens[:, 1:], chosen[:, -1:]], dim=1)
        return honest(tokens, chosen, tree)

    monkeypatch.setattr(engine_module, "accept", accept)
    code, row = run("--lossy")
    assert code == 1
    assert row["lossy"]
    assert "tpot_ms" in row
