"""From token ids to text while they arrive: whole characters only, and nothing past a stop string.

Decoding the whole output again at every step would be quadratic; instead each token is decoded in a
short window that starts at the last point where the text was complete.
"""

from typing import Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The one method needed of a Hugging Face tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Ids to text."""


class TextAssembler:
    """The text of a growing list of token ids, cut before the first stop string.

    Attributes:
        token_ids: the ids kept so far.
        text: their text; a trailing incomplete character is left out until ``finish``.
        stopped_by: the stop string that ended the text, or None.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest_stop = max((len(text) for text in stop), default=0)
        self._text_ends: list[int] = []  # length of `text` after each token
        self._window = 0  # first token of the decoding window
        self._decoded = 0  # first token whose text is not yet part of `text`
        self._num_shown = 0

    def push(self, token_id: int) -> bool:
        """Append one token; True when it completed a stop string (ids and text are then cut)."""
        self.token_ids.append(token_id)
        known = self._decode(self._window, self._decoded)
        window = self._decode(self._window, len(self.token_ids))
        if len(window) > len(known) and not window.endswith(_INCOMPLETE):
            self._append(window[len(known) :])
            self._window, self._decoded = self._decoded, len(self.token_ids)
        self._text_ends.append(len(self.text))
        return self.stopped_by is not None

    def take(self) -> str:
        """The text that can be shown and was not shown before; what may be cut is held back."""
        stop = len(self.text) if self.stopped_by else len(self.text) - self._held_back()
        piece = self.text[self._num_shown : stop]
        self._num_shown = max(stop, self._num_shown)
        return piece

    def finish(self) -> str:
        """The last piece: what was held back, an incomplete character included."""
        if self.stopped_by is None:
            rest = self._decode(self._window, len(self.token_ids))
            self._append(rest[len(self._decode(self._window, self._decoded)) :])
            self._window = self._decoded = len(self.token_ids)
        piece, self._num_shown = self.text[self._num_shown :], len(self.text)
        return piece

    def _decode(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(self.token_ids[start:stop], skip_special_tokens=True)

    def _append(self, piece: str) -> None:
        first = max(0, len(self.text) - self._longest_stop + 1)
        self.text += piece
        found = [(at, text) for text in self._stop if (at := self.text.find(text, first)) >= 0]
        if not found:
            return
        at, self.stopped_by = min(found)
        self.text = self.text[:at]
        # Keep the fewest tokens whose text holds everything before the match.
        ends = [*self._text_ends, at]
        kept = 0 if at == 0 else next(i for i, end in enumerate(ends) if end >= at) + 1
        self.token_ids = self.token_ids[:kept]

    def _held_back(self) -> int:
        """Length of the longest end of the text that a stop string starts with."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(text.startswith(tail) for text in self._stop):
                return length
        return 0
