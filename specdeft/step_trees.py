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
    (`pacing`). Before it does, it falls back to the tree that brings most for what it costs, where
    steps are not captured: another graph would take longer than it saves.

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
        self._by_place: dict[Place, tuple[_Step, ...]] = {}
        if choice.is_auto:
            place = self._place(max(num_prompt_tokens))
            self._first = self._steps(place)
            self._by_place[place] = self._first
            self._pace = Pace(max(budgets), self._first[0].extra)
        else:
            self._first = (_Step(choice.tree, 0.0),)
        self.largest = self._first[0].tree

    def __call__(self, num_tokens_left: int) -> TreeTensors:
        """The tree of the next step, when at most so many tokens are still wanted."""
        step = self._first[0]
        if self._pace is not None:
            step = self._payable(self._pace, self._at(self._end - num_tokens_left))
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

    def _payable(self, pace: Pace, steps: tuple[_Step, ...]) -> _Step:
        """The first that can be paid if it brings nothing, nor do those in flight."""
        unknown = sum(step.extra for step in self._in_flight)
        return next((step for step in steps if pace.can_pay(step.extra + unknown)), PLAIN)

    def _at(self, num_context: int) -> tuple[_Step, ...]:
        """What pays there on average; looked for once a place, since that may read a file."""
        place = self._place(num_context)
        if place not in self._by_place:
            known = self._choice.is_known(place, self._asked)
            steps = self._steps(place) if known else self._first
            # Memory was taken for the first place's tree.
            largest = self.largest
            fits = all(
                step.tree.num_nodes <= largest.num_nodes
                and step.tree.max_depth <= largest.max_depth
                for step in steps
            )
            self._by_place[place] = steps if fits else self._first
        return self._by_place[place]

    def _steps(self, place: Place) -> tuple[_Step, ...]:
        """The tree with the most tokens per time, and the frugal one."""
        chosen = [self._choice.at(place, self._asked)]
        if not self._whole:
            chosen.append(self._choice.frugal(place, self._asked))
        return tuple(_Step(one.tree, one.extra) for one in chosen)

    def _place(self, num_context: int) -> Place:
        return self._choice.place(num_context, self._num_sequences)
