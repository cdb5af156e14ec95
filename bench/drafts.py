"""Drafts that follow a plan instead of a trained head: the ceiling, the floor, and replays.

The plain continuation of the prompt is known beforehand, so a plan can say how many drafted tokens
each step shall accept: all of them (oracle, the engine's ceiling), none (random, pure overhead), or
the lengths that another model recorded (replay). Verification is not told: the text stays exact.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from specdeft.heads.best_tokens import BestTokens, best_tokens
from specdeft.heads.eight_bit import Product
from specdeft.heads.medusa import MedusaHeads
from specdeft.trees.draft_plan import draft_plan
from specdeft.trees.token_tree import TokenTree


class PlannedHeads(nn.Module):
    """Stands where `MedusaHeads` stand; real heads, where given, run and are overruled.

    All state lives in tensors on the device that are changed in place, so a step that uses it can
    be captured in a graph.
    """

    def __init__(
        self,
        tree: TokenTree,
        vocab_size: int,
        device: torch.device,
        capacity: int,
        real: MedusaHeads | None,
        product: Product = linear,
    ) -> None:
        """Args: the tree; ids in all; where; most tokens of a text; heads whose cost counts, and
        how they multiply."""
        super().__init__()
        self.config: Any = SimpleNamespace(
            num_heads=max(tree.max_depth, 1), num_logits=vocab_size, sequential=False
        )
        self._real = real
        self._product = product
        self._vocab_size = vocab_size
        self._levels = draft_plan(tree, device)
        # The path that the right tokens are put on: the first of the deepest ones.
        last = tree.depths.index(tree.max_depth)
        self._path = torch.tensor(tree.paths[last], dtype=torch.int64, device=device)
        self._level = torch.arange(tree.max_depth, device=device)
        self._continuation = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._num_lengths = torch.ones((), dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._root_at = torch.zeros((), dtype=torch.int64, device=device)

    def plan(self, continuation: Sequence[int], lengths: Sequence[int]) -> None:
        """Start a text.

        Args:
            continuation: what decoding will give, the first token included.
            lengths: drafted tokens to be accepted at each step; repeated from the start when used
                up, and no more than the tree is deep.
        """
        self._continuation.zero_()
        self._continuation[: len(continuation)] = torch.tensor(continuation)
        self._lengths[: len(lengths)] = torch.tensor(lengths)
        self._num_lengths.fill_(len(lengths))
        self._step.zero_()
        self._root_at.zero_()

    def draft(
        self,
        hidden: Tensor,
        root: Tensor,
        embed: nn.Module,
        output_layer: nn.Module,
        top_k: int,
        best: BestTokens = best_tokens,
    ) -> Tensor:
        """Token ids [1, K, top_k] int64, as `MedusaHeads.draft`."""
        nothing: Tensor | int = 0
        if self._real is not None:
            if self._real.config.sequential:
                real = self._real.draft_tree(
                    hidden, root, embed, output_layer, self._levels, self._product, best
                )
            else:
                real = self._real.draft(hidden, root, embed, output_layer, top_k, best)
            # No token is below 0, which a compiler does not know: what is not used it leaves out.
            nothing = (real.amin() < 0).to(torch.int64)
        # Indexing with a tensor of no dimension would read it on the host.
        length = self._lengths.index_select(0, (self._step % self._num_lengths)[None])[0]
        length = length.clamp(max=len(self._level))
        at = (self._root_at + 1 + self._level).clamp(max=len(self._continuation) - 1)
        right = self._continuation[at]
        # Distinct tokens, none of them the right one.
        other = 1 + torch.arange(top_k, device=right.device)
        tokens = (right[:, None] + other) % self._vocab_size
        on_path = self._path[:, None] == torch.arange(top_k, device=right.device)
        wanted = (self._level < length)[:, None] & on_path
        tokens = torch.where(wanted, right[:, None], tokens) + nothing
        self._step += 1
        self._root_at += 1 + length
        return tokens[None]


def read_accept_lengths(path: str | Path) -> list[list[int]]:
    """Recorded tokens a step, the bonus included, one list a text, as accepted drafted tokens.

    Raises:
        ValueError: the file is not a list of lists of whole numbers, or an object that holds one
            as ``accept_lengths``.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"the replay file {path} cannot be read ({error.strerror}): give a JSON file of "
            "accept lengths"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"the replay file {path} is not JSON: give lists of whole numbers"
        ) from error
    lists = content.get("accept_lengths") if isinstance(content, dict) else content
    if not isinstance(lists, list) or not lists or not all(_is_lengths(entry) for entry in lists):
        raise ValueError(
            f"the replay file {path} holds no accept lengths: give a list of lists of whole "
            "numbers from 0, one list a text"
        )
    # A recorder that counts the bonus token writes 1 where nothing was accepted; Medusa's writes
    # an occasional 0 for the step that ended a text.
    return [[max(count - 1, 0) for count in entry] for entry in lists]


def _is_lengths(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and bool(entry)
        and all(type(count) is int and count >= 0 for count in entry)
    )
