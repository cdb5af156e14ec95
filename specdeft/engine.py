"""The decoding loop: draft, forward over the tree, accept, commit.

    prompt -> prefill -> step -> step -> ...

`Batch` is what a step starts from and what it leaves behind. Plain decoding is the same step with a
one-node tree, so both paths share every kernel and every rule. `Engine.step` waits for nothing and
allocates nothing that grows: it runs eagerly, and `graphs.py` captures it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdeft import drafting
from specdeft.accept import Acceptance, accept
from specdeft.attention import KernelChoice, make_attention
from specdeft.batch import Batch
from specdeft.compiling import compiled, room_for_forms
from specdeft.heads.eight_bit import Product, product_for
from specdeft.heads.medusa import MedusaHeads
from specdeft.kernels.commit import commit
from specdeft.kernels.launch_shape import prefix_pays
from specdeft.kv_tree import KVTree
from specdeft.model import TargetModel, TargetOutput
from specdeft.sampling import Sampler, choose_tokens
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.token_tree import TokenTree
from specdeft.walk import choose_along

if TYPE_CHECKING:
    from specdeft.prompt_graphs import PromptGraphs

PREFILL_CHUNK_TOKENS = 512
# A GPU is kept busy by more rows, and the host launches fewer of them.
PREFILL_CHUNK_TOKENS_CUDA = 2048
# The first chunk, where torch's fused causal attention reads it (`attention.FirstChunkAttention`).
FIRST_CHUNK_TOKENS = 8192
PAGE_SIZE_TOKENS = 128
CAPACITY_STEP_TOKENS = 256  # sequences of a generation have room for multiples of it


class Decision(NamedTuple):
    """What a step decided: the walk, root [B] and hidden state [B, H] of the next step, and the
    positions [B, E] int64 of the emitted tokens."""

    outcome: Acceptance
    root: Tensor
    hidden: Tensor
    positions: Tensor


def _decide(
    tokens: Tensor,
    output: TargetOutput,
    lengths: Tensor,
    tree: TreeTensors,
    sampler: Sampler,
    *,
    on_host: bool = False,
) -> Decision:
    """on_host: tokens are drawn along the walk alone, by a loop that no graph or compiler holds."""
    positions = lengths.to(torch.int64)[:, None] + 1 + tree.levels
    if on_host:
        chosen = choose_along(output.logits, positions, tokens, tree, sampler)
    else:
        chosen = choose_tokens(output.logits, positions, tree.depths, sampler)
    outcome = accept(tokens, chosen, tree)
    last = outcome.last_node[:, None, None].expand(-1, 1, output.hidden.shape[-1])
    return Decision(outcome, outcome.bonus, output.hidden.gather(1, last)[:, 0], positions)


def _advance(batch: Batch, tree: TreeTensors, decision: Decision) -> None:
    outcome = decision.outcome
    batch.root.copy_(decision.root)
    batch.hidden.copy_(decision.hidden)
    batch.emitted[:, : tree.num_levels] = outcome.emitted
    batch.record(decision.positions, outcome.emitted)
    batch.counts.copy_(outcome.num_accepted + 1)
    batch.lengths.add_(batch.counts).mul_(batch.active)


@dataclass(frozen=True)
class Engine:
    """The target, its heads and the kernels they run on; holds no state of a generation.

    Attributes:
        target: the model whose output is reproduced.
        heads: propose the token tree; None allows the one-node tree only.
        kernels: which attention kernels run.
        cuda_graphs: steps are replayed from CUDA graphs (`graphs.py`) instead of run eagerly.
    """

    target: TargetModel
    heads: MedusaHeads | None
    kernels: KernelChoice
    cuda_graphs: bool = False

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of a prompt that one forward reads behind others."""
        on_cuda = self.target.device.type == "cuda"
        return PREFILL_CHUNK_TOKENS_CUDA if on_cuda else PREFILL_CHUNK_TOKENS

    @property
    def first_chunk_tokens(self) -> int:
        """Most tokens that the first forward of a prompt reads."""
        fused = self.kernels is KernelChoice.TRITON and self.target.dtype != torch.float32
        return FIRST_CHUNK_TOKENS if fused and self.target.sees_all else self.chunk_tokens

    def chunks(self, tokens: Tensor, num_before: int) -> list[Tensor]:
        """Tokens [T] behind ``num_before`` others, as forwards read them."""
        first = self.chunk_tokens if num_before else self.first_chunk_tokens
        begin, rest = tokens[:first], tokens[first:]
        return [begin, *rest.split(self.chunk_tokens)] if len(rest) else [begin]

    def new_cache(self, capacity: int) -> KVTree:
        """A cache for one sequence of ``capacity`` tokens, drafted ones included."""
        return self.new_cache_for([capacity])

    def new_cache_for(self, capacities: Sequence[int]) -> KVTree:
        """A cache for sequences of so many tokens each, drafted ones included, in the layout the
        kernels read: one page a sequence on the CPU, which walks views of the pool; small pages
        elsewhere."""
        page_size = self.page_size_for(capacities)
        return KVTree(
            self.target.shape,
            num_pages=sum(-(-capacity // page_size) for capacity in capacities),
            page_size=page_size,
            dtype=self.target.dtype,
            device=self.target.device,
        )

    def page_size_for(self, capacities: Sequence[int]) -> int:
        """Tokens per page of a cache for such sequences."""
        return PAGE_SIZE_TOKENS if self.kernels is KernelChoice.TRITON else max(capacities)

    def stored_tokens(self, capacities: Sequence[int], num_shared: int) -> list[int]:
        """Tokens to store for each of several sequences whose first ``num_shared`` are the same:
        full pages of them are kept once, where there are small pages."""
        if self.kernels is not KernelChoice.TRITON:
            return list(capacities)
        kept_once = num_shared // PAGE_SIZE_TOKENS * PAGE_SIZE_TOKENS
        return [capacities[0], *(capacity - kept_once for capacity in capacities[1:])]

    def can_hold(self, cache: KVTree, capacities: Sequence[int]) -> bool:
        """Whether a cache made for others holds sequences of so many tokens each."""
        one_page_each = self.kernels is not KernelChoice.TRITON
        if one_page_each and max(capacities) > cache.page_size:
            return False
        return sum(-(-capacity // cache.page_size) for capacity in capacities) <= cache.num_pages

    def load_tree(self, tree: TokenTree) -> TreeTensors:
        """Copy a tree to the device.

        Raises:
            ValueError: the heads cannot fill it.
        """
        if tree.head_tree.num_nodes > 1:
            if self.heads is None:
                raise ValueError(
                    "this decoder has no draft heads: give heads=... or use the tree of 1 node"
                )
            tree.validate_for(self.heads.config.num_heads, self.heads.config.num_logits)
        return TreeTensors.build(tree, self.target.device)

    @torch.inference_mode()
    def read(
        self, cache: KVTree, batch: Batch, tokens: Tensor, graphs: "PromptGraphs | None" = None
    ) -> TargetOutput:
        """Read tokens [T] int64 into the one sequence of ``batch``, behind what it holds.

        The KV tree's own count is advanced. Returns logits and hidden state of the last token.

        Args:
            cache: holds pages for the tokens.
            batch: of one sequence.
            tokens: what to read.
            graphs: of this cache; replayed for the chunks that they hold.
        """
        (sequence,) = batch.sequences
        for chunk in self.chunks(tokens, cache.length(sequence)):
            start, num_new = cache.length(sequence), len(chunk)
            replayed = graphs.read(batch, chunk, start) if graphs else None
            output = replayed or self.target.forward(
                chunk[None],
                torch.arange(start, start + num_new, device=tokens.device)[None],
                make_attention(self.kernels, cache, batch, num_new, None),
                rows=torch.full((1,), num_new - 1, device=tokens.device),
            )
            batch.history[:, start : start + num_new] = chunk
            cache.advance(sequence, num_new)
            batch.lengths += num_new
        return output

    @torch.inference_mode()
    def prefill(
        self,
        cache: KVTree,
        batch: Batch,
        prompt: Tensor,
        sampler: Sampler,
        graphs: "PromptGraphs | None" = None,
    ) -> None:
        """`read` the prompt [T] int64 and decide its first token, which is ``batch.emitted[0, 0]``
        then."""
        output = self.read(cache, batch, prompt, graphs)
        depths = torch.zeros(1, dtype=torch.int64, device=prompt.device)
        position = batch.lengths.to(torch.int64)[:, None]
        batch.root.copy_(choose_tokens(output.logits, position, depths, sampler)[:, 0])
        batch.hidden.copy_(output.hidden[:, 0])
        batch.emitted[:, 0] = batch.root
        batch.record(position, batch.root[:, None])
        batch.counts.fill_(1)

    @torch.inference_mode()
    def step(
        self,
        cache: KVTree,
        batch: Batch,
        tree: TreeTensors,
        sampler: Sampler,
        max_context: int | None = None,
    ) -> None:
        """One verified step for every sequence, in place.

        The accepted nodes are committed, the bonus token is the next root, ``emitted`` and
        ``counts`` hold the step's tokens. The KV tree's own counts are the caller's to advance.

        Args:
            cache: holds pages for ``tree.num_nodes`` more tokens in every sequence.
            batch: where the sequences stand.
            tree: the token tree.
            sampler: how the target's tokens are chosen.
            max_context: see `attention.make_attention`.
        """
        with room_for_forms() if self.is_compiled else nullcontext():
            tokens = self.draft(batch, tree)
            output = self.verify(cache, batch, tree, tokens, max_context)
            decision = self.decide(batch, tree, tokens, output, sampler)
            self.commit(cache, batch, tree, decision)

    def reads_prefix_once(self, cache: KVTree, batch: Batch, num_nodes: int) -> bool:
        """Whether a step of so many nodes reads the pages that all sequences share once for all of
        them; known on the host, and with it which of two graphs holds the step."""
        if self.kernels is not KernelChoice.TRITON or batch.prefix is None:
            return False
        return prefix_pays(
            batch=batch.size,
            num_nodes=num_nodes,
            query_heads=self.target.num_query_heads,
            kv_heads=self.target.shape.num_kv_heads,
            head_dim=self.target.shape.head_dim,
            dtype=self.target.dtype,
            device=self.target.device,
            page_size=cache.page_size,
            num_tokens=batch.num_shared,
        )

    # -- the four phases of a step ---------------------------------------------------------------

    def draft(self, batch: Batch, tree: TreeTensors) -> Tensor:
        """The tokens of the tree's nodes, [B, N] int64."""
        draft = self._fused[0] if self.is_compiled else drafting.draft_tokens
        return draft(self.target, self.heads, batch, tree, self._product)

    def verify(
        self,
        cache: KVTree,
        batch: Batch,
        tree: TreeTensors,
        tokens: Tensor,
        max_context: int | None,
    ) -> TargetOutput:
        """The target's forward over the nodes' tokens; their keys and values stand in the cache."""
        start = batch.lengths.to(torch.int64)[:, None]
        # Drafted nodes past the last position can never be kept; any valid position will do there.
        positions = (start + tree.depths).clamp(max=self.target.max_context - 1)
        attention = make_attention(
            self.kernels,
            cache,
            batch,
            tree.num_nodes,
            tree,
            max_context,
            prefix_once=self.reads_prefix_once(cache, batch, tree.num_nodes),
        )
        return self.target.forward(tokens, positions, attention)

    def decide(
        self,
        batch: Batch,
        tree: TreeTensors,
        tokens: Tensor,
        output: TargetOutput,
        sampler: Sampler,
    ) -> Decision:
        """The target's tokens after the nodes, and the walk along them."""
        if self.is_compiled:
            return self._fused[1](tokens, output, batch.lengths, tree, sampler)
        on_host = not (output.logits.is_cuda or sampler.rule.is_greedy)
        return _decide(tokens, output, batch.lengths, tree, sampler, on_host=on_host)

    def commit(self, cache: KVTree, batch: Batch, tree: TreeTensors, decision: Decision) -> None:
        """Keep what was accepted: in the cache, and in the batch for the next step."""
        outcome = decision.outcome
        commit(
            cache.keys,
            cache.values,
            lengths=batch.lengths,
            path_nodes=outcome.path,
            num_accepted=outcome.num_accepted.to(torch.int32),
            page_table=batch.page_table,
            page_size=cache.page_size,
            capacity=cache.page_size,
        )
        advance = self._fused[2] if self.is_compiled else _advance
        advance(batch, tree, decision)

    @cached_property
    def _product(self) -> Product:
        return product_for(self.target.device, compiled=self.is_compiled)

    @cached_property
    def _fused(
        self,
    ) -> tuple[Callable[..., Tensor], Callable[..., Decision], Callable[..., None]]:
        return compiled(drafting.draft_tokens), compiled(_decide), compiled(_advance)

    @property
    def is_compiled(self) -> bool:
        """Whether draft, layers, decision and what they leave are fused by torch.compile."""
        return self.target.is_compiled
