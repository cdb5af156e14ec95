"""Phases add up to the step; ranks found again from a text are paths of the tree."""

from itertools import count
from typing import Any

import pytest

from specdeft.bench import latency_measure
from specdeft.bench.phases import _EventWatch, measure_phases
from specdeft.bench.ranks import kept_ranks
from specdeft.bench.rows import DecoderRow
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import Workbench
from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.trees.named import named_tree
from specdeft.trees.token_tree import TokenTree
from tests.bench.test_bench_commands import tiny_bench
from tests.core.tiny import prompt_ids


def test_phases_add_up_to_the_step():
    known, ticks = tiny_bench(), count()
    # Every reading of the clock is a second later than the one before.
    bench = Workbench(known.model, known.tokenizer, known.heads, None, lambda: float(next(ticks)))
    config = GenerationConfig(max_new_tokens=20, ignore_eos=True)
    steps = measure_phases(bench, "chain-2", prompt_ids(5), config)
    assert len(steps) > 3
    num_layers = known.model.config.num_hidden_layers
    for step in steps:
        # Two readings around each part; a layer's attention is read twice inside the forward.
        assert step.draft == step.accept == step.commit == 1000.0
        assert step.attention == num_layers * 1000.0
        assert step.forward == (num_layers + 1) * 1000.0
        assert step.idle >= 5000.0
        assert step.step == pytest.approx(sum(step))
    whole = [step.step for step in steps]
    assert all(seconds == pytest.approx(round(seconds, -3)) for seconds in whole)
    assert measure_phases(bench, "chain-2", prompt_ids(5), GenerationConfig(max_new_tokens=1)) == []


class FakeEvent:
    """Ends when its graph's replay does; reading it before that is a fault."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def synchronize(self) -> None:
        self.log.append(f"wait {self.name}")

    def elapsed_time(self, _end: "FakeEvent") -> float:
        return 500.0


def test_a_replayed_step_is_read_while_the_next_one_runs():
    """Two captures take turns: neither is replayed again before its events were read."""
    log: list[str] = []
    watch = _EventWatch(("draft",))

    class FakeGraph:
        def __init__(self, name: str) -> None:
            self.name = name

        def replay(self) -> None:
            log.append(f"replay {self.name}")

    class FakeGraphs:
        names = iter("AB")

        def __init__(self, *_captured_on: object) -> None:
            self.engine = self.cache = self.batch = self.sampler = None
            self.name, self.known = next(self.names), dict[str, FakeGraph]()

        def graph(self, tree: str, _max_context: int) -> FakeGraph:
            if tree not in self.known:
                name = self.name + tree
                mark: Any = FakeEvent(log, name)
                watch._marks = [("draft", mark, mark)]
                self.known[tree] = FakeGraph(name)
            return self.known[tree]

    graphs: Any = FakeGraphs()
    trees: Any = ["1", "1", "1", "2", "1"]
    for tree in trees:
        watch.run(graphs, tree, 1024)
    expected = "replay A1, replay B1, wait A1, replay A1, wait B1, replay B2, wait A1, replay A1"
    assert ", ".join(log) == f"{expected}, wait B2"
    assert watch.steps == [{"draft": 0.5}] * 4


def test_phases_are_those_of_the_tree_of_the_whole_request(monkeypatch, tmp_path):
    """They are measured in a short text, for which "auto" might take another tree."""
    seen = []

    def tree_of(_decoder, config, num_prompt_tokens):
        return TokenTree.chain(config.max_new_tokens // num_prompt_tokens)

    def measured(_bench, tree, _ids, config):
        seen.append((tree, config.max_new_tokens))
        return []

    monkeypatch.setattr(SpecDecoder, "tree_of", tree_of)
    monkeypatch.setattr(latency_measure, "measure_phases", measured)
    row = DecoderRow("chain-2", tiny_bench())
    with RunFolder(tmp_path) as folder:
        folder.open({"command": []})
        config = GenerationConfig(max_new_tokens=200)
        result = latency_measure.RowResult("chain-2", is_ours=True)
        assert latency_measure.phase_figures(row, result, [1] * 50, config, folder) == {}
    assert seen == [(TokenTree.chain(4), 32)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("fields", [{}, {"sequential": True, "token_input": True}])
def test_ranks_found_again_are_paths_of_the_tree(temperature, fields):
    bench = tiny_bench(**fields)
    paths = set(named_tree("deft-64").paths)
    row = DecoderRow("deft-64", bench)
    found = []
    for seed in range(4):
        prompt = prompt_ids(9, seed=seed)
        config = GenerationConfig(max_new_tokens=40, temperature=temperature, seed=seed)
        run = row.run(prompt, config)
        ranks = kept_ranks(bench, prompt, run, row.decoder.tree.top_k)
        assert [len(step) for step in ranks] == list(run.per_step_accepted)
        found += [step for step in ranks if step]
    assert len(found) > 5
    assert set(found) <= paths
    assert len(set(found)) > 2
