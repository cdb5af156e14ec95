"""The store kernel against plain indexing: odd sizes, shuffled pages, strided inputs."""

import pytest
import torch

pytest.importorskip("triton")

from specdeft.kernels.kv_store import store_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 64), (1, 16), (5, 80)])
@pytest.mark.parametrize("num_new", [1, 7, 65])
def test_rows_land_in_their_slots_and_nothing_else_moves(
    kv_heads: int, dim: int, num_new: int
) -> None:
    page_size, num_pages, lengths = 16, 16, [0, 30]
    table = torch.randperm(num_pages)[: 2 * 7].reshape(2, 7).to(DEVICE, torch.int32)
    pools = [torch.full((num_pages * page_size, kv_heads, dim), -1.0, device=DEVICE) for _ in "kv"]
    # As the model hands them over: heads before tokens in memory.
    k, v = (torch.randn(2, kv_heads, num_new, dim, device=DEVICE).transpose(1, 2) for _ in "kv")
    expected = [pool.clone() for pool in pools]
    for row, length in enumerate(lengths):
        for token in range(num_new):
            page, offset = divmod(length + token, page_size)
            slot = int(table[row, page]) * page_size + offset
            expected[0][slot], expected[1][slot] = k[row, token], v[row, token]
    store_kv(
        k,
        v,
        *pools,
        lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_table=table,
        page_size=page_size,
        capacity=112,
    )
    assert torch.equal(pools[0], expected[0])
    assert torch.equal(pools[1], expected[1])


def test_the_contiguous_layout() -> None:
    pools = [torch.zeros(2 * 32, 2, 16, device=DEVICE) for _ in "kv"]
    k, v = (torch.randn(2, 3, 2, 16, device=DEVICE) for _ in "kv")
    lengths = torch.tensor([5, 29], dtype=torch.int32, device=DEVICE)
    store_kv(k, v, *pools, lengths=lengths, page_table=None, page_size=32, capacity=32)
    assert torch.equal(pools[0][5:8], k[0])
    assert torch.equal(pools[1][32 + 29 : 64], v[1])
    assert int((pools[0] != 0).any(-1).any(-1).sum()) == 6


def test_layouts_it_cannot_write_are_refused() -> None:
    pool = torch.zeros(32, 2, 16, device=DEVICE)
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    layout = {"lengths": lengths, "page_table": None, "page_size": 32, "capacity": 32}
    k = torch.zeros(1, 1, 2, 16, device=DEVICE)
    with pytest.raises(ValueError, match="dtype"):
        store_kv(k.half(), k.half(), pool, pool, **layout)
    with pytest.raises(ValueError, match="contiguous rows"):
        store_kv(k, k, pool.transpose(0, 1), pool.transpose(0, 1), **layout)
