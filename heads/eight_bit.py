"""Products with weights kept in 8 bits: what drafting on a CPU reads, level after level.

A level of drafting is a product of few rows with the output rows and with the cell, bound by the
memory its weights come from; in 8 bits they are half of 16-bit ones, a quarter of float32, and
those of all levels stay in the CPU's cache between two levels. A guess need not be exact: the
target decides about every token, so rounding costs acceptance at most (docs/decisions.md has how
little). Each output row has a scale of its own; sums are float32.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

# torch's kernel reads rows of 16-bit inputs in whole vectors and past the end of odd ones.
_COLUMNS_MULTIPLE = 64
# Measured on 2 cores with AVX-512, 16,384 x 576: up to 4 rows take a third of a bf16 product's
# time, 12 as long.
MOST_ROWS = 12


class Product(Protocol):
    """`linear`, or something near it."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x [..., K] @ weight [O, K].T + bias [O]."""


class EightBitWeight(NamedTuple):
    """Rows int8 [O, K] and their scales bfloat16 [O]: rows * scales is about the weight."""

    rows: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> EightBitWeight:
        """The nearest 8-bit form of a weight [O, K] by its rows' largest magnitudes."""
        numbers = weight.detach().float().contiguous()
        # The scale that is stored is the one that is divided by. A row of zeros keeps them.
        scales = (numbers.abs().amax(dim=1) / 127).to(torch.bfloat16)
        divisors = scales.float().masked_fill(scales == 0, 1.0)[:, None]
        rows = (numbers / divisors).round().clamp(-127, 127).to(torch.int8)
        return cls(rows, scales)

    def product(self, x: Tensor) -> Tensor:
        """x [..., K] -> bfloat16 [..., O]."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
        out: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.rows, self.scales)
        return out.view(*x.shape[:-1], len(self.rows))


class EightBitProducts:
    """`linear` with weights that stay as they are while they are drafted with: each is rounded when
    it is first seen, and anew when it was written to since."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        """`most_rows`: of x; products of more are exact."""
        self._most_rows = most_rows
        self._known: dict[tuple[int, torch.Size], _Known] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x [..., K] @ weight [O, K].T + bias [O] in the dtype of x; exact where 8 bits are not
        worth it."""
        num_rows = x.numel() // x.shape[-1]
        if num_rows > self._most_rows or not is_readable(x, weight):
            return linear(x, weight, bias)
        out = self._rounded(weight).product(x).to(x.dtype)
        return out if bias is None else out + bias

    def _rounded(self, weight: Tensor) -> EightBitWeight:
        key = weight.data_ptr(), weight.shape
        version = 0 if weight.is_inference() else weight._version
        known = self._known.get(key)
        if known is None or known.version != version:
            known = self._known[key] = _Known(weight, version, EightBitWeight.of(weight))
        return known.rounded


class _Known(NamedTuple):
    """weight: kept, so that no other one comes to stand at its address."""

    weight: Tensor
    version: int
    rounded: EightBitWeight


def is_readable(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's kernel can read these."""
    return x.device.type == "cpu" and weight.shape[1] % _COLUMNS_MULTIPLE == 0


def product_for(device: torch.device, *, compiled: bool, most_rows: int = MOST_ROWS) -> Product:
    """How drafting multiplies on a device: a CPU waits for the weights, so they are rounded there;
    compiled forms hold plain products."""
    rounds = device.type == "cpu" and not compiled
    return EightBitProducts(most_rows) if rounds else linear
