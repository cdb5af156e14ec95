"""How good heads are: joint ranks on text the target wrote, tree values, and tau by replay.

A replay decodes known text with the heads: at each step the tree is walked along the tokens that
really follow, which for a greedy target is exactly what the engine would accept. It needs one
forward over the text and no engine, so tau can be judged while the heads train.

Shapes: M rows, K heads, R ranks looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdeft.heads.documents import Documents
from specdeft.heads.features import Features, extract, tokens_before
from specdeft.heads.medusa import MedusaHeads
from specdeft.trees.lookup import look_up
from specdeft.trees.mixing import best_mix
from specdeft.trees.options import Options
from specdeft.trees.search import ReplayedTau, ValuedPaths, best_tree
from specdeft.trees.statistics import accepted_depths, count_ranks, with_lookup
from specdeft.trees.token_tree import TokenTree

NUM_RANKS = 32
MAX_PATHS = 256
MAX_LOOKUP = 24  # tokens of a lookup chain that are valued
REFERENCE_NODES = 32
REPLAYED_SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REPLAYED_TOKENS = (32, 64, 128, 256, 512)  # of every answer, and the longest one's
VALUES_NAME = "tree_values.json"


class Replay(NamedTuple):
    """tau = tokens / steps over all documents; per_document: float32 [documents], NaN-free (a
    document without a step is left out of both); starts: int64, the rows at which steps began."""

    tau: float
    per_document: Tensor
    documents: Tensor
    starts: Tensor


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
    starts: list[int] = []
    for number, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        # The last row's root is the last token of the text: nothing is left to decode there.
        last, row, count = start + length - 1, start, 0
        while row < last:
            starts.append(row)
            row += gains[row]
            count += 1
        if count:
            taus.append((length - 1) / count)
            kept.append(number)
            tokens, steps = tokens + length - 1, steps + count
        start += length
    found = (torch.tensor(taus), torch.tensor(kept), torch.tensor(starts, dtype=torch.int64))
    return Replay(tokens / max(steps, 1), *found)


def repeat_rate(documents: Documents, size: int = 8) -> Tensor:
    """float32 [documents]: share of a document's learnt `size`-grams that occurred in it before."""
    rates = []
    for index in range(len(documents)):
        span = slice(int(documents.offsets[index]), int(documents.offsets[index + 1]))
        ids = documents.tokens[span][documents.learn[span]].tolist()
        grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
        rates.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return torch.tensor(rates)


class Samples(NamedTuple):
    """What is known of the drafts at every row of some texts, on the CPU.

    ranks: int64 [M,K] as `head_ranks`. num_known: int64 [M]. document: int64 [M]. lookup: as
    `lookup_depths`.
    """

    ranks: Tensor
    num_known: Tensor
    document: Tensor
    lookup: LookupDepths

    def replay(self, tree: TokenTree) -> Replay:
        """Decode the texts with a tree."""
        return replay(self.ranks, self.document, tree, self.lookup.depth)

    @property
    def _counts(self) -> list[int]:
        """Rows of every text."""
        counts: list[int] = self.document.unique_consecutive(return_counts=True)[1].tolist()
        return counts

    @property
    def num_longest(self) -> int:
        """Rows of the longest text."""
        return max(self._counts)

    def first(self, num_tokens: int) -> Samples:
        """The first rows of every text, so many at most."""
        place = torch.cat([torch.arange(count) for count in self._counts])
        return self.at((place < num_tokens).nonzero().squeeze(1))

    def at(self, rows: Tensor) -> Samples:
        """Some of the rows, int64 [R], repeated where they are named again."""
        return Samples(
            self.ranks[rows],
            self.num_known[rows],
            self.document[rows],
            LookupDepths(self.lookup.depth[rows], self.lookup.num_known[rows]),
        )


