"""The reference against sums worked out by hand."""

import math

import pytest
import torch

from specdeft.kernels.reference import tree_attention_reference, tree_visibility


def test_two_visible_keys_give_the_hand_computed_average() -> None:
    q = torch.tensor([[[1.0, 0.0]]])
    k = torch.tensor([[[0.0, 0.0]], [[math.log(3.0), 0.0]], [[99.0, 0.0]]])
    v = torch.tensor([[[4.0, 0.0]], [[8.0, 1.0]], [[-1.0, -1.0]]])
    out, lse = tree_attention_reference(q, k, v, torch.tensor([[True, True, False]]), scale=1.0)
    torch.testing.assert_close(out[0, 0], torch.tensor([7.0, 0.75], dtype=torch.float64))
    assert lse.item() == pytest.approx(math.log(4.0))


def test_a_row_that_sees_nothing_is_zero_with_lse_minus_infinity() -> None:
    q, kv = torch.randn(2, 2, 16), torch.randn(3, 1, 16)
    visible = torch.tensor([[False] * 3, [True] * 3])
    out, lse = tree_attention_reference(q, kv, kv, visible, scale=1.0)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(lse[0], torch.full_like(lse[0], float("-inf")))
    assert torch.isfinite(out[1]).all()


def test_softcap_and_sink_of_one_score() -> None:
    q, k, v = (torch.full((1, 1, 1), x) for x in (2.0, 3.0, 5.0))
    out, lse = tree_attention_reference(
        q,
        k,
        v,
        torch.ones(1, 1, dtype=torch.bool),
        scale=1.0,
        softcap=4.0,
        sinks=torch.tensor([1.0]),
    )
    score = 4 * math.tanh(6 / 4)
    assert lse.item() == pytest.approx(math.log(math.exp(score) + math.e))
    assert out.item() == pytest.approx(5 * math.exp(score) / (math.exp(score) + math.e))


def test_window_counts_positions_by_depth() -> None:
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    visible = tree_visibility(ancestors, 2, depths=torch.tensor([0, 1, 1]), window=2)
    expected = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1]], dtype=torch.bool)
    assert torch.equal(visible, expected)
