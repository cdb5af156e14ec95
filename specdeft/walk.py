"""Sampling on a CPU: the target's tokens are drawn only where the walk comes by.

Noise over the vocabulary for every level of a tree, and cutting it for every node, cost a CPU a
tenth of a step and more, and most of it is for nodes that were refused further up. A GPU draws for
all nodes at once (`sampling.choose_tokens`), since it may not wait to learn which are needed.
"""

import torch
from torch import Tensor

from specdeft.sampling import Sampler, choose_tokens
from specdeft.tree_tensors import TreeTensors

NOT_DRAWN = -1  # equals no token, so nothing below is ever confirmed


def choose_along(
    logits: Tensor, positions: Tensor, tokens: Tensor, tree: TreeTensors, sampler: Sampler
) -> Tensor:
    """The target's token after every node that the walk of `accept` can reach.

    Args:
        logits: [B, N, V] on the CPU.
        positions: [B, E] int64, the absolute position of the token drawn at each depth.
        tokens: [B, N] int64, the token of every node.
        tree: the tree's tensors.
        sampler: the rule, the temperature and the noise keys.

    Returns:
        [B, N] int64: what `choose_tokens` gives, and NOT_DRAWN below a refused node.
    """
    chosen = torch.full_like(tokens, NOT_DRAWN)
    parents = tree.tree.parents
    for row, drafted in enumerate(tokens.tolist()):
        noise, depth, reached = sampler.row(row), 0, [0]
        while reached:
            drawn = choose_tokens(
                logits[row : row + 1, reached],
                positions[row : row + 1, depth : depth + 1],
                torch.zeros(len(reached), dtype=torch.int64),
                noise,
            )
            chosen[row, reached] = drawn[0]
            wanted = dict(zip(reached, drawn[0].tolist(), strict=True))
            reached = [
                node
                for node, parent in enumerate(parents)
                if wanted.get(parent, NOT_DRAWN) == drafted[node]
            ]
            depth += 1
    return chosen
