"""What the heads learn from: the frozen target's hidden states beside the tokens that followed.

One row is one position t of a document: its hidden state after the final norm, the root token t+1,
and the labels t+2 .. t+1+K. Rows of a document follow each other, so row i+1+k holds the hidden
state from which the target itself predicts label k of row i: that is what the soft loss reads.

Shapes: M rows, K heads, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdeft.heads.documents import Documents
from specdeft.heads.parallel import ALONE, Processes

IGNORED = -100  # a label that does not exist: outside every vocabulary, torch's own ignore index


@dataclass(frozen=True)
class Features:
    """hidden [M,H]; root int64 [M]; labels int64 [M,K], IGNORED where the answer has ended;
    document int64 [M], not falling: which document a row is from."""

    hidden: Tensor
    root: Tensor
    labels: Tensor
    document: Tensor

    def __len__(self) -> int:
        return self.root.numel()

    def num_known(self) -> Tensor:
        """int64 [M]: labels that exist in each row (always the first ones)."""
        return (self.labels != IGNORED).sum(dim=1)


def rows_of(tokens: Tensor, learn: Tensor, lengths: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """(where int64 [M,2], root [M], labels [M,K]) of padded documents: tokens and learn [B,S].

    Position t is a row iff token t+1 is to be learnt; label k exists iff all of t+2 .. t+2+k are,
    so nothing is learnt across a turn, an end, or the padding.
    """
    inside = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    learn = learn & inside
    where = learn[:, 1:].nonzero()
    ahead = where[:, 1:] + 1 + torch.arange(num_heads + 1)
    clipped = ahead.clamp(max=tokens.shape[1] - 1)
    documents = where[:, :1]
    known = (learn[documents, clipped] & (ahead < tokens.shape[1])).cummin(dim=1).values
    values = tokens[documents, clipped].masked_fill(~known, IGNORED)
    return where, values[:, 0], values[:, 1:]


def tokens_before(root: Tensor, labels: Tensor) -> Tensor:
    """int64 [M,K]: the token before each label, from root [M] and labels [M,K].

    Behind an unknown label any token will do, for every label after it is unknown too: 0.
    """
    return torch.cat([root[:, None], labels[:, :-1]], dim=1).clamp(min=0)


@torch.no_grad()  # not inference mode: layers in parts (heads/sharding.py) count versions
def extract(
    model: Any,
    documents: Documents,
    num_heads: int,
    *,
    batch_tokens: int = 65_536,
    group: Processes = ALONE,
) -> Features:
    """Run the frozen target over the documents and keep the rows to learn from, on its device.

    `batch_tokens` bounds the activations of one forward; the processes of a group share the work.
    """
    decoder, device = model.base_model, model.device
    parts: list[Features] = []
    for number, index in enumerate(documents.batches(batch_tokens)):
        tokens, learn, lengths = documents.padded(index)
        where, root, labels = rows_of(tokens, learn, lengths, num_heads)
        where = where.to(device)
        if number % group.size == group.rank:
            # Causal attention: what stands right of a document's end cannot reach its positions.
            hidden = decoder(input_ids=tokens.to(device), use_cache=False).last_hidden_state
            hidden = hidden[where[:, 0], where[:, 1]]
        else:  # another process's share: a sum with zeros brings it over exactly
            hidden = _zeros(model, len(where))
        parts.append(
            Features(
                hidden,
                root.to(device),
                labels.to(device),
                index.to(device)[where[:, 0]],
            )
        )
    joined = _joined(parts)
    group.wait()  # a process with a batch less lends its part of the target
    group.add(joined.hidden)
    return joined


def _zeros(model: Any, count: int) -> Tensor:
    width = model.get_input_embeddings().weight.shape[1]
    return torch.zeros(count, width, dtype=model.dtype, device=model.device)


def _joined(parts: list[Features]) -> Features:
    if not parts:
        raise ValueError("No document was read: give at least one document.")
    total = sum(map(len, parts))
    first = parts[0]
    hidden = first.hidden.new_empty(total, first.hidden.shape[1])
    start = 0
    for part in parts:
        hidden[start : start + len(part)] = part.hidden
        start += len(part)
    return Features(
        hidden,
        torch.cat([part.root for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.document for part in parts]),
    )
