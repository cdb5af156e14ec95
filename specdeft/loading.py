"""Loading: a model by name, id or path, its tokenizer, and the draft heads that belong to it."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from specdeft.default_model import DEFAULT_MODELS, resolve_default_model
from specdeft.heads.formats.fetch import local_path
from specdeft.heads.medusa import MedusaHeads
from specdeft.heads.target import load_model
from specdeft.trees.search import ValuedPaths

_SHIPPED_HEADS = Path(__file__).parent / "heads" / "pretrained"
TREE_VALUES_FILE = "tree_values.json"


class LoadedTarget(NamedTuple):
    """A stock model on its device, its tokenizer, and the name it was asked for by."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str


class LoadedHeads(NamedTuple):
    """Heads and, where they were calibrated, the rank paths by value that trees are made of."""

    heads: MedusaHeads
    values: ValuedPaths | None


def pick_device(device: torch.device | str) -> torch.device:
    """ "auto" is CUDA where there is a GPU, else the CPU.

    Raises:
        ValueError: CUDA was asked for and there is none, or the name is not a device.
    """
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is not a device: give auto, cpu or cuda") from error
    if picked.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device} is not supported: give auto, cpu or cuda")
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("CUDA was asked for and torch sees no GPU here: give device cpu or auto")
    return picked


def pick_dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the device computes in it, else float32.

    Raises:
        ValueError: the name is not float32, float16 or bfloat16.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_has_bf16() else torch.float32
    if dtype not in names:
        raise ValueError(f"dtype {dtype!r} is not known: give auto, {', '.join(names)}")
    return names[dtype]


def load_target(
    name: str | Path, *, dtype: torch.dtype | str, device: torch.device | str, **arguments: Any
) -> LoadedTarget:
    """A model and its tokenizer, ready on its device.

    Raises:
        ValueError: the device, the dtype or the model is not there.
    """
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    path = resolve_default_model(str(name)) if str(name) in DEFAULT_MODELS else name
    known = f"{', '.join(DEFAULT_MODELS)}, "
    model, tokenizer = load_model(path, str(name), known=known, dtype=precision, **arguments)
    if "device_map" not in arguments:
        model = model.to(place)
    return LoadedTarget(model.eval(), tokenizer, str(name))


def quiet_loading() -> None:
    """No progress bars and remarks of transformers, for commands that print their own lines."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def shipped_heads(name: str) -> Path:
    """Where the heads of an embedded model are, if it has any."""
    return _SHIPPED_HEADS / name


def load_heads(heads: str | Path | None, loaded: LoadedTarget) -> LoadedHeads | None:
    """The heads for a model; "auto" is the shipped ones for an embedded model, else none.

    Raises:
        ValueError: the folder holds no heads, or those of another model.
    """
    if heads is None:
        return None
    if str(heads) == "auto":
        folder = shipped_heads(loaded.name)
        if loaded.name not in DEFAULT_MODELS or not folder.is_dir():
            return None
    else:
        folder = local_path(heads)
    output_layer = loaded.model.get_output_embeddings()
    module = MedusaHeads.load(
        folder,
        dtype=loaded.model.dtype,
        device=output_layer.weight.device,
        hidden_size=loaded.model.config.get_text_config().hidden_size,
        vocab_size=output_layer.weight.shape[0],
        output_weight=output_layer.weight if output_layer.weight.is_floating_point() else None,
    )
    values = folder / TREE_VALUES_FILE
    return LoadedHeads(module, ValuedPaths.load(values) if values.is_file() else None)


def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; without it float32 is the faster one."""
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    if get_capabilities is None:
        return bool(torch.cpu._is_avx512_bf16_supported())
    known = get_capabilities()
    return any(known.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
