"""DeFT-Flatten attention for speculation: a token tree per sequence over its committed KV.

The plan is a closed form of the length, so nothing is planned on the host. The KV of a sequence,
the committed tokens and then the tree, is one flattened run cut into equal splits of BLOCK-token
steps; a program takes (row tile, KV head, split):

    rows     the G query heads of a KV head folded in: row r = node r // G, head r % G
    loop 1   blocks that every row sees entirely: no mask, no bounds, the page id of the next block
             loaded one step ahead so that the pipeline stays deep
    loop 2   the rest: a 64-bit window of each row's mask words, moved to the block's first column
    epilogue the output itself where one split exists, else a partial for `merge`

A prefix that the sequences share is a group of its own (KV-guided grouping): the same launch holds
programs whose rows are the B * R queries of a KV head and whose KV is the prefix, loop 1 only, and
those of the sequences begin behind it. The partials of both meet in the merge.

Everything a launch depends on (grid, splits, scratch) follows from shapes and `max_context`;
lengths, page table and mask words are read on the device, so a CUDA graph can hold the call.
Bytes moved: K and V once per row tile (through L2; once from memory where the tiles of a split run
together), q and out once, 8 * R * Hkv * D per split of partials.
Algorithm: Yao et al., "DeFT" (arXiv 2404.00242), section 3; split and merge as in Flash-Decoding.
"""

# Jitted bodies are Triton's language, not Python's: mypy checks the launcher only.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.kernels.launch_shape import (
    MIN_BLOCKS,
    Kernel,
    LaunchShape,
    SharedPrefix,
    can_start_early,
    launch_shape,
)
from specdeft.kernels.merge import (
    MERGE_TILE,
    TAIL_WEIGHT,
    UNSPECIALIZED,
    blocks_of_tile,
    extent_of_part,
    merge_kernel,
    merge_warps,
    place_of_program,
    split_begin,
    splits_used,
    store_rows,
)
from specdeft.kernels.tile_ops import (
    NO_SCORE,
    bit_columns,
    capped,
    product,
    slots_of,
    softmax_step,
    window_of_bits,
)

__all__ = ["Scratch", "allocate_scratch", "launch_shape", "tree_attention"]

_SHORT_TAIL_NODES = 256  # up to here the masked loop is too short to pay for a pipeline's memory


class Scratch(NamedTuple):
    """Partials of one call, reusable by every layer: out fp32 [B, Hkv, S, R, D], lse [..., R]; S
    counts the splits of a shared prefix too."""

    out: Tensor
    lse: Tensor


