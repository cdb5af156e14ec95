"""A tree with a lookup chain is the heads' tree and a chain at the root, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdeft.trees.draft_plan import draft_plan
from specdeft.trees.named import named_tree
from specdeft.trees.statistics import accepted_depths
from specdeft.trees.token_tree import TokenTree

PATHS = st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=12)
TREES = PATHS.map(
    lambda paths: TokenTree.from_paths(
        sorted({path[:end] for path in paths for end in range(1, len(path) + 1)})
    )
)


@given(TREES, st.integers(0, 9))
def test_the_chain_stands_first_and_leaves_the_rest_as_it_was(tree: TokenTree, chain: int) -> None:
    both = tree.with_lookup(chain)
    assert both.num_nodes == tree.num_nodes + chain
    assert both.head_tree == tree
    assert both.paths[1 : chain + 1] == tuple((-1,) * depth for depth in range(1, chain + 1))
    assert both.paths[chain + 1 :] == tree.paths[1:]
    assert both.max_depth == max(tree.max_depth, chain)
    assert both.top_k == tree.top_k
    assert both.with_lookup(0) == tree
    assert TokenTree.from_json(both.to_json()) == both
    # Rebuilt the long way round, node by node: the same ancestors.
    sees = both.ancestors()
    for node in range(both.num_nodes):
        above = {node}
        while (node := both.parents[node]) >= 0:
            above.add(node)
        assert set(sees[max(above)].nonzero().squeeze(1).tolist()) == above


@given(TREES, st.integers(0, 9), st.integers(0, 5))
def test_pruning_cuts_both_parts(tree: TokenTree, chain: int, depth: int) -> None:
    cut = tree.with_lookup(chain).prune(depth)
    assert cut == tree.prune(depth).with_lookup(min(chain, depth))


def test_heads_are_asked_for_their_part_only() -> None:
    tree = named_tree("deft-32").with_lookup(20)
    tree.validate_for(num_heads=4)
    with pytest.raises(ValueError, match="4 deep but there are 3 heads"):
        tree.validate_for(num_heads=3)
    ranks = torch.tensor([[0, 0, 0, 0], [3, 1, 2, 0], [9, 0, 0, 0]])
    assert accepted_depths(tree, ranks).tolist() == [4, 2, 0]
    with pytest.raises(ValueError, match="plan its head_tree"):
        draft_plan(tree)


def test_hash_and_text_name_the_chain() -> None:
    tree = TokenTree.chain(2)
    assert tree.with_lookup(2).content_hash not in (
        tree.content_hash,
        tree.with_lookup(1).content_hash,
    )
    assert "lookup 3" in tree.with_lookup(3).summary()
    assert tree.with_lookup(2).draw(ascii_only=True) == "o-+-=---=\n  `-0---0"


@pytest.mark.parametrize(
    ("parents", "ranks", "num_lookup"),
    [
        ((-1, 0), (-1, 0), 1),  # a head's node is no lookup
        ((-1, 0, 0), (-1, -1, -1), 2),  # not a chain
        ((-1, 0, 1, 1), (-1, -1, -1, 0), 2),  # something hangs below it
        ((-1, 0), (-1, -1), 2),  # longer than the tree
        ((-1, 0), (-1, -1), -1),
    ],
)
def test_what_is_no_chain_at_the_root_is_refused(
    parents: tuple[int, ...], ranks: tuple[int, ...], num_lookup: int
) -> None:
    with pytest.raises(ValueError, match="lookup"):
        TokenTree(parents, ranks, num_lookup)


@pytest.mark.parametrize("lookup", ["-1", "1.5", "true", '"3"', "5000"])
def test_files_with_a_wrong_chain_are_refused(lookup: str) -> None:
    with pytest.raises(ValueError, match="lookup"):
        TokenTree.from_json(f'{{"paths": [[0]], "lookup": {lookup}}}')
