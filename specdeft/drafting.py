"""Tokens for the nodes of a tree: pure functions on a step's tensors, without a host read."""

from torch import Tensor

from specdeft.batch import Batch
from specdeft.heads.medusa import MedusaHeads
from specdeft.model import TargetModel
from specdeft.tree_tensors import TreeTensors


def draft_tokens(
    target: TargetModel, heads: MedusaHeads | None, batch: Batch, tree: TreeTensors
) -> Tensor:
    """Tokens of the tree's nodes, [B, N] int64: the roots, and what the heads propose behind them.

    Args:
        target: whose embedding and output layer the heads read.
        heads: None leaves the root alone.
        batch: the sequences.
        tree: which ranks of which heads are wanted.
    """
    if tree.num_nodes == 1 or heads is None:
        return batch.root[:, None]
    embedding, output = target.embedding, target.output_layer
    if getattr(heads.config, "sequential", False):
        return heads.draft_tree(batch.hidden, batch.root, embedding, output, tree.draft_levels)
    drafted = heads.draft(batch.hidden, batch.root, embedding, output, tree.tree.top_k)
    return tree.fill(batch.root, drafted)
