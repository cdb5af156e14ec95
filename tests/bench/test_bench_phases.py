"""Phases add up to the step; ranks found again from a text are paths of the tree."""

from itertools import count

import pytest

from specdeft.bench import latency_measure
from specdeft.bench.phases import measure_phases
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