def samples_of(
    model: Any, heads: MedusaHeads | None, documents: Documents, *, batch_tokens: int = 16_384
) -> Samples:
    """Ranks and lookup depths on texts that the target wrote; without heads K is 0."""
    if heads is None:
        document = torch.cat(
            [
                torch.full((int(documents.padded(torch.tensor([index]))[1][0, 1:].sum()),), index)
                for index in range(len(documents))
            ]
        )
        none = torch.zeros(len(document), 0, dtype=torch.int64)
        known = torch.zeros_like(document)
        return Samples(none, known, document, lookup_depths(documents, document))
    features = extract(model, documents, heads.config.num_heads, batch_tokens=batch_tokens)
    document = features.document.cpu()
    return Samples(
        head_ranks(model, heads, features),
        features.num_known().cpu(),
        document,
        lookup_depths(documents, document),
    )


def step_values(
    samples: Samples, *, reference_nodes: int = REFERENCE_NODES, rounds: int = 3
) -> ValuedPaths:
    """Paths and lookup chains valued where steps start, not at every token.

    A step that accepts ten tokens skips nine places, so places inside text that repeats itself
    begin few steps: counted like all others they make long chains look better than they are. The
    starts are those of replays with the best tree of `reference_nodes` so far, all rounds together.
    """
    rows = torch.arange(len(samples.document))
    starts: list[Tensor] = []
    values = _valued(samples)
    for _ in range(rounds):
        most = 1 + len(values.paths) + len(values.lookup)
        tree = best_mix(values, min(reference_nodes, most)).tree
        starts.append(samples.replay(tree).starts)
        rows = torch.cat(starts)
        if not len(rows):
            break
        values = _valued(samples.at(rows))
    return values


def _valued(samples: Samples) -> ValuedPaths:
    values = tree_values(samples.ranks, samples.num_known)
    return with_lookup(values, samples.ranks, samples.num_known, *samples.lookup)


def calibrate(
    model: Any,
    heads: MedusaHeads | None,
    documents: Documents,
    folder: Path,
    *,
    batch_tokens: int = 16_384,
) -> dict[str, Any]:
    """Write the tree values of texts that the target wrote beside the heads; returns what was
    measured.

    The texts should be answers to prompts like those the heads will meet, not to those they learnt
    from. Paths are valued on the sampled texts where there are any: greedy texts of small models
    repeat themselves, and trees made for that do badly elsewhere, while the reverse costs little
    (docs/decisions.md). What the trees bring is replayed on greedy and sampled texts apart.
    """
    groups = {}
    for chosen in (documents.temperature > 0, documents.temperature == 0):
        if bool(chosen.any()):
            part = documents.select(chosen.nonzero().squeeze(1))
            heat = round(float(part.temperature.mean()), 3)
            groups[heat] = samples_of(model, heads, part, batch_tokens=batch_tokens)
    values = step_values(next(iter(groups.values())))
    taus = [row for heat, samples in groups.items() for row in replayed_taus(values, samples, heat)]
    values = replace(values, taus=tuple(taus))
    values.save(folder / VALUES_NAME)
    report: dict[str, Any] = {}
    for heat, samples in groups.items():
        report[f"temperature {heat:g}"] = {
            "positions": len(samples.document),
            **top_accuracies(samples.ranks, samples.num_known),
            **{
                name: {
                    str(row.num_nodes): row.tau
                    for row in taus
                    if (row.temperature, row.lookup) == (heat, lookup)
                    and row.num_tokens == samples.num_longest
                }
                for name, lookup in (("replayed_tau", False), ("replayed_tau_with_lookup", True))
            },
        }
    return report


def replayed_taus(
    values: ValuedPaths, samples: Samples, temperature: float
) -> Iterator[ReplayedTau]:
    """What the best trees of some sizes bring on the beginnings of texts and on whole ones, without
    a lookup chain and with one."""
    longest = samples.num_longest
    for num_tokens in (*(length for length in REPLAYED_TOKENS if length < longest), longest):
        part = samples.first(num_tokens)
        for size in REPLAYED_SIZES:
            if size <= len(values.paths) + 1:
                tau = part.replay(best_tree(values, size)).tau
                yield ReplayedTau(temperature, False, size, round(tau, 4), num_tokens)
            if size <= 1 + len(values.paths) + len(values.lookup):
                tau = part.replay(best_mix(values, size).tree).tau
                yield ReplayedTau(temperature, True, size, round(tau, 4), num_tokens)


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
