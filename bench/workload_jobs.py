"""Which workloads to run: from the options to shapes of generations, checked before any work."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdeft.bench.drafts import read_accept_lengths
from specdeft.bench.growing_tree import BUILTIN_TREE, GrowingTree, read_growing_tree
from specdeft.bench.workload_states import GrowingState, SpeculativeState, State
from specdeft.model import TargetModel
from specdeft.trees.named import NAMED_TREES, named_tree
from specdeft.trees.options import listed, whole_numbers

FEW_SHOT, REASONING, SPECULATIVE = "few-shot", "reasoning", "speculative"
WORKLOADS = (FEW_SHOT, REASONING, SPECULATIVE)
# Drafted tokens kept, where no record is given: our own, a made-up run with a mean of 2.2.
_BUILTIN_LENGTHS = (2, 3, 1, 4, 0, 2, 3, 4, 2, 1)


@dataclass(frozen=True)
class Job:
    """One workload to run: its name, and what its state is made from.

    Attributes:
        growing: the recorded tree; None for speculation.
        token_tree, accepted: of speculation.
        num_prompt: tokens of the prompt.
    """

    name: str
    num_prompt: int
    growing: GrowingTree | None = None
    token_tree: str = ""
    accepted: tuple[int, ...] = ()

    def state(self, target: TargetModel, page_size: int) -> State:
        """The workload on a fresh KV tree."""
        pool: dict[str, Any] = {
            "page_size": page_size,
            "dtype": target.dtype,
            "device": target.device,
        }
        if self.growing is not None:
            return GrowingState(self.growing, target.shape, **pool)
        tree = named_tree(self.token_tree)
        return SpeculativeState(self.num_prompt, tree, self.accepted, target.shape, **pool)

    @property
    def num_steps(self) -> int:
        """Decoding steps of the whole run."""
        return self.growing.num_steps if self.growing else len(self.accepted)

    @property
    def longest_path(self) -> int:
        """Most tokens of one sequence, drafted ones included."""
        if self.growing is None:
            tree = named_tree(self.token_tree)
            kept = sum(min(count, tree.max_depth) + 1 for count in self.accepted)
            return self.num_prompt + kept + tree.num_nodes
        lengths: list[int] = []
        for parent, count in zip(self.growing.parents, self.growing.tokens, strict=True):
            lengths.append(count + (lengths[parent] if parent >= 0 else 0))
        return max(lengths)


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """What is to be run, checked.

    Raises:
        ValueError: an option is out of range, or a file is not what it should be.
    """
    jobs: list[Job] = []
    for workload in pick_names(options.workloads, WORKLOADS, "workload"):
        if workload == FEW_SHOT:
            for branches in whole_numbers(options.branches, "branches", "20,50"):
                tree = GrowingTree.few_shot(options.prompt_len, branches, options.branch_len)
                jobs.append(Job(f"few-shot, {branches} branches", options.prompt_len, tree))
        elif workload == REASONING:
            jobs.append(_reasoning(options))
        else:
            accepted = _accept_lengths(options)
            jobs += [
                Job(f"speculative, {tree}", options.prompt_len, None, tree, accepted)
                for tree in pick_names(options.trees, NAMED_TREES, "tree")
            ]
    return jobs


def _reasoning(options: argparse.Namespace) -> Job:
    if options.tree_file is None:
        return Job("reasoning, built-in", BUILTIN_TREE.tokens[0], BUILTIN_TREE)
    tree = read_growing_tree(options.tree_file, options.tree_index)
    return Job(f"reasoning, {Path(options.tree_file).stem}", tree.tokens[0], tree)


def _accept_lengths(options: argparse.Namespace) -> tuple[int, ...]:
    if options.replay is None:
        return _BUILTIN_LENGTHS * 10
    return tuple(read_accept_lengths(options.replay)[0])


def pick_names(text: str, valid: Sequence[str], what: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(listed(text)))
    wrong = next((name for name in names if name not in valid), None)
    if wrong is not None or not names:
        given = f"there is no {what} {wrong!r}" if names else f"no {what} was given"
        raise ValueError(f"{given}: give some of {', '.join(valid)}, with commas")
    return names
