"""Bytes and operations of each attention method: by formula, and counted from the actual plan.

Two views, kept apart because the first leaves out re-reads, partials and indices: `paper_elements`
is Table 12 of Yao et al. (arXiv 2404.00242), elements per layer and query head; `*_bytes` is what
the code of this repository asks of memory for one layer, whether a cache answers or not. `floor` is
what no method can avoid. All for one layer; nothing here touches a device.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from specdeft.kernels.baselines.prepared import HeadShape
from specdeft.trees.plan import AttentionPlan, KVForest

_FLOAT_BYTES = 4
_INDEX_BYTES = 4
_WORD_BYTES = 8
_ITEM_BYTES = 32


class Method(Enum):
    """The methods of Table 12; Flash-Decoding and Radix attention, and the first two DeFT
    partitions, share their rows."""

    NAIVE = "naive"
    PER_PATH = "per-path"
    MEDUSA = "medusa"
    SPECINFER = "specinfer"
    DEFT_NODE = "deft-node"
    DEFT_FLATTEN = "deft-flatten"


class PaperElements(NamedTuple):
    """Elements moved per layer and query head: K and V, masks, and scores kept in memory."""

    kv: int
    masks: int
    scores: int


class IoBytes(NamedTuple):
    """Bytes asked of memory for one layer, by what they are."""

    kv: int
    queries: int
    indices: int
    masks: int
    scores: int
    partials: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Floor(NamedTuple):
    """Least bytes (K, V, q, out once each) and operations (visible pairs only) of a layer."""

    num_bytes: int
    num_flops: int

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The larger of both times at measured rates."""
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


def paper_elements(method: Method, forest: KVForest, head_dim: int) -> PaperElements:
    """Table 12: N tokens, t queries, N_i tokens on the path of query i, d = head_dim."""
    tokens, queries = forest.total_tokens, forest.num_queries
    paths = int(forest.path_lengths().sum())
    if method is Method.NAIVE:  # QK^T, scaled and softmax, each written and read
        return PaperElements(2 * head_dim * paths, 0, 6 * paths)
    if method is Method.PER_PATH:
        return PaperElements(2 * head_dim * paths, 0, 0)
    if method is Method.MEDUSA:  # as naive, and the masked scores
        return PaperElements(2 * head_dim * tokens, queries * tokens, 8 * queries * tokens)
    if method is Method.SPECINFER:
        return PaperElements(2 * head_dim * tokens * queries, queries * tokens // 64, 0)
    masks = tokens if method is Method.DEFT_FLATTEN else 0
    return PaperElements(2 * head_dim * tokens, masks, 0)


def floor(forest: KVForest, shape: HeadShape) -> Floor:
    """What every method must move and compute at least."""
    size = shape.dtype.itemsize
    kv = 2 * forest.total_tokens * shape.kv_heads * shape.head_dim * size
    pairs = int(forest.path_lengths().sum())
    return Floor(
        kv + _query_bytes(forest.num_queries, shape),
        4 * pairs * shape.query_heads * shape.head_dim,
    )


def plan_bytes(plan: AttentionPlan, shape: HeadShape) -> IoBytes:
    """The forest kernels on this plan: DeFT's partitions, Radix attention, Flash-Decoding.

    Partials are written once and read once; q is read once per item that holds the query.
    """
    counts = plan.counts()
    row = shape.query_heads * shape.head_dim
    heads = shape.kv_heads
    return IoBytes(
        kv=2 * counts.kv_tokens * heads * shape.head_dim * shape.dtype.itemsize,
        queries=(counts.partial_rows + plan.num_queries) * row * shape.dtype.itemsize,
        indices=(counts.kv_tokens * _INDEX_BYTES + counts.items * _ITEM_BYTES) * heads,
        masks=counts.masked_tokens * plan.num_words * _WORD_BYTES * heads,
        scores=0,
        partials=2 * counts.partial_rows * (row + shape.query_heads) * _FLOAT_BYTES,
    )


def medusa_bytes(forest: KVForest, shape: HeadShape) -> IoBytes:
    """`baselines.dense_mask.prepare_medusa`: every intermediate through memory.

    Of each score in the type of q: product written, scaled read and written, masked read and
    written, softmax read, its result written and read again; the float32 softmax written and read.
    """
    size = shape.dtype.itemsize
    pairs = forest.num_queries * forest.total_tokens
    return IoBytes(
        kv=2 * forest.total_tokens * shape.kv_heads * shape.head_dim * size,
        queries=_query_bytes(forest.num_queries, shape),
        indices=0,
        masks=pairs * shape.query_heads * size,
        scores=pairs * shape.query_heads * (8 * size + 2 * _FLOAT_BYTES),
        partials=0,
    )


def sdpa_bytes(forest: KVForest, shape: HeadShape) -> IoBytes:
    """`baselines.dense_mask.prepare_sdpa`: K and V at least once, the mask once per KV head."""
    pairs = forest.num_queries * forest.total_tokens
    return medusa_bytes(forest, shape)._replace(
        masks=pairs * shape.query_heads * shape.dtype.itemsize, scores=0
    )


def specinfer_bytes(forest: KVForest, shape: HeadShape, num_splits: int) -> IoBytes:
    """`baselines.query_bitmask`: the whole KV for every query."""
    queries, tokens = forest.num_queries, forest.total_tokens
    row = shape.query_heads * shape.head_dim
    return IoBytes(
        kv=2 * queries * tokens * shape.kv_heads * shape.head_dim * shape.dtype.itemsize,
        queries=_query_bytes(queries, shape) + (num_splits - 1) * queries * row * 2,
        indices=queries * tokens * shape.kv_heads * _INDEX_BYTES,
        masks=queries * -(-tokens // 64) * shape.kv_heads * _WORD_BYTES,
        scores=0,
        partials=2 * num_splits * queries * (row + shape.query_heads) * _FLOAT_BYTES,
    )


def commit_bytes(num_layers: int, num_moved: int, kv_heads: int, head_dim: int, size: int) -> int:
    """Keys and values of the moved slots, read and written, in all layers."""
    return 4 * num_layers * num_moved * kv_heads * head_dim * size


def _query_bytes(num_queries: int, shape: HeadShape) -> int:
    """q read and out written, once."""
    return 2 * num_queries * shape.query_heads * shape.head_dim * shape.dtype.itemsize


__all__ = [
    "Floor",
    "IoBytes",
    "Method",
    "PaperElements",
    "commit_bytes",
    "floor",
    "medusa_bytes",
    "paper_elements",
    "plan_bytes",
    "sdpa_bytes",
    "specinfer_bytes",
]
