"""Recorded accept lengths, and what a step must read, by hand."""

import json

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd

from specdeft.bench.analytic import kv_read_bytes_per_step, kv_read_ratio_vs_per_path
from specdeft.bench.drafts import PlannedHeads, read_accept_lengths
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.kv_tree import KVShape
from specdeft.trees.token_tree import TokenTree


def test_lengths_count_the_bonus(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"accept_lengths": [[1, 3, 0], [5]]}))
    assert read_accept_lengths(path) == [[0, 2, 0], [4]]
    path.write_text("[[2]]")
    assert read_accept_lengths(path) == [[1]]


@pytest.mark.parametrize("text", ["{", "{}", "[]", "[[]]", "[[1.5]]", "[[true]]", "[[-1]]", "3"])
def test_what_is_not_lengths_is_refused(tmp_path, text):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"lengths\.json"):
        read_accept_lengths(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_accept_lengths(tmp_path / "nowhere.json")


def test_planned_tokens_are_distinct_and_right_only_where_planned():
    tree = TokenTree.full([3, 2])
    heads = PlannedHeads(tree, 11, torch.device("cpu"), 20, None)
    heads.plan([4, 10, 6, 7, 8], [1, 2])
    anything = torch.zeros(1)
    module = torch.nn.Identity()
    first = heads.draft(anything, anything, module, module, 3)
    assert first.shape == (1, 2, 3)
    assert first[0, 0].tolist() == [10, 1, 2]  # rank 0 is on the path
    assert first[0, 1].tolist() == [7, 8, 9]  # 6 is right, and nowhere
    second = heads.draft(anything, anything, module, module, 3)
    assert second[0, 0, 0] == 7
    assert second[0, 1, 0] == 8


def test_kv_reads_by_hand():
    shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=4)
    tree = TokenTree.full([2, 2])  # 7 nodes, 4 paths of 3 nodes
    assert kv_read_bytes_per_step(shape, torch.bfloat16, tree, 93) == 100 * 2 * 2 * 3 * 4 * 2
    assert kv_read_ratio_vs_per_path(tree, 93) == pytest.approx(4 * 96 / 100)
    assert kv_read_ratio_vs_per_path(TokenTree.chain(4), 50) == 1.0


@pytest.mark.parametrize("fields", [None, {}, {"sequential": True, "token_input": True}])
def test_planned_drafts_are_one_graph_for_the_compiler(fields):
    """Engines that compile their drafts compile these, too: no break, the same tokens."""
    torch.manual_seed(0)
    tree = TokenTree.full([3, 2])
    real = None
    if fields is not None:
        config = HeadsConfig(num_heads=2, num_layers=1, hidden_size=8, vocab_size=11, **fields)
        real = MedusaHeads(config)
    plain, fused = (PlannedHeads(tree, 11, torch.device("cpu"), 20, real) for _ in range(2))
    compiled = torch.compile(fused.draft, fullgraph=True, backend="eager")
    embedding, output = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
    for heads in (plain, fused):
        heads.plan([4, 10, 6, 7, 8], [1, 2])
    arguments = (torch.randn(1, 8), torch.tensor([4]), embedding, output, 3)
    for _step in range(3):
        with torch.inference_mode():
            assert torch.equal(plain.draft(*arguments), compiled(*arguments))


@pytest.mark.parametrize("fields", [{}, {"sequential": True, "token_input": True}])
def test_a_compiler_does_not_leave_out_the_heads_that_are_paid_for(fields):
    """What nothing depends on is dropped from compiled graphs, and the row would be too fast."""
    config = HeadsConfig(num_heads=2, num_layers=1, hidden_size=8, vocab_size=11, **fields)
    planned = PlannedHeads(TokenTree.full([3, 2]), 11, torch.device("cpu"), 20, MedusaHeads(config))
    kept: list[str] = []

    def compiler(graph, _inputs):
        kept.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(
        planned.draft, fullgraph=True, backend=aot_autograd(fw_compiler=compiler)
    )
    planned.plan([4, 10, 6, 7, 8], [1, 2])
    embedding, output = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
    with torch.inference_mode():
        compiled(torch.randn(1, 8), torch.tensor([4]), embedding, output, 3)
    assert any("topk" in name for name in kept)


def test_the_heads_that_are_paid_for_multiply_as_those_that_draft():
    config = HeadsConfig(
        num_heads=2, num_layers=1, hidden_size=8, vocab_size=11, sequential=True, token_input=True
    )
    shapes = []

    def product(x, weight, bias=None):
        shapes.append(weight.shape)
        return torch.nn.functional.linear(x, weight, bias)

    real = MedusaHeads(config)
    planned = PlannedHeads(TokenTree.full([3, 2]), 11, torch.device("cpu"), 20, real, product)
    planned.plan([4, 10, 6, 7, 8], [1, 2])
    embedding, output = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
    with torch.inference_mode():
        planned.draft(torch.randn(1, 8), torch.tensor([4]), embedding, output, 3)
    assert len(shapes) >= 4
