"""Recorded trees and their replay on the KV tree: every query sees its own path, nothing else."""

import json

import pytest
import torch

from specdeft.bench.growing_tree import BUILTIN_TREE, GrowingTree, read_growing_tree
from specdeft.bench.workload_states import GrowingState, SpeculativeState
from specdeft.kv_tree import KVShape
from specdeft.trees.token_tree import TokenTree

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=1)
POOL = {"page_size": 4, "dtype": torch.float32, "device": torch.device("cpu")}
#        0 -- 1 -- 3    the prompt of 6, then 1 (3 tokens) and 2 (5); 3 and 4 below 1
#         \    `-- 4
#          `-- 2
SMALL = GrowingTree((-1, 0, 1, 1, 0), (6, 3, 2, 4, 5))


def test_a_small_tree_by_hand():
    assert SMALL.starts == (-5, 1, 4, 4, 1)
    assert SMALL.ends == (0, 3, 5, 7, 5)
    assert (SMALL.num_steps, SMALL.num_generated) == (7, 14)
    assert [SMALL.alive(step) for step in (1, 4, 6, 7)] == [[1, 4], [2, 3, 4], [3], [3]]
    assert SMALL.kept(4) == [0, 1, 2, 3, 4]
    assert SMALL.kept(6) == [0, 1, 3]
    assert SMALL.begins_at(4) == [2, 3]
    assert GrowingTree.few_shot(9, 2, 3).alive(3) == [1, 2]


@pytest.mark.parametrize(
    ("parents", "tokens"),
    [((), ()), ((0,), (1,)), ((-1, 0), (3,)), ((-1, 0), (3, 0)), ((-1, 0, 0, 1), (1, 1, 1, 1))],
)
def test_what_is_no_tree_is_refused(parents, tokens):
    with pytest.raises(ValueError, match="node"):
        GrowingTree(parents, tokens)


def write_trees(path, *trees):
    path.write_text(json.dumps({"trees": list(trees)}))
    return path


def test_records_are_read_and_empty_nodes_left_out(tmp_path):
    nodes = [[6, -5, [1, 2, 3]], [3, 1, [4]], [0, 1, []], [5, 1, []], [2, 4, []]]
    path = write_trees(
        tmp_path / "t.json",
        {"incomplete": True, "nodes": [[2, -1, []]]},
        {"incomplete": False, "nodes": nodes},
    )
    assert read_growing_tree(path) == GrowingTree((-1, 0, 1, 0), (6, 3, 2, 5))
    assert read_growing_tree(path, 0).tokens == (2,)


@pytest.mark.parametrize(
    ("content", "index", "named"),
    [
        ("{", None, "holds no recorded trees"),
        ('{"trees": []}', None, "holds no complete tree"),
        ('{"trees": [{"incomplete": false, "nodes": [[2, -1, []]]}]}', 3, "tree 3 was asked for"),
        ('{"trees": [{"incomplete": false, "nodes": [[2, -1, [7]]]}]}', 0, "not a recorded tree"),
        ('{"trees": [{"incomplete": false, "nodes": [[2, -1, [0]]]}]}', 0, "has two parents"),
    ],
)
def test_a_file_without_such_a_tree_is_refused(tmp_path, content, index, named):
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=named):
        read_growing_tree(path, index)
    with pytest.raises(ValueError, match="cannot be read"):
        read_growing_tree(tmp_path / "nowhere.json")


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("tree", [SMALL, BUILTIN_TREE, GrowingTree.few_shot(13, 3, 6)])
def test_every_query_sees_the_values_its_path_wrote(tree, page_size):
    """Each token writes (its node, its place in the node) as its key; a query must see exactly the
    tokens of its path in order: no other branch's, none lost to a fork, none twice."""
    state = GrowingState(tree, SHAPE, **{**POOL, "page_size": page_size})

    def mark(node: int, place: int) -> float:
        return float(node * 10_000 + place)

    prompt = torch.tensor([mark(0, place) for place in range(tree.tokens[0])])
    checked = 0
    for step in state.steps():
        pool = state.kv.keys[0, :, 0, 0]
        if step.number == 1:
            # The prompt was cached before the branches were forked: write it where each sees it.
            for row in step.forest.visible():
                pool[step.forest.slots[row].long()[: len(prompt)]] = prompt
        alive = tree.alive(step.number)
        for slot, node in zip(step.new_slots.tolist(), alive, strict=True):
            pool[slot] = mark(node, step.number - tree.starts[node])
        state.kv.check_invariants()
        if step.number % 7 and step.number > 20:
            continue
        for node, row, position in zip(
            alive, step.forest.visible(), step.positions.tolist(), strict=True
        ):
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            expected = [mark(above, i) for above in path[:-1] for i in range(tree.tokens[above])]
            expected += [mark(node, i) for i in range(1 + step.number - tree.starts[node])]
            assert pool[step.forest.slots[row].long()].tolist() == expected
            assert position == len(expected) - 1
            checked += 1
    assert checked > 10
    assert state.num_steps == tree.num_steps


def test_ended_branches_free_their_pages():
    state = GrowingState(GrowingTree((-1, 0, 0), (8, 40, 4)), SHAPE, **POOL)
    free = {step.number: len(state.kv._free) for step in state.steps()}
    assert free[5] - free[4] == 1  # four tokens of the second branch, one page of four


def test_speculation_keeps_the_accepted_path():
    tree = TokenTree.full([2, 2])  # nodes 0, 1 (2, 3), 4 (5, 6); the kept path is 0, 1, 2
    state = SpeculativeState(5, tree, [2, 0, 1], SHAPE, **POOL)
    pool = state.kv.keys[0, :, 0, 0]
    kept = [float(-1 - position) for position in range(5)]
    lengths = []
    for step in state.steps():
        if step.number == 1:
            pool[step.forest.slots[:5].long()] = torch.tensor(kept)
        written = [100.0 * step.number + node for node in range(7)]
        pool[step.new_slots] = torch.tensor(written)
        visible = step.forest.visible()
        seen = pool[step.forest.slots[visible[6]].long()].tolist()
        assert seen == [*kept, written[0], written[4], written[6]]
        assert step.positions.tolist() == [len(kept) + depth for depth in tree.depths]
        kept += [written[node] for node in (0, 1, 2)[: step.num_tokens]]
        lengths.append(step.num_tokens)
    assert lengths == [3, 1, 2]
