"""A call is ended where it takes too long: a yardstick that hangs must not take the run along."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeIsUpError(BaseException):
    """Not an `Exception`, like Ctrl-C: compilers catch those and go on."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """End what runs inside after so many seconds; None never does.

    It ends where the interpreter gets the turn again, so not within a call into the driver. Signals
    are the main thread's, and POSIX's: elsewhere nothing is limited.

    Raises:
        TimeIsUpError: from inside, when the time is up.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if seconds is None or not in_main_thread or not hasattr(signal, "setitimer"):
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
