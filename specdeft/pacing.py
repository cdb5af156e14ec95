"""When drafting stops paying on the text at hand: plain steps until it may be tried again.

A tree is chosen by what its guesses bring on average. Some texts are unpredictable, and there every
step of a large tree costs more than a plain one and brings as little. So a generation keeps an
account in units of one plain step: what its steps emitted beyond one token, less what they cost
beyond a plain step. It drafts where a step without any hit could still be paid from what the
account holds and a small overdraft, a share of the text; otherwise it steps plainly. Steps whose
outcome is not known yet count as such without a hit, so that the overdraft is never exceeded: what
a text can lose against plain decoding is bounded, whatever it is.
"""

from dataclasses import dataclass

LOSS_SHARE = 0.013  # of a text's plain steps: what may be lost
MOST_PLANNED_TOKENS = 512  # of a longer request the rest counts as it comes: it may end early
MOST_CREDIT = 16.0  # older gains are forgotten: a text that turns unpredictable is noticed


@dataclass
class Pace:
    """The account of one generation; the clock's part is only what steps cost by measurement.

    Attributes:
        planned_tokens: tokens asked for.
        least: what may be lost in any case: one step is tried in the shortest text.
        balance: gains less losses so far, in plain steps.
        num_tokens: emitted so far.
    """

    planned_tokens: int
    least: float = 0.0
    balance: float = 0.0
    num_tokens: float = 0.0

    def can_pay(self, extra: float) -> bool:
        """Whether so much could be lost now: what the next step and those whose outcome is not
        known yet cost beyond plain ones."""
        return extra <= 0 or self.balance - extra >= -self.overdraft

    def observe(self, num_tokens: float, extra: float) -> None:
        """Enter a step: the tokens it emitted (a mean over the sequences of a batch) and what it
        cost beyond a plain one."""
        self.num_tokens += num_tokens
        self.balance = min(self.balance + num_tokens - 1 - extra, MOST_CREDIT)

    @property
    def overdraft(self) -> float:
        """What may be lost by now, in plain steps."""
        num_tokens = max(min(self.planned_tokens, MOST_PLANNED_TOKENS), self.num_tokens)
        return max(LOSS_SHARE * num_tokens, self.least)
