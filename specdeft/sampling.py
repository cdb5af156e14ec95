"""From logits to the target's token, the same for plain and speculative decoding.

Greedy takes the likeliest token, the lowest id on a tie. Sampling takes
``argmax(log p + Gumbel noise)`` where the noise is a pure function of
(seed, sequence, absolute position, token id): whichever tree led to a position, the draw there is
the same, so a speculative run equals the plain run with that seed token for token (the coupling of
Daliri et al., arXiv 2408.07978, with a counter-based generator). All functions are free of host
waits and of data-dependent shapes unless the logits are on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdeft.best_columns import best_columns
from specdeft.config import GenerationConfig

# Finaliser constants of "lowbias32" (C. Wellons, https://nullprogram.com/blog/2018/07/31/),
# written as signed 32-bit numbers because torch has no arithmetic on unsigned ones.
_MULTIPLIER_A = 0x7FEB352D
_MULTIPLIER_B = 0x846CA68B - 2**32
_NUCLEUS_HEAD = 256


@dataclass(frozen=True)
class SamplingRule:
    """The part of a request that shapes the computation; seeds and temperatures are data."""

    is_greedy: bool
    top_k: int | None
    top_p: float

    @classmethod
    def of(cls, config: GenerationConfig) -> "SamplingRule":
        """The rule of a request."""
        if config.is_greedy:
            return cls(True, None, 1.0)
        return cls(False, config.top_k, config.top_p)


@dataclass(eq=False)
class Sampler:
    """A rule with its data on the device.

    Attributes:
        rule: greedy or not, and what is drawn among.
        keys: [B] int32, from seed and sequence number: what the noise of a sequence is keyed by.
        temperature: float32 scalar.
    """

    rule: SamplingRule
    keys: Tensor
    temperature: Tensor

    @classmethod
    def build(
        cls, config: GenerationConfig, numbers: tuple[int, ...], device: torch.device
    ) -> "Sampler":
        """Args: the request, the sequences' numbers (0 for a single one), where the logits are."""
        keys = torch.empty(len(numbers), dtype=torch.int32, device=device)
        sampler = cls(
            SamplingRule.of(config), keys, torch.empty((), dtype=torch.float32, device=device)
        )
        sampler.restart(config, numbers)
        return sampler

    def row(self, index: int) -> "Sampler":
        """One sequence's sampler, on the same storage."""
        return self.select(slice(index, index + 1))

    def select(self, rows: "slice | Sequence[int]") -> "Sampler":
        """The sampler of some of the sequences."""
        return Sampler(self.rule, self.keys[rows], self.temperature)

    def restart(self, config: GenerationConfig, numbers: tuple[int, ...]) -> None:
        """Use the same tensors for another request of as many sequences."""
        self.rule = SamplingRule.of(config)
        self.keys.copy_(noise_keys(config.seed, torch.tensor(numbers, dtype=torch.int64)))
        self.temperature.fill_(config.temperature)


def choose_tokens(logits: Tensor, positions: Tensor, depths: Tensor, sampler: Sampler) -> Tensor:
    """The target's token after every tree node.

    Args:
        logits: [B, N, V], any float dtype.
        positions: [B, E] int64, the absolute position of the token drawn at depth e = 0..E-1.
        depths: [N] int64, the depth of each node: node n draws for ``positions[:, depths[n]]``.
        sampler: the rule, the temperature and the noise keys.

    Returns:
        [B, N] int64 token ids.
    """
    rule = sampler.rule
    if rule.is_greedy:
        return likeliest(logits)
    scores = restrict(logits.float() / sampler.temperature, rule.top_k, rule.top_p)
    noise = gumbel_noise(sampler.keys, positions, logits.shape[-1])
    return scores.add_(noise.index_select(1, depths)).argmax(dim=-1)


def likeliest(logits: Tensor) -> Tensor:
    """int64 [...] the column of the largest of logits [..., V], the first of equal ones."""
    if logits.device.type == "cpu" and logits.dtype != torch.float32:
        # argmax takes 16-bit numbers one by one on a CPU; this is five times as fast.
        return logits.max(dim=-1).indices
    if logits.is_cuda:
        return best_columns(logits, 1)[..., 0]
    return logits.argmax(dim=-1)


def restrict(scores: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Scores [..., V] with every token outside the top-k and then the top-p set at -inf.

    Both sets are cut by value, so equal scores stay or go together and the result does not depend
    on the order a sort leaves ties in.
    """
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if top_p < 1.0:
        scores = scores.masked_fill(scores < _nucleus_floor(scores, top_p), float("-inf"))
    return scores


def _nucleus_floor(scores: Tensor, top_p: float) -> Tensor:
    """[..., 1] the smallest score inside the top-p set."""
    log_total = scores.logsumexp(dim=-1, keepdim=True)
    if scores.device.type == "cpu" and scores.shape[-1] > _NUCLEUS_HEAD:
        # A full sort of a large vocabulary costs as much as a forward of a small model on a CPU;
        # the set nearly always lies within the first few hundred tokens.
        head = scores.topk(_NUCLEUS_HEAD, dim=-1).values
        mass = (head - log_total).exp().cumsum(dim=-1)
        if bool((mass[..., -1] >= top_p).all()):
            return _floor_of(head, mass, top_p)
    ordered = scores.sort(dim=-1, descending=True).values
    return _floor_of(ordered, (ordered - log_total).exp().cumsum(dim=-1), top_p)


def _floor_of(ordered: Tensor, mass: Tensor, top_p: float) -> Tensor:
    # The set ends with the first token at which the mass reaches top_p; at least one token stays.
    # Rounding can leave the total just under top_p: then the whole row stays.
    last = (mass < top_p).sum(dim=-1, keepdim=True).clamp_(max=ordered.shape[-1] - 1)
    return ordered.gather(-1, last)


def noise_keys(seed: int, numbers: Tensor) -> Tensor:
    """int32 [B] keys of a seed (0 .. 2**63 - 1) and sequence numbers (int64 [B])."""
    low, high = seed & 0x7FFFFFFF, (seed >> 31) & 0x7FFFFFFF
    key = _mix(torch.full_like(numbers, low).to(torch.int32))
    key = _mix(key ^ high) ^ (seed >> 62)
    return _mix(key ^ numbers.to(torch.int32))


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, E, V] float32 for keys int32 [B] and positions int64 [B, E]."""
    key = _mix(keys[:, None] ^ positions.to(torch.int32))
    ids = torch.arange(vocab_size, dtype=torch.int32, device=positions.device)
    bits = _mix(_mix(ids) ^ key[..., None])
    # 23 bits and a half fit the 24 of a float32 exactly: the uniform never rounds to 0 or 1.
    uniform = ((bits >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 that spreads every input bit; shifts are made logical by masks."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _MULTIPLIER_A
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _MULTIPLIER_B
    return x ^ ((x >> 16) & 0xFFFF)
