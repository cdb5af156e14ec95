"""Kill `specdeft train` with SIGKILL at random moments and go on: the same files must come out.

    python tests/heads/kill_and_resume.py --model TINY --kills 20
    python tests/heads/kill_and_resume.py --model TINY --processes 2 --shard-target

One run is left alone; then, for each phase (the target writes its texts; the heads are trained), a
run is killed once at a random moment, resumed to its end and compared byte for byte with the first.
Processes are forked from this one after the imports, so that a trial takes a second or two; several
of them find each other as torchrun's do. Of those, all are killed or only one: then the others have
to end by themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from specdeft.heads.target import load_target
from specdeft.heads.train import main as train

PHASES = ("writing", "training")
# The record and the optimizer's file hold times or are compared by what follows from them.
NOT_COMPARED = {"training_record.json", "training_state.pt"}
POLL_S = 0.002
PATIENCE_S = 60.0  # for processes that have lost one of theirs to notice


def command(model: Path, output: Path, extra: Sequence[str]) -> list[str]:
    """A run of some seconds with many waves and many saved states."""
    return [
        *extra,
        *("--model", str(model), "--output", str(output), "--self-generate", "64"),
        *("--wave-rows", "12", "--num-heads", "2", "--num-layers", "1", "--held-out", "0.1"),
        *("--batch-rows", "128", "--max-steps", "150", "--save-every", "7", "--seed", "5"),
        *("--evaluate-every", "50"),
    ]


def start(arguments: Sequence[str], count: int) -> list[int]:
    """The ids of `count` forked processes that train together and then end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(count):
        process = os.fork()
        if process == 0:
            status = 1  # an exception, too, must not leave this block: the parent's files are below
            try:
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1)
                os.dup2(quiet, 2)
                if count > 1:
                    names = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                    values = (str(rank), str(rank), str(count), "127.0.0.1", port)
                    os.environ.update(zip(names, values, strict=True))
                status = train(arguments)
            finally:
                os._exit(status)
        processes.append(process)
    return processes


def finish(processes: Sequence[int]) -> None:
    """Wait for a run that nobody kills."""
    for process in processes:
        status = os.waitpid(process, 0)[1]
        if status != 0:
            raise SystemExit(f"a run that was left alone ended with status {status}")


def kill(processes: Sequence[int], only: int | None) -> bool:
    """SIGKILL to all, or to the one of this number: then the others end by themselves in time.
    False if they had ended before."""
    chosen = processes if only is None else [processes[only]]
    ended = {process for process in processes if os.waitpid(process, os.WNOHANG)[0]}
    for process in set(chosen) - ended:
        os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    waiting = set(processes) - ended
    while waiting and time.monotonic() < deadline:
        waiting -= {process for process in waiting if os.waitpid(process, os.WNOHANG)[0]}
        time.sleep(POLL_S)
    for process in waiting:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    if waiting:
        raise SystemExit("a process that had lost another one did not end")
    return not ended


class Trials(NamedTuple):
    """What is run again and again, by how many processes."""

    model: Path
    processes: int
    extra: Sequence[str]

    def start(self, output: Path, *more: str) -> list[int]:
        """The ids of the processes of a run."""
        return start([*command(self.model, output, self.extra), *more], self.processes)

    def timed_run(self, output: Path) -> dict[str, float]:
        """Seconds of each phase of a run that nobody kills."""
        began, processes = time.monotonic(), self.start(output)
        while not (output / "documents.safetensors").is_file():
            time.sleep(POLL_S)
        written = time.monotonic()
        finish(processes)
        return {"writing": written - began, "training": time.monotonic() - written}

    def killed_run(self, output: Path, phase: str, delay_s: float, only: int | None) -> str:
        """Kill a run so long after a phase began, resume it; says where it was killed, or nothing
        if it had ended before."""
        processes = self.start(output)
        while phase == "training" and not (output / "documents.safetensors").is_file():
            time.sleep(POLL_S)
        time.sleep(delay_s)
        killed = kill(processes, only)
        waves = len(list((output / "waves").rglob("wave-*")))
        state = output / "training_state.pt"
        step = torch.load(state, weights_only=True)["step"] if state.is_file() else 0
        finish(self.start(output, "--resume"))
        who = "all" if only is None else f"process {only}"
        where = f"{phase}, {who} after {delay_s:.3f} s: {waves} waves, {step} steps on disk"
        return where if killed else ""


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
    parser.add_argument("--processes", type=int, default=1, help="that train together")
    parser.add_argument("--shard-target", action="store_true", help="each holds a part of it")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    # Threads of torch do not survive a fork; what is imported here is imported once.
    torch.set_num_threads(1)
    load_target(str(options.model))
    if find_spec("matplotlib") is not None:
        import_module("matplotlib.backends.backend_agg")
    with tempfile.TemporaryDirectory() as name:
        folder, wrong = Path(name), 0
        extra = ["--shard-target"] if options.shard_target else []
        trials = Trials(options.model, options.processes, extra)
        seconds = trials.timed_run(folder / "whole")
        for phase in options.phases:
            kills = number = 0
            while kills < options.kills:
                output, number = folder / f"{phase}{number}", number + 1
                delay_s = rng.uniform(0, seconds[phase])
                only = rng.choice([None, rng.randrange(options.processes)])
                where = trials.killed_run(output, phase, delay_s, only)
                bad = differences(folder / "whole", output)
                wrong += bool(bad)
                kills += bool(where)
                result = f"differs in {bad}" if bad else "the same"
                sys.stdout.write(f"{where or 'ended before it was killed'}: {result}\n")
        tensors = load_file(folder / "whole" / "model.safetensors")
        if not any(bool(tensor.count_nonzero()) for tensor in tensors.values()):
            raise SystemExit("the run that was left alone learnt nothing")
    sys.stdout.write(f"{wrong} of {len(options.phases) * options.kills} runs differ\n")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
