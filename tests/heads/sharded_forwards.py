"""Run under torchrun: a target in parts computes what the whole one does, however unevenly it is
used.

    torchrun --nproc-per-node 2 tests/heads/sharded_forwards.py

Fails with an assertion, which torchrun turns into an exit status.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from specdeft.heads.features import extract
from specdeft.heads.parallel import processes
from specdeft.heads.sharding import Attendance, shard
from specdeft.heads.target import Target, default_device, default_dtype
from tests.heads.conftest import VOCAB_SIZE, make_target
from tests.heads.test_trainer import texts


def on(device: str) -> Target:
    made = make_target()
    return made._replace(model=made.model.to(device, default_dtype(device)))


def hidden(target: Target, length: int) -> Tensor:
    ids = torch.arange(3, 3 + length, device=target.model.device).unsqueeze(0) % VOCAB_SIZE
    with torch.no_grad():
        states: Tensor = target.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states


def part_of(tensor: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def main() -> int:
    """0, or an AssertionError."""
    with processes() as group:
        device = default_device()
        whole, parts = on(device), on("cpu")
        parts.model.to(default_dtype(device))
        shard(parts, group, device)
        attendance = Attendance(parts.model, group)
        layers = list(parts.model.base_model.layers.parameters())
        assert sum(part_of(p).numel() for p in layers) * group.size == sum(
            p.numel() for p in layers
        )
        assert all(part_of(p).device.type == device for p in parts.model.parameters())
        assert parts.model.device.type == device
        assert parts.model.dtype == default_dtype(device)
        # The processes ask 0, 3, 6, .. times, for texts of lengths of their own; then all again.
        for calls in (3 * group.rank, 3 * (group.size - 1 - group.rank), 2):
            for call in range(calls):
                length = 5 + call + group.rank
                assert torch.equal(hidden(parts, length), hidden(whole, length))
            attendance.attend()
        waiting = type(group)(group.size, group.rank, attendance.attend)
        # 3 batches for 2 processes: one of them has none in the last round.
        for size in (500, 200, 40):
            of_parts = extract(parts.model, texts(), 2, batch_tokens=size, group=waiting)
            of_whole = extract(whole.model, texts(), 2, batch_tokens=size, group=group)
            assert torch.equal(of_parts.hidden, of_whole.hidden)
            assert bool(of_parts.hidden.any(dim=1).all())
    sys.stdout.write(f"process {group.rank} of {group.size}: the same\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
