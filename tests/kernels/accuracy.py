"""The measuring stick: error against float64, judged by a dense run in the same precision."""

from typing import Any

import torch
from torch import Tensor

from specdeft.kernels.reference import tree_attention_reference


def relative_error(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact||, both finite; an exact zero wants a zero."""
    result = result.double().cpu()
    assert torch.isfinite(result).all(), "the result holds NaN or infinity"
    norm = exact.norm()
    return float((result - exact).norm() / norm) if norm > 0 else float(result.norm())


def allowed_error(same_precision: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Twice (the dense run in the same precision + one rounding)."""
    return 2 * (relative_error(same_precision, exact) + torch.finfo(dtype).eps)


def reference(
    device: torch.device, dtype: torch.dtype = torch.float64, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """`tree_attention_reference` on a device, its results on the CPU.

    On the kernel's device: a CPU multiplies 16-bit floats by the slowest way it has.
    """
    there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    out, lse = tree_attention_reference(**there, dtype=dtype)
    return out.cpu(), lse.cpu()
