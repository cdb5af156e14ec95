"""Is the speculative text the plain text? Exact in float32; in 16 bits, explained token by token.

A forward over N rows and one over a single row round differently in 16 bits, so two tokens whose
logits lie within the last bits can swap. Nothing is hidden: the first difference is located, and
the whole text is read again by the target (teacher-forced) to say how far each token lies from the
target's own choice there, in units of the last place (ulp) of the dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdeft.attention import make_attention
from specdeft.batch import Batch
from specdeft.config import GenerationConfig
from specdeft.engine import PREFILL_CHUNK_TOKENS, Engine
from specdeft.sampling import gumbel_noise, noise_keys, restrict
from specdeft.sampling_edges import edges

NEAR_TIE_ULP = 2.0


@dataclass(frozen=True)
class IdentityReport:
    """How a speculative text compares with the plain one.

    Attributes:
        identical: the ids are equal.
        first_difference: index of the first differing id, None where there is none.
        num_tokens: ids read again by the target.
        num_exact: of these, the target's own choice.
        num_near_ties: of the others, within ``NEAR_TIE_ULP`` of it, or drawn where tokens so near
            an edge of top-k or top-p fall on its other side.
        worst_ulp: the largest distance from the target's choice.
        dtype: the target's.
    """

    identical: bool
    first_difference: int | None
    num_tokens: int
    num_exact: int
    num_near_ties: int
    worst_ulp: float
    dtype: str

    @property
    def passed(self) -> bool:
        """Tier 1 (identical), or tier 2 (every token the target's choice or a near tie)."""
        return self.identical or self.num_exact + self.num_near_ties == self.num_tokens

    @property
    def tier(self) -> str:
        """ "exact", "near-tie" or "different"."""
        if self.identical:
            return "exact"
        return "near-tie" if self.passed else "different"

    def describe(self) -> str:
        """One line for people."""
        if self.identical:
            return "identical to plain decoding: yes, token for token"
        return (
            f"identical to plain decoding: no, from token {self.first_difference} on; read again "
            f"by the target, {self.num_exact} of {self.num_tokens} tokens are its own choice and "
            f"{self.num_near_ties} within {NEAR_TIE_ULP:g} ulp of {self.dtype} of it "
            f"(worst {self.worst_ulp:.1f} ulp)"
        )


def compare(
    engine: Engine,
    prompt_ids: tuple[int, ...],
    speculative_ids: tuple[int, ...],
    plain_ids: tuple[int, ...],
    config: GenerationConfig,
    sequence: int = 0,
) -> IdentityReport:
    """Compare the ids of two generations of one prompt; a difference is examined. ``sequence`` is
    the number both were sampled with."""
    dtype = str(engine.target.dtype).removeprefix("torch.")
    if speculative_ids == plain_ids:
        count = len(speculative_ids)
        return IdentityReport(True, None, count, count, 0, 0.0, dtype)
    pairs = zip(speculative_ids, plain_ids, strict=False)
    shorter = min(len(speculative_ids), len(plain_ids))
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
    distance = distance_from_choice_ulp(engine, prompt_ids, speculative_ids, config, sequence)
    exact = int((distance == 0).sum())
    near = int((distance <= NEAR_TIE_ULP).sum()) - exact
    worst = float(distance.max()) if len(distance) else 0.0
    return IdentityReport(False, first, len(speculative_ids), exact, near, worst, dtype)


@torch.inference_mode()
def distance_from_choice_ulp(
    engine: Engine,
    prompt_ids: tuple[int, ...],
    token_ids: tuple[int, ...],
    config: GenerationConfig,
    sequence: int = 0,
) -> Tensor:
    """How far the target's choice lies above each token, [len(token_ids)] float32 in ulp.

    Scores are logits, or what is drawn from (restricted, with noise) above temperature 0; the unit
    is that of the target's dtype at the size of the chosen logit, over the temperature. A token
    that is drawn where others within ``NEAR_TIE_ULP`` of an edge of top-k or top-p fall on its
    other side lies that far.
    """
    logits = _forced_logits(engine, [*prompt_ids, *token_ids[:-1]], len(token_ids)).float()
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    if config.is_greedy:
        return _gap(logits, tokens) / _ulp(logits, logits, engine.target.dtype)
    scores = logits / config.temperature
    key = noise_keys(config.seed, torch.tensor([sequence])).to(logits.device)
    positions = torch.arange(len(token_ids), device=logits.device) + len(prompt_ids)
    noise = gumbel_noise(key, positions[None], logits.shape[-1])[0]
    drawn = restrict(scores, config.top_k, config.top_p) + noise
    ulp = _ulp(logits, drawn, engine.target.dtype) / config.temperature
    distance = _gap(drawn, tokens) / ulp
    sure, possible = edges(scores, NEAR_TIE_ULP * ulp[:, None], config.top_k, config.top_p)
    # Against the tokens that are inside for sure, and itself.
    rivals = (scores + noise).masked_fill(~sure.scatter(1, tokens, True), float("-inf"))
    at_edge = possible.gather(1, tokens)[:, 0] & (_gap(rivals, tokens) <= NEAR_TIE_ULP * ulp)
    return torch.where(at_edge, distance.clamp(max=NEAR_TIE_ULP), distance)


def _gap(scores: Tensor, tokens: Tensor) -> Tensor:
    """[T], how far the best of [T, V] scores lies above that of each row's token [T, 1]."""
    return scores.amax(dim=-1) - scores.gather(1, tokens)[:, 0]


def _ulp(logits: Tensor, scores: Tensor, dtype: torch.dtype) -> Tensor:
    """[T], the unit in the last place of a dtype at the logit of the best score."""
    size = logits.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0].abs()
    size = size.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.exp2(size.log2().floor()) * torch.finfo(dtype).eps


def _forced_logits(engine: Engine, token_ids: list[int], num_last: int) -> Tensor:
    """Logits [num_last, V] after the last tokens of a given text, read in chunks."""
    device = engine.target.device
    cache = engine.new_cache(len(token_ids))
    sequence = cache.open()
    cache.reserve(sequence, len(token_ids))
    batch = Batch.empty(engine.target, cache, (sequence,), 1)
    rows: list[Tensor] = []
    for chunk in torch.tensor(token_ids, device=device).split(PREFILL_CHUNK_TOKENS):
        start, num_new = cache.length(sequence), len(chunk)
        attention = make_attention(engine.kernels, cache, batch, num_new, None)
        positions = torch.arange(start, start + num_new, device=device)[None]
        output = engine.target.forward(chunk[None], positions, attention, last_only=False)
        cache.advance(sequence, num_new)
        batch.lengths += num_new
        first_kept = len(token_ids) - num_last
        rows.append(output.logits[0, max(first_kept - start, 0) :])
    return torch.cat(rows)[-num_last:]
