"""Commit against a token-by-token copy written out in Python: torch and Triton, paged and not."""

import os

import pytest
import torch
from torch import Tensor

from specdeft.kernels import commit_triton
from specdeft.kernels.commit import commit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH_AND_TRITON = pytest.mark.parametrize("move", [commit, commit_triton.launch])
assert DEVICE == "cuda" or os.environ["TRITON_INTERPRET"] == "1"


def _expected(
    pools: Tensor, lengths: list[int], paths: list[list[int]], slots: list[list[int]]
) -> Tensor:
    moved = pools.clone()
    for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
        for depth, node in enumerate(path):
            moved[:, slots[row][length + depth]] = pools[:, slots[row][length + node]]
    return moved


def _run(
    move: object, lengths: list[int], paths: list[list[int]], page_size: int | None, heads: int = 3
) -> None:
    """One commit of B sequences of 96 slots each, padded paths poisoned."""
    batch, capacity, layers = len(lengths), 96, 2
    pools = torch.randn(2, layers, batch * capacity, heads, 16)
    table = None
    slots = [[row * capacity + t for t in range(capacity)] for row in range(batch)]
    if page_size is not None:
        order = torch.randperm(batch * capacity // page_size).view(batch, -1)
        table = order.to(torch.int32)
        slots = [
            [int(order[row, t // page_size]) * page_size + t % page_size for t in range(capacity)]
            for row in range(batch)
        ]
    padded = torch.full((batch, 24), 2**40)
    for row, path in enumerate(paths):
        padded[row, : len(path)] = torch.tensor(path)
    expected = [_expected(pool, lengths, paths, slots) for pool in pools]
    pools = pools.to(DEVICE)
    move(  # type: ignore[operator]
        pools[0],
        pools[1],
        lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        path_nodes=padded.to(DEVICE),
        num_accepted=torch.tensor([len(p) - 1 for p in paths], dtype=torch.int32, device=DEVICE),
        page_table=None if table is None else table.to(DEVICE),
        page_size=page_size or 16,
        capacity=capacity,
    )
    for pool, want in zip(pools.cpu(), expected, strict=True):
        assert torch.equal(pool, want)


@TORCH_AND_TRITON
@pytest.mark.parametrize("page_size", [None, 16, 32])
@pytest.mark.parametrize(
    ("lengths", "paths"),
    [
        ([0], [[0]]),
        ([5], [[0, 1, 2, 3]]),
        ([14], [[0, 2, 3, 9, 40]]),
        ([31, 0, 7], [[0, 3], [0], [0, 1, 4, 5, 6, 20, 21]]),
        ([15, 16], [list(range(0, 40, 2)), [0, 17]]),
    ],
)
def test_the_accepted_path_moves(
    move: object, page_size: int | None, lengths: list[int], paths: list[list[int]]
) -> None:
    _run(move, lengths, paths, page_size)


@TORCH_AND_TRITON
def test_more_columns_than_one_program(move: object) -> None:
    _run(move, [3], [[0, 4, 5]], 16, heads=40)


def test_bad_input_is_refused_in_one_sentence() -> None:
    pool = torch.zeros(1, 8, 1, 16)
    one = torch.ones(1, dtype=torch.int32)
    arguments = {"lengths": one, "path_nodes": one[None].long(), "num_accepted": one}
    with pytest.raises(ValueError, match="one shape and one layout"):
        commit(pool, pool[:, :4], **arguments, page_table=None, page_size=4, capacity=8)
    with pytest.raises(ValueError, match="2 rows cannot serve 1 sequences"):
        commit(pool, pool, **arguments, page_table=one.expand(2, 1), page_size=4, capacity=8)
    arguments["num_accepted"] = one.expand(3)
    with pytest.raises(ValueError, match="one of each per sequence"):
        commit(pool, pool, **arguments, page_table=None, page_size=4, capacity=8)
