"""Which token tree a decoder uses: what was asked for, or the size that pays on this device."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from specdeft.engine import Engine
from specdeft.step_cost import Place, cached_step_ms, known_step_ms
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
from specdeft.trees.search import ValuedPaths, choose_size, replayed_tau
from specdeft.trees.token_tree import TokenTree

AUTO_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# A GPU that waits for its memory computes further rows nearly for nothing.
AUTO_SIZES_CUDA = (*AUTO_SIZES, 96, 128)
# Every size is compiled for itself, some seconds each: fewer are tried.
AUTO_SIZES_COMPILED = (1, 16, 64, 128)
# One size is compiled for requests of all lengths: the one that suits texts of so many tokens.
COMPILED_FOR_TOKENS = 128
RATIO_NOISE = 0.03  # measured step times over that of a plain step are known as well as that
MOST_REMEMBERED = 256  # choices: requests differ in temperature and length without end
NOTHING = ValuedPaths((), ())  # neither heads nor lookup: plain decoding


class Asked(NamedTuple):
    """What a generation asks for, as far as what guesses bring depends on it: its temperature and
    its number of new tokens; None for as many as drafts were calibrated with."""

    temperature: float = 0.0
    num_tokens: int | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn, which costs a step more than taking the likeliest."""
        return self.temperature > 0


USUALLY_ASKED = Asked()
# Step times are measured best at the sizes that one of these would choose.
TYPICALLY_ASKED = (USUALLY_ASKED, Asked(0.0, 64), Asked(0.7), Asked(0.7, 64))


