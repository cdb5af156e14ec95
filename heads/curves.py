"""The curves of a training run as a PNG, out of its log: loss of each head, held-out top-1, tau.

    python -m specdeft.heads.curves my-heads

Drawn by matplotlib (the extra `bench`); without it a run says so and draws nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from specdeft.trees.atomic import write_atomic

LOG_NAME = "log.jsonl"
CURVES_NAME = "curves.png"
MISSING = "curves.png is not drawn: pip install 'specdeft[bench]' for matplotlib"

Line = list[tuple[int, float]]  # (step, value)


class Curves(NamedTuple):
    """Lines by name; what was never logged has no line."""

    loss: dict[str, Line]
    top1: dict[str, Line]
    tau: dict[str, Line]


def read_log(path: Path) -> Curves:
    """The lines of a training log (log.jsonl)."""
    curves = Curves({}, {}, {})
    for text in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(text)
        step, held_out = entry["step"], entry.get("held_out", {})
        for lines, values in (
            (curves.loss, _by_head(entry.get("per_head", ()))),
            (curves.top1, _by_head(held_out.get("top1", ()))),
            (curves.tau, {f"{n} nodes": x for n, x in held_out.get("tau", {}).items()}),
        ):
            for name, value in values.items():
                lines.setdefault(name, []).append((step, value))
    return curves


def _by_head(values: Sequence[float]) -> dict[str, float]:
    return {f"head {number}": value for number, value in enumerate(values)}


def draw(folder: Path) -> Path | None:
    """Draw `curves.png` beside the log in `folder`; None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 4.0), layout="constrained")
    axes = figure.subplots(1, 3)
    curves = read_log(folder / LOG_NAME)
    titles = ("loss (cross entropy, nats)", "held-out top-1", "replayed tau, held out")
    for axis, title, lines in zip(axes, titles, curves, strict=True):
        _plot(axis, title, lines)
    path = folder / CURVES_NAME
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=110, format="png"))
    return path


def _plot(axis: Any, title: str, lines: dict[str, Line]) -> None:
    axis.set_title(title)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    for name, line in lines.items():
        steps, values = zip(*line, strict=True)
        axis.plot(steps, values, label=name, marker="." if len(line) < 20 else None)
    if lines:
        axis.legend(fontsize="small")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the curves of the run in a folder."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    path = draw(Path(folder))
    sys.stdout.write(f"{path or MISSING}\n")
    return 0 if path else 1


if __name__ == "__main__":
    raise SystemExit(main())
