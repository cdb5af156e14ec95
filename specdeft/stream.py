"""Text piece by piece, and the rule that a decoder runs one generation at a time."""

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from specdeft.generation import Generation
from specdeft.result import GenerationResult


class Turn:
    """Whose turn it is: one stream at a time; only the thread that started it may replace it.

    The stream is held weakly: one that nobody can read on any more does not keep its turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[weakref.ref[Stream], threading.Thread] | None = None

    @contextmanager
    def taken_by(self, stream: "weakref.ref[Stream]") -> Iterator[None]:
        """Hold the turn; an unfinished stream of the same thread, or of one that ended, is ended.

        Raises:
            RuntimeError: another thread's stream is running.
        """
        thread = threading.current_thread()
        with self._lock:
            running = self._running[0]() if self._running else None
            owner = self._running[1] if self._running else thread
            if running is not None and owner is not thread and owner.is_alive():
                raise RuntimeError(
                    "this decoder is generating in another thread: wait for it, or use one "
                    "decoder per thread"
                )
            self._running = (stream, thread)
        if running is not None:
            running.supersede()
        try:
            yield
        finally:
            with self._lock:
                if self._running is not None and self._running[0] is stream:
                    self._running = None


class Stream:
    """The pieces of one generation, of a batch those of its first prompt; holds its decoder until
    exhausted, closed or superseded.

    A stream that was left half-way (an error in its consumer, Ctrl-C) need not be closed: the next
    generation started by the same thread ends it. Another thread is refused meanwhile.
    """

    def __init__(self, turn: Turn, start: Callable[[], Generation]) -> None:
        """Args: the decoder's turn, and what makes the generation once it is this stream's."""
        self._superseded = False
        self._box: list[Generation] = []
        # The generator knows the stream weakly, so that an abandoned stream is finalised at once.
        self._pieces = _run(turn, weakref.ref(self), start, self._box)

    @property
    def result(self) -> GenerationResult | None:
        """The outcome; None until the stream is exhausted."""
        return self.results[0] if self.results else None

    @property
    def results(self) -> list[GenerationResult] | None:
        """The outcomes of all prompts of a batch; None until the stream is exhausted."""
        return self._box[0].results if self._box else None

    @property
    def num_new_tokens(self) -> int:
        """Tokens kept so far."""
        return self._box[0].num_new_tokens if self._box else 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._superseded:
            raise RuntimeError(
                "this stream was ended by a later generation of its decoder: finish one stream "
                "before the next, or use two decoders"
            )
        return next(self._pieces)

    def exhaust(self) -> list[GenerationResult]:
        """Run to the end and return the outcomes."""
        for _piece in self:
            pass
        if self.results is None:
            raise RuntimeError("this stream was closed before its end: it has no result")
        return self.results

    def close(self) -> None:
        """End early: the cache is released and the decoder is free again."""
        self._pieces.close()

    def supersede(self) -> None:
        """Close, and refuse to go on."""
        self._superseded = True
        self.close()


def _run(
    turn: Turn,
    stream: weakref.ref[Stream],
    start: Callable[[], Generation],
    box: list[Generation],
) -> Generator[str, None, None]:
    with turn.taken_by(stream):
        box.append(start())
        for pieces in box[0]:
            yield pieces[0]
