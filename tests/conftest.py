"""What every test gets: a fixed seed, poisoned fresh memory, and no GPU unless it asks for one."""

import os
from collections.abc import Iterator

import pytest
import torch

# Triton decides at import whether kernels are compiled or interpreted, so this comes before any
# test module is collected: without a GPU the same kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Progress bars and the hub's checks have no place in a test run.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill what ``torch.empty`` returns with NaN (floats) or the largest value (integers).

    A read of memory that nobody wrote then shows in the result instead of passing by luck.
    On CPU only: on a GPU deterministic mode would also change which library kernels run.
    """
    if torch.cuda.is_available():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests marked ``gpu`` a reason instead of a crash where there is no GPU."""
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)
