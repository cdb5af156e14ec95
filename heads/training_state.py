"""What a training run goes on from: written whole or not at all, and trusted in nothing when read.

A state belongs to one configuration, one kind of heads and one set of texts. All of it is checked
against what this run would have written before any of it is used, so that a file of another run, a
damaged or a made-up one is refused in one sentence and nothing has changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdeft.heads.documents import Documents
from specdeft.heads.formats.files import all_finite
from specdeft.trees.atomic import write_atomic

STATE_NAME = "training_state.pt"
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Set anew at every step, or a matter of the device.
_FREE_SETTINGS = ("lr", "fused", "params")


class TrainingState(NamedTuple):
    """Everything a run that goes on must know.

    step: steps done. num_steps, skipped, last: as in `Trainer`. log_bytes: length of the log then.
    config, origin: what it belongs to, compared as a whole. heads, optimizer: their state_dict().
    """

    step: int
    num_steps: int
    skipped: int
    log_bytes: int
    config: dict[str, Any]
    origin: dict[str, Any]
    last: dict[str, Any]
    heads: dict[str, Tensor]
    optimizer: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write it into `folder`, atomically."""
        content = self._asdict()
        write_atomic(folder / STATE_NAME, lambda temporary: torch.save(content, temporary))


def fingerprint(documents: Documents) -> str:
    """Equal for equal texts only."""
    digest = hashlib.sha256()
    for part in (documents.tokens, documents.learn, documents.offsets):
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def read_state(
    path: Path,
    config: dict[str, Any],
    origin: dict[str, Any],
    heads: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    log_bytes: int,
) -> TrainingState:
    """The state in `path`, for heads and an optimizer as they are in a new run with this config and
    origin; `log_bytes`: length of the log beside it.

    Raises:
        ValueError: it cannot be read, is another run's, or does not fit.
    """
    device = next(heads.parameters()).device
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # the reader of damaged archives raises of every kind
        raise ValueError(
            f"{path} is no whole training state: delete the file to start anew."
        ) from error
    state = _as_state(path, content)
    for what, ours, theirs in (
        ("configuration", config, state.config),
        ("model, kind of heads or set of texts", origin, state.origin),
    ):
        if repr(ours) != repr(theirs):  # what stands in a file may not even compare
            raise ValueError(
                f"{path} is from a run with another {what}: repeat that command, or delete the "
                "file to start anew."
            )
    wrong = (
        _wrong_counts(state, log_bytes)
        or _wrong_heads(state.heads, heads.state_dict())
        or _wrong_optimizer(state, optimizer)
    )
    if wrong:
        raise ValueError(f"{path} does not add up ({wrong}): delete the file to start anew.")
    return state


def _as_state(path: Path, content: Any) -> TrainingState:
    kinds = {"step": int, "num_steps": int, "skipped": int, "log_bytes": int}
    names = TrainingState._fields
    known = set(content) if isinstance(content, dict) else set()
    if missing := sorted(set(names) - known):
        raise ValueError(f"{path} lacks {missing}: delete the file to start anew.")
    for name in names:
        if type(content[name]) is not kinds.get(name, dict) and name != "heads":
            raise ValueError(f"{path} holds a wrong {name}: delete the file to start anew.")
    if not isinstance(content["heads"], dict):  # an ordered one, as modules make it
        raise ValueError(f"{path} holds wrong heads: delete the file to start anew.")
    try:
        json.dumps(content["last"], allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds a wrong last: delete the file to start anew.") from error
    return TrainingState(*(content[name] for name in names))


def _wrong_counts(state: TrainingState, log_bytes: int) -> str:
    if not 0 < state.step <= state.num_steps:
        return f"step {state.step} of {state.num_steps}"
    if not 0 <= state.skipped <= state.step:
        return f"{state.skipped} of {state.step} steps skipped"
    if not 0 <= state.log_bytes <= log_bytes:
        return f"the log has {log_bytes} bytes and had {state.log_bytes}"
    return ""


def _wrong_heads(found: dict[str, Any], wanted: dict[str, Tensor]) -> str:
    if set(found) != set(wanted):
        return f"heads: {sorted(map(str, set(found) ^ set(wanted)))} missing or unknown"
    return next(filter(None, (_unlike(n, found[n], wanted[n]) for n in wanted)), "")


def _wrong_optimizer(state: TrainingState, optimizer: torch.optim.Optimizer) -> str:
    ours, theirs = optimizer.state_dict(), state.optimizer
    groups, moments = theirs.get("param_groups"), theirs.get("state")
    if not isinstance(groups, list) or not isinstance(moments, dict):
        return "the optimizer's parts"
    if len(groups) != 1 or not isinstance(groups[0], dict):
        return "the optimizer's groups"
    settings = [
        {name: value for name, value in group.items() if name not in _FREE_SETTINGS}
        for group in (ours["param_groups"][0], groups[0])
    ]
    numbers = repr(groups[0].get("params")) == repr(ours["param_groups"][0]["params"])
    if repr(settings[0]) != repr(settings[1]) or not numbers:
        return "the optimizer's settings"
    parameters = optimizer.param_groups[0]["params"]
    trained = {number for number, one in enumerate(parameters) if one.numel()}
    if set(moments) != (trained if state.step > state.skipped else set()):
        return "the optimizer's parameters"
    for number, entry in moments.items():
        if not isinstance(entry, dict) or set(entry) != {"step", *_MOMENTS}:
            return f"the optimizer's entry {number}"
        step = entry["step"]
        if not isinstance(step, Tensor) or step.numel() != 1 or not 0 < float(step) <= state.step:
            return f"the optimizer's step {number}"
        for name in _MOMENTS:
            if wrong := _unlike(
                f"the optimizer's {name} {number}", entry[name], parameters[number]
            ):
                return wrong
        if bool((entry["exp_avg_sq"] < 0).any()):
            return f"the optimizer's exp_avg_sq {number} is negative"
    return ""


def _unlike(name: str, found: Any, wanted: Tensor) -> str:
    if type(found) is not Tensor or found.layout != torch.strided or found.is_meta:
        return f"{name} is no tensor"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return (
            f"{name} is {found.dtype} {tuple(found.shape)} and not "
            f"{wanted.dtype} {tuple(wanted.shape)}"
        )
    if found.is_floating_point() and not all_finite(found):
        return f"{name} holds NaN or infinity"
    return ""
