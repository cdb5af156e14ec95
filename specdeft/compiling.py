"""How this project compiles: one form per shape, and room for all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

# A form per tree size, batch size, sampling rule and kind of layer; torch gives up after 8.
_MOST_FORMS = 1024

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """``function`` fused by torch.compile when first called, once per shape; it is never run
    uncompiled in silence. Call it within `room_for_forms`."""
    return cast(Function, torch.compile(function, fullgraph=True, dynamic=False))


@contextmanager
def room_for_forms() -> Iterator[None]:
    """Within it a function may have as many compiled forms as sizes and rules are used."""
    limits: dict[str, Any] = {
        "recompile_limit": _MOST_FORMS,
        "accumulated_recompile_limit": _MOST_FORMS,
    }
    with torch._dynamo.config.patch(limits):
        yield
