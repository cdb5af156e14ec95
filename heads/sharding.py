"""A frozen target that no single device holds: its layers are shared out over all processes.

    torchrun --nproc-per-node 8 heads/train.py --model M --output my-heads --shard-target

Each process keeps an equal part of every layer and gathers a layer whole while it runs
(`fully_shard`, torch's FSDP). The embeddings, the final norm and the output layer stay whole
everywhere: the heads' losses read them at every step.

A layer can be gathered only if all processes take part, but they do not run the target equally
often: each writes texts of its own, of its own lengths. So every forward begins by asking who has
work, and a process that has none runs one token of its own beside the others until nobody has work
(`Processes.wait`). What a process computes is what it would have computed with the whole target.
Source: PyTorch FSDP, https://arxiv.org/abs/2304.11277, section 3.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from specdeft.heads.parallel import Processes
from specdeft.heads.target import Target, default_device, default_dtype, load_target


def check_processes(group: Processes) -> None:
    """ValueError where there is nobody to share the target with."""
    if group.size == 1:
        raise ValueError(
            "--shard-target shares the target out over several processes and there is one: start "
            "with torchrun --nproc-per-node N heads/train.py, or leave the option out"
        )


def load_sharded(name: str, group: Processes, *, label: str = "") -> tuple[Target, Processes]:
    """(the target, of which this process holds a part; the group as it waits from here on).

    Processes read the model one after another, so that main memory holds it once at a time. Raises
    ValueError, in all of them, as `load_target` and `shard` do.
    """
    check_processes(group)
    device, loaded = default_device(), None
    for turn in range(group.size):
        problem = ""
        if turn == group.rank:
            try:
                loaded = load_target(name, dtype=default_dtype(device), device="cpu", label=label)
                shard(loaded, group, device)
            except ValueError as error:
                problem = str(error)
        if problem := group.agree(problem, of=turn):
            raise ValueError(problem)
    assert loaded is not None
    return loaded, replace(group, attend=Attendance(loaded.model, group).attend)


def shard(target: Target, group: Processes, device: str) -> None:
    """Keep this process's part of every layer, and the rest of the model, on `device`.

    Raises ValueError if the model is quantised or its layers cannot be told apart.
    """
    model = target.model
    decoder = model.base_model
    layers = next((m for m in decoder.modules() if isinstance(m, nn.ModuleList)), None)
    if layers is None:
        raise ValueError(
            f"--shard-target finds no list of layers in {target.name} "
            f"({type(decoder).__name__}): leave the option out"
        )
    quantised = getattr(model.config, "quantization_config", None) is not None
    if quantised or not all(p.is_floating_point() for p in model.parameters()):
        raise ValueError(
            f"{target.name} is quantised and --shard-target shares out floating-point layers "
            "only: give the model without quantisation, or leave the option out"
        )
    mesh = init_device_mesh(device, (group.size,))
    inside = set(layers.parameters())
    whole = {parameter for parameter in model.parameters() if parameter not in inside}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device)


class Attendance:
    """Forwards of the target in step with those of the other processes."""

    def __init__(self, model: Any, group: Processes) -> None:
        """From here on every forward of the model's decoder waits for the other processes."""
        self.decoder, self.group, self.device = model.base_model, group, model.device
        self._attends = False
        # Before everything else that a forward does: what follows gathers the first layer.
        self.decoder.register_forward_pre_hook(self._announce, prepend=True)

    def attend(self) -> None:
        """Take part in the forwards of the others until nobody has any left."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._attends = True
        with torch.no_grad():
            while self._anyone_works(False):
                self.decoder(input_ids=token, use_cache=False)
        self._attends = False

    def _announce(self, *_: Any) -> None:
        if not self._attends:
            self._anyone_works(True)

    def _anyone_works(self, here: bool) -> bool:
        working = torch.tensor(int(here), device=self.device)
        return bool(self.group.add(working))
