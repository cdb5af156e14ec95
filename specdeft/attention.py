"""How one forward's layers reach the KV tree: store the new keys and values, then attend.

Two forms of the same contract (`model.LayerAttention`): views and a loop over sequences on the CPU,
device-side lengths and the Triton kernels on CUDA. Neither builds a mask over the context, neither
copies the cache.
"""

from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdeft.batch import Batch
from specdeft.kernels import cpu
from specdeft.kv_tree import KVTree
from specdeft.model import AttentionOptions, LayerAttention
from specdeft.tree_tensors import TreeTensors


class KernelChoice(str, Enum):
    """Which kernels run; an explicit choice is honoured or refused, never replaced."""

    CPU = "cpu"
    TRITON = "triton"

    @classmethod
    def for_device(cls, device: torch.device) -> "KernelChoice":
        """The choice for tensors on ``device``."""
        return cls.TRITON if device.type == "cuda" else cls.CPU


def make_attention(
    choice: KernelChoice,
    cache: KVTree,
    batch: Batch,
    num_new: int,
    tree: TreeTensors | None,
    max_context: int | None = None,
    *,
    prefix_once: bool = False,
) -> LayerAttention:
    """The attention of one forward of ``num_new`` tokens after the committed ones.

    Args:
        choice: which kernels.
        cache: holds pages for ``num_new`` more tokens in every sequence.
        batch: the sequences and their committed lengths.
        num_new: N tokens of this forward.
        tree: whose ancestors the N tokens see; None is a causal chunk of a prompt.
        max_context: a bound on the committed lengths that fixes the launch (Triton only); None
            asks the KV tree, whose counts are then up to date.
        prefix_once: the pages that all sequences begin with are read once (Triton only), but for
            layers with a window, which begins elsewhere in each sequence.
    """
    if choice is KernelChoice.CPU:
        return CpuAttention(cache, batch, num_new, tree)
    if max_context is None:
        max_context = max(cache.length(sequence) for sequence in batch.sequences)
    begins = tree is None and max_context == 0
    kind = FirstChunkAttention if begins else TritonAttention
    return kind(cache, batch, num_new, tree, max_context, prefix_once=prefix_once)


class CpuAttention:
    """Attention over views of the pool, one sequence after the other."""

    def __init__(self, cache: KVTree, batch: Batch, num_new: int, tree: TreeTensors | None) -> None:
        self._cache = cache
        self._tree = tree
        self._num_context = batch.lengths.tolist()  # host memory: nothing waits
        self._runs = [
            cache.run(sequence, context + num_new)
            for sequence, context in zip(batch.sequences, self._num_context, strict=True)
        ]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `model.LayerAttention`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        rows = []
        for row, (run, num_context) in enumerate(zip(self._runs, self._num_context, strict=True)):
            fresh = slice(run.start + num_context, run.stop)
            keys[fresh], values[fresh] = k[row], v[row]
            rows.append(self._attend_one(q[row], keys[run], values[run], num_context, options))
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def _attend_one(
        self, q: Tensor, k: Tensor, v: Tensor, num_context: int, options: AttentionOptions
    ) -> Tensor:
        if self._tree is None:
            return cpu.prefill_attention_cpu(q, k, v, num_context=num_context, **options._asdict())
        bias = _tree_bias(self._tree, q.shape[1] // k.shape[1], q.dtype)
        return cpu.tree_attention_cpu(
            q, k, v, num_context=num_context, tree_bias=bias, **options._asdict()
        )


@lru_cache(maxsize=32)
def _tree_bias(tree: TreeTensors, group: int, dtype: torch.dtype) -> cpu.TreeBias:
    return cpu.TreeBias(tree.ancestors, group=group, dtype=dtype, depths=tree.depths)


class TritonAttention:
    """Attention through the DeFT-Flatten kernels; lengths and page tables stay on the device."""

    def __init__(
        self,
        cache: KVTree,
        batch: Batch,
        num_new: int,
        tree: TreeTensors | None,
        max_context: int,
        *,
        prefix_once: bool = False,
    ) -> None:
        # These need triton, which the CPU path must not.
        from specdeft.kernels.deft_flatten import tree_attention
        from specdeft.kernels.kv_store import store_kv

        self._store = store_kv
        self._tree_attention = tree_attention
        self._cache = cache
        self._place: dict[str, Any] = {
            "lengths": batch.lengths,
            "page_table": batch.page_table,
            "page_size": cache.page_size,
            "capacity": cache.page_size * batch.page_table.shape[1],
        }
        self._prefix = batch.prefix if prefix_once else None
        self._num_new, self._tree, self._max_context = num_new, tree, max_context

    @cached_property
    def _shape(self) -> dict[str, Any]:
        device = self._cache.keys.device
        num_new, tree = self._num_new, self._tree
        return {
            "mask_words": tree.mask_words if tree else chain_words(num_new, device),
            "depths": (tree.depths if tree else torch.arange(num_new, device=device)).int(),
            "max_context": self._max_context,
        }

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `model.LayerAttention`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._store(k, v, keys, values, **self._place)
        prefix = self._prefix if options.window is None else None
        out: Tensor = self._tree_attention(
            q, keys, values, **self._place, **self._shape, **options._asdict(), prefix=prefix
        )[0]
        return out


class FirstChunkAttention(TritonAttention):
    """The chunk a prompt begins with: nothing stands before it, so torch's fused causal attention
    does in 16 bits; float32 and what that one does not compute stay with our kernels."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `model.LayerAttention`."""
        plain = options.window is None and options.softcap is None and options.sinks is None
        if not plain or q.dtype == torch.float32:
            return super().attend(layer, q, k, v, options)
        self._store(k, v, self._cache.keys[layer], self._cache.values[layer], **self._place)
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out: Tensor = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=options.scale, enable_gqa=True
        )
        return out.transpose(1, 2)


@lru_cache(maxsize=8)
def chain_words(num_tokens: int, device: torch.device) -> Tensor:
    """Mask words int64 [N, ceil(N / 64)] of a causal chunk, a tree without branches: row i has the
    bits 0 .. i. Made where they are used: a tree of a prompt's length takes the host long."""
    token = torch.arange(num_tokens, device=device)[:, None]
    first = 64 * torch.arange(-(-num_tokens // 64), device=device)
    count = (token + 1 - first).clamp(0, 64)
    # A shift by 64 is none at all: a full word is written as what it is.
    return torch.where(count == 64, -1, (1 << count.clamp(max=63)) - 1)
