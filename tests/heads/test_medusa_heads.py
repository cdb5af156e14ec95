"""MedusaHeads: shapes, the reading of hidden state and root, output kinds, drafts, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specdeft.heads.medusa import HeadsConfig, MedusaHeads

K, H, V, R = 3, 8, 20, 6


def make(**changes: object) -> MedusaHeads:
    settings: dict[str, object] = {
        "num_heads": K,
        "num_layers": 2,
        "hidden_size": H,
        "vocab_size": V,
        **changes,
    }
    ids = torch.tensor([1, 4, 5, 9, 12, 19]) if settings.get("draft_vocab_size") == R else None
    return MedusaHeads(HeadsConfig(**settings), ids)


def randomised(heads: MedusaHeads, seed: int = 0) -> MedusaHeads:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return heads


@pytest.fixture
def layers() -> tuple[nn.Embedding, nn.Linear]:
    torch.manual_seed(1)
    return nn.Embedding(V, H), nn.Linear(H, V, bias=False)


OUTPUTS = [("shared", None), ("own", None), ("own", R), ("reduced", R)]


@pytest.mark.parametrize(("output", "size"), OUTPUTS)
@pytest.mark.parametrize("token_input", [False, True])
@pytest.mark.parametrize("projection", [False, True])
def test_fresh_heads_repeat_the_targets_logits(
    output: str,
    size: int | None,
    token_input: bool,
    projection: bool,
    layers: tuple[nn.Embedding, nn.Linear],
) -> None:
    embed, out = layers
    heads = make(
        output=output, token_input=token_input, projection=projection, draft_vocab_size=size
    )
    if output == "own":
        heads.init_own_output(out)
    hidden, root = torch.randn(5, H), torch.randint(V, (5,))
    logits = heads(hidden, root, embed, out)
    expected = out(hidden)
    if heads.draft_ids is not None:
        expected = expected[:, heads.draft_ids]
    for head in logits:
        torch.testing.assert_close(head, expected)


def by_hand(heads: MedusaHeads, hidden: Tensor, embedding: Tensor, head: int) -> Tensor:
    """One head and one row at a time, written out."""
    rows = []
    for h, e in zip(hidden, embedding, strict=True):
        x = h.clone()
        if heads.token_weight is not None:
            x = x + heads.token_weight[head] @ (e / (e.pow(2).mean() + 1.1920929e-07).sqrt())
        for weight, bias in zip(heads.block_weight, heads.block_bias, strict=True):
            z = weight[head] @ x + bias[head]
            x = x + z * torch.sigmoid(z)
        rows.append(x if heads.projection is None else heads.projection[head] @ x)
    return torch.stack(rows)


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_stacked_heads_equal_heads_one_by_one(num_layers: int) -> None:
    heads = randomised(make(num_layers=num_layers, token_input=True, projection=True))
    hidden, embedding = torch.randn(4, H), torch.randn(4, H)
    states = heads.states(hidden, embedding)
    assert states.shape == (K, 4, H)
    for head in range(K):
        torch.testing.assert_close(states[head], by_hand(heads, hidden, embedding, head))


@pytest.mark.parametrize(("output", "size"), OUTPUTS)
def test_draft_is_the_best_tokens_of_each_head(
    output: str, size: int | None, layers: tuple[nn.Embedding, nn.Linear]
) -> None:
    embed, out = layers
    heads = randomised(make(output=output, token_input=True, draft_vocab_size=size))
    hidden, root = torch.randn(2, H), torch.tensor([3, 7])
    draft = heads.draft(hidden, root, embed, out, top_k=4)
    assert draft.shape == (2, K, 4)
    assert draft.dtype == torch.int64
    logits = heads(hidden, root, embed, out)
    for row in range(2):
        for head in range(K):
            order = logits[head, row].argsort(descending=True)[:4]
            ids = order if heads.draft_ids is None else heads.draft_ids[order]
            assert draft[row, head].tolist() == ids.tolist()


def test_reduced_draft_follows_a_new_output_layer(
    layers: tuple[nn.Embedding, nn.Linear],
) -> None:
    embed, out = layers
    heads = randomised(make(output="reduced", draft_vocab_size=R))
    other = nn.Linear(H, V, bias=True)
    hidden, root = torch.randn(3, H), torch.zeros(3, dtype=torch.int64)
    heads.draft(hidden, root, embed, out, 2)
    assert heads.draft_ids is not None
    expected = other(heads.states(hidden, None))[..., heads.draft_ids]
    torch.testing.assert_close(heads(hidden, root, embed, other), expected)


@pytest.mark.parametrize("top_k", [0, R + 1])
def test_top_k_beyond_what_can_be_drafted_is_refused(
    top_k: int, layers: tuple[nn.Embedding, nn.Linear]
) -> None:
    heads = make(output="reduced", draft_vocab_size=R)
    with pytest.raises(ValueError, match="top_k"):
        heads.draft(torch.randn(1, H), torch.tensor([0]), *layers, top_k)


def test_token_input_needs_the_embedding() -> None:
    with pytest.raises(ValueError, match="root token"):
        make(token_input=True).states(torch.randn(1, H), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 0},
        {"num_heads": None},
        {"num_layers": None},
        {"hidden_size": None},
        {"vocab_size": None},
        {"base_model": 5},
        {"num_layers": -1},
        {"output": "tied"},
        {"output": "reduced"},
        {"output": "shared", "draft_vocab_size": 4},
        {"output": "reduced", "draft_vocab_size": V + 1},
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        make(**changes)


def test_quantised_output_layer_is_refused_by_name_for_a_reduced_vocabulary() -> None:
    class Packed(nn.Module):
        weight = torch.zeros(V, H, dtype=torch.int8)

    heads = make(output="reduced", draft_vocab_size=R)
    with pytest.raises(ValueError, match="Packed"):
        heads.output_rows(Packed())
