"""The largest of rows of logits: by a kernel of ours on a GPU, by the library elsewhere."""

from typing import cast

import torch
from torch import Tensor
from torch import library as torch_library

from specdeft.heads.best_tokens import best_tokens

_MOST_COLUMNS = 32  # of what our kernel finds


def best_columns(logits: Tensor, k: int) -> Tensor:
    """The columns int64 [..., k] of the k largest of logits [..., V], the device's way."""
    if not _is_for_our_kernel(logits) or k > _MOST_COLUMNS:
        return best_tokens(logits, k)
    if torch.compiler.is_compiling():
        return cast(Tensor, top_columns_op(logits, k))
    return _top_columns(logits, k)


def _top_columns(logits: Tensor, k: int) -> Tensor:
    from specdeft.kernels.top_columns import top_columns  # needs triton

    return top_columns(logits, k)


def _is_for_our_kernel(logits: Tensor) -> bool:
    return logits.is_cuda


@torch_library.custom_op("specdeft::top_columns", mutates_args=())
def top_columns_op(logits: Tensor, k: int) -> Tensor:
    """`best_columns` as one node of a compiled graph."""
    return _top_columns(logits, k)


@top_columns_op.register_fake
def _(logits: Tensor, k: int) -> Tensor:
    return logits.new_empty(*logits.shape[:-1], k, dtype=torch.int64)
