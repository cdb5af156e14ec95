"""What a generation is asked to do: every default lives here, every value is checked once."""

from dataclasses import dataclass

DEFAULT_MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class GenerationConfig:
    """One request's settings.

    Attributes:
        max_new_tokens: most tokens to emit, at least 1; None is 256, or what the context leaves.
        temperature: 0 is greedy; above 0 logits are divided by it and a token is drawn.
        top_k: draw among the ``top_k`` likeliest tokens only; None is all of them.
        top_p: draw among the smallest set of likeliest tokens holding this probability; 1 is all.
        seed: of the noise; the same seed gives the same text whatever the tree (design, section 4).
        stop: strings that end the text; the text and ids are cut before the first match.
        ignore_eos: go on to ``max_new_tokens`` past an end-of-text token (for measuring).

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        asked = self.max_new_tokens
        if asked is not None and (not isinstance(asked, int) or asked < 1):
            raise ValueError(f"max_new_tokens is {asked!r}: give a whole number of at least 1")
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

    def token_budget(self, num_prompt_tokens: int, max_context: int) -> int:
        """Most tokens that this prompt may be followed by.

        Raises:
            ValueError: the prompt fills the context, or what was asked does not fit behind it.
        """
        room = max_context - num_prompt_tokens
        if room < 1:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens and the model's context holds "
                f"{max_context}: shorten it to leave room for new tokens"
            )
        if self.max_new_tokens is None:
            return min(DEFAULT_MAX_NEW_TOKENS, room)
        if self.max_new_tokens > room:
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and max_new_tokens={self.max_new_tokens} "
                f"exceed the model's context of {max_context}: ask for at most {room}"
            )
        return self.max_new_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0.0
