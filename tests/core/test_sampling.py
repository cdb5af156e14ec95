"""The target's token: greedy ties, keyed noise, the laws it must follow."""

import math

import pytest
import torch

from specdeft.config import GenerationConfig
from specdeft.sampling import (
    Sampler,
    choose_tokens,
    gumbel_noise,
    likeliest,
    noise_keys,
    restrict,
)


def choose(logits: torch.Tensor, positions: torch.Tensor, **settings: object) -> torch.Tensor:
    """One draw a position, as N nodes of one sequence at depths 0..N-1."""
    depths = torch.arange(len(positions))
    sampler = Sampler.build(GenerationConfig(**settings), (0,), torch.device("cpu"))
    return choose_tokens(logits[None], positions[None], depths, sampler)[0]


def noise_of(seed: int, numbers: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    return gumbel_noise(noise_keys(seed, numbers), positions, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_on_a_tie(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 1000, dtype=dtype)
    logits[0, [70, 500, 900]] = 3.0
    assert choose(logits, torch.tensor([5, 6])).tolist() == [70, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 512, 49152])
def test_the_likeliest_is_the_first_of_the_largest(dtype: torch.dtype, size: int) -> None:
    """Few values, so that most rows hold the largest one many times over."""
    logits = torch.randint(-3, 4, (2, 5, size)).to(dtype)
    expected = [[row.index(max(row)) for row in rows] for rows in logits.tolist()]
    assert likeliest(logits).tolist() == expected
    assert likeliest(logits.transpose(0, 1)).transpose(0, 1).tolist() == expected


def test_noise_is_a_function_of_its_key_alone() -> None:
    sequences = torch.tensor([0, 3])
    positions = torch.tensor([[4, 5, 9], [4, 7, 9]])
    noise = noise_of(11, sequences, positions, 64)
    alone = noise_of(11, torch.tensor([3]), torch.tensor([[7]]), 64)
    assert torch.equal(noise[1, 1], alone[0, 0])
    # A prefix of the vocabulary gets the same noise: nothing depends on the shape.
    assert torch.equal(noise[1, 1, :10], noise_of(11, sequences, positions, 10)[1, 1])
    rows = [*noise.flatten(0, 1), noise_of(12, sequences, positions, 64)[0, 0]]
    rows += [noise_of(11 + 2**40, sequences, positions, 64)[0, 0]]
    distinct = {tuple(row.tolist()) for row in rows}
    assert len(distinct) == len(rows)


def test_noise_has_the_moments_of_the_gumbel_law() -> None:
    noise = noise_of(0, torch.tensor([0]), torch.arange(20)[None], 49152).double()
    assert bool(noise.isfinite().all())
    # Mean = Euler's constant, variance = pi^2 / 6; 983,040 samples: 4 standard errors.
    assert abs(noise.mean().item() - 0.5772156649) < 4 * math.sqrt(1.6449 / noise.numel())
    assert abs(noise.var().item() - math.pi**2 / 6) < 4 * math.sqrt(2 * 4.4 * 1.6449**2 / 983040)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.7}, [0, 1, 2, 3, 4]),
        ({"temperature": 1.0, "top_k": 3}, [0, 1, 2]),
        ({"temperature": 1.0, "top_p": 0.8}, [0, 1, 2]),
        ({"temperature": 0.5, "top_p": 0.8}, [0, 1]),
    ],
)
def test_draws_follow_the_exact_law(settings: dict[str, float], kept: list[int]) -> None:
    p = torch.tensor([0.45, 0.25, 0.15, 0.1, 0.05], dtype=torch.float64)
    law = torch.zeros(5, dtype=torch.float64)
    law[kept] = p[kept] ** (1 / settings["temperature"])
    law /= law.sum()
    num_draws = 20000
    logits = p.log().float().expand(num_draws, 5)
    tokens = choose(logits, torch.arange(num_draws), **settings)
    counts = tokens.bincount(minlength=5).double()
    assert counts[law == 0].sum() == 0
    used = law > 0
    chi_square = ((counts - num_draws * law)[used] ** 2 / (num_draws * law[used])).sum().item()
    # 0.999 quantiles of chi-square with 1..4 degrees of freedom.
    assert chi_square < [10.83, 13.82, 16.27, 18.47][int(used.sum()) - 2]


def test_neighbouring_positions_are_independent() -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    tokens = choose(p.log().expand(20001, 4), torch.arange(20001), temperature=1.0)
    pairs = (tokens[:-1] * 4 + tokens[1:]).bincount(minlength=16).double()
    law = torch.outer(p, p).flatten().double() * 20000
    # Overlapping pairs: 12 degrees of freedom would be exact; 37.7 is the 0.999 quantile of 15.
    assert ((pairs - law) ** 2 / law).sum().item() < 37.7


def test_cut_by_value_keeps_ties_together() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert restrict(scores, 1, 1.0).isfinite().tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_the_short_cut_for_large_vocabularies_changes_nothing(top_p: float, spread: float) -> None:
    """Peaked rows lie within the first few hundred tokens, flat ones do not: both equal a sort."""
    scores = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * spread
    ordered, order = scores.sort(dim=-1, descending=True)
    before = ordered.softmax(-1).double().cumsum(-1) - ordered.softmax(-1).double()
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, before < top_p)
    got = restrict(scores, None, top_p).isfinite()
    # A token exactly at the boundary may fall either way by rounding: at most one a row.
    assert int((got != keep).sum(-1).max()) <= 1
    assert bool(got.any(-1).all())


def test_top_p_of_one_token_vocabulary_rows_keeps_the_best() -> None:
    scores = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    assert restrict(scores, None, 0.5).isfinite().tolist() == [[False, True, False]]
