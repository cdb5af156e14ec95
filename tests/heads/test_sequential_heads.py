"""Sequential heads: every guess follows from the tokens of its own path, in training and trees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdeft.heads.features import IGNORED, tokens_before
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.trees.draft_plan import draft_plan
from specdeft.trees.named import named_tree
from specdeft.trees.token_tree import TokenTree

K, H, V, R = 4, 16, 50, 30


def make(
    output: str = "shared", projection: bool = True, cell_size: int | None = None
) -> MedusaHeads:
    size, ids = (R, torch.randperm(V)[:R]) if output == "reduced" else (None, None)
    config = HeadsConfig(
        num_heads=K,
        num_layers=2,
        hidden_size=H,
        vocab_size=V,
        output=output,
        token_input=True,
        projection=projection,
        draft_vocab_size=size,
        sequential=True,
        cell_size=cell_size,
    )
    heads = MedusaHeads(config, ids)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    return heads


@pytest.fixture
def layers() -> tuple[nn.Embedding, nn.Linear]:
    return nn.Embedding(V, H), nn.Linear(H, V, bias=False)


def by_hand(heads: MedusaHeads, hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """States [K,H] of one row, written out: the state of a head is where the next one starts."""
    assert heads.token_weight is not None
    x, states = hidden, []
    for head in range(K):
        e = embeddings[head]
        x = x + heads.token_weight[head] @ (e / (e.pow(2).mean() + 1.1920929e-07).sqrt())
        for weight, bias in zip(heads.block_weight, heads.block_bias, strict=True):
            z = weight[head] @ x + bias[head]
            x = x + z * torch.sigmoid(z)
        states.append(x if heads.projection is None else heads.projection[head] @ x)
    return torch.stack(states)


@pytest.mark.parametrize("projection", [False, True])
def test_states_by_hand(projection: bool, layers: tuple[nn.Embedding, nn.Linear]) -> None:
    heads = make(projection=projection)
    hidden, embeddings = torch.randn(3, H), torch.randn(K, 3, H)
    states = heads.states_along(hidden, embeddings)
    for row in range(3):
        torch.testing.assert_close(
            states[:, row], by_hand(heads, hidden[row], embeddings[:, row]), rtol=1e-4, atol=1e-5
        )


def cell_by_hand(
    heads: MedusaHeads, hidden: torch.Tensor, embeddings: torch.Tensor
) -> torch.Tensor:
    """States [K,H] of one row of heads that share a cell, written out."""
    assert heads.token_weight is not None
    assert heads.cell is not None
    x, states = hidden, []

    def unit(v: torch.Tensor) -> torch.Tensor:
        return v / (v.pow(2).mean() + 1.1920929e-07).sqrt()

    for head in range(K):
        x = x + heads.token_weight[0] @ unit(embeddings[head]) + heads.block_bias[0, head]
        for gate_up, down in zip(heads.cell.gate_up, heads.cell.down, strict=True):
            gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
            z = gate @ unit(x)
            x = x + down @ (z * torch.sigmoid(z) * (up @ unit(x)))
        states.append(x if heads.projection is None else heads.projection[0] @ x)
    return torch.stack(states)


@pytest.mark.parametrize("projection", [False, True])
def test_states_of_a_shared_cell_by_hand(projection: bool) -> None:
    heads = make(projection=projection, cell_size=24)
    assert heads.block_weight.numel() == 0
    hidden, embeddings = torch.randn(3, H), torch.randn(K, 3, H)
    states = heads.states_along(hidden, embeddings)
    for row in range(3):
        torch.testing.assert_close(
            states[:, row],
            cell_by_hand(heads, hidden[row], embeddings[:, row]),
            rtol=1e-4,
            atol=1e-4,
        )


def test_a_fresh_cell_repeats_the_target(layers: tuple[nn.Embedding, nn.Linear]) -> None:
    config = HeadsConfig(
        K, 2, H, V, token_input=True, projection=True, sequential=True, cell_size=24
    )
    heads, hidden = MedusaHeads(config), torch.randn(3, H)
    assert torch.equal(heads.states_along(hidden, torch.randn(K, 3, H)), hidden.expand(K, 3, H))
    assert torch.equal(heads.state_dict()["cell.gate_up"], MedusaHeads(config).cell.gate_up)  # type: ignore[union-attr]


def test_a_cell_needs_sequential_heads_and_a_size() -> None:
    with pytest.raises(ValueError, match="set sequential too"):
        HeadsConfig(K, 1, H, V, token_input=True, cell_size=8)
    with pytest.raises(ValueError, match="cell_size is 0"):
        HeadsConfig(K, 1, H, V, token_input=True, sequential=True, cell_size=0)


@pytest.mark.parametrize("cell_size", [None, 24])
@pytest.mark.parametrize("output", ["shared", "own", "reduced"])
@pytest.mark.parametrize("tree", [named_tree("deft-64"), TokenTree.chain(4), TokenTree.full([9])])
def test_every_node_is_the_guess_behind_its_own_path(
    output: str,
    tree: TokenTree,
    cell_size: int | None,
    layers: tuple[nn.Embedding, nn.Linear],
) -> None:
    heads, (embed, out) = make(output, cell_size=cell_size), layers
    hidden, root = torch.randn(2, H), torch.tensor([7, 31])
    tokens = heads.draft_tree(hidden, root, embed, out, draft_plan(tree))
    assert torch.equal(tokens[:, 0], root)
    for row in range(2):
        for node in range(1, tree.num_nodes):
            path, at = [], node
            while at:
                at = tree.parents[at]
                path.append(int(tokens[row, at]))
            before = torch.tensor([[*reversed(path), *[0] * K][:K]])
            best = heads.draft_along(hidden[row : row + 1], before, embed, out, 10)
            assert tokens[row, node] == best[0, tree.depths[node] - 1, tree.ranks[node]]


def test_parallel_heads_read_the_root_alone(layers: tuple[nn.Embedding, nn.Linear]) -> None:
    embed, out = layers
    heads = MedusaHeads(HeadsConfig(K, 1, H, V, token_input=True))
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden, tokens = torch.randn(3, H), torch.randint(V, (3, K))
    along = heads.draft_along(hidden, tokens, embed, out, 5)
    assert torch.equal(along, heads.draft(hidden, tokens[:, 0], embed, out, 5))


def test_the_root_alone_is_no_draft_for_sequential_heads(
    layers: tuple[nn.Embedding, nn.Linear],
) -> None:
    with pytest.raises(ValueError, match="every token before them"):
        make().draft(torch.randn(1, H), torch.tensor([1]), *layers, 3)
    with pytest.raises(ValueError, match="set token_input too"):
        HeadsConfig(K, 1, H, V, sequential=True)


def test_tokens_before_labels() -> None:
    labels = torch.tensor([[5, 6, 7], [8, IGNORED, IGNORED]])
    assert tokens_before(torch.tensor([4, 9]), labels).tolist() == [[4, 5, 6], [9, 8, 0]]
