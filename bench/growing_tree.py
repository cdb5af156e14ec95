"""Recorded shapes of branching generations: who starts when, below whom, and for how long.

A node is a run of tokens that one branch writes. The prompt is node 0 and ends at step 0; every
later step gives one token to each branch that is alive. Where a node ends its children begin; one
without children is cut away, and what only it needed is freed.

File form (that of the DeFT repository's records): {"trees": [{"incomplete": false, "nodes":
[[tokens, start_step, [children]], ...]}, ...]}; the prompt's start is 1 - tokens.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GrowingTree:
    """M nodes in depth-first order.

    Attributes:
        parents: -1 for the prompt, which is node 0; else an earlier node.
        tokens: of each node, 1 or more.

    Raises ValueError for other numbers or another order.
    """

    parents: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or len(self.parents) != len(self.tokens) or self.parents[0] != -1:
            raise ValueError("a growing tree needs a prompt as node 0 and a parent for every node")
        if min(self.tokens) < 1:
            raise ValueError(f"a node holds {min(self.tokens)} tokens: give each at least 1")
        path: list[int] = []
        for node, parent in enumerate(self.parents):
            while path and path[-1] != parent:
                path.pop()
            if node and not path:
                raise ValueError(f"node {node} does not follow its parent {parent} depth-first")
            path.append(node)

    @classmethod
    def few_shot(cls, prompt: int, branches: int, tokens: int) -> "GrowingTree":
        """One prompt, and so many continuations of it."""
        return cls((-1, *([0] * branches)), (prompt, *([tokens] * branches)))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The step at which each node gets its first token; 1 - tokens for the prompt."""
        starts = [1 - self.tokens[0]]
        for node in range(1, len(self.parents)):
            starts.append(self.ends_of(starts, self.parents[node]) + 1)
        return tuple(starts)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The step at which each node gets its last token; 0 for the prompt."""
        return tuple(self.ends_of(list(self.starts), node) for node in range(len(self.parents)))

    def ends_of(self, starts: list[int], node: int) -> int:
        """Last step of a node whose start is known."""
        return starts[node] + self.tokens[node] - 1

    @property
    def num_steps(self) -> int:
        """Decoding steps until the last branch has ended."""
        return max(self.ends)

    @property
    def num_generated(self) -> int:
        """Tokens of all branches, the prompt left out."""
        return sum(self.tokens[1:])

    def alive(self, step: int) -> list[int]:
        """Nodes that get a token at this step, in depth-first order."""
        return [
            node
            for node in range(1, len(self.parents))
            if self.starts[node] <= step <= self.ends[node]
        ]

    def kept(self, step: int) -> list[int]:
        """The alive nodes and everything above them, in depth-first order."""
        found = set[int]()
        for node in self.alive(step):
            above = node
            while above >= 0 and above not in found:
                found.add(above)
                above = self.parents[above]
        return sorted(found)

    def begins_at(self, step: int) -> list[int]:
        """Nodes whose first token comes at this step."""
        return [node for node in range(1, len(self.parents)) if self.starts[node] == step]


# Our own small record of a search: four thoughts on a prompt, the best one thought further, twice.
BUILTIN_TREE = GrowingTree(
    parents=(-1, 0, 0, 2, 2, 4, 4, 4, 2, 2, 0, 0),
    tokens=(700, 120, 90, 80, 60, 110, 40, 75, 100, 20, 150, 45),
)


def read_growing_tree(path: str | Path, index: int | None = None) -> GrowingTree:
    """A recorded tree of a file: the one of this index, or the first complete one.

    Nodes without tokens and without children are left out: their end would precede their birth.

    Raises:
        ValueError: the file cannot be read, holds no such tree, or the tree is not one.
    """
    try:
        trees = json.loads(Path(path).read_text(encoding="utf-8"))["trees"]
        complete = [number for number, tree in enumerate(trees) if not tree["incomplete"]]
    except OSError as error:
        raise ValueError(f"the tree file {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{path} holds no recorded trees: give {{"trees": [{{"incomplete": false, "nodes": '
            "[[tokens, start, [children]], ...]}]}"
        ) from error
    if index is None and not complete:
        raise ValueError(f"{path} holds no complete tree: name one by its index")
    if index is not None and not 0 <= index < len(trees):
        raise ValueError(f"tree {index} was asked for and {path} holds {len(trees)}")
    chosen = complete[0] if index is None else index
    try:
        return _from_records(trees[chosen]["nodes"])
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise ValueError(f"tree {chosen} of {path} is not a recorded tree ({error})") from error


def _from_records(nodes: list[Any]) -> GrowingTree:
    parents: list[int] = []
    tokens: list[int] = []
    stack = [(0, -1)]
    seen = set[int]()
    while stack:
        record, parent = stack.pop()
        if record in seen:
            raise ValueError(f"node {record} has two parents")
        seen.add(record)
        count, _start, children = nodes[record]
        if not count:
            if children:
                raise ValueError(f"node {record} has children and no tokens")
            continue
        number = len(parents)
        parents.append(parent)
        tokens.append(int(count))
        stack += [(child, number) for child in reversed(children)]
    return GrowingTree(tuple(parents), tuple(tokens))
