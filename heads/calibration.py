"""How good heads are: joint ranks on text the target wrote, tree values, and tau by replay.

A replay decodes known text with the heads: at each step the tree is walked along the tokens that
really follow, which for a greedy target is exactly what the engine would accept. It needs one
forward over the text and no engine, so tau can be judged while the heads train.

Shapes: M rows, K heads, R ranks looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdeft.heads.documents import Documents
from specdeft.heads.features import Features, extract, tokens_before
from specdeft.heads.medusa import MedusaHeads
from specdeft.trees.lookup import look_up
from specdeft.trees.options import Options
from specdeft.trees.search import ValuedPaths, best_tree
from specdeft.trees.statistics import accepted_depths, count_ranks
from specdeft.trees.token_tree import TokenTree

NUM_RANKS = 32
MAX_PATHS = 256
MAX_LOOKUP = 16  # tokens of a lookup chain that are valued
VALUES_NAME = "tree_values.json"
SAMPLED_VALUES_NAME = "tree_values_t0.7.json"


class Replay(NamedTuple):
    """tau = tokens / steps over all documents; per_document: float32 [documents], NaN-free (a
    document without a step is left out of both)."""

    tau: float
    per_document: Tensor
    documents: Tensor


@torch.inference_mode()
def head_ranks(
    model: Any,
    heads: MedusaHeads,
    features: Features,
    *,
    num_ranks: int = NUM_RANKS,
    batch_rows: int = 4096,
) -> Tensor:
    """int64 [M,K] on the CPU: the rank of each label in its head's draft; num_ranks if it is not in
    it or does not exist."""
    embed, output = model.get_input_embeddings(), model.get_output_embeddings()
    K = heads.config.num_heads
    num_ranks = min(num_ranks, heads.config.num_logits)
    parts = []
    for start in range(0, len(features), batch_rows):
        rows = slice(start, start + batch_rows)
        dtype = heads.block_bias.dtype
        hidden = features.hidden[rows].to(dtype)
        labels = features.labels[rows, :K]
        tokens = tokens_before(features.root[rows], labels)
        drafted = heads.draft_along(hidden, tokens, embed, output, num_ranks)
        hit = drafted == labels.unsqueeze(-1)
        parts.append(torch.where(hit.any(-1), hit.int().argmax(-1), num_ranks))
    return torch.cat(parts).cpu()


class LookupDepths(NamedTuple):
    """Per row, int64 [M] on the CPU: how many tokens of a lookup chain come true, and how many true
    tokens of it exist before the answer ends."""

    depth: Tensor
    num_known: Tensor


@torch.inference_mode()
def lookup_depths(
    documents: Documents,
    document: Tensor,
    *,
    num_tokens: int = MAX_LOOKUP,
    device: torch.device | str = "cpu",
) -> LookupDepths:
    """What `look_up` would have guessed at every row of the documents, by the very same function.

    document: int64 [M], the document of each row (`Features.document`).
    """
    depths, counts = [], []
    for index in document.unique_consecutive().tolist():
        tokens, learn, _ = (part.to(device) for part in documents.padded(torch.tensor([index])))
        # A row's root is a token to learn; what follows it, as far as it is to be learnt, is known.
        roots = learn[0, 1:].nonzero().squeeze(1) + 1
        ahead = roots[:, None] + 1 + torch.arange(num_tokens, device=roots.device)
        inside = ahead < tokens.shape[1]
        ahead = ahead.clamp(max=tokens.shape[1] - 1)
        known = (inside & learn[0, ahead]).cummin(dim=1).values
        guessed = look_up(tokens.expand(len(roots), -1), roots, num_tokens)
        right = ((guessed == tokens[0, ahead]) & known).cummin(dim=1).values
        depths.append(right.sum(1).cpu())
        counts.append(known.sum(1).cpu())
    return LookupDepths(torch.cat(depths), torch.cat(counts))


def tree_values(
    ranks: Tensor, num_known: Tensor, *, num_ranks: int = NUM_RANKS, max_paths: int = MAX_PATHS
) -> ValuedPaths:
    """Rank paths by joint frequency, from ranks [M,K] of which the first num_known [M] exist."""
    num_known = num_known.cpu().clamp(max=ranks.shape[1])
    return count_ranks(ranks, num_ranks, num_known).valued_paths(max_paths)


def top_accuracies(ranks: Tensor, num_known: Tensor) -> dict[str, list[float]]:
    """Share of labels in the top 1, 5 and 10 of each head, of the labels that exist."""
    known = torch.arange(ranks.shape[1]) < num_known.cpu().unsqueeze(1)
    count = known.sum(0).clamp(min=1)
    return {
        f"top{n}": [round(x, 4) for x in (((ranks < n) & known).sum(0) / count).tolist()]
        for n in (1, 5, 10)
    }


def replay(
    ranks: Tensor, document: Tensor, tree: TokenTree, lookup_depth: Tensor | None = None
) -> Replay:
    """Decode the known texts with `tree`: ranks [M,K] of consecutive rows, document [M], and
    lookup_depth int64 [M] (`lookup_depths`), which a tree with a lookup chain needs.

    Row i holds the root of token i of an answer; a step at row i emits depth + 1 tokens and goes on
    at row i + depth + 1. The prompt's own forward emits the first token and is not a step.
    """
    if tree.num_lookup and lookup_depth is None:
        raise ValueError("the tree has a lookup chain: give the lookup depths of the rows too.")
    gained = accepted_depths(tree, ranks)
    if tree.num_lookup and lookup_depth is not None:
        gained = torch.maximum(gained, lookup_depth.clamp(max=tree.num_lookup))
    gains = (gained + 1).tolist()
    ids, lengths = document.cpu().unique_consecutive(return_counts=True)
    taus, kept, tokens, steps, start = [], [], 0, 0, 0
    for number, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        # The last row's root is the last token of the text: nothing is left to decode there.
        last, row, count = start + length - 1, start, 0
        while row < last:
            row += gains[row]
            count += 1
        if count:
            taus.append((length - 1) / count)
            kept.append(number)
            tokens, steps = tokens + length - 1, steps + count
        start += length
    return Replay(tokens / max(steps, 1), torch.tensor(taus), torch.tensor(kept))


def repeat_rate(documents: Documents, size: int = 8) -> Tensor:
    """float32 [documents]: share of a document's learnt `size`-grams that occurred in it before."""
    rates = []
    for index in range(len(documents)):
        span = slice(int(documents.offsets[index]), int(documents.offsets[index + 1]))
        ids = documents.tokens[span][documents.learn[span]].tolist()
        grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
        rates.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return torch.tensor(rates)


