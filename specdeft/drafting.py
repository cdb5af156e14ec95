"""Tokens for the nodes of a tree: pure functions on a step's tensors, without a host read."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from specdeft.batch import Batch
from specdeft.best_columns import best_columns
from specdeft.heads.eight_bit import Product
from specdeft.heads.medusa import MedusaHeads
from specdeft.model import TargetModel
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.lookup import look_up


def draft_tokens(
    target: TargetModel,
    heads: MedusaHeads | None,
    batch: Batch,
    tree: TreeTensors,
    product: Product = linear,
) -> Tensor:
    """Tokens of the tree's nodes, [B, N] int64: the roots, then what the lookup chain and the heads
    propose behind them.

    Args:
        target: whose embedding and output layer the heads read.
        heads: needed where the tree has nodes of theirs (`Engine.load_tree` sees to it).
        batch: the sequences.
        tree: which tokens are wanted.
        product: how sequential heads multiply with their weights.
    """
    num_lookup = tree.tree.num_lookup
    parts = [batch.root[:, None]]
    if num_lookup:
        parts.append(look_up(batch.history, batch.lengths, num_lookup))
    if heads is not None and tree.num_nodes > num_lookup + 1:
        parts.append(_draft_by_heads(target, heads, batch, tree, product))
    return torch.cat(parts, dim=1)


def _draft_by_heads(
    target: TargetModel, heads: MedusaHeads, batch: Batch, tree: TreeTensors, product: Product
) -> Tensor:
    """Tokens [B, N - 1 - num_lookup] of the nodes that heads propose."""
    embedding, output = target.embedding, target.output_layer
    if heads.config.sequential:
        drafted = heads.draft_tree(
            batch.hidden, batch.root, embedding, output, tree.draft_levels, product, best_columns
        )
        return drafted[:, 1:]
    drafted = heads.draft(
        batch.hidden, batch.root, embedding, output, tree.tree.top_k, best_columns
    )
    return drafted.flatten(1).index_select(1, tree.draft_index)
