"""The measuring stick: error against float64, judged by a dense run in the same precision."""

import torch
from torch import Tensor


def relative_error(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact||, both finite; an exact zero wants a zero."""
    result = result.double().cpu()
    assert torch.isfinite(result).all(), "the result holds NaN or infinity"
    norm = exact.norm()
    return float((result - exact).norm() / norm) if norm > 0 else float(result.norm())


def allowed_error(same_precision: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Twice (the dense run in the same precision + one rounding)."""
    return 2 * (relative_error(same_precision, exact) + torch.finfo(dtype).eps)
