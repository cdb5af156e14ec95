"""The fused loss against plain autograd in fp64 and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from specdeft.heads.features import IGNORED
from specdeft.heads.loss import frozen_output_loss, head_weights, own_output_loss

K, M, H, V = 3, 7, 5, 11


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(K, M, H, generator=generator, requires_grad=True)
    weight = torch.randn(V, H, generator=generator)
    labels = torch.randint(V, (M, K), generator=generator)
    labels[2:4, 1:] = IGNORED
    labels[5] = IGNORED
    return states, labels, weight, head_weights(K, 0.8)


def test_by_hand() -> None:
    """Two heads, two tokens; logits (0, ln 3): probabilities 1/4 and 3/4."""
    states = torch.tensor([[[1.0]], [[1.0]]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3)]])
    result = frozen_output_loss(states, torch.tensor([[0, 1]]), weight, head_weights(2, 0.5))
    assert result.per_head.tolist() == pytest.approx([math.log(4), math.log(4 / 3)])
    assert float(result.total.detach()) == pytest.approx(math.log(4) + 0.5 * math.log(4 / 3))
    result.total.backward()
    assert states.grad is not None
    assert states.grad.flatten().tolist() == pytest.approx(
        [0.75 * math.log(3), -0.5 * 0.25 * math.log(3)]
    )


@pytest.mark.parametrize("chunk_logits", [1, 2 * V, 1 << 20])
@pytest.mark.parametrize("with_bias", [False, True])
def test_hard_loss_and_gradient_equal_autograd(chunk_logits: int, with_bias: bool) -> None:
    states, labels, weight, weights = problem()
    bias = torch.linspace(-1, 1, V) if with_bias else None
    result = frozen_output_loss(
        states, labels, weight, weights, bias=bias, chunk_logits=chunk_logits
    )
    (3 * result.total).backward()
    exact = states.detach().double().requires_grad_()
    logits = exact @ weight.double().T + (0 if bias is None else bias.double())
    losses = torch.stack(
        [cross_entropy(logits[k], labels[:, k], ignore_index=IGNORED) for k in range(K)]
    )
    (3 * (losses * weights.double()).sum()).backward()
    assert states.grad is not None
    assert exact.grad is not None
    # fp32 sums over 11 logits: a few units in the last place of values near 1.
    torch.testing.assert_close(result.per_head.double(), losses.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(states.grad.double(), exact.grad, atol=1e-5, rtol=0)
    assert result.num_known.tolist() == [6, 4, 4]


def test_soft_loss_and_gradient_equal_autograd() -> None:
    states, labels, weight, weights = problem(1)
    teacher = torch.randn(K, M, H, generator=torch.Generator().manual_seed(5))
    result = frozen_output_loss(
        states, labels, weight, weights, teacher=teacher, temperature=0.7, chunk_logits=3 * V
    )
    result.total.backward()
    exact = states.detach().double().requires_grad_()
    wanted = ((teacher.double() @ weight.double().T) / 0.7).softmax(-1)
    losses = -(wanted * (exact @ weight.double().T).log_softmax(-1)).sum(-1)
    known = labels.T != IGNORED
    per_head = (losses * known).sum(1) / known.sum(1)
    (per_head * weights.double()).sum().backward()
    assert states.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(result.per_head.double(), per_head.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(states.grad.double(), exact.grad, atol=1e-5, rtol=0)


def test_nothing_known_gives_zero_not_nan() -> None:
    states, labels, weight, weights = problem()
    result = frozen_output_loss(states, torch.full_like(labels, IGNORED), weight, weights)
    result.total.backward()
    assert float(result.total.detach()) == 0
    assert states.grad is not None
    assert not bool(states.grad.any())
    assert not bool(result.num_known.any())


def test_own_layers_give_the_same_loss() -> None:
    states, labels, weight, weights = problem()
    fused = frozen_output_loss(states, labels, weight, weights)
    own = own_output_loss(states @ weight.T, labels, weights)
    torch.testing.assert_close(own.total, fused.total)
    torch.testing.assert_close(own.per_head, fused.per_head)
