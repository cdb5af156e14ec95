"""One call of the speculation kernel with everything hostile around it, and its exact answer.

Pools are NaN wherever no token of a sequence stands (page tails included), fresh scratch is
poisoned by the suite, and pages are shuffled; a read outside the plan turns the result into NaN.
A prefix stands once, on pages of its own that every table begins with.
"""

from typing import Any

import torch
from torch import Tensor

from specdeft.kernels.deft_flatten import tree_attention
from specdeft.kernels.launch_shape import LaunchShape, SharedPrefix, TileShape, launch_shape
from specdeft.kernels.reference import tree_visibility
from specdeft.trees.mask import mask_words_from_ancestors
from tests.kernels.accuracy import allowed_error, reference, relative_error
from tests.kernels.random_trees import ancestors_and_depths

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Case:
    """B sequences over one pool, everything random, and the exact answer of each.

    With ``prefix_pages`` the lengths count that prefix; a sequence of length 0 has ended, and all
    its pages are its own last one.
    """

    def __init__(
        self,
        lengths: list[int],
        parents: list[int],
        *,
        heads: tuple[int, int, int] = (2, 1, 16),
        dtype: torch.dtype = torch.float32,
        page_size: int | None = 64,
        prefix_pages: int = 0,
        gain: float = 1.0,
        **options: Any,
    ) -> None:
        torch.manual_seed(len(parents))
        self.query_heads, self.kv_heads, self.dim = heads
        self.lengths, self.num_nodes, self.options = lengths, len(parents), options
        self.ancestors, self.depths = ancestors_and_depths(parents)
        self.page_size = page_size or 16
        most = max(prefix_pages * self.page_size, *lengths) + self.num_nodes
        pages = -(-most // self.page_size)
        self.capacity = pages * self.page_size
        count = len(lengths) * pages
        self.table = (torch.randperm(count) if page_size else torch.arange(count)).view(-1, pages)
        self.paged = page_size is not None
        self.prefix_pages = self.table[0, :prefix_pages].clone()
        self.has_prefix = prefix_pages > 0
        num_prefix = prefix_pages * self.page_size
        self.q = (gain * torch.randn(len(lengths), self.num_nodes, *heads[:1], self.dim)).to(dtype)
        self.pool = torch.full((2, count * self.page_size, *heads[1:]), float("nan"), dtype=dtype)
        self.rows = []
        prefix = torch.randn(2, num_prefix, *heads[1:]).to(dtype)
        self.pool.unflatten(1, (-1, self.page_size))[:, self.prefix_pages] = prefix.unflatten(
            1, (prefix_pages, self.page_size)
        )
        for row, length in enumerate(lengths):
            if length:
                self.table[row, :prefix_pages] = self.prefix_pages
            elif prefix_pages:
                self.table[row] = self.table[row, -1]
            fresh = torch.randn(2, length + self.num_nodes, *heads[1:]).to(dtype)
            fresh[:, : min(length, num_prefix)] = prefix[:, : min(length, num_prefix)]
            position = torch.arange(length + self.num_nodes)
            slot = self.table[row, position // self.page_size] * self.page_size
            self.pool[:, slot + position % self.page_size] = fresh
            self.rows.append(fresh)

    def run(self, shape: LaunchShape | None = None, **changed: Any) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = {
            "lengths": torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE),
            "mask_words": mask_words_from_ancestors(self.ancestors).to(DEVICE),
            "page_table": self.table.int().to(DEVICE) if self.paged else None,
            "page_size": self.page_size,
            "capacity": self.capacity,
            "max_context": max(self.lengths),
            "scale": self.dim**-0.5,
            "depths": self.depths.int().to(DEVICE),
            "shape": shape,
            "prefix": self.prefix(),
            **{k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in self.options.items()},
            **changed,
        }
        pool = self.pool.to(DEVICE)
        return tree_attention(self.q.to(DEVICE), pool[0], pool[1], **arguments)

    def prefix(self) -> SharedPrefix | None:
        """What the kernel is told of the prefix; None where there is none."""
        if not self.has_prefix:
            return None
        num_tokens = torch.tensor([len(self.prefix_pages) * self.page_size], dtype=torch.int32)
        return SharedPrefix(num_tokens.to(DEVICE), self.prefix_pages.int().to(DEVICE))

    def chosen(self) -> LaunchShape:
        """What the launcher takes when it is given no shape."""
        return launch_shape(
            batch=len(self.lengths),
            num_nodes=self.num_nodes,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            max_tokens=max(self.lengths) + self.num_nodes,
            dtype=self.q.dtype,
            device=DEVICE,
            page_size=self.page_size if self.paged else None,
            plain=not {"window", "softcap"} & set(self.options),
            has_prefix=self.has_prefix,
        )

    def shape(
        self, num_splits: int, tile: TileShape | None = None, prefix_splits: int | None = None
    ) -> LaunchShape:
        """The chosen shape with another number of splits, and another tile if one is given."""
        chosen = self.chosen()
        if prefix_splits is not None:
            chosen = chosen._replace(prefix_splits=prefix_splits)
        if tile is not None:
            row_tiles = -(-chosen.num_rows // tile.rows)
            chosen = chosen._replace(tile=tile, num_row_tiles=row_tiles)
        return chosen._replace(num_splits=num_splits)

    def check(
        self,
        num_splits: int | None = None,
        tile: TileShape | None = None,
        prefix_splits: int | None = None,
    ) -> None:
        shape = None if num_splits is None else self.shape(num_splits, tile, prefix_splits)
        out, lse = self.run(shape)
        options = {k: v for k, v in self.options.items() if k != "window"}
        for row, length in enumerate(self.lengths):
            if self.has_prefix and not length:
                assert torch.isfinite(out[row]).all()
                continue
            visible = tree_visibility(
                self.ancestors, length, depths=self.depths, window=self.options.get("window")
            )
            kwargs: dict[str, Any] = {"visible": visible, "scale": self.dim**-0.5, **options}
            kwargs |= {"q": self.q[row], "k": self.rows[row][0], "v": self.rows[row][1]}
            exact, exact_lse = reference(DEVICE, **kwargs)
            dense, dense_lse = reference(DEVICE, self.q.dtype, **kwargs)
            limit = allowed_error(dense, exact, self.q.dtype)
            assert relative_error(out[row], exact) <= limit
            limit = allowed_error(dense_lse, exact_lse, torch.float32)
            assert relative_error(lse[row], exact_lse) <= limit
