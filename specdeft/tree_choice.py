"""Which token tree a decoder uses: what was asked for, or the size that pays on this device."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from specdeft.engine import Engine
from specdeft.step_cost import Place, cached_step_ms
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.mixing import expected_mix
from specdeft.trees.request import (
    LOOKUP_ONLY,
    NOT_CALIBRATED,
    LookupRequest,
    TreeRequest,
    check_lookup,
    tree_of,
)
from specdeft.trees.search import ValuedPaths, choose_size
from specdeft.trees.token_tree import TokenTree

AUTO_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Every size is compiled for itself, tens of seconds each: fewer are tried.
AUTO_SIZES_COMPILED = (1, 16, 64)
NOTHING = ValuedPaths((), ())  # neither heads nor lookup: plain decoding


class Chosen(NamedTuple):
    """The tree of a place (context and batch), its expected tau and its step time in milliseconds
    beside that of plain decoding."""

    tree: TokenTree
    tau: float
    step_ms: float
    plain_ms: float

    @property
    def report(self) -> str:
        """One line that says what was chosen and why."""
        lookup = f" ({self.tree.num_lookup} of lookup)" if self.tree.num_lookup else ""
        speedup = self.tau * self.plain_ms / self.step_ms
        return (
            f"tree of {self.tree.num_nodes} nodes{lookup} by measured step cost: "
            f"{self.step_ms:.1f} ms against {self.plain_ms:.1f} plain, {self.tau:.2f} tokens a "
            f"step expected, {speedup:.2f}x"
        )


class TreeChoice:
    """A request for a tree, checked at once and resolved when first needed.

    Attributes:
        report: one line that says which tree is used and why; empty until it is resolved.
    """

    def __init__(
        self,
        engine: Engine,
        request: TreeRequest,
        values: ValuedPaths | None,
        clock: Callable[[], float],
        lookup: LookupRequest = "auto",
    ) -> None:
        """Args as in `SpecDecoder`; ``values`` are the heads' rank paths by value, if known.

        Raises:
            ValueError: there is no such tree, or the heads cannot fill it.
        """
        self.report = ""
        self._engine = engine
        self._lookup = check_lookup(lookup)
        self._values = values
        if engine.heads is None:
            self._values = NOTHING if lookup == "off" else LOOKUP_ONLY
        self._clock = clock
        self._loaded: dict[TokenTree, TreeTensors] = {}
        self._by_place: dict[Place, Chosen] = {}
        self._asked = None if request == "auto" else self._of(request)
        if self._asked is not None:
            engine.load_tree(self._asked)

    @cached_property
    def tree(self) -> TokenTree:
        """The tree; "auto" measures the step cost the first time on a device."""
        if self._asked is not None:
            self.report = f"tree of {self._asked.num_nodes} nodes, as asked"
            return self._asked
        if self._values == NOTHING:
            self.report = "no draft heads and no lookup: plain decoding"
            return TokenTree.chain(0)
        chosen = self.at(Place())
        self.report = chosen.report
        return chosen.tree

    @property
    def expected_tau(self) -> float | None:
        """Tokens a step expected of a tree that drafts, where what it is made of was measured."""
        if self._values is None or self.tree.num_nodes == 1:
            return None
        return expected_mix(self._values, self.tree)

    def at(self, place: Place) -> Chosen:
        """What "auto" takes at a place; measures the step cost there the first time."""
        if place not in self._by_place:
            trees = self._sizes()
            step_ms = cached_step_ms(self._engine, trees, self._clock, place)
            values = self._known_values()
            expected = {size: expected_mix(values, tree) for size, tree in trees.items()}
            size = choose_size(expected, step_ms)
            self._by_place[place] = Chosen(trees[size], expected[size], step_ms[size], step_ms[1])
        return self._by_place[place]

    def whole(self, _num_tokens_left: int) -> TreeTensors:
        """The whole tree whatever is left: one graph serves to the end."""
        return self._load(self.tree)

    def for_budget(self, num_tokens_left: int) -> TreeTensors:
        """The tree without the levels that could only draft past the token budget."""
        return self._load(self.tree.prune(min(self.tree.max_depth, max(num_tokens_left - 1, 0))))

    def _load(self, tree: TokenTree) -> TreeTensors:
        if tree not in self._loaded:
            self._loaded[tree] = self._engine.load_tree(tree)
        return self._loaded[tree]

    def _sizes(self) -> dict[int, TokenTree]:
        """The trees that "auto" chooses among, by size."""
        values = self._known_values()
        most = 1 + len(values.paths) + (len(values.lookup) if self._lookup != "off" else 0)
        tried = AUTO_SIZES_COMPILED if self._engine.target.is_compiled else AUTO_SIZES
        return {size: tree_of(size, values, self._lookup) for size in tried if size <= most}

    def _of(self, request: TreeRequest) -> TokenTree:
        if self._values == NOTHING and str(request).isdecimal() and int(str(request)) > 1:
            raise ValueError(
                "this decoder has no draft heads to fill a tree: give heads=..., allow lookup, or "
                "use tree 1"
            )
        return tree_of(request, self._values, self._lookup)

    def _known_values(self) -> ValuedPaths:
        if self._values is None:
            raise ValueError(NOT_CALIBRATED)
        return self._values
