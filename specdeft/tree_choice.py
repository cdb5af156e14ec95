"""Which token tree a decoder uses: what was asked for, or the size that pays on this device."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from specdeft.engine import Engine
from specdeft.step_cost import cached_step_ms
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.named import NAMED_TREES, named_tree
from specdeft.trees.search import ValuedPaths, best_tree, choose_size, expected_tau
from specdeft.trees.token_tree import TokenTree

TreeRequest = str | int | Path | TokenTree
AUTO_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Every size is compiled for itself, tens of seconds each: fewer are tried.
AUTO_SIZES_COMPILED = (1, 16, 64)


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
    ) -> None:
        """Args as in `SpecDecoder`; ``values`` are the heads' rank paths by value, if known.

        Raises:
            ValueError: there is no such tree, or the heads cannot fill it.
        """
        self.report = ""
        self._engine = engine
        self._values = values
        self._clock = clock
        self._by_depth: dict[int, TreeTensors] = {}
        self._asked = None if request == "auto" else self._named(request)
        if self._asked is not None:
            engine.load_tree(self._asked)

    @cached_property
    def tree(self) -> TokenTree:
        """The tree; "auto" measures the step cost the first time on a device."""
        if self._asked is not None:
            self.report = f"tree of {self._asked.num_nodes} nodes, as asked"
            return self._asked
        return self._auto()

    @property
    def expected_tau(self) -> float | None:
        """Tokens a step expected of the tree, where it is made of calibrated paths."""
        if self._values is None:
            return None
        known = dict(zip(self._values.paths, self._values.values, strict=True))
        return 1.0 + sum(known.get(path, 0.0) for path in self.tree.paths[1:])

    def whole(self, _num_tokens_left: int) -> TreeTensors:
        """The whole tree whatever is left: one graph serves to the end."""
        return self.for_budget(self.tree.max_depth + 1)

    def for_budget(self, num_tokens_left: int) -> TreeTensors:
        """The tree without the levels that could only draft past the token budget."""
        depth = min(self.tree.max_depth, max(num_tokens_left - 1, 0))
        if depth not in self._by_depth:
            self._by_depth[depth] = self._engine.load_tree(self.tree.prune(depth))
        return self._by_depth[depth]

    def _named(self, request: TreeRequest) -> TokenTree:
        if isinstance(request, TokenTree):
            return request
        text = str(request)
        if isinstance(request, int) or text.isdecimal():
            return self._of_size(int(text))
        if text in NAMED_TREES:
            return named_tree(text)
        if Path(text).suffix == ".json" or Path(text).exists():
            return TokenTree.load(text)
        raise ValueError(
            f"there is no tree {text!r}: give auto, a number of nodes, a JSON file, or one of "
            f"{', '.join(NAMED_TREES)}"
        )

    def _of_size(self, num_nodes: int) -> TokenTree:
        if num_nodes < 1:
            raise ValueError(f"a tree of {num_nodes} nodes is empty: ask for 1 (plain) or more")
        if num_nodes == 1:
            return TokenTree.chain(0)
        return best_tree(self._known_values(), num_nodes)

    def _known_values(self) -> ValuedPaths:
        if self._engine.heads is None:
            raise ValueError(
                "this decoder has no draft heads to fill a tree: give heads=... or use tree 1"
            )
        if self._values is None:
            raise ValueError(
                "these heads were not calibrated, so the best tree of a size is not known: name a "
                f"tree ({', '.join(NAMED_TREES)}) or give a JSON file"
            )
        return self._values

    def _auto(self) -> TokenTree:
        if self._engine.heads is None:
            self.report = "no draft heads: plain decoding"
            return TokenTree.chain(0)
        values = self._known_values()
        tried = AUTO_SIZES_COMPILED if self._engine.target.is_compiled else AUTO_SIZES
        sizes = [size for size in tried if size <= len(values.paths) + 1]
        trees = {size: self._of_size(size) for size in sizes}
        step_ms = cached_step_ms(self._engine, trees, self._clock)
        expected = {size: expected_tau(values, size) for size in sizes}
        size = choose_size(expected, step_ms)
        speedup = expected[size] * step_ms[1] / step_ms[size]
        self.report = (
            f"tree of {size} nodes by measured step cost: {step_ms[size]:.1f} ms against "
            f"{step_ms[1]:.1f} plain, {expected[size]:.2f} tokens a step expected, {speedup:.2f}x"
        )
        return trees[size]
