"""What a generation is asked to do: every default lives here, every value is checked once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationConfig:
    """One request's settings.

    Attributes:
        max_new_tokens: most tokens to emit, at least 1.
        temperature: 0 is greedy; above 0 logits are divided by it and a token is drawn.
        top_k: draw among the ``top_k`` likeliest tokens only; None is all of them.
        top_p: draw among the smallest set of likeliest tokens holding this probability; 1 is all.
        seed: of the noise; the same seed gives the same text whatever the tree (design, section 4).
        stop: strings that end the text; the text and ids are cut before the first match.
        ignore_eos: go on to ``max_new_tokens`` past an end-of-text token (for measuring).

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int):
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens!r}: give a whole number of at least 1"
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: ask for at least 1 token")
        # `not (x >= 0)` also refuses NaN.
        if not (0.0 <= self.temperature < float("inf")):
            raise ValueError(
                f"temperature is {self.temperature}: give 0 for greedy decoding or a finite "
                "number above 0"
            )
        if not (0.0 < self.top_p <= 1.0):
            raise ValueError(
                f"top_p is {self.top_p}: it must be above 0 and at most 1 (1 keeps every token)"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: give at least 1, or None to keep every token")
        if not (0 <= self.seed < 2**63):
            raise ValueError(f"seed is {self.seed}: give a whole number from 0 to 2**63 - 1")
        if any(not text for text in self.stop):
            raise ValueError("a stop string is empty: leave it out or give at least one character")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0.0
