"""Medusa heads: guess several tokens ahead from one hidden state, in one batched product.

Head k reads the target's hidden state after the final norm at position t (the very tensor the
target's output layer reads) and predicts token t+2+k; the target itself predicts token t+1, the
root of the tree.

    x      = h  [+ E_k rms(embed(root))]   token_input: the root is already decided, so it is free
    x      = x + SiLU(W x + b)             num_layers residual blocks, W and b start at zero
    out    = P_k x                         projection: starts at the identity
    logits = output layer (out)            shared with the target, reduced (some of its rows), or
                                           own, over the whole or over a draft vocabulary

Sequential heads go on from each other: x of head k starts from that of head k - 1 and reads the
token before its guess. With a cell_size all of them are one cell, applied again and again: W, E and
P are shared, the blocks are gated and wider, and only a bias tells the heads apart.

The projection matters when the output layer is shared: SiLU cannot fall below -0.28, so a residual
block alone can hardly remove from h what belongs to the *next* token. Every map of all K heads is
one stacked tensor: no Python loop over heads runs.

Shapes: B rows, K heads, H hidden size, V vocabulary, R rows of a reduced draft vocabulary.
Sources: Medusa, https://arxiv.org/abs/2401.10774, section 2.1 (heads); FR-Spec,
https://arxiv.org/abs/2502.14856 (a draft vocabulary chosen by frequency); Hydra,
https://arxiv.org/abs/2402.05109 (sequential heads); ReDrafter, https://arxiv.org/abs/2403.09919
(one recurrent cell).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from specdeft.heads.best_tokens import BestTokens, best_tokens
from specdeft.heads.eight_bit import Product
from specdeft.trees.draft_plan import DraftLevel

_MOST = 1 << 24  # more rows, heads or blocks than any model has: a damaged config

OutputKind = Literal["shared", "own", "reduced"]


@dataclass(frozen=True)
class HeadsConfig:
    """What a set of heads is made of; the counts fix the shape of every tensor in the
    checkpoint."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    output: OutputKind = "shared"
    token_input: bool = False
    projection: bool = False
    draft_vocab_size: int | None = None
    base_model: str = ""
    sequential: bool = False
    cell_size: int | None = None

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "vocab_size", "draft_vocab_size", "cell_size")
        for name in ("num_heads", "num_layers", *sizes):
            value = getattr(self, name)
            absent = value is None and name in ("draft_vocab_size", "cell_size")
            if not absent and (type(value) is not int or value > _MOST):
                raise ValueError(f"{name} is {value!r}: give a whole number up to {_MOST}.")
        for name in ("token_input", "projection", "sequential"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give true or false.")
        if not isinstance(self.base_model, str):
            raise ValueError(f"base_model is {self.base_model!r}: give a name or an empty text.")
        for name in ("num_heads", "hidden_size", "vocab_size", "cell_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: give a whole number from 1.")
        if self.num_layers < 0:
            raise ValueError(f"num_layers is {self.num_layers}: give 0 or more residual blocks.")
        if self.sequential and not self.token_input:
            raise ValueError("sequential heads read the tokens before them: set token_input too.")
        if self.shares_cell and not self.sequential:
            raise ValueError("heads that share a cell are sequential: set sequential too.")
        if self.output not in get_args(OutputKind):
            kinds = ", ".join(get_args(OutputKind))
            raise ValueError(f"output is {self.output!r}: choose one of {kinds}.")
        size = self.draft_vocab_size
        needed, allowed = self.output == "reduced", self.output != "shared"
        if (needed and size is None) or (not allowed and size is not None):
            raise ValueError(
                f"draft_vocab_size is {size} with output {self.output!r}: give a size with "
                "output='reduced', one or none with 'own', none with 'shared'."
            )
        if size is not None and not 1 <= size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {size}: give a number from 1 to the vocabulary size "
                f"{self.vocab_size}."
            )

    @property
    def shares_cell(self) -> bool:
        """Whether all heads are one recurrent cell of `num_layers` gated blocks."""
        return self.cell_size is not None

    @property
    def num_logits(self) -> int:
        """Columns of a head's logits: the rows of its output layer."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


class GatedBlocks(nn.Module):
    """n residual blocks x + D (SiLU(G r) * U r) with r = rms(x); all D start at zero."""

    def __init__(self, num_blocks: int, hidden_size: int, size: int) -> None:
        """`size`: width inside a block. G and U of a block are one matrix."""
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_blocks, 2 * size, hidden_size))
        if not self.gate_up.is_meta:  # else a checkpoint is going to fill it
            # Seeded by the shape alone: fresh heads are the same in every process.
            generator = torch.Generator().manual_seed(num_blocks * size + hidden_size)
            nn.init.normal_(self.gate_up, std=hidden_size**-0.5, generator=generator)
        self.down = nn.Parameter(torch.zeros(num_blocks, hidden_size, size))

    def forward(self, x: Tensor, product: Product = linear) -> Tensor:
        """[...,H] to [...,H]."""
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            gate, up = product(rms_norm(x, x.shape[-1:]), gate_up).chunk(2, dim=-1)
            x = x + product(silu(gate) * up, down)
        return x


class MedusaHeads(nn.Module):
    """K heads, stacked. Fresh heads repeat the target's own next-token logits exactly."""

    block_weight: nn.Parameter
    block_bias: nn.Parameter
    draft_ids: Tensor | None

    def __init__(self, config: HeadsConfig, draft_ids: Tensor | None = None) -> None:
        """`draft_ids`: int64 [R], the token ids of the draft vocabulary where there is one."""
        super().__init__()
        self.config = config
        K, H, n = config.num_heads, config.hidden_size, config.num_layers
        maps = 1 if config.shares_cell else K
        self.block_weight = nn.Parameter(torch.zeros(0 if config.shares_cell else n, K, H, H))
        self.block_bias = nn.Parameter(torch.zeros(1 if config.shares_cell else n, K, H))
        self.token_weight = nn.Parameter(torch.zeros(maps, H, H)) if config.token_input else None
        self.projection = (
            nn.Parameter(torch.eye(H).repeat(maps, 1, 1)) if config.projection else None
        )
        self.cell = GatedBlocks(n, H, config.cell_size) if config.cell_size is not None else None
        own = torch.zeros(K, config.num_logits, H) if config.output == "own" else None
        self.output_weight = nn.Parameter(own) if own is not None else None
        self.register_buffer("draft_ids", _checked_draft_ids(config, draft_ids))
        self._gathered: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def init_own_output(self, output_layer: nn.Module) -> None:
        """Start the own output layers as copies of the target's."""
        if self.output_weight is None:
            raise ValueError("These heads have no output layer of their own: use output='own'.")
        self.output_weight.copy_(self.output_rows(output_layer).expand_as(self.output_weight))

    def states(self, hidden: Tensor, root_embedding: Tensor | None) -> Tensor:
        """What each head hands to the output layer: [K,B,H] from hidden [B,H] and, with
        token_input, the embedding [B,H] of the root token."""
        if self.config.sequential:
            raise ValueError("Sequential heads need every token before them: use states_along.")
        K, H = self.config.num_heads, self.config.hidden_size
        x = hidden.expand(K, *hidden.shape)
        if self.token_weight is not None:
            if root_embedding is None:
                raise ValueError("These heads read the root token: give its embedding.")
            token = rms_norm(root_embedding, (H,))
            mapped = linear(token, self.token_weight.reshape(K * H, H))
            x = x + mapped.unflatten(-1, (K, H)).transpose(0, 1)
        for weight, bias in zip(self.block_weight, self.block_bias, strict=True):
            x = x + silu(torch.baddbmm(bias.unsqueeze(1), x, weight.mT))
        return x if self.projection is None else torch.bmm(x, self.projection.mT)

    def states_along(self, hidden: Tensor, embeddings: Tensor, product: Product = linear) -> Tensor:
        """[K,B,H] as `states`, along a known text: hidden [B,H], embeddings [K,B,H] of the token
        before each head's guess (the root, then the tokens that heads 0 .. K-2 had to guess).
        Parallel heads read the root's alone."""
        if not self.config.sequential:
            return self.states(hidden, embeddings[0] if self.config.token_input else None)
        x, states = hidden, []
        for head, embedding in enumerate(embeddings):
            x = self._advance(head, x, embedding, product)
            states.append(self._projected(head, x, product))
        return torch.stack(states)

    def _advance(
        self, head: int, x: Tensor, embedding: Tensor, product: Product = linear
    ) -> Tensor:
        """Sequential: the state [...,H] of a head from that of the head before and its token."""
        assert self.token_weight is not None
        token = rms_norm(embedding, (self.config.hidden_size,))
        if self.cell is not None:
            x = x + product(token, self.token_weight[0], self.block_bias[0, head])
            return cast(Tensor, self.cell(x, product))
        x = x + product(token, self.token_weight[head])
        for weight, bias in zip(self.block_weight[:, head], self.block_bias[:, head], strict=True):
            x = x + silu(product(x, weight, bias))
        return x

    def _projected(self, head: int, x: Tensor, product: Product = linear) -> Tensor:
        if self.projection is None:
            return x
        return product(x, self.projection[0 if self.config.shares_cell else head])

    def output_rows(self, output_layer: nn.Module) -> Tensor:
        """The rows [R,H] or [V,H] of the target's output layer that the heads can draft."""
        weight = _weight(output_layer)
        if self.draft_ids is None:
            return weight
        # Gathered once per weight tensor: the copy is what makes a reduced vocabulary cheap.
        if self._gathered is None or self._gathered[0] is not weight:
            self._gathered = (weight, weight.detach().index_select(0, self.draft_ids))
        return self._gathered[1]

    def logits(self, states: Tensor, output_layer: nn.Module, product: Product = linear) -> Tensor:
        """Logits [K,B,V] (over a draft vocabulary [K,B,R], columns in the order of `draft_ids`) of
        states [K,B,H]."""
        if self.output_weight is not None:
            if product is linear:
                return torch.bmm(states, self.output_weight.mT)
            each = zip(states, self.output_weight, strict=True)
            return torch.stack([product(x, weight) for x, weight in each])
        if self.draft_ids is None:
            return cast(Tensor, output_layer(states))
        bias = getattr(output_layer, "bias", None)
        rows = None if bias is None else bias.index_select(0, self.draft_ids)
        return product(states, self.output_rows(output_layer), rows)

    def forward(self, hidden: Tensor, root: Tensor, embed: nn.Module, output: nn.Module) -> Tensor:
        """Logits [K,B,V or R] from hidden [B,H] and root int64 [B]."""
        root_embedding = embed(root) if self.config.token_input else None
        return self.logits(self.states(hidden, root_embedding), output)

    @torch.no_grad()
    def draft(
        self,
        hidden: Tensor,
        root: Tensor,
        embed: nn.Module,
        output_layer: nn.Module,
        top_k: int,
        best: BestTokens = best_tokens,
    ) -> Tensor:
        """Token ids int64 [B,K,top_k], best first, drafted for positions root+1 .. root+K.

        hidden [B,H]: the target's hidden state after the final norm at the position that decided
        root int64 [B]; embed, output_layer: the target's own modules; best: finds the best columns.
        Runs on the device without a host sync, so it can be captured in a CUDA graph.
        """
        if not 1 <= top_k <= self.config.num_logits:
            raise ValueError(
                f"top_k is {top_k}: give a number from 1 to {self.config.num_logits}, "
                "the tokens these heads can draft."
            )
        found = best(self(hidden, root, embed, output_layer), top_k).transpose(0, 1)
        return found if self.draft_ids is None else self.draft_ids[found]

    @torch.no_grad()
    def draft_along(
        self,
        hidden: Tensor,
        tokens: Tensor,
        embed: nn.Module,
        output_layer: nn.Module,
        top_k: int,
        product: Product = linear,
    ) -> Tensor:
        """`draft` where the text is known: tokens int64 [B,K] are the root and what heads
        0 .. K-2 had to guess, so every head guesses behind right tokens."""
        states = self.states_along(hidden, embed(tokens).transpose(0, 1), product)
        best = best_tokens(self.logits(states, output_layer, product), top_k).transpose(0, 1)
        return best if self.draft_ids is None else self.draft_ids[best]

    @torch.no_grad()
    def draft_tree(
        self,
        hidden: Tensor,
        root: Tensor,
        embed: nn.Module,
        output_layer: nn.Module,
        levels: Sequence[DraftLevel],
        product: Product = linear,
        best: BestTokens = best_tokens,
    ) -> Tensor:
        """Tokens int64 [B,N] of a tree's nodes by sequential heads, level by level.

        hidden [B,H] decided root int64 [B]; levels: `trees.draft_plan` of the tree; product: how
        the weights are multiplied with; best: finds the best columns. Every node that has children
        guesses them behind its own token. No host sync.
        """
        num_nodes = 1 + sum(level.child.numel() for level in levels)
        tokens = root[:, None].expand(-1, num_nodes).clone()
        x = hidden[:, None]
        for head, level in enumerate(levels):
            before = embed(tokens.index_select(1, level.inner))
            x = self._advance(head, x.index_select(1, level.previous), before, product)
            states = self._projected(head, x, product)
            found = best(self._logits_of(head, states, output_layer, product), level.top_k)
            drafted = found.flatten(1).index_select(1, level.row * level.top_k + level.rank)
            if self.draft_ids is not None:
                drafted = self.draft_ids[drafted]
            tokens.index_copy_(1, level.child, drafted)
        return tokens

    def _logits_of(
        self, head: int, states: Tensor, output_layer: nn.Module, product: Product
    ) -> Tensor:
        """Logits [B,I,V or R] of one head's states [B,I,H]."""
        if self.output_weight is not None:
            return product(states, self.output_weight[head])
        return self.logits(states, output_layer, product)

    def save(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.json` (see heads/checkpoint.py)."""
        from specdeft.heads.checkpoint import save_heads

        save_heads(self, Path(folder))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        hidden_size: int | None = None,
        vocab_size: int | None = None,
        output_weight: Tensor | None = None,
    ) -> MedusaHeads:
        """Read heads written by `save`, or of any format in heads/formats; the sizes are the
        target's and are checked if given, and so is its output weight [V,H], which heads of other
        formats share if theirs is the same."""
        from specdeft.heads.formats.load import load_any_heads
        from specdeft.heads.formats.parts import TargetSizes

        target = TargetSizes(hidden_size, vocab_size, output_weight)
        return load_any_heads(Path(folder), target, dtype=dtype, device=device)


def _checked_draft_ids(config: HeadsConfig, draft_ids: Tensor | None) -> Tensor | None:
    if (draft_ids is None) != (config.draft_vocab_size is None):
        raise ValueError(
            "draft_ids go with a draft_vocab_size and only with it: give both or none."
        )
    if draft_ids is None:
        return None
    if draft_ids.shape != (config.draft_vocab_size,):
        raise ValueError(
            f"draft_ids has shape {tuple(draft_ids.shape)}: give one id for each of the "
            f"{config.draft_vocab_size} rows of the draft vocabulary."
        )
    return draft_ids.to(torch.int64)


def _weight(output_layer: nn.Module) -> Tensor:
    weight = getattr(output_layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise ValueError(
            f"The target's output layer ({type(output_layer).__name__}) has no floating-point "
            "weight to take rows from: use heads with output='shared'."
        )
    return weight
