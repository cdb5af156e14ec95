"""When drafting stops paying on the text at hand: plain steps until it may be tried again.

A tree is chosen by what its guesses bring on average. Some texts are unpredictable, and there every
step of a large tree costs more than a plain one and brings as little. So a generation keeps an
account in units of one plain step: what its steps emitted, less what they cost. It drafts as long
as the account stands above a small overdraft, which grows slowly with the text; otherwise it takes
plain steps, until the overdraft has grown enough to pay for another try.
"""

from dataclasses import dataclass

START_SHARE = 0.01  # of the tokens asked for: what may be lost at once
GROWTH = 0.005  # per token: what may be lost as the text goes on
MOST_PLANNED_TOKENS = 512  # of a longer request the rest is not counted: it may end early
TRY_STEPS = 3  # a new try begins when this many steps without any hit can be paid
MOST_CREDIT = 16.0  # older gains are forgotten: a text that turns unpredictable is noticed


@dataclass
class Pace:
    """The account of one generation; the clock's part is only the measured ratio of two steps.

    Attributes:
        cost: time of a drafting step over that of a plain one, at least 1.
        planned_tokens: tokens asked for.
    """

    cost: float
    planned_tokens: int
    balance: float = 0.0
    num_tokens: float = 0.0
    drafting: bool = True

    def observe(self, num_tokens: float, drafted: bool) -> None:
        """Enter a step that emitted so many tokens (a mean over the sequences of a batch)."""
        self.num_tokens += num_tokens
        if drafted:
            self.balance = min(self.balance + num_tokens - self.cost, MOST_CREDIT)
        allowed = self.overdraft
        if self.balance < -allowed:
            self.drafting = False
        elif self.balance - TRY_STEPS * (self.cost - 1.0) >= -allowed:
            self.drafting = True

    @property
    def overdraft(self) -> float:
        """What may be lost by now, in plain steps."""
        planned = min(self.planned_tokens, MOST_PLANNED_TOKENS)
        return START_SHARE * planned + GROWTH * self.num_tokens
