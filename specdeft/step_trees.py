"""The tree of every step of one generation: what was chosen, as long as it pays."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from specdeft.pacing import Pace
from specdeft.step_cost import Place
from specdeft.tree_choice import Asked, TreeChoice
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.token_tree import TokenTree


class _Step(NamedTuple):
    """A step's tree and what it costs beyond a plain step, in plain steps."""

    tree: TokenTree
    extra: float


PLAIN = _Step(TokenTree.chain(0), 0.0)


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
        self._asked = Asked(temperature, max(budgets))
        self._pace: Pace | None = None
        self._in_flight: deque[_Step] = deque()
        self._by_place: dict[Place, _Step] = {}
        if choice.is_auto:
            place = self._place(max(num_prompt_tokens))
            start = choice.at(place, self._asked)
            self._first = _Step(start.tree, start.extra)
            self._by_place[place] = self._first
            self._pace = Pace(max(budgets), start.extra)
        else:
            self._first = _Step(choice.tree, 0.0)
        self.largest = self._first.tree

    def __call__(self, num_tokens_left: int) -> TreeTensors:
        """The tree of the next step, when at most so many tokens are still wanted."""
        step = self._first
        if self._pace is not None:
            step = self._at(self._end - num_tokens_left)
            unknown = sum(earlier.extra for earlier in self._in_flight)
            step = step if self._pace.can_pay(step.extra + unknown) else PLAIN
        self._in_flight.append(step)
        tree = step.tree
        if not self._whole:
            tree = tree.prune(min(tree.max_depth, max(num_tokens_left - 1, 0)))
        return self._choice.load(tree)

    def observe(self, num_tokens: float) -> bool:
        """What the oldest step not yet observed emitted, a mean over the sequences going on;
        whether it drafted."""
        step = self._in_flight.popleft()
        if self._pace is not None:
            self._pace.observe(num_tokens, step.extra)
        return step.tree.num_nodes > 1

    def _at(self, num_context: int) -> _Step:
        """What pays there on average; looked for once a place, since that may read a file."""
        place = self._place(num_context)
        if place not in self._by_place:
            self._by_place[place] = self._chosen(place)
        return self._by_place[place]

    def _chosen(self, place: Place) -> _Step:
        if not self._choice.is_known(place, self._asked):
            return self._first
        chosen = self._choice.at(place, self._asked)
        largest = self.largest
        # Memory was taken for the first place's tree.
        fits = (
            chosen.tree.num_nodes <= largest.num_nodes
            and chosen.tree.max_depth <= largest.max_depth
        )
        return _Step(chosen.tree, chosen.extra) if fits else self._first

    def _place(self, num_context: int) -> Place:
        return self._choice.place(num_context, self._num_sequences)
