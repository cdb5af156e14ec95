"""What a run was: enough to repeat it, and to refuse to mix it with another.

A copy of the sources without git's own folder (a container, a cluster's snapshot) can be told its
commit: SPECDEFT_GIT_HASH=HASH, or HASH-dirty where files differ from it.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import specdeft
from specdeft.bench.prompt_set import PromptSet
from specdeft.decoder import SpecDecoder

_PACKAGES = ("torch", "transformers", "triton", "flashinfer-python", "economize", "flashspec")
GIT_VARIABLE = "SPECDEFT_GIT_HASH"
_SOURCE = Path(__file__).resolve().parent


def describe_run(
    decoder: SpecDecoder, prompts: PromptSet, command: Sequence[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """The manifest of a run on prompts.

    Args:
        decoder: any decoder of the run; they share model, dtype and device.
        prompts: what it is measured on.
        command: the arguments after ``specdeft``.
        settings: what must agree for two parts of a run to be the same run.

    Raises:
        ValueError: the commit that the environment states cannot be right.
    """
    known = {
        "source": prompts.name,
        "sha256": prompts.sha256,
        "rule": prompts.rule,
        "ids": [prompt.id for prompt in prompts.prompts],
    }
    return describe(decoder.device, decoder.dtype_name, known, command, settings)


def describe(
    device: torch.device,
    dtype: str,
    prompts: dict[str, Any],
    command: Sequence[str],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The manifest of any run; ``prompts`` says what was computed on. Errors as above."""
    on_cuda = device.type == "cuda"
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": ["specdeft", *map(without_folder, command)],
        "settings": {
            key: without_folder(value) if isinstance(value, str) else value
            for key, value in settings.items()
        },
        "prompts": prompts,
        "versions": versions(),
        "git": git_state(),
        "device": torch.cuda.get_device_name(device)
        if on_cuda
        else f"CPU ({torch.get_num_threads()} threads)",
        "dtype": dtype,
        "machine": machine(device),
    }


def fingerprint(manifest: dict[str, Any]) -> dict[str, Any]:
    """The part that two halves of one run must share."""
    keys = ("settings", "prompts", "versions", "device", "dtype")
    return {key: manifest[key] for key in keys}


def versions() -> dict[str, str | None]:
    """Of everything that decides a result; None is not installed."""
    found: dict[str, str | None] = {
        "specdeft": specdeft.__version__,
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def without_folder(text: str) -> str:
    """An absolute path as its last part, anything else as it is: a manifest names no machine's
    folders, and a file is the same file from wherever the command is given."""
    option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    name = Path(value).name if Path(value).is_absolute() else value
    return f"{option}{equals}{name}"


def git_state() -> dict[str, Any] | None:
    """The commit and whether files differ from it; None where there is neither a checkout nor
    SPECDEFT_GIT_HASH.

    Raises:
        ValueError: SPECDEFT_GIT_HASH is no hash, or contradicts the checkout.
    """
    commit = _output("git", "-C", str(_SOURCE), "rev-parse", "HEAD")
    stated = os.environ.get(GIT_VARIABLE)
    if stated:
        found = re.fullmatch(r"([0-9a-f]{7,64})(-dirty)?", stated)
        if found is None:
            raise ValueError(
                f"{GIT_VARIABLE} is {stated!r}: give the hexadecimal hash of a commit, with "
                "-dirty behind it where files differ"
            )
        if commit is None:
            return {"commit": found[1], "modified": found[2] is not None, "stated": True}
        if not commit.startswith(found[1]):
            raise ValueError(
                f"{GIT_VARIABLE} states {found[1]} and the checkout is at {commit}: unset it, it "
                "is for copies without git's own folder"
            )
    changes = _output("git", "-C", str(_SOURCE), "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "modified": bool(changes)}


def machine(device: torch.device) -> dict[str, Any]:
    """The hardware a run sees; no host name."""
    known: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"
        known["gpu"] = torch.cuda.get_device_name(device)
        known["cuda"] = torch.version.cuda
        which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
        known["nvidia_smi"] = _output(
            "nvidia-smi", which, f"--query-gpu={fields}", "--format=csv,noheader"
        )
    return known


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _output(*command: str) -> str | None:
    """A short command's output; None where there is no such command or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
