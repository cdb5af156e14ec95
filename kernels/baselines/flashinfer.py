"""FlashInfer as a peer, where it is installed: its two ways to attend with a token tree.

Cascade: the committed tokens in full pages without a mask, the rest and the tree under a custom
mask, both by its FA2 kernels with the query group packed into rows, then `merge_state`. Measured to
be its fastest way on Hopper. XQA: one launch, the tree's mask as bits of the draft block.

Both are given their best case: what FlashInfer plans on the host for an exact length is planned in
`prepare`, outside of any time, though every step of a decoder would have to plan again.
Pages lie as ours do: position p stands in page table[p // page_size].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdeft.kernels.baselines.prepared import HeadShape, Prepared

_WORKSPACE_BYTES = 256 << 20
_XQA_PAGES = (16, 32, 64, 128)


class PagedTree(NamedTuple):
    """One sequence: page_table int32 [P] on the CPU, its committed tokens, the tree after them.

    ancestors: bool [N, N], row i True where node i sees node j.
    """

    page_table: Tensor
    page_size: int
    num_context: int
    ancestors: Tensor


def prepare_cascade(tree: PagedTree, shape: HeadShape, device: torch.device) -> Prepared:
    """The two-part cascade; one part where less than a page is committed.

    Raises:
        ValueError: FlashInfer cannot be imported.
    """
    library = _library()
    num_full = tree.num_context // tree.page_size
    rest = tree.num_context - num_full * tree.page_size
    num_nodes = tree.ancestors.shape[0]
    mask = torch.ones(num_nodes, rest + num_nodes, dtype=torch.bool)
    mask[:, rest:] = tree.ancestors
    tail = _planned(
        library, shape, device, tree, tree.page_table[num_full:], rest + num_nodes, mask
    )
    if not num_full:
        return Prepared("flashinfer", lambda q, k, v: _attend(tail, tree, q, k, v)[0])
    length = num_full * tree.page_size
    prefix = _planned(library, shape, device, tree, tree.page_table[:num_full], length, None)

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        above = _attend(prefix, tree, q, k_pool, v_pool)
        below = _attend(tail, tree, q, k_pool, v_pool)
        out: Tensor = library.merge_state(*above, *below)[0]
        return out

    return Prepared("flashinfer", run)


def prepare_xqa(tree: PagedTree, shape: HeadShape, device: torch.device) -> Prepared:
    """XQA with the tree as the mask of its draft block.

    Raises:
        ValueError: FlashInfer cannot be imported, or XQA has no such page size or dtype.
    """
    library = _library()
    num_nodes = tree.ancestors.shape[0]
    if tree.page_size not in _XQA_PAGES or shape.dtype == torch.float32:
        raise ValueError(
            f"XQA takes 16-bit types and pages of {_XQA_PAGES} tokens, got {shape.dtype} and "
            f"{tree.page_size}: leave it out"
        )
    arguments: dict[str, Any] = {
        "workspace_buffer": torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "block_tables": tree.page_table[None].to(device),
        "seq_lens": _int32([tree.num_context + num_nodes]).to(device),
        "max_seq_len": tree.num_context + num_nodes,
        "bmm1_scale": shape.scale,
        "bmm2_scale": 1.0,
        "q_len_per_req": num_nodes,
        "mask": draft_mask(tree.ancestors).to(device) if num_nodes > 1 else None,
    }

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        pools = (_pages(k_pool, tree), _pages(v_pool, tree))
        out: Tensor = library.decode.xqa_batch_decode_with_kv_cache(q, pools, **arguments)
        return out.view(q.shape)

    return Prepared("flashinfer-xqa", run)


def draft_mask(ancestors: Tensor) -> Tensor:
    """uint16 [1, N, 2 * ceil(N / 32)]: bit j of row i, lowest first, where node i sees node j."""
    num_nodes = ancestors.shape[0]
    bits = torch.zeros(num_nodes, -(-num_nodes // 32) * 2, 16, dtype=torch.int32)
    bits.view(num_nodes, -1)[:, :num_nodes] = ancestors.to(torch.int32)
    words = (bits << torch.arange(16, dtype=torch.int32)).sum(dim=-1)
    return words.to(torch.uint16)[None]


def _planned(
    library: Any,
    shape: HeadShape,
    device: torch.device,
    tree: PagedTree,
    pages: Tensor,
    length: int,
    mask: Tensor | None,
) -> Any:
    """FlashInfer's wrapper over `length` tokens in `pages`, planned."""
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        _int32([0, tree.ancestors.shape[0]]).to(device),
        _int32([0, pages.shape[0]]).to(device),
        pages.to(device),
        _int32([(length - 1) % tree.page_size + 1]).to(device),
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        tree.page_size,
        custom_mask=None if mask is None else mask.flatten().to(device),
        causal=False,
        sm_scale=shape.scale,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
    )
    return wrapper


def _attend(
    wrapper: Any, tree: PagedTree, q: Tensor, k_pool: Tensor, v_pool: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and base-2 log-sum-exp of one part."""
    pools = (_pages(k_pool, tree), _pages(v_pool, tree))
    out, lse = wrapper.run(q, pools, return_lse=True)
    return out, lse


def _pages(pool: Tensor, tree: PagedTree) -> Tensor:
    """A pool [S, Hkv, D] as [pages, page_size, Hkv, D]."""
    return pool.view(-1, tree.page_size, *pool.shape[1:])


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _library() -> Any:
    try:
        import flashinfer
    except ImportError as error:
        raise ValueError(
            f"FlashInfer cannot be imported ({error}): install flashinfer-python to compare with "
            "it, or leave the method out"
        ) from error
    return flashinfer