def calibrate(
    model: Any,
    heads: MedusaHeads,
    documents: Documents,
    folder: Path,
    *,
    batch_tokens: int = 16_384,
) -> dict[str, Any]:
    """Write the tree values of held-out documents beside the heads; returns what was measured.

    Greedy documents (temperature 0) give `tree_values.json`, all others `tree_values_t0.7.json`.
    """
    report: dict[str, Any] = {}
    for name, chosen in (
        (VALUES_NAME, documents.temperature == 0),
        (SAMPLED_VALUES_NAME, documents.temperature > 0),
    ):
        if not bool(chosen.any()):
            continue
        part = documents.select(chosen.nonzero().squeeze(1))
        features = extract(model, part, heads.config.num_heads, batch_tokens=batch_tokens)
        ranks, known = head_ranks(model, heads, features), features.num_known().cpu()
        values = tree_values(ranks, known)
        values.save(folder / name)
        report[name] = {
            "documents": len(part),
            "positions": len(features),
            **top_accuracies(ranks, known),
            "replayed_tau": tau_by_size(ranks, features.document, values),
        }
    return report


def tau_by_size(
    ranks: Tensor, document: Tensor, values: ValuedPaths, sizes: Sequence[int] = (4, 8, 16, 32, 64)
) -> dict[str, float]:
    """Replayed tau of the best trees of some sizes (those the values reach)."""
    return {
        str(size): round(replay(ranks, document, best_tree(values, size)).tau, 4)
        for size in sizes
        if size <= len(values.paths) + 1
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m specdeft.heads.calibration --model M --heads DIR --documents
    held_out.safetensors`."""
    parser = Options(prog="specdeft calibrate", description=main.__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face id or folder of the target")
    parser.add_argument("--heads", required=True, type=Path, help="folder of the heads")
    parser.add_argument("--documents", required=True, type=Path, help="texts the target wrote")
    options = parser.parse_args(arguments)
    from specdeft.heads.target import load_target

    target = load_target(options.model)
    heads = MedusaHeads.load(
        options.heads,
        dtype=target.model.dtype,
        device=target.model.device,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )
    report = calibrate(target.model, heads, Documents.load(options.documents), options.heads)
    print(report)  # noqa: T201  the command's result
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
