"""The tree of every step of one generation: what was chosen, as long as it pays."""

from collections import deque
from collections.abc import Callable, Sequence

from specdeft.pacing import Pace
from specdeft.step_cost import Place
from specdeft.tree_choice import Asked, Chosen, TreeChoice
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.token_tree import TokenTree

PLAIN = TokenTree.chain(0)


class StepTrees:
    """Asked before every step for its tree, told after it what it brought.

    A tree that was asked for is used throughout. "auto" looks again when the context has grown
    into another place (`step_cost.Place`), and steps plainly where drafting does not pay
    (`pacing`).

    Attributes:
        largest: the most nodes and levels a step can have: what memory is taken for.
    """

    def __init__(
        self,
        choice: TreeChoice,
        num_prompt_tokens: Sequence[int],
        budgets: Sequence[int],
        temperature: float,
        *,
        whole: bool,
    ) -> None:
        """Args: the request; the prompts' lengths and the tokens asked for, a row each; the
        sampling temperature; whether a tree keeps levels past the budget, so that one graph
        serves to the end."""
        self._choice = choice
        self._whole = whole
        self._num_sequences = len(num_prompt_tokens)
        self._end = max(
            prompt + budget for prompt, budget in zip(num_prompt_tokens, budgets, strict=True)
        )
        asked = Asked(temperature, max(budgets))
        self._at: Callable[[Place], Chosen] = lambda place: choice.at(place, asked)
        self._first = self._place(max(num_prompt_tokens))
        self._pace: Pace | None = None
        self._drafted: deque[bool] = deque()
        if choice.is_auto:
            start = self._at(self._first)
            self.largest = start.tree
            self._pace = Pace(max(start.step_ms / start.plain_ms, 1.0), max(budgets))
        else:
            self.largest = choice.tree

    def __call__(self, num_tokens_left: int) -> TreeTensors:
        """The tree of the next step, when at most so many tokens are still wanted."""
        tree = self.largest
        if self._pace is not None:
            tree = self._auto(self._end - num_tokens_left) if self._pace.drafting else PLAIN
        self._drafted.append(tree.num_nodes > 1)
        if not self._whole:
            tree = tree.prune(min(tree.max_depth, max(num_tokens_left - 1, 0)))
        return self._choice.load(tree)

    def observe(self, num_tokens: float) -> bool:
        """What the oldest step not yet observed emitted, a mean over the sequences going on;
        whether it drafted."""
        drafted = self._drafted.popleft()
        if self._pace is not None:
            self._pace.observe(num_tokens, drafted)
        return drafted

    def _auto(self, num_context: int) -> TokenTree:
        place = self._place(num_context)
        if place == self._first or not self._choice.is_known(place):
            return self.largest
        tree = self._at(place).tree
        # Memory was taken for the first place's tree.
        fits = tree.num_nodes <= self.largest.num_nodes and tree.max_depth <= self.largest.max_depth
        return tree if fits else self.largest

    def _place(self, num_context: int) -> Place:
        return self._choice.place(num_context, self._num_sequences)
