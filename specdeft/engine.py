"""The decoding loop of one sequence: draft, forward over the tree, accept, commit.

    prompt -> prefill -> Position -> step -> Position -> step -> ...

A `Position` is what a step starts from: the root token (decided, not yet in the cache) and the
hidden state that predicted it. Plain decoding is the same step with a one-node tree, so both paths
share every kernel and every rule.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.accept import Acceptance, accept
from specdeft.attention import KernelChoice, make_attention
from specdeft.config import GenerationConfig
from specdeft.heads.medusa import MedusaHeads
from specdeft.kernels.commit import commit
from specdeft.kv_tree import KVTree
from specdeft.model import TargetModel
from specdeft.sampling import choose_tokens
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.token_tree import TokenTree

PREFILL_CHUNK_TOKENS = 512


class Position(NamedTuple):
    """Where a sequence stands: root token [1] int64 and the hidden state before it [1, hidden]."""

    root: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Engine:
    """The target, its heads and the kernels they run on; holds no state of a generation.

    Attributes:
        target: the model whose output is reproduced.
        heads: propose the token tree; None allows the one-node tree only.
        kernels: which attention kernels run.
    """

    target: TargetModel
    heads: MedusaHeads | None
    kernels: KernelChoice

    def new_cache(self, capacity: int) -> KVTree:
        """A contiguous cache for one sequence of ``capacity`` tokens, drafted ones included."""
        return KVTree.contiguous(
            self.target.shape,
            num_sequences=1,
            capacity=capacity,
            dtype=self.target.dtype,
            device=self.target.device,
        )

    def load_tree(self, tree: TokenTree) -> TreeTensors:
        """Copy a tree to the device.

        Raises:
            ValueError: the heads cannot fill it.
        """
        if tree.num_nodes > 1:
            if self.heads is None:
                raise ValueError(
                    "this decoder has no draft heads: give heads=... or use the tree of 1 node"
                )
            tree.validate_for(self.heads.config.num_heads, self.heads.config.num_logits)
        return TreeTensors.build(tree, self.target.device)

    @torch.inference_mode()
    def prefill(
        self, cache: KVTree, sequence: int, prompt: Tensor, config: GenerationConfig
    ) -> Position:
        """Read the prompt [T] int64 into ``sequence`` and decide the first token."""
        for chunk in prompt.split(PREFILL_CHUNK_TOKENS):
            start, num_new = cache.length(sequence), len(chunk)
            cache.reserve(sequence, num_new)
            output = self.target.forward(
                chunk[None],
                torch.arange(start, start + num_new, device=prompt.device)[None],
                make_attention(self.kernels, cache, [sequence], num_new, None),
                last_only=True,
            )
            cache.advance(sequence, num_new)
        depths = torch.zeros(1, dtype=torch.int64, device=prompt.device)
        position = depths[None] + cache.length(sequence)
        root = choose_tokens(output.logits, position, depths, depths, config)
        return Position(root[0], output.hidden[:, 0])

    @torch.inference_mode()
    def step(
        self,
        cache: KVTree,
        sequence: int,
        position: Position,
        tree: TreeTensors,
        config: GenerationConfig,
    ) -> tuple[Acceptance, Position]:
        """One verified step: the accepted nodes are committed, the bonus token is the next root."""
        tokens = self._draft(position, tree)
        start, num_nodes = cache.length(sequence), tree.num_nodes
        cache.reserve(sequence, num_nodes)
        # Drafted nodes past the last position can never be kept; any valid position will do there.
        positions = (tree.depths + start).clamp_(max=self.target.max_context - 1)
        output = self.target.forward(
            tokens,
            positions[None],
            make_attention(self.kernels, cache, [sequence], num_nodes, tree),
            last_only=False,
        )
        levels = torch.arange(start + 1, start + 1 + tree.num_levels, device=tokens.device)
        sequences = torch.zeros(1, dtype=torch.int64, device=tokens.device)
        chosen = choose_tokens(output.logits, levels[None], tree.depths, sequences, config)
        acceptance = accept(tokens, chosen, tree)
        num_accepted = int(acceptance.num_accepted)
        if num_accepted:
            self._commit(cache, sequence, acceptance)
        cache.advance(sequence, 1 + num_accepted)
        hidden = output.hidden[:, acceptance.last_node[0]]
        return acceptance, Position(acceptance.bonus, hidden)

    def _draft(self, position: Position, tree: TreeTensors) -> Tensor:
        """Tokens of the tree's nodes, [1, N]."""
        if tree.num_nodes == 1 or self.heads is None:
            return position.root[:, None]
        drafted = self.heads.draft(
            position.hidden,
            position.root,
            self.target.embedding,
            self.target.output_layer,
            tree.tree.top_k,
        )
        return tree.fill(position.root, drafted)

    def _commit(self, cache: KVTree, sequence: int, acceptance: Acceptance) -> None:
        device = cache.keys.device
        commit(
            cache.keys,
            cache.values,
            lengths=torch.tensor([cache.length(sequence)], dtype=torch.int32, device=device),
            path_nodes=acceptance.path,
            num_accepted=acceptance.num_accepted.to(torch.int32),
            page_table=cache.page_table([sequence]),
            page_size=cache.page_size,
            capacity=cache.page_size,
        )
