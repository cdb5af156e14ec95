"""Products in 8 bits: near the exact ones, never where the kernel cannot, never stale."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from specdeft.heads.eight_bit import (
    MOST_ROWS,
    EightBitProducts,
    EightBitWeight,
)
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.trees.draft_plan import draft_plan
from specdeft.trees.named import named_tree

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, MOST_ROWS])
@pytest.mark.parametrize(("outputs", "columns"), [(1, 64), (7, 128), (33, 576), (300, 1472)])
def test_the_error_is_that_of_the_roundings(
    dtype: torch.dtype, num_rows: int, outputs: int, columns: int
) -> None:
    torch.manual_seed(columns)
    weight = torch.randn(outputs, columns).to(dtype)
    x, bias = torch.randn(2, num_rows, columns).to(dtype)[:1], torch.randn(outputs).to(dtype)
    got = EightBitProducts()(x, weight, bias)
    assert got.dtype == dtype
    assert got.shape == (1, num_rows, outputs)
    exact = linear(x.double(), weight.double())
    # A weight is off by half a step of 1/127 of its row's largest number, and the scale, the input
    # and the result by half an ulp of bfloat16 each, 2^-9; the sum's terms add up by magnitude.
    magnitude = linear(x.double().abs(), weight.double().abs())
    step = weight.double().abs().amax(1) / 127
    bound = 0.51 * step * x.double().abs().sum(-1, keepdim=True) + 2**-8 * magnitude
    bound += 2**-8 * (exact.abs() + bias.double().abs()) + 1e-6
    assert ((got.double() - exact - bias.double()).abs() <= bound).all()


def test_a_row_of_zeros_stays_zero_and_the_largest_number_is_kept() -> None:
    weight = torch.zeros(3, 64)
    weight[1, 5], weight[2] = -254.0, 1e-3
    rounded = EightBitWeight.of(weight)
    assert rounded.rows[0].tolist() == [0] * 64
    assert int(rounded.rows[1, 5]) == -127
    assert rounded.rows.dtype == torch.int8
    product = rounded.product(torch.eye(64, dtype=torch.bfloat16)[:8])
    assert product[:, 0].tolist() == [0.0] * 8
    assert float(product[5, 1]) == -254.0
    torch.testing.assert_close(product[0, 2].float(), torch.tensor(1e-3), rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "columns"), [(1, 1), (2, 13), (1, 63), (1, 575), (1, 584)])
def test_shapes_that_the_kernel_cannot_read_are_multiplied_exactly(
    dtype: torch.dtype, num_rows: int, columns: int
) -> None:
    x, weight = torch.randn(num_rows, columns).to(dtype), torch.randn(9, columns).to(dtype)
    assert torch.equal(EightBitProducts()(x, weight), linear(x, weight))


def test_many_rows_are_multiplied_exactly() -> None:
    weight = torch.randn(9, 64)
    for num_rows, rounded in ((MOST_ROWS, True), (MOST_ROWS + 1, False)):
        x = torch.randn(num_rows, 64)
        assert torch.equal(EightBitProducts()(x, weight), linear(x, weight)) is not rounded
        assert not torch.equal(EightBitProducts(num_rows)(x, weight), linear(x, weight))
        assert torch.equal(EightBitProducts(num_rows - 1)(x, weight), linear(x, weight))


def test_a_part_of_a_weight_and_rows_that_do_not_follow_one_another() -> None:
    stacked = torch.randn(3, 16, 128)
    x = torch.randn(128, 4).T
    products = EightBitProducts()
    for part in (stacked[1], stacked[2], torch.randn(128, 16).T, torch.randn(16, 256)[:, ::2]):
        error = (products(x, part) - linear(x, part)).abs().max()
        assert 0 < error < 0.4  # standard deviation of the product: 11


def test_a_weight_that_was_written_to_is_rounded_anew() -> None:
    weight, x, products = nn.Parameter(torch.randn(8, 64)), torch.randn(2, 64), EightBitProducts()
    with torch.no_grad():
        before = products(x, weight)
        assert torch.equal(products(x, weight), before)
        weight.mul_(2.0)
        torch.testing.assert_close(products(x, weight), 2 * before)


def test_weights_that_take_the_place_of_others_are_told_apart() -> None:
    products, x = EightBitProducts(), torch.randn(2, 64)
    for _ in range(50):
        weight = torch.randn(8, 64)  # may come to stand where the one before stood
        torch.testing.assert_close(products(x, weight), linear(x, weight), rtol=0, atol=0.5)


@torch.no_grad()
@pytest.mark.parametrize("cell_size", [None, 64])
@pytest.mark.parametrize("output", ["shared", "own", "reduced"])
def test_what_eight_bits_draft_is_as_good_as_the_best_guess(
    output: str, cell_size: int | None
) -> None:
    """Behind every drafted path, the exact score of the next token is that of its rank but for a
    twentieth of what the scores span."""
    torch.manual_seed(0)
    K, H, V = 4, 64, 40
    ids = torch.randperm(V)[:24] if output == "reduced" else None
    config = HeadsConfig(
        num_heads=K,
        num_layers=1,
        hidden_size=H,
        vocab_size=V,
        output=output,
        token_input=True,
        projection=True,
        draft_vocab_size=None if ids is None else 24,
        sequential=True,
        cell_size=cell_size,
    )
    heads = MedusaHeads(config, ids)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    embed, out, tree = nn.Embedding(V, H), nn.Linear(H, V, bias=False), named_tree("deft-64")
    hidden, root, products = torch.randn(1, H), torch.tensor([7]), EightBitProducts()
    tokens = heads.draft_tree(hidden, root, embed, out, draft_plan(tree), products)[0].tolist()
    exact = heads.draft_tree(hidden, root, embed, out, draft_plan(tree))[0].tolist()
    assert tokens[:2] == exact[:2]
    columns = list(range(V)) if ids is None else ids.tolist()
    for node in range(1, tree.num_nodes):
        path, at = [], node
        while at:
            at = tree.parents[at]
            path.append(tokens[at])
        before = torch.tensor([[*reversed(path), *[0] * K][:K]])
        states = heads.states_along(hidden, embed(before).transpose(0, 1))
        scores = heads.logits(states, out)[tree.depths[node] - 1, 0]
        wanted = scores.sort(descending=True).values[tree.ranks[node]]
        span = scores.max() - scores.min()
        assert abs(scores[columns.index(tokens[node])] - wanted) <= 0.05 * span
