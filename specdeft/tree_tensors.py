"""A token tree as tensors on the target's device: what draft, attention and acceptance read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdeft.trees.draft_plan import DraftLevel, draft_plan
from specdeft.trees.token_tree import TokenTree


@dataclass(frozen=True, eq=False)  # compared and cached by identity: tensors have no truth value
class TreeTensors:
    """Static tensors of one token tree of N nodes and depth E - 1.

    Attributes:
        tree: the topology they were made from.
        parents: [N] int64; the root's entry is 0 and is never followed.
        depths: [N] int64, the root's is 0.
        ancestors: [N, N] bool, row i marks node i and its ancestors.
        mask_words: [N, W] int64, the same rows as 64-bit words.
        path_nodes: [N, E] int64, entry d is the ancestor at depth d for d <= depths.
        draft_index: [N - 1 - num_lookup] int64, where the token of each node that a head proposes
            stands in the flat [K * top_k] list of draft tokens.
        levels: [E] int64, 0 .. E - 1.
        draft_levels: in which order sequential heads fill the tree.
    """

    tree: TokenTree
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    mask_words: Tensor
    path_nodes: Tensor
    draft_index: Tensor
    levels: Tensor
    draft_levels: tuple[DraftLevel, ...]

    @classmethod
    def build(cls, tree: TokenTree, device: torch.device) -> "TreeTensors":
        """Copy ``tree`` to ``device``."""
        depths = torch.tensor(tree.depths, dtype=torch.int64)
        ranks = torch.tensor(tree.ranks, dtype=torch.int64)
        by_heads = slice(tree.num_lookup + 1, None)
        parents = torch.tensor(tree.parents, dtype=torch.int64).clamp(min=0)
        return cls(
            tree=tree,
            parents=parents.to(device),
            depths=depths.to(device),
            ancestors=tree.ancestors().to(device),
            mask_words=tree.mask_words().to(device),
            path_nodes=tree.path_nodes().to(device),
            draft_index=((depths - 1) * max(tree.top_k, 1) + ranks)[by_heads].to(device),
            levels=torch.arange(tree.max_depth + 1, device=device),
            draft_levels=draft_plan(tree.head_tree, device),
        )

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return self.tree.num_nodes

    @property
    def num_levels(self) -> int:
        """E, the number of depths: most tokens one step can emit."""
        return self.tree.max_depth + 1
