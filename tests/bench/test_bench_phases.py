"""Phases add up to the step; ranks found again from a text are paths of the tree."""

from itertools import count

import pytest

from specdeft.bench.phases import measure_phases
from specdeft.bench.ranks import kept_ranks
from specdeft.bench.rows import DecoderRow
from specdeft.bench.workbench import Workbench
from specdeft.config import GenerationConfig
from specdeft.trees.named import named_tree
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
