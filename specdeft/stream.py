"""Text piece by piece, and the rule that a decoder runs one generation at a time."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from specdeft.generation import Generation
from specdeft.result import GenerationResult


class Turn:
    """Whose turn it is: one stream at a time; only the thread that started it may replace it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[Stream, int] | None = None  # and the thread that started it

    @contextmanager
    def taken_by(self, stream: "Stream") -> Iterator[None]:
        """Hold the turn; an unfinished stream of the same thread is ended.

        Raises:
            RuntimeError: another thread's stream is running.
        """
        thread = threading.get_ident()
        with self._lock:
            running = self._running
            if running is not None and running[1] != thread:
                raise RuntimeError(
                    "this decoder is generating in another thread: wait for it, or use one "
                    "decoder per thread"
                )
            self._running = (stream, thread)
        if running is not None:
            running[0].supersede()
        try:
            yield
        finally:
            with self._lock:
                if self._running is not None and self._running[0] is stream:
                    self._running = None


class Stream:
    """The pieces of one generation; holds its decoder until exhausted, closed or superseded.

    A stream that was left half-way (an error in its consumer, Ctrl-C) need not be closed: the next
    generation started by the same thread ends it. Another thread is refused meanwhile.
    """

    def __init__(self, turn: Turn, start: Callable[[], Generation]) -> None:
        """Args: the decoder's turn, and what makes the generation once it is this stream's."""
        self._turn = turn
        self._start = start
        self._generation: Generation | None = None
        self._superseded = False
        self._pieces = self._run()

    @property
    def result(self) -> GenerationResult | None:
        """The outcome; None until the stream is exhausted."""
        return self._generation.result if self._generation else None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._superseded:
            raise RuntimeError(
                "this stream was ended by a later generation of its decoder: finish one stream "
                "before the next, or use two decoders"
            )
        return next(self._pieces)

    def exhaust(self) -> GenerationResult:
        """Run to the end and return the outcome."""
        for _piece in self:
            pass
        if self.result is None:
            raise RuntimeError("this stream was closed before its end: it has no result")
        return self.result

    def close(self) -> None:
        """End early: the cache is released and the decoder is free again."""
        self._pieces.close()

    def supersede(self) -> None:
        """Close, and refuse to go on."""
        self._superseded = True
        self.close()

    def _run(self) -> Generator[str, None, None]:
        with self._turn.taken_by(self):
            self._generation = self._start()
            yield from self._generation
