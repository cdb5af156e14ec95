"""The comparison's own parts on the CPU: inputs, layouts, gate, report. Times need a GPU."""

import pytest
import torch

from specdeft.bench import attention
from specdeft.bench.attention import Cell, Outcome
from specdeft.bench.cuda_timing import Ceilings, num_sets
from specdeft.bench.report import as_markdown
from specdeft.trees.token_tree import TokenTree

CPU = torch.device("cpu")
CELL = Cell(attention.parse_heads("4/2/32", torch.float16), 200, attention.random_tree(9))


@pytest.mark.parametrize("method", [m for m in attention.METHODS if m != "flex"])
def test_every_method_passes_the_gate(method: str) -> None:
    forest = attention.speculation_forest(CELL)
    q, k, v = attention.random_inputs(CELL, forest, CPU)
    exact = attention.exact_output(CELL, forest, q, k, v)
    prepared = attention.prepare(method, CELL, forest, 32, CPU)
    k_pool, v_pool = (attention.pool_for(method, CELL, forest, kv, 32) for kv in (k, v))
    out = prepared.run(q, k_pool, v_pool)
    assert attention.relative_error(out, exact) <= attention.worst_error(method, torch.float16)


def test_the_gate_refuses_nan_and_wrong_masks() -> None:
    forest = attention.speculation_forest(CELL)
    q, k, v = attention.random_inputs(CELL, forest, CPU)
    exact = attention.exact_output(CELL, forest, q, k, v)
    assert attention.relative_error(torch.full_like(q, float("nan")), exact) == float("inf")
    chain = CELL._replace(tree=TokenTree.chain(8))
    prepared = attention.prepare("sdpa", chain, attention.speculation_forest(chain), 32, CPU)
    wrong = attention.relative_error(prepared.run(q, k, v), exact)
    assert wrong > attention.WORST_ERROR[torch.float16]


def test_a_forest_of_the_cell_sees_what_the_tree_sees() -> None:
    visible = attention.speculation_forest(CELL).visible()
    assert visible[:, :200].all()
    assert torch.equal(visible[:, 200:], CELL.tree.ancestors())


def test_report_names_the_cells_where_another_is_ahead() -> None:
    outcomes = [
        Outcome(CELL, attention.OURS, 1.0, 1e-4, 8.0, 0.1, None),
        Outcome(CELL, "sdpa", 1.0, 1e-4, 7.0, 0.1, None),
        Outcome(CELL, "flex", 1.0, None, None, None, "no valid configuration"),
    ]
    report = attention.make_report(outcomes, Ceilings(4e12, 7e14), CPU)
    assert report.remarks == ("sdpa is ahead at 4/2/32, context 200, 9 nodes: 7.0 us against 8.0",)
    assert "no valid configuration" in as_markdown(report)
    assert report.data["outcomes"][2]["median_us"] is None


def test_sets_outlast_the_cache() -> None:
    assert num_sets(32 << 20) == 10
    assert num_sets(1 << 40) == 2
    assert num_sets(1) == 64


@pytest.mark.parametrize("text", ["32/8", "a/b/c", "32/5/64", "0/1/64"])
def test_malformed_heads_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--heads"):
        attention.parse_heads(text, torch.bfloat16)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="on a machine with a GPU"):
        attention.main([])
