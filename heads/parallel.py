"""Several processes that train one set of heads: each takes an equal part of every batch.

    torchrun --nproc-per-node 2 heads/train.py --model M --output my-heads

The target is frozen and held whole by every process (or in parts: heads/sharding.py); its hidden
states are computed in shares and exchanged, so that every process can draw any row. Gradients are
added up, all else is the same in all processes; the first of them writes the files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, distributed

SETTLE_S = 0.2  # thousands of times what a thread needs to drop a tensor

_T = TypeVar("_T")


@dataclass(frozen=True)
class Processes:
    """How many processes train together and which of them this one is; `attend` is what it does for
    the others while it waits, until none of them needs it."""

    size: int = 1
    rank: int = 0
    attend: Callable[[], None] = lambda: None

    @property
    def first(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def agree(self, value: _T, of: int = 0) -> _T:
        """The value that process `of` gives."""
        if self.size == 1:
            return value
        shared = [value]
        distributed.broadcast_object_list(shared, src=of)
        return shared[0]

    def wait(self) -> None:
        """Until all processes have come here."""
        self.attend()
        if self.size > 1:
            distributed.barrier()


ALONE = Processes()


@contextmanager
def processes() -> Iterator[Processes]:
    """The processes that torchrun started, each on its own GPU where there are GPUs; else ALONE."""
    if "LOCAL_RANK" not in os.environ:
        yield ALONE
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(backend)
    try:
        yield Processes(distributed.get_world_size(), distributed.get_rank())
    finally:
        distributed.destroy_process_group()
        # A thread of gloo may still have to let go of the last collective's tensors. If Python ends
        # meanwhile, it ends the process with SIGABRT; so it is given the interpreter's lock here.
        threading.Event().wait(SETTLE_S)
