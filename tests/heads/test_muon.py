"""The optimizer: orthogonal steps for matrices, AdamW for the rest, a state that resumes."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from specdeft.heads.muon import Muon, orthogonalised


def test_orthogonalised_keeps_directions_and_levels_their_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 2, 16, 24, generator=generator)
    for matrices in (stack, stack.mT):
        made = orthogonalised(matrices)
        assert made.shape == matrices.shape
        assert made.dtype == matrices.dtype
        sizes = torch.linalg.svdvals(made)
        # The published coefficients trade exactness for speed: 0.7 to 1.2 is their band.
        assert sizes.min() > 0.6
        assert sizes.max() < 1.3
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        exact = left @ right
        agreement = (made * exact).sum((-2, -1)) / (
            made.norm(dim=(-2, -1)) * exact.norm(dim=(-2, -1))
        )
        assert agreement.min() > 0.97


def problem() -> tuple[list[nn.Parameter], Tensor]:
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(2, 8, 8)), nn.Parameter(torch.zeros(2, 1, 8))]
    return parameters, torch.randn(2, 8, 8, generator=generator)


def steps(optimizer: Muon, parameters: list[nn.Parameter], wanted: Tensor, count: int) -> float:
    loss = torch.zeros(())
    for _ in range(count):
        optimizer.zero_grad(set_to_none=True)
        loss = (parameters[0] + parameters[1] - wanted).square().sum()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_it_minimises() -> None:
    parameters, wanted = problem()
    optimizer = Muon(parameters[:1], parameters[1:], lr=0.05)
    first = steps(optimizer, parameters, wanted, 1)
    assert steps(optimizer, parameters, wanted, 200) < 0.02 * first


def test_other_parameters_follow_adamw() -> None:
    parameters, wanted = problem()
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    ours = Muon([], parameters, lr=0.01, weight_decay=0.1)
    reference = torch.optim.AdamW(twins, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    steps(ours, parameters, wanted, 25)
    steps(reference, twins, wanted, 25)
    for mine, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(mine, twin, atol=1e-6, rtol=1e-5)


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    parameters, wanted = problem()
    optimizer = Muon(parameters[:1], parameters[1:], lr=0.05, weight_decay=0.01)
    steps(optimizer, parameters, wanted, 5)
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = Muon(twins[:1], twins[1:], lr=0.05, weight_decay=0.01)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, parameters, wanted, 5)
    steps(resumed, twins, wanted, 5)
    for mine, twin in zip(parameters, twins, strict=True):
        assert torch.equal(mine, twin)
