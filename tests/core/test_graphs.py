"""What capturing a step holds to that no GPU is needed for."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdeft import graphs
from specdeft.graphs import StepGraphs


def test_one_capture_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginning a capture waits for the device, which fails while another thread captures."""
    held: list[bool] = []

    @contextmanager
    def capture(*_arguments: Any, **_settings: Any) -> Any:
        held.append(graphs._capturing.locked())
        yield

    stream = SimpleNamespace(wait_stream=lambda _other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    steps = object.__new__(StepGraphs)
    steps.batch = SimpleNamespace(lengths=torch.zeros(1))  # type: ignore[assignment]
    steps._pool = (0, 0)  # type: ignore[assignment]
    monkeypatch.setattr(StepGraphs, "_step", lambda *_arguments: held.append(True))
    steps._warm_and_capture(SimpleNamespace(), 1024)
    assert held == [True] * 4  # two steps to warm up, the capture's beginning, its step
    assert not graphs._capturing.locked()

    def fails(*_arguments: Any) -> None:
        if graphs._capturing.locked():
            raise torch.cuda.OutOfMemoryError("short")

    monkeypatch.setattr(StepGraphs, "_step", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        steps._warm_and_capture(SimpleNamespace(), 1024)
    assert not graphs._capturing.locked()
