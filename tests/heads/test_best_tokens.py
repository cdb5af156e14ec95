"""The best tokens found in chunks are the best tokens."""

import pytest
import torch

from specdeft.heads.best_tokens import best_in_chunks, best_tokens, num_chunks


@pytest.mark.parametrize("shape", [(5, 4096), (1, 3, 6144), (2, 512)])
@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_find_what_one_row_finds(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(len(shape) * k)
    logits = torch.randn(shape).to(dtype)
    expected = logits.topk(k, dim=-1).values
    for chunks in (1, 2, 16, 32):
        found = best_in_chunks(logits, k, chunks)
        assert found.shape == (*shape[:-1], k)
        # In bfloat16 several columns hold one value: any of them will do, each only once.
        assert torch.equal(logits.gather(-1, found), expected)
        assert all(len(set(row)) == k for row in found.flatten(0, -2).tolist())


def test_all_of_the_best_in_one_chunk() -> None:
    logits = torch.zeros(2, 4096)
    logits[:, 64:74] = torch.arange(10.0) + 1
    assert best_in_chunks(logits, 10, 32).tolist() == [list(range(73, 63, -1))] * 2


@pytest.mark.parametrize(
    ("columns", "k", "expected"),
    [(97, 4, 1), (4095, 1, 1), (4096, 1, 64), (16384, 10, 64), (49152, 1, 64), (128256, 10, 1),
     (4098, 4, 2), (4096, 200, 2)],
)  # fmt: skip
def test_chunks_are_equal_and_hold_enough(columns: int, k: int, expected: int) -> None:
    assert num_chunks(columns, k) == expected
    assert columns % expected == 0


def test_on_the_cpu_one_stage_is_taken() -> None:
    logits = torch.randn(3, 8192)
    assert torch.equal(best_tokens(logits, 5), logits.topk(5, dim=-1).indices)
