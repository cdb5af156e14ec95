"""What capturing holds to that no GPU is needed for."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdeft import capturing
from specdeft.capturing import capture


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for the device; notes a capture's beginning and its end."""
    log: list[str] = []

    @contextmanager
    def graph(*_arguments: Any, **settings: Any) -> Any:
        assert settings["pool"] == "pool"
        log.append(f"begin {capturing._capturing.locked()}")
        yield
        log.append("end")

    side = SimpleNamespace(wait_stream=lambda _other: None)
    main = SimpleNamespace(wait_stream=lambda other: log.append("wait") if other is side else None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return log


def test_one_capture_at_a_time_behind_two_runs_that_are_undone(log: list[str]) -> None:
    """Beginning a capture waits for the device, which fails while another thread captures."""
    capture(
        lambda: log.append(f"run {capturing._capturing.locked()}"),
        "pool",
        "Name",
        reset=lambda: log.append("reset"),
    )
    assert log == ["run False", "reset"] * 2 + ["wait", "begin True", "run True", "end"]
    assert not capturing._capturing.locked()


@pytest.mark.parametrize("chained", [False, True])
def test_short_memory_is_told_from_what_no_graph_holds(chained: bool) -> None:
    short = torch.cuda.OutOfMemoryError("short")

    def fails() -> None:
        if not capturing._capturing.locked():
            return
        if not chained:
            raise short
        try:
            raise short
        except RuntimeError:
            raise RuntimeError("the capture was ended by an error")  # noqa: B904  as torch does

    with pytest.raises(torch.cuda.OutOfMemoryError):
        capture(fails, "pool", "Name")
    assert not capturing._capturing.locked()


def test_what_a_failed_warm_up_launched_is_waited_for(log: list[str]) -> None:
    """It writes the cache and the batch that the caller goes on with, without a graph."""

    def fails() -> None:
        raise torch.cuda.OutOfMemoryError("short")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        capture(fails, "pool", "Name", reset=lambda: log.append("reset"))
    assert log == ["wait"]


def test_what_no_graph_holds_is_named() -> None:
    def fails() -> None:
        if capturing._capturing.locked():
            raise RuntimeError("a wait for the device.\nmore")

    with pytest.raises(ValueError, match=r"^Name cannot be captured .*\(a wait for the device\)"):
        capture(fails, "pool", "Name")
    assert not capturing._capturing.locked()
