"""Seeded tree topologies for the kernel tests, parents first."""

import random

import torch
from torch import Tensor


def random_parents(num_nodes: int, seed: int) -> list[int]:
    """A depth-first tree: every node hangs below a node of the path to the one before it."""
    draw = random.Random(seed)
    parents = [-1]
    for node in range(1, num_nodes):
        above = node - 1
        while above > 0 and draw.random() < 0.5:
            above = parents[above]
        parents.append(above)
    return parents


def chain_parents(num_nodes: int) -> list[int]:
    return list(range(-1, num_nodes - 1))


def star_parents(num_nodes: int) -> list[int]:
    return [-1] + [0] * (num_nodes - 1)


def ancestors_and_depths(parents: list[int]) -> tuple[Tensor, Tensor]:
    """bool [N, N] (a node counts as its own ancestor) and int64 [N] (root 0)."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, above in enumerate(parents):
        if above >= 0:
            ancestors[node] |= ancestors[above]
    return ancestors, ancestors.sum(dim=1) - 1
