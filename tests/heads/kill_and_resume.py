"""Kill `specdeft train` with SIGKILL at random moments and go on: the same files must come out.

    python tests/heads/kill_and_resume.py --kills 20

One run is left alone; then, for each phase (the target writes its texts; the heads are trained), a
run is killed once at a random moment, resumed to its end and compared byte for byte with the first.
Processes are forked from this one after the imports, so that a trial takes a second or two.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file

from specdeft.heads.target import load_target
from specdeft.heads.train import main as train

PHASES = ("writing", "training")
# The record and the optimizer's file hold times or are compared by what follows from them.
NOT_COMPARED = {"training_record.json", "training_state.pt"}
POLL_S = 0.002


def command(model: Path, output: Path) -> list[str]:
    """A run of some seconds with many waves and many saved states."""
    return [
        *("--model", str(model), "--output", str(output), "--self-generate", "64"),
        *("--wave-rows", "12", "--num-heads", "2", "--num-layers", "1", "--held-out", "0.1"),
        *("--batch-rows", "128", "--max-steps", "150", "--save-every", "7", "--seed", "5"),
        *("--evaluate-every", "50"),
    ]


def start(arguments: Sequence[str]) -> int:
    """The id of a forked process that trains and then ends."""
    process = os.fork()
    if process == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os._exit(train(arguments))
    return process


def finish(process: int) -> None:
    """Wait for a run that nobody kills."""
    status = os.waitpid(process, 0)[1]
    if status != 0:
        raise SystemExit(f"a run that was left alone ended with status {status}")


def timed_run(model: Path, output: Path) -> dict[str, float]:
    """Seconds of each phase of a run that nobody kills."""
    began, process = time.monotonic(), start(command(model, output))
    while not (output / "documents.safetensors").is_file():
        time.sleep(POLL_S)
    written = time.monotonic()
    finish(process)
    return {"writing": written - began, "training": time.monotonic() - written}


def killed_run(model: Path, output: Path, phase: str, delay_s: float) -> str:
    """Kill a run so long after a phase began, resume it; says where it was killed."""
    process = start(command(model, output))
    while phase == "training" and not (output / "documents.safetensors").is_file():
        time.sleep(POLL_S)
    time.sleep(delay_s)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    waves = len(list((output / "waves").rglob("wave-*")))
    state = output / "training_state.pt"
    step = torch.load(state, weights_only=True)["step"] if state.is_file() else 0
    finish(start([*command(model, output), "--resume"]))
    return f"{phase} after {delay_s:.3f} s: {waves} waves and {step} steps were on disk"


def differences(one: Path, other: Path) -> list[str]:
    """Names of files that differ or exist on one side only."""
    names = {
        path.relative_to(folder).as_posix()
        for folder in (one, other)
        for path in folder.rglob("*")
        if path.is_file()
    }
    return sorted(
        name
        for name in names - NOT_COMPARED
        if not ((one / name).is_file() and (other / name).is_file())
        or (one / name).read_bytes() != (other / name).read_bytes()
    )


def main() -> int:
    """Exit status 1 if any resumed run differs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a tiny chat model")
    parser.add_argument("--kills", type=int, default=20, help="of each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    # Threads of torch do not survive a fork; what is imported here is imported once.
    torch.set_num_threads(1)
    load_target(str(options.model))
    if find_spec("matplotlib") is not None:
        import_module("matplotlib.backends.backend_agg")
    with tempfile.TemporaryDirectory() as name:
        folder, wrong = Path(name), 0
        seconds = timed_run(options.model, folder / "whole")
        for phase in options.phases:
            for number in range(options.kills):
                output = folder / f"{phase}{number}"
                delay_s = rng.uniform(0, seconds[phase])
                where = killed_run(options.model, output, phase, delay_s)
                bad = differences(folder / "whole", output)
                wrong += bool(bad)
                sys.stdout.write(f"{where}: {'differs in ' + str(bad) if bad else 'the same'}\n")
        tensors = load_file(folder / "whole" / "model.safetensors")
        if not any(bool(tensor.count_nonzero()) for tensor in tensors.values()):
            raise SystemExit("the run that was left alone learnt nothing")
    sys.stdout.write(f"{wrong} of {len(options.phases) * options.kills} runs differ\n")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
