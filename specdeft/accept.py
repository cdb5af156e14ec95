"""Which drafted nodes the target confirms: the walk from the root along the target's own tokens.

The target's token after every node is known (greedy or drawn, ``sampling.choose_tokens``). A node
is accepted when it holds the token the target chose after its parent and its parent is accepted;
the root always is. So every emitted token is the target's own, for every tree and temperature.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.tree_tensors import TreeTensors


class Acceptance(NamedTuple):
    """The outcome of one step for B sequences; E is the number of tree levels.

    num_accepted: [B] int64, accepted drafted nodes, the bonus token excluded.
    last_node: [B] int64, the deepest accepted node (0: the root alone).
    path: [B, E] int64, nodes from the root; entries past num_accepted repeat the last node.
    emitted: [B, E] int64, the num_accepted drafted tokens, then the bonus token; entries past it
        repeat the bonus and are not output.
    """

    num_accepted: Tensor
    last_node: Tensor
    path: Tensor
    emitted: Tensor

    @property
    def bonus(self) -> Tensor:
        """[B] int64, the target's token after the last accepted node: the next root."""
        return self.emitted.gather(1, self.num_accepted[:, None])[:, 0]


def accept(tree_tokens: Tensor, target_tokens: Tensor, tree: TreeTensors) -> Acceptance:
    """Walk the tree.

    Args:
        tree_tokens: [B, N] int64, the token of every node.
        target_tokens: [B, N] int64, the target's token after every node.
        tree: the tree's tensors.
    """
    confirmed = tree_tokens == target_tokens.index_select(1, tree.parents)
    confirmed[:, 0] = True
    refused_above = (tree.ancestors & ~confirmed[:, None, :]).any(dim=-1)
    # Siblings hold distinct tokens, but for a lookup chain that guesses what the heads guess: every
    # path that is accepted holds the same tokens, and the first of the deepest is taken.
    last_node = torch.where(refused_above, -1, tree.depths).argmax(dim=-1)
    num_accepted = tree.depths.index_select(0, last_node)
    path = tree.path_nodes.index_select(0, last_node)
    tokens = tree_tokens.gather(1, path)
    bonus = target_tokens.gather(1, last_node[:, None])
    shifted = torch.cat([tokens[:, 1:], bonus], dim=1)
    emitted = torch.where(tree.levels < num_accepted[:, None], shifted, bonus)
    return Acceptance(num_accepted, last_node, path, emitted)
