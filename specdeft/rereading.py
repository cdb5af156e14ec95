"""A text read again by its target: how far each token lies from the target's own choice there.

In 16 bits a choice depends on how many tokens the forward read at once: two tokens whose scores lie
within the rounding noise of each other can swap. How large that noise is differs by model, device
and text, so it is measured: plain decoding's own text is read twice, all tokens at once and one
after the other as plain decoding reads them, and where the two best tokens lie closest, the change
of their gap between the two readings is the noise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdeft.attention import make_attention
from specdeft.batch import Batch
from specdeft.config import GenerationConfig
from specdeft.engine import PREFILL_CHUNK_TOKENS, Engine
from specdeft.graphs import context_bucket
from specdeft.kv_tree import KVTree
from specdeft.sampling import gumbel_noise, noise_keys, restrict
from specdeft.sampling_edges import edges
from specdeft.tree_tensors import TreeTensors
from specdeft.trees.token_tree import TokenTree

# The logits themselves are rounded, each by half a unit: their gap by as much as one.
ROUNDING_ULP = 1.0
# Of the noise: were it normal, one honest choice in 3.5 million would lie further off.
DEVIATIONS = 5.0
# Plain decoding's whole text is read twice; where it is shorter, the end of its prompt as well.
LEAST_CONTROL_TOKENS = 64


class Reading(NamedTuple):
    """What reading a text again found.

    Attributes:
        distance_ulp: [T] float32, how far the target's choice lies above each token, in units of
            the last place of the target's dtype.
        limit_ulp: up to here a token is a near tie.
        noise_ulp: the measured noise that the limit follows from; None where every token lies
            within the rounding of the logits themselves.
    """

    distance_ulp: Tensor
    limit_ulp: float
    noise_ulp: float | None

    @property
    def num_exact(self) -> int:
        """Tokens that are the target's own choice."""
        return int((self.distance_ulp == 0).sum())

    @property
    def num_far(self) -> int:
        """Tokens further off than a near tie."""
        return int((self.distance_ulp > self.limit_ulp).sum())

    @property
    def worst_ulp(self) -> float:
        """Of the token that lies furthest off."""
        return float(self.distance_ulp.max()) if len(self.distance_ulp) else 0.0


class Rereader:
    """Reads texts of one engine and one config again; the noise is measured once a plain text."""

    def __init__(self, engine: Engine, config: GenerationConfig) -> None:
        self.engine = engine
        self.config = config
        self._noise_ulp: dict[tuple[tuple[int, ...], int, int], float] = {}

    @torch.inference_mode()
    def read(
        self,
        prompt_ids: tuple[int, ...],
        token_ids: tuple[int, ...],
        plain_ids: tuple[int, ...],
        sequence: int = 0,
    ) -> Reading:
        """Read ``token_ids`` at once; a token further off than the logits' rounding is read again
        in plain decoding's own arithmetic and measured by the noise on ``plain_ids``."""
        distance = self.distance_ulp(prompt_ids, token_ids, sequence)
        doubtful = distance > ROUNDING_ULP
        if not bool(doubtful.any()):
            return Reading(distance, ROUNDING_ULP, None)
        noise_ulp = self.noise_ulp(prompt_ids, plain_ids, sequence)
        limit_ulp = max(ROUNDING_ULP, DEVIATIONS * noise_ulp)
        last = 1 + int(doubtful.nonzero().max())
        logits = one_by_one(self.engine, [*prompt_ids, *token_ids[: last - 1]], last)
        again = self._distance_ulp(logits, len(prompt_ids), token_ids[:last], sequence, limit_ulp)
        distance[:last] = torch.where(doubtful[:last], again, distance[:last])
        return Reading(distance, limit_ulp, noise_ulp)

    @torch.inference_mode()
    def distance_ulp(
        self, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], sequence: int = 0
    ) -> Tensor:
        """How far the target's choice lies above each token, [len(token_ids)] float32, when all are
        read at once.

        Scores are logits, or what is drawn from (restricted, with noise) above temperature 0; the
        unit is that of the target's dtype at the size of the chosen logit, over the temperature.
        """
        logits = at_once(self.engine, [*prompt_ids, *token_ids[:-1]], len(token_ids))
        return self._distance_ulp(logits, len(prompt_ids), token_ids, sequence, ROUNDING_ULP)

    @torch.inference_mode()
    def noise_ulp(
        self, prompt_ids: tuple[int, ...], plain_ids: tuple[int, ...], sequence: int = 0
    ) -> float:
        """Root mean square of the change of the gap between the two best tokens, from one reading
        of plain decoding's text to the other, over the half of its tokens with the smallest gaps:
        where these are large nothing can swap."""
        tokens = (*prompt_ids, *plain_ids)
        count = min(max(len(plain_ids), LEAST_CONTROL_TOKENS), len(tokens) - 1)
        key = tokens, len(prompt_ids), sequence
        if key not in self._noise_ulp:
            few, many = (
                read(self.engine, list(tokens[:-1]), count) for read in (one_by_one, at_once)
            )
            scores = self._perturbed(few, len(tokens) - count, sequence)
            best = scores.topk(2, dim=-1)
            gap = best.values[:, 0] - best.values[:, 1]
            change = (few - many).gather(1, best.indices).diff(dim=-1)[:, 0]
            change = change / _ulp(few, scores, self.engine.target.dtype)
            self._noise_ulp[key] = float(change[gap <= gap.median()].square().mean().sqrt())
        return self._noise_ulp[key]

    def _perturbed(self, logits: Tensor, first: int, sequence: int) -> Tensor:
        """Scores [T, V] whose best is chosen where nothing is restricted: logits over the
        temperature with the noise of positions ``first``, ``first + 1``, .."""
        if self.config.is_greedy:
            return logits
        key = noise_keys(self.config.seed, torch.tensor([sequence])).to(logits.device)
        positions = torch.arange(len(logits), device=logits.device) + first
        noise = gumbel_noise(key, positions[None], logits.shape[-1])[0]
        return logits / self.config.temperature + noise

    def _distance_ulp(
        self,
        logits: Tensor,
        first: int,
        token_ids: tuple[int, ...],
        sequence: int,
        slack_ulp: float,
    ) -> Tensor:
        """Of tokens at positions ``first``, ..; one that is drawn where others within
        ``slack_ulp`` of an edge of top-k or top-p fall on its other side lies that far."""
        config, dtype = self.config, self.engine.target.dtype
        tokens = torch.tensor(token_ids, device=logits.device)[:, None]
        if config.is_greedy:
            return _gap(logits, tokens) / _ulp(logits, logits, dtype)
        scores = logits / config.temperature
        perturbed = self._perturbed(logits, first, sequence)
        outside = restrict(scores, config.top_k, config.top_p).isneginf()
        drawn = perturbed.masked_fill(outside, float("-inf"))
        ulp = _ulp(logits, drawn, dtype) / config.temperature
        distance = _gap(drawn, tokens) / ulp
        sure, possible = edges(scores, slack_ulp * ulp[:, None], config.top_k, config.top_p)
        # Against the tokens that are inside for sure, and itself.
        rivals = perturbed.masked_fill(~sure.scatter(1, tokens, True), float("-inf"))
        at_edge = possible.gather(1, tokens)[:, 0] & (_gap(rivals, tokens) <= slack_ulp * ulp)
        return torch.where(at_edge, distance.clamp(max=slack_ulp), distance)


