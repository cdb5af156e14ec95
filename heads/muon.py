"""AdamW whose matrices take orthogonalised steps (Muon).

The momentum of a weight matrix is replaced by the nearest half-orthogonal matrix before it is
subtracted, so that every direction of it moves alike; a quintic Newton-Schulz iteration comes near
enough in five products of products. Stacked matrices [..., a, b] are treated one by one in batched
products. Biases follow AdamW. The step of a matrix is scaled by 0.2 sqrt(max(a, b)), the size
AdamW's steps have, so that one learning rate fits both.

Sources: Muon, https://kellerjordan.github.io/posts/muon/ (the iteration and its coefficients); the
scale and the decay: https://arxiv.org/abs/2502.16982, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_ADAM_BETAS = (0.9, 0.98)
_EPSILON = 1e-8


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for the matrices, AdamW for everything else."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        """`matrices`: maps of one hidden state to another, [..., a, b], not output layers."""
        groups = [
            {"params": list(parameters), "orthogonal": orthogonal}
            for parameters, orthogonal in ((matrices, True), (others, False))
        ]
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([group for group in groups if group["params"]], settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; no host read."""
        if closure is not None:
            raise ValueError("Muon takes no closure: compute the gradients first.")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                if group["orthogonal"]:
                    update = self._orthogonal(parameter, group)
                else:
                    update = self._adam(parameter)
                parameter.add_(update, alpha=-group["lr"])

    def _orthogonal(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"])
        size = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        return size * orthogonalised(ahead)

    def _adam(self, parameter: Tensor) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["first"] = torch.zeros_like(parameter)
            state["second"] = torch.zeros_like(parameter)
        first, second = _ADAM_BETAS
        state["step"] += 1
        mean: Tensor = state["first"].lerp_(gradient, 1 - first) / (1 - first ** state["step"])
        square = state["second"].lerp_(gradient.square(), 1 - second)
        update: Tensor = mean / ((square / (1 - second ** state["step"])).sqrt() + _EPSILON)
        return update


def orthogonalised(matrices: Tensor) -> Tensor:
    """[..., a, b] -> the same shape with singular values near 1 (0.7 to 1.2), in bf16 on a GPU."""
    a, b, c = _COEFFICIENTS
    x: Tensor = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices.float()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrices.dtype)
