"""What a step must read of the KV cache: computed, not counted ("analytic" wherever it is printed).

A step over a tree reads the context's keys and values once for all its nodes, and the tree's own.
Without a tree, a sequence for every root-to-leaf path would read the context once for each path.
"""

import torch

from specdeft.kv_tree import KVShape
from specdeft.trees.token_tree import TokenTree


def kv_read_bytes_per_step(
    shape: KVShape, dtype: torch.dtype, tree: TokenTree, num_context: int
) -> int:
    """Bytes of keys and values, all layers, with ``num_context`` tokens before the root."""
    return shape.num_bytes(num_context + tree.num_nodes, dtype)


def kv_read_ratio_vs_per_path(tree: TokenTree, num_context: int) -> float:
    """How many times more a sequence for every path would read."""
    per_path = sum(num_context + tree.depths[leaf] + 1 for leaf in tree.leaves)
    return per_path / (num_context + tree.num_nodes)