def _gap(scores: Tensor, tokens: Tensor) -> Tensor:
    """[T], how far the best of [T, V] scores lies above that of each row's token [T, 1]."""
    return scores.amax(dim=-1) - scores.gather(1, tokens)[:, 0]


def _ulp(logits: Tensor, scores: Tensor, dtype: torch.dtype) -> Tensor:
    """[T], the unit in the last place of a dtype at the logit of the best score."""
    size = logits.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0].abs()
    size = size.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.exp2(size.log2().floor()) * torch.finfo(dtype).eps


@torch.inference_mode()
def at_once(engine: Engine, token_ids: list[int], num_last: int) -> Tensor:
    """Logits [num_last, V] float32 after the last tokens of a given text, read in chunks."""
    reader = _Reader(engine, len(token_ids))
    rows: list[Tensor] = []
    for chunk in torch.tensor(token_ids).split(PREFILL_CHUNK_TOKENS):
        first_kept = len(token_ids) - num_last - reader.num_read
        rows.append(reader.read(chunk)[max(first_kept, 0) :])
    return torch.cat(rows)[-num_last:]


@torch.inference_mode()
def one_by_one(engine: Engine, token_ids: list[int], num_last: int) -> Tensor:
    """The same in plain decoding's arithmetic: the prompt in chunks, then a token a forward."""
    reader = _Reader(engine, len(token_ids))
    tokens = torch.tensor(token_ids)
    prompt, rest = tokens.split([len(tokens) - num_last + 1, num_last - 1])
    for chunk in prompt.split(PREFILL_CHUNK_TOKENS):
        rows = [reader.read(chunk)[-1:]]
    root = engine.load_tree(TokenTree.chain(0))
    rows += [reader.read(token, root) for token in rest.split(1)]
    return torch.cat(rows)


class _Reader:
    """A text as it is read: its cache, and how far it is.

    Attributes:
        num_read: tokens read.
    """

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self.num_read = 0
        self._engine = engine
        self._bucket = context_bucket(num_tokens)
        self._cache: KVTree = engine.new_cache(num_tokens)
        sequence = self._cache.open()
        self._cache.reserve(sequence, num_tokens)
        self._sequence = sequence
        self._batch = Batch.empty(engine.target, self._cache, (sequence,), 1)

    def read(self, tokens: Tensor, tree: TreeTensors | None = None) -> Tensor:
        """Logits [N, V] float32 after each of the next tokens [N] int64: those of a tree, or a
        chunk of a prompt."""
        engine, count = self._engine, len(tokens)
        # The launches of a plain step are those of its context bucket.
        bound = None if tree is None else self._bucket
        attention = make_attention(engine.kernels, self._cache, self._batch, count, tree, bound)
        tokens = tokens.to(engine.target.device)
        positions = torch.arange(self.num_read, self.num_read + count, device=tokens.device)
        # A chunk's length is a text's own: no form would serve twice.
        output = engine.target.forward(
            tokens[None], positions[None], attention, fused=tree is not None
        )
        self._cache.advance(self._sequence, count)
        self._batch.lengths += count
        self.num_read += count
        return output.logits[0].float()