class Chosen(NamedTuple):
    """The tree of a place (context and batch), its expected tau and its step time in milliseconds
    beside that of plain decoding."""

    place: Place
    tree: TokenTree
    tau: float
    step_ms: float
    plain_ms: float

    @property
    def extra(self) -> float:
        """What a step costs at most beyond a plain one, in plain steps."""
        if self.tree.num_nodes == 1:
            return 0.0
        return max(self.step_ms / self.plain_ms - 1.0, 0.0) + RATIO_NOISE

    @property
    def report(self) -> str:
        """One line that says what was chosen and why."""
        speedup = self.tau * self.plain_ms / self.step_ms
        return (
            f"{_described(self.tree)} by measured step cost: {self.step_ms:.1f} ms against "
            f"{self.plain_ms:.1f} plain behind up to {self.place.num_context} tokens, "
            f"{self.tau:.2f} tokens a step expected, {speedup:.2f}x"
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
        *,
        refresh: bool = False,
    ) -> None:
        """Args as in `SpecDecoder`; ``values`` are the heads' rank paths by value, if known;
        ``refresh`` measures step times that the cache holds already.

        Raises:
            ValueError: there is no such tree, or the heads cannot fill it.
        """
        self.report = ""
        self._engine = engine
        self._lookup = check_lookup(lookup)
        self._values = values
        if engine.heads is None:
            self._values = NOTHING if lookup == "off" else values or LOOKUP_ONLY
        self._clock = clock
        self._refresh = refresh
        self._step_ms: dict[tuple[Place, bool], dict[int, float]] = {}
        self._loaded: dict[TokenTree, TreeTensors] = {}
        self._by_size: dict[int, TokenTree] | None = None
        self._chosen: dict[tuple[Place, Asked], Chosen] = {}
        self._asked = None if request == "auto" else self._of(request)
        if self._asked is not None:
            engine.load_tree(self._asked)

    @property
    def is_auto(self) -> bool:
        """Whether the tree is chosen by measured step cost."""
        return self._asked is None and self._values != NOTHING

    @cached_property
    def tree(self) -> TokenTree:
        """The tree; "auto" measures the step cost the first time on a device."""
        if self._asked is not None:
            self.report = f"{_described(self._asked)}, as asked"
            return self._asked
        if not self.is_auto:
            self.report = "no draft heads and no lookup: plain decoding"
            return TokenTree.chain(0)
        chosen = self.at(self.place())
        self.report = chosen.report
        return chosen.tree

    def place(self, num_context: int = 0, num_sequences: int = 1) -> Place:
        """The place whose step times stand for a context and a batch."""
        return Place.around(num_context, num_sequences)

    def expected_tau(
        self, asked: Asked = USUALLY_ASKED, place: Place | None = None
    ) -> float | None:
        """Tokens a step is expected to bring, where what the tree is made of was measured; None for
        a tree that drafts nothing."""
        tree = self.at(place or self.place(), asked).tree if self.is_auto else self.tree
        if self._values is None or tree.num_nodes == 1:
            return None
        return self._expected(tree, asked)

    def at(self, place: Place, asked: Asked = USUALLY_ASKED) -> Chosen:
        """What "auto" takes at a place; measures the step cost there the first time."""
        key = place, asked
        if key not in self._chosen:
            if len(self._chosen) == MOST_REMEMBERED:
                self._chosen.clear()
            trees, step_ms = self._sizes(), self.step_ms(place, sampled=asked.is_sampled)
            usual = self._usual(asked)
            expected = {size: self._expected(tree, usual) for size, tree in trees.items()}
            self._chosen[key] = self._sized(choose_size(expected, step_ms), place, asked)
        return self._chosen[key]

    def frugal(self, place: Place, asked: Asked = USUALLY_ASKED) -> Chosen:
        """What brings most for what it costs beyond a plain step: often a much smaller tree than
        the one with the most tokens per time. Measures as `at` does."""
        best = self.at(place, asked)
        smaller = [
            self._sized(size, place, asked)
            for size in self._sizes()
            if 1 < size < best.tree.num_nodes
        ]
        return max([best, *smaller], key=lambda chosen: (chosen.tau - 1) / (chosen.extra or 1.0))

    def _sized(self, size: int, place: Place, asked: Asked) -> Chosen:
        step_ms = self.step_ms(place, sampled=asked.is_sampled)
        tree = self._sizes()[size]
        return Chosen(place, tree, self._expected(tree, asked), step_ms[size], step_ms[1])

    def tree_at(self, place: Place, asked: Asked) -> TokenTree:
        """The tree of a generation that starts there."""
        return self.at(place, asked).tree if self.is_auto else self.tree

    def report_at(self, place: Place, asked: Asked) -> str:
        """Which tree such a generation starts with, and why."""
        if self.is_auto:
            return self.at(place, asked).report
        _resolved = self.tree
        return self.report

    def step_ms(self, place: Place, *, sampled: bool = False) -> dict[int, float]:
        """Milliseconds of a greedy or a sampled step by the sizes that "auto" chooses among;
        measured once."""
        key = place, sampled
        if key not in self._step_ms:
            trees = self._sizes()
            expected = [
                {size: self._expected(tree, asked) for size, tree in trees.items()}
                for asked in TYPICALLY_ASKED
                if asked.is_sampled == sampled
            ]
            self._step_ms[key] = cached_step_ms(
                self._engine,
                trees,
                self._clock,
                place,
                expected,
                sampled=sampled,
                refresh=self._refresh,
            )
        return self._step_ms[key]

    def is_known(self, place: Place, asked: Asked) -> bool:
        """Whether `at` answers without measuring."""
        sampled = asked.is_sampled
        return (place, sampled) in self._step_ms or bool(
            known_step_ms(self._engine, self._sizes(), place, sampled=sampled)
        )

    def load(self, tree: TokenTree) -> TreeTensors:
        """The tree's tensors, made once."""
        if tree not in self._loaded:
            self._loaded[tree] = self._engine.load_tree(tree)
        return self._loaded[tree]

    def _usual(self, asked: Asked) -> Asked:
        """What a size is chosen for: compiling another for another length takes longer than it
        saves."""
        return asked._replace(num_tokens=COMPILED_FOR_TOKENS) if self._engine.is_compiled else asked

    def _expected(self, tree: TokenTree, asked: Asked) -> float:
        """By replay where the tree is one of those that were replayed, else by its values."""
        values = self._known_values()
        size = tree.num_nodes
        if self._is_best(tree):
            replayed = replayed_tau(
                values,
                size,
                temperature=asked.temperature,
                lookup=self._lookup != "off",
                num_tokens=asked.num_tokens,
            )
            if replayed is not None:
                return replayed
        return expected_mix(values, tree)

    def _is_best(self, tree: TokenTree) -> bool:
        """Whether it is the best tree of its size by the values."""
        known = (self._by_size or {}).get(tree.num_nodes)
        if known is not None:  # every request asks: searching again would delay its first token
            return tree == known
        try:
            return tree == tree_of(tree.num_nodes, self._values, self._lookup)
        except ValueError:  # larger than the values reach
            return False

    def _sizes(self) -> Mapping[int, TokenTree]:
        """The trees that "auto" chooses among, by size."""
        if self._by_size is None:
            self._by_size = self._best_of_sizes()
        return self._by_size

    def _best_of_sizes(self) -> dict[int, TokenTree]:
        values = self._known_values()
        most = 1 + len(values.paths) + (len(values.lookup) if self._lookup != "off" else 0)
        target = self._engine.target
        tried = sizes_tried(target.device.type, target.is_compiled)
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


def sizes_tried(device_type: str, is_compiled: bool) -> tuple[int, ...]:
    """The tree sizes whose steps "auto" measures on a kind of device."""
    if is_compiled:
        return AUTO_SIZES_COMPILED
    return AUTO_SIZES_CUDA if device_type == "cuda" else AUTO_SIZES


def _described(tree: TokenTree) -> str:
    lookup = f" ({tree.num_lookup} of lookup)" if tree.num_lookup else ""
    return f"tree of {tree.num_nodes} nodes{lookup}"
