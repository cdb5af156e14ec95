"""Tree values measured on this machine, kept for the model and heads they were measured with."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import specdeft
from specdeft.heads.medusa import MedusaHeads
from specdeft.trees.search import ValuedPaths
from specdeft.user_cache import cache_root, tell

VALUES_FILE = "tree_values.json"
_SAMPLED_NUMBERS = 4096  # of each tensor: enough to tell two models apart, read at once


def calibration_folder(model: Any, heads: MedusaHeads | None) -> Path:
    """Where the values of this model and these heads stand; it need not exist.

    Other weights, another device or other versions of what computes them are another folder: what
    was measured with those is stale.
    """
    device = next(model.parameters()).device
    is_cuda = device.type == "cuda"
    key = {
        "model": model.config.to_json_string(use_diff=False),
        "model_weights": _fingerprint(model),
        "heads": repr(heads.config) if heads else "",
        "heads_weights": _fingerprint(heads) if heads else "",
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "dtype": str(model.dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "specdeft": specdeft.__version__,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / "calibration" / digest


def cached_values(model: Any, heads: MedusaHeads | None) -> ValuedPaths | None:
    """The values that `specdeft calibrate` measured here; None where it was not run, or where they
    cannot be read, which is said."""
    path = calibration_folder(model, heads) / VALUES_FILE
    if not path.is_file():
        return None
    try:
        return ValuedPaths.load(path)
    except ValueError as error:
        tell(f"{error}: run specdeft calibrate again")
        return None


def _fingerprint(module: nn.Module) -> str:
    """A digest of some numbers of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(_some_numbers(parameter.detach()).numpy().tobytes())
    return digest.hexdigest()


def _some_numbers(values: Tensor) -> Tensor:
    """float32 on the CPU, spread evenly over the tensor."""
    flat = values.reshape(-1)
    step = max(1, flat.numel() // _SAMPLED_NUMBERS)
    return flat[::step].to("cpu", torch.float32)
