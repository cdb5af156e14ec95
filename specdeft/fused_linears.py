"""Projections as a step needs them: siblings in one product, small ones in a kernel of ours.

At one tree token a product is bound by reading its weights, and a small one (k and v of a grouped
model) is over before the memory is busy. q, k and v read the same rows, and so do gate and up:
their weights are moved into one tensor once, of which each module keeps its own rows. So the stock
model is unchanged in value, in memory and in use; only inside `FusedLinears.installed` do the
siblings answer from one product, and layers of 16-bit weights from `kernels.one_row_linear`
where that is the faster one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch import library as torch_library
from torch.nn.functional import linear

from specdeft.kernels.linear_tile import LinearTile, linear_tile

# More rows are bound by arithmetic, and parts that stand apart in memory slow what reads them next.
_MOST_JOINED_ROWS = 512
# Siblings by name: they are called in this order, with the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Group:
    """Linear layers of one input, held as one."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        self.later = [_Later(self, layer) for layer in layers[1:]]
        self._sizes = [layer.out_features for layer in layers]
        # A tuple: older compilers cannot follow a list that is kept here and popped.
        self._pending: tuple[Tensor, ...] = ()
        self._join()

    def _join(self) -> None:
        self._weight = _adjoined([layer.weight for layer in self.layers])
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        self._bias = _adjoined(biases) if biases else None
        self._addresses = self._current_addresses()

    def _current_addresses(self) -> list[int]:
        return [
            parameter.data_ptr()
            for layer in self.layers
            for parameter in (layer.weight, layer.bias)
            if parameter is not None
        ]

    def refresh(self) -> None:
        """Join again where the parameters were moved or replaced since."""
        if self._current_addresses() != self._addresses:
            self._join()

    def forward(self, x: Tensor) -> Tensor:
        """The first sibling's product, and with not too many rows those of all."""
        if _are_many(x):
            return project(x, self.layers[0].weight, self.layers[0].bias)
        out = project(x, self._weight, self._bias)
        parts = out.split(self._sizes, dim=-1)
        self._pending = parts[1:]
        return cast(Tensor, parts[0])

    def take(self) -> Tensor:
        """The next sibling's product."""
        mine, self._pending = self._pending[0], self._pending[1:]
        return mine


class _Later:
    """A sibling that is not the first one."""

    def __init__(self, group: _Group, layer: nn.Linear) -> None:
        self._group = group
        self._layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Its product."""
        if _are_many(x):
            return project(x, self._layer.weight, self._layer.bias)
        return self._group.take()


def _are_many(x: Tensor) -> bool:
    return x.numel() // x.shape[-1] > _MOST_JOINED_ROWS


class _Single:
    """A linear layer of its own."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Its product."""
        return project(x, self.layer.weight, self.layer.bias)


class FusedLinears:
    """The projections of one model, joined and in kernels of ours where that is faster."""

    def __init__(self, model: nn.Module, output_layer: nn.Module) -> None:
        """Join what can be joined: plain linear layers of one dtype without hooks of others.

        Args:
            model: whose layers they are.
            output_layer: is left alone.
        """
        found = (_siblings(module, names) for module in model.modules() for names in _SIBLINGS)
        self._groups = [_Group(layers) for layers in found if _can_be_joined(layers)]
        joined = {layer for group in self._groups for layer in group.layers}
        self._singles = [
            _Single(module)
            for module in model.modules()
            if type(module) is nn.Linear
            and module is not output_layer
            and module not in joined
            and _is_for_our_kernel(module.weight)
            and _can_be_joined([module])
        ]

    @property
    def num_groups(self) -> int:
        """How many products stand for several."""
        return len(self._groups)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it the layers answer from these; not for two threads at once."""
        # Past nn.Module's own bookkeeping of attributes, which costs more than the rest.
        for group in self._groups:
            group.refresh()
            parts: tuple[_Group | _Later, ...] = (group, *group.later)
            for layer, part in zip(group.layers, parts, strict=True):
                layer.__dict__["forward"] = part.forward
        for single in self._singles:
            single.layer.__dict__["forward"] = single.forward
        try:
            yield
        finally:
            for group in self._groups:
                group._pending = ()
                for layer in group.layers:
                    del layer.__dict__["forward"]
            for single in self._singles:
                del single.layer.__dict__["forward"]


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] @ weight [O, K].T + bias [O], by whichever kernel is faster at this size."""
    tile = None
    if bias is None and _is_for_our_kernel(weight) and x.stride(-1) == 1:
        num_rows = x.numel() // x.shape[-1]
        tile = linear_tile(num_rows, weight.shape[0], weight.shape[1])
    if tile is None:
        product: Tensor = linear(x, weight, bias)
        return product
    return cast(Tensor, one_row_op(x, weight, *tile))


def _is_for_our_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


@torch_library.custom_op("specdeft::one_row_linear", mutates_args=())
def one_row_op(
    x: Tensor, weight: Tensor, outputs: int, block: int, num_warps: int, num_stages: int
) -> Tensor:
    """`one_row_linear` of x [..., K] with one row, as one node of a compiled graph."""
    from specdeft.kernels.one_row_linear import one_row_linear  # needs triton

    tile = LinearTile(outputs, block, num_warps, num_stages)
    out = one_row_linear(x.reshape(1, x.shape[-1]), weight, tile)
    return out.view(*x.shape[:-1], weight.shape[0])


@one_row_op.register_fake
def _(x: Tensor, weight: Tensor, *_tile: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _adjoined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor [sum of rows, ...] whose rows the parts are from now on."""
    sizes = [part.numel() * part.element_size() for part in parts]
    begin, storage = parts[0].data_ptr(), parts[0].untyped_storage()
    follows = all(
        part.data_ptr() == begin + sum(sizes[:index]) and part.is_contiguous()
        for index, part in enumerate(parts)
    )
    if follows and begin + sum(sizes) <= storage.data_ptr() + storage.nbytes():
        # Another decoder of this model joined them.
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        rows: Tensor = parts[0].detach().as_strided(shape, parts[0].stride())
        return rows
    joined = torch.cat([part.detach() for part in parts])
    for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = rows
    return joined


def _siblings(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The module's plain linear layers of these names; none unless all are there."""
    layers = [getattr(module, name, None) for name in names]
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    return linears if len(linears) == len(names) else []


def _can_be_joined(linears: Sequence[nn.Linear]) -> bool:
    if len({layer.in_features for layer in linears}) != 1:
        return False
    weights = [layer.weight for layer in linears]
    return (
        len({(weight.dtype, weight.device) for weight in weights}) == 1
        and weights[0].device.type != "meta"
        and len({layer.bias is None for layer in linears}) == 1
        and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in linears)
        and not any("forward" in layer.__dict__ for layer in linears)
    )