@triton.jit
def _visible_blocks(
    b_acc, b_max, b_sum, b_q, first, last, k_ptr, v_ptr, table_row, first_slot, last_block,
    stride_slot, scale, cap,
    BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Loop 1: blocks first..last-1, seen entirely by every row."""
    o_token = tl.arange(0, BLOCK)
    o_dim = tl.arange(0, DIM_PADDED)
    SCATTERED: tl.constexpr = PAGED and PAGE_SIZE < BLOCK  # a block spans several pages
    PER_PAGE: tl.constexpr = PAGE_SIZE // BLOCK if PAGE_SIZE > BLOCK else 1
    p_tile = o_token[:, None] * stride_slot + o_dim[None, :]
    if SCATTERED:
        page = tl.load(table_row + (first * BLOCK + o_token) // PAGE_SIZE)
    elif PAGED:
        page = tl.load(table_row + first // PER_PAGE)
    for i_block in range(first, last):
        if SCATTERED:
            slot = page.to(tl.int64) * PAGE_SIZE + o_token % PAGE_SIZE
            p_kv = slot[:, None] * stride_slot + o_dim[None, :]
        elif PAGED:
            slot = page.to(tl.int64) * PAGE_SIZE + (i_block % PER_PAGE) * BLOCK
            p_kv = slot * stride_slot + p_tile
        else:
            p_kv = (first_slot + i_block * BLOCK) * stride_slot + p_tile
        if DIM == DIM_PADDED:
            b_k = tl.load(k_ptr + p_kv)
            b_v = tl.load(v_ptr + p_kv)
        else:
            b_k = tl.load(k_ptr + p_kv, mask=(o_dim < DIM)[None, :], other=0.0)
            b_v = tl.load(v_ptr + p_kv, mask=(o_dim < DIM)[None, :], other=0.0)
        if PAGED:  # of the next block; after the last one, of the last one again
            following = tl.minimum(i_block + 1, last_block)
            if SCATTERED:
                page = tl.load(table_row + (following * BLOCK + o_token) // PAGE_SIZE)
            else:
                page = tl.load(table_row + following // PER_PAGE)
        b_scores = product(b_q, tl.trans(b_k), PRECISION)
        factor = scale
        if CAPPED:
            b_scores = capped(b_scores * scale, cap)
            factor = 1.4426950408889634
        b_acc, b_max, b_sum = softmax_step(b_acc, b_max, b_sum, b_scores, b_v, factor, PRECISION)
    return b_acc, b_max, b_sum


@triton.jit
def _masked_blocks(
    b_acc, b_max, b_sum, b_q, begin, end, length, num_nodes, m_row, words_ptr, o_word, num_words,
    depths_ptr, b_depth, k_ptr, v_ptr, table_row, first_slot, stride_slot, scale, cap,
    TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Loop 2: tokens begin..end-1 under the mask words (and the window), TILE <= 64 at a time."""
    o_dim = tl.arange(0, DIM_PADDED)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        o_token = tl.arange(0, TILE)
        position = at + o_token
        m_token = position < length + num_nodes
        slot = slots_of(
            tl.where(m_token, position, 0).to(tl.int64), table_row, first_slot, PAGE_SIZE, PAGED
        )
        p_kv = slot[:, None] * stride_slot + o_dim[None, :]
        m_kv = m_token[:, None] & (o_dim < DIM)[None, :]
        b_k = tl.load(k_ptr + p_kv, mask=m_kv, other=0.0)
        b_v = tl.load(v_ptr + p_kv, mask=m_kv, other=0.0)
        b_scores = product(b_q, tl.trans(b_k), PRECISION)
        factor = scale
        if CAPPED:
            b_scores = capped(b_scores * scale, cap)
            factor = 1.4426950408889634
        visible = bit_columns(
            window_of_bits(words_ptr, o_word, at - length, num_words, m_row), o_token
        )
        if WINDOW > 0:
            node = position - length
            b_position = tl.load(depths_ptr + node, mask=(node >= 0) & m_token, other=0)
            b_position = tl.where(node < 0, node, b_position.to(tl.int32))
            visible = visible & (b_depth[:, None] - b_position[None, :] < WINDOW)
        b_scores = tl.where(visible, b_scores, float("-inf"))
        b_acc, b_max, b_sum = softmax_step(b_acc, b_max, b_sum, b_scores, b_v, factor, PRECISION)
    return b_acc, b_max, b_sum


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
    lengths_ptr, words_ptr, depths_ptr, table_ptr, prefix_tokens_ptr, prefix_pages_ptr, sinks_ptr,
    num_nodes, num_rows, num_words, num_splits, prefix_splits, prefix_rows, capacity, scale, cap,
    q_stride_b, q_stride_n, q_stride_h, out_stride_b, out_stride_n, out_stride_h,
    stride_slot, stride_head, words_stride_b, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED_TILE: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr, ONE_SPLIT: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_PREFIX: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # launched while the kernel before still ends: what it wrote is complete from here on
        tl.extra.cuda.gdc_wait()
    # Row tiles are neighbours: those of a split share its KV through L2.
    i_tile, i_head, i_split, i_sequence, in_prefix = place_of_program(
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        num_splits, num_rows, prefix_splits, prefix_rows, ROWS, KV_HEADS, HAS_PREFIX,
    )  # fmt: skip
    length = tl.load(lengths_ptr + i_sequence).to(tl.int32)
    table_row = table_ptr + i_sequence * table_stride
    if HAS_PREFIX:
        prefix_tokens = tl.load(prefix_tokens_ptr)
        length, table_row, num_nodes, num_rows, num_splits, first_partial = extent_of_part(
            in_prefix, length, table_row, num_nodes, num_rows, num_splits,
            prefix_tokens, prefix_pages_ptr, prefix_splits, prefix_rows, KV_HEADS, PAGE_SIZE,
        )  # fmt: skip
        part_out_ptr += first_partial * DIM
        part_lse_ptr += first_partial
    begin, end = blocks_of_tile(length, num_nodes, i_tile, ROWS, GROUP, BLOCK, WINDOW)
    used = splits_used(end - begin, num_splits, MIN_BLOCKS)
    if i_split >= used:
        return
    all_see_to = length // BLOCK
    first = split_begin(i_split, used, begin, end, all_see_to, TAIL_WEIGHT)
    last = split_begin(i_split + 1, used, begin, end, all_see_to, TAIL_WEIGHT)

    o_row = i_tile * ROWS + tl.arange(0, ROWS)
    o_dim = tl.arange(0, DIM_PADDED)
    m_row = o_row < num_rows
    o_node = o_row // GROUP
    o_head = i_head * GROUP + o_row % GROUP
    p_q = q_ptr + i_sequence * q_stride_b + o_node * q_stride_n + o_head * q_stride_h
    m_q = m_row[:, None] & (o_dim < DIM)[None, :]
    b_q = tl.load(p_q[:, None] + o_dim[None, :], mask=m_q, other=0.0)
    b_acc = tl.zeros([ROWS, DIM_PADDED], dtype=tl.float32)
    b_max = tl.full([ROWS], NO_SCORE, dtype=tl.float32)
    b_sum = tl.zeros([ROWS], dtype=tl.float32)

    k_head = k_ptr + i_head.to(tl.int64) * stride_head
    v_head = v_ptr + i_head.to(tl.int64) * stride_head
    first_slot = i_sequence * capacity
    o_word = i_sequence * words_stride_b + o_node * num_words
    b_depth = o_node  # read with a window only
    all_see_from = 0
    if WINDOW > 0:
        b_depth = tl.load(depths_ptr + o_node, mask=m_row, other=0).to(tl.int32)
        # No node is deeper than N - 1: from here on every row's window reaches.
        all_see_from = tl.cdiv(tl.maximum(length + num_nodes - WINDOW, 0), BLOCK)
        b_acc, b_max, b_sum = _masked_blocks(
            b_acc, b_max, b_sum, b_q, first * BLOCK,
            tl.minimum(tl.minimum(all_see_from, last), length // BLOCK) * BLOCK,
            length, num_nodes, m_row, words_ptr, o_word, num_words, depths_ptr, b_depth,
            k_head, v_head, table_row, first_slot, stride_slot, scale, cap,
            MASKED_TILE, PAGE_SIZE, PAGED, DIM, DIM_PADDED, WINDOW, CAPPED, PRECISION,
            MASKED_STAGES,
        )  # fmt: skip
    b_acc, b_max, b_sum = _visible_blocks(
        b_acc, b_max, b_sum, b_q, tl.maximum(first, all_see_from), tl.minimum(last, all_see_to),
        k_head, v_head, table_row, first_slot, end - 1, stride_slot, scale, cap,
        BLOCK, PAGE_SIZE, PAGED, DIM, DIM_PADDED, CAPPED, PRECISION,
    )  # fmt: skip
    b_acc, b_max, b_sum = _masked_blocks(
        b_acc, b_max, b_sum, b_q, tl.maximum(first, all_see_to) * BLOCK, last * BLOCK,
        length, num_nodes, m_row, words_ptr, o_word, num_words, depths_ptr, b_depth,
        k_head, v_head, table_row, first_slot, stride_slot, scale, cap,
        MASKED_TILE, PAGE_SIZE, PAGED, DIM, DIM_PADDED, WINDOW, CAPPED, PRECISION,
            MASKED_STAGES,
    )  # fmt: skip
    if PDL and not ONE_SPLIT:
        tl.extra.cuda.gdc_launch_dependents()
    if ONE_SPLIT:
        store_rows(
            b_acc, b_max, b_sum, o_node, o_head, m_row, o_dim,
            out_ptr + i_sequence * out_stride_b, out_stride_n, out_stride_h,
            lse_ptr + i_sequence * num_nodes * KV_HEADS * GROUP, KV_HEADS * GROUP,
            sinks_ptr, HAS_SINKS, DIM,
        )  # fmt: skip
    else:
        b_divisor = tl.where(b_sum > 0, b_sum, 1.0)
        b_lse = tl.where(b_sum > 0, b_max + tl.log2(b_divisor), float("-inf"))
        row = ((i_sequence * KV_HEADS + i_head) * num_splits + i_split) * num_rows + o_row
        tl.store(
            part_out_ptr + row[:, None] * DIM + o_dim[None, :],
            b_acc / b_divisor[:, None],
            mask=m_q,
        )
        tl.store(part_lse_ptr + row, b_lse, mask=m_row)


def allocate_scratch(
    shape: LaunchShape, *, batch: int, kv_heads: int, head_dim: int, device: torch.device
) -> Scratch | None:
    """Room for the partials of `shape`, to be passed to every layer's call; None where one split
    writes the output itself."""
    splits = shape.num_splits + shape.prefix_splits
    if splits == 1:
        return None
    rows = (batch, kv_heads, splits, shape.num_rows)
    return Scratch(
        torch.empty(*rows, head_dim, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    lengths: Tensor,
    mask_words: Tensor,
    page_table: Tensor | None,
    page_size: int,
    capacity: int,
    max_context: int,
    scale: float,
    depths: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    prefix: SharedPrefix | None = None,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
    shape: LaunchShape | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of N tree tokens per sequence; their K/V already stand after the committed tokens.

    q [B, N, Hq, D]; k_pool, v_pool [S, Hkv, D] of the same dtype (bfloat16, float16, float32);
    lengths int32 [B] committed tokens, <= max_context, which fixes the grid; mask_words int64
    [N, W] or [B, N, W], bits past N clear, nodes in depth-first order; page_table int32 [B, P], or
    None where sequence b owns the slots from b * capacity on; page_size a power of two >= 16;
    window in positions counted by depth, which needs depths int32 [N]; sinks [Hq]. `shape`
    overrides `launch_shape`; `scratch` comes from `allocate_scratch`, else is allocated here;
    `out` like q.
    prefix: committed tokens of all sequences, counted in their lengths, that are read once for all
    B * N queries; page_size holds whole blocks of the tile then, and there is no window. A sequence
    of length 0 has ended: it reads its own nodes only, and its output means nothing.
    Returns out [B, N, Hq, D] and lse float32 [B, N, Hq], natural log, sinks included.
    """
    _check(q, k_pool, v_pool, lengths, mask_words, page_table, page_size, scale, depths, window)
    batch, num_nodes, query_heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group = query_heads // kv_heads
    shape = shape or launch_shape(
        batch=batch,
        num_nodes=num_nodes,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_tokens=max_context + num_nodes,
        dtype=q.dtype,
        device=q.device,
        page_size=None if page_table is None else page_size,
        plain=window is None and softcap is None,
        has_prefix=prefix is not None,
    )
    tile, splits = shape.tile, shape.num_splits + shape.prefix_splits
    if prefix is not None:
        _check_prefix(shape, page_table, page_size, window)
        # Rows of all sequences as one run; a copy only where they do not lie so.
        q = q.reshape(1, batch * num_nodes, query_heads, head_dim).view_as(q)
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(batch, num_nodes, query_heads, dtype=torch.float32, device=q.device)
    if splits > 1 and scratch is None:
        scratch = allocate_scratch(
            shape, batch=batch, kv_heads=kv_heads, head_dim=head_dim, device=q.device
        )
    part_out, part_lse = scratch if splits > 1 and scratch is not None else (out, lse)
    if splits > 1 and part_out.shape != (batch, kv_heads, splits, shape.num_rows, head_dim):
        raise ValueError(
            f"scratch of shape {tuple(part_out.shape)} does not fit {splits} splits of "
            f"{shape.num_rows} rows: take it from allocate_scratch with this call's launch_shape"
        )
    shared = {
        "part_out_ptr": part_out,
        "part_lse_ptr": part_lse,
        "out_ptr": out,
        "lse_ptr": lse,
        "lengths_ptr": lengths,
        "prefix_tokens_ptr": lengths if prefix is None else prefix.num_tokens,
        "sinks_ptr": lengths if sinks is None else sinks,
        "num_nodes": num_nodes,
        "num_rows": shape.num_rows,
        "num_splits": shape.num_splits,
        "prefix_splits": shape.prefix_splits,
        "prefix_rows": 0 if prefix is None else batch * shape.num_rows,
        "out_stride_b": out.stride(0),
        "out_stride_n": out.stride(1),
        "out_stride_h": out.stride(2),
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": head_dim,
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        "MIN_BLOCKS": MIN_BLOCKS,
        "HAS_SINKS": sinks is not None,
        "HAS_PREFIX": prefix is not None,
        # Either kernel starts while the one before it ends, and waits for its results before
        # reading any.
        **({"launch_pdl": True} if can_start_early(q) else {}),
    }
    given = {
        "q_ptr": q,
        "words_ptr": mask_words,
        "table_ptr": lengths if page_table is None else page_table,
        "prefix_pages_ptr": lengths if prefix is None else prefix.pages,
        "num_words": mask_words.shape[-1],
        "capacity": capacity,
        "q_stride_b": q.stride(0),
        "q_stride_n": q.stride(1),
        "q_stride_h": q.stride(2),
        "words_stride_b": mask_words.stride(0) if mask_words.ndim == 3 else 0,
        "table_stride": 0 if page_table is None else page_table.stride(0),
        "PAGE_SIZE": page_size,
        "PAGED": page_table is not None,
        "ONE_SPLIT": splits == 1,
        "num_warps": tile.num_warps,
    }
    grid = (shape.num_row_tiles, kv_heads, batch * splits)
    if prefix is not None:
        prefix_tiles = triton.cdiv(batch * shape.num_rows, tile.rows)
        items = prefix_tiles * shape.prefix_splits + shape.num_row_tiles * batch * shape.num_splits
        grid = (items * kv_heads, 1, 1)
    if tile.kernel is not Kernel.TRITON:
        from specdeft.kernels import flatten_hopper  # Gluon's Hopper half exists on such a device

        flatten_hopper.launch(
            grid,
            k_pool,
            v_pool,
            scale=scale,
            wide=tile.kernel is Kernel.HOPPER_WIDE,
            STAGES=tile.num_stages,
            **given,
            **shared,
        )
    else:
        _tree_attention_kernel[grid](
            k_ptr=k_pool,
            v_ptr=v_pool,
            depths_ptr=lengths if depths is None else depths,
            scale=scale if softcap is not None else scale * math.log2(math.e),
            cap=softcap or 1.0,
            stride_slot=k_pool.stride(0),
            stride_head=k_pool.stride(1),
            DIM_PADDED=triton.next_power_of_2(head_dim),
            MASKED_TILE=min(64, tile.block),
            MASKED_STAGES=masked_stages(num_nodes, q.dtype),
            WINDOW=window or 0,
            CAPPED=softcap is not None,
            PRECISION=dot_precision(q),
            PDL=can_start_early(q),
            num_stages=tile.num_stages,
            **given,
            **shared,
        )
    if splits > 1:
        splits_padded = triton.next_power_of_2(splits)
        dim_padded = triton.next_power_of_2(head_dim)
        merged = merged_rows(splits_padded, head_dim, tile.rows)
        merge_kernel[(triton.cdiv(shape.num_rows, merged), kv_heads, batch)](
            DIM_PADDED=dim_padded,
            MERGED=merged,
            SPLITS_PADDED=splits_padded,
            WINDOW=window or 0,
            PDL=can_start_early(q),
            num_warps=merge_warps(merged * splits_padded * dim_padded),
            **shared,
        )
    return out, lse


def dot_precision(q: Tensor) -> str:
    """How matrix products take their operands: exact float32 for float32, else as they are."""
    if q.dtype == torch.float32:
        return "ieee"
    return "tf32" if q.is_cuda or q.dtype != torch.bfloat16 else "widened"


def masked_stages(num_nodes: int, dtype: torch.dtype) -> int:
    """Pipeline depth of the masked loop. float32 needs 2: unpipelined, its operands spill."""
    return 1 if num_nodes <= _SHORT_TAIL_NODES and dtype != torch.float32 else 2


def merged_rows(splits_padded: int, head_dim: int, tile_rows: int) -> int:
    """Rows of a merge program: what `MERGE_TILE` holds, a power of two that divides the tile."""
    rows: int = MERGE_TILE // (splits_padded * triton.next_power_of_2(head_dim))
    return max(1, min(rows, tile_rows, 8))


def _check_prefix(
    shape: LaunchShape, page_table: Tensor | None, page_size: int, window: int | None
) -> None:
    """What a prefix that is read once asks for: blocks without a mask, and a launch made for it."""
    if page_table is None or page_size % shape.tile.block or window is not None:
        raise ValueError(
            f"a shared prefix is read once from pages of whole blocks of {shape.tile.block} tokens "
            f"and without a window, got pages of {page_size if page_table is not None else None} "
            f"and window {window}: leave it to the sequences with prefix=None"
        )
    if not shape.prefix_splits:
        raise ValueError("the launch shape has no splits for the prefix: give has_prefix=True")


def _check(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    lengths: Tensor,
    mask_words: Tensor,
    page_table: Tensor | None,
    page_size: int,
    scale: float,
    depths: Tensor | None,
    window: int | None,
) -> None:
    """Everything that can be refused without reading the device."""
    batch, num_nodes, query_heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    if query_heads % kv_heads or k_pool.shape[2] != head_dim or head_dim % 16 or head_dim > 256:
        raise ValueError(
            f"{query_heads} query heads of {head_dim} do not fit {kv_heads} KV heads of "
            f"{k_pool.shape[2]}: head dims are equal multiples of 16 up to 256, and Hkv divides Hq"
        )
    if k_pool.dtype != q.dtype or v_pool.dtype != q.dtype or q.stride(3) != 1:
        raise ValueError(
            f"q {q.dtype}, k {k_pool.dtype}, v {v_pool.dtype} must be one of bfloat16, float16, "
            "float32, with adjacent head elements: convert them alike"
        )
    if k_pool.stride() != v_pool.stride() or k_pool.stride(2) != 1:
        raise ValueError(
            f"k_pool and v_pool must share one layout with adjacent head elements, got strides "
            f"{k_pool.stride()} and {v_pool.stride()}: allocate them alike"
        )
    if mask_words.dtype != torch.int64 or mask_words.shape[-2:] != (num_nodes, -(-num_nodes // 64)):
        raise ValueError(
            f"mask_words {mask_words.dtype} {tuple(mask_words.shape)} do not fit {num_nodes} "
            "nodes: pass int64 [N, ceil(N / 64)] as of TokenTree.mask_words(), or one per sequence"
        )
    if not mask_words.is_contiguous():
        raise ValueError("mask_words must be contiguous: pass them as TokenTree.mask_words() does")
    if lengths.shape[0] != batch or (page_table is not None and page_table.shape[0] != batch):
        raise ValueError(
            f"{batch} sequences need {batch} lengths and page table rows, got "
            f"{lengths.shape[0]} and {None if page_table is None else page_table.shape[0]}"
        )
    if page_table is not None and (page_size < 16 or page_size & (page_size - 1)):
        raise ValueError(f"page_size {page_size} must be a power of two of at least 16")
    if window is not None and depths is None:
        raise ValueError("a window counts positions by depth: pass depths int32 [N]")
    if not scale > 0:
        raise ValueError(f"scale is {scale}: it must be above 0, usually head_dim ** -0.5")
