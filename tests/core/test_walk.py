"""Drawn only where the walk comes by: the same tokens there, the same outcome, and no draw else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft import walk
from specdeft.accept import accept
from specdeft.config import GenerationConfig
from specdeft.sampling import Sampler, choose_tokens
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.token_tree import TokenTree
from specdeft.walk import NOT_DRAWN, choose_along

CPU = torch.device("cpu")
VOCAB_SIZE = 5
TREES = (
    TokenTree.chain(0),
    TokenTree.chain(4),
    TokenTree.from_paths([(0,), (0, 0), (0, 1), (1,), (1, 0), (2,), (0, 0, 0)]),
    # The chain and the heads can guess the same: two paths of the same tokens.
    TokenTree.from_paths([(0,), (0, 0), (1,), (1, 0)]).with_lookup(3),
)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    tree=st.sampled_from(TREES),
    size=st.integers(1, 3),
    cut=st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.8}]),
)
def test_the_outcome_is_that_of_drawing_everywhere(
    seed: int, tree: TokenTree, size: int, cut: dict[str, float]
) -> None:
    torch.manual_seed(seed)
    tensors = TreeTensors.build(tree, CPU)
    config = GenerationConfig(temperature=0.8, seed=seed, **cut)
    sampler = Sampler.build(config, tuple(range(size)), CPU)
    # Sharp logits that depend on the depth alone, so that paths are often accepted.
    by_depth = 3 * torch.randn(size, tensors.num_levels, VOCAB_SIZE)
    logits = by_depth[:, tensors.depths]
    positions = torch.randint(100, (size, 1)) + tensors.levels
    tokens = torch.randint(VOCAB_SIZE, (size, tree.num_nodes))
    everywhere = choose_tokens(logits, positions, tensors.depths, sampler)
    along = choose_along(logits, positions, tokens, tensors, sampler)
    drawn = along != NOT_DRAWN
    assert torch.equal(along[drawn], everywhere[drawn])
    assert bool(drawn[:, 0].all())
    for found, wanted in zip(
        accept(tokens, along, tensors), accept(tokens, everywhere, tensors), strict=True
    ):
        assert torch.equal(found, wanted)


def test_a_refused_branch_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = TreeTensors.build(TREES[2], CPU)
    sampler = Sampler.build(GenerationConfig(temperature=1.0), (0,), CPU)
    logits = torch.zeros(1, tensors.num_nodes, VOCAB_SIZE)
    logits[..., 3] = 50.0  # surely drawn
    tokens = torch.zeros(1, tensors.num_nodes, dtype=torch.int64)
    second = [node for node, parent in enumerate(TREES[2].parents) if parent == 0][1]
    tokens[0, second] = 3
    rows: list[int] = []

    def counted(logits: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(logits.shape[1])
        return choose_tokens(logits, *rest)

    monkeypatch.setattr(walk, "choose_tokens", counted)
    along = choose_along(logits, tensors.levels[None], tokens, tensors, sampler)
    assert rows == [1, 1]
    assert (along != NOT_DRAWN).nonzero()[:, 1].tolist() == [0, second]
