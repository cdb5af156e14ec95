"""Capturing work as a CUDA graph: warmed up, one at a time, refusals named.

All graphs of this package are captured here (`graphs`, `prompt_graphs`).
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

# Beginning a capture waits for the device, which is refused while another thread captures.
_capturing = threading.Lock()


def capture(
    run: Callable[[], _T],
    pool: Any,
    model_name: str,
    *,
    reset: Callable[[], object] = lambda: None,
) -> tuple[torch.cuda.CUDAGraph, _T]:
    """What ``run`` launches on the device, as a graph, and what it returned when captured: tensors
    that every replay writes.

    Args:
        run: is called three times, the last time to be captured.
        pool: whose memory the graph takes, of `torch.cuda.graph_pool_handle`.
        model_name: for the refusal.
        reset: undoes what a call changed, after each of the first two.

    Raises:
        torch.cuda.OutOfMemoryError: memory is too short.
        ValueError: the model does something that no graph can hold.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles kernels, fills library workspaces
                run()
                reset()
    finally:  # where it failed the caller goes on, with what is still being written there
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # What other threads do on the device meanwhile is theirs.
        with _capturing, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if isinstance(error.__context__, torch.cuda.OutOfMemoryError):
            raise error.__context__ from None
        reason = str(error.__context__ or error).strip().split("\n")[0].rstrip(".")
        raise ValueError(
            f"{model_name} cannot be captured in a CUDA graph ({reason}): use cuda_graphs=False, "
            "which is slower"
        ) from error
    return graph, result
