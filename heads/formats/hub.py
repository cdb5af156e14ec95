"""A folder for the Hugging Face hub: our own format, the trees, the record, and a model card.

Nothing is uploaded and no network is needed; every figure of the card stands in a file that
measuring wrote (training_record.json, reports of `specdeft bench`); what was not measured is not
there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from specdeft.heads.checkpoint import load_heads, save_heads, write_json
from specdeft.heads.formats.files import printable, read_json
from specdeft.heads.formats.folder import member
from specdeft.heads.formats.writing import new_folder, same_bits
from specdeft.heads.medusa import MedusaHeads
from specdeft.trees.atomic import write_text_atomic
from specdeft.trees.search import ValuedPaths

RECORD_NAME = "training_record.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def export_to_hub(
    heads: MedusaHeads, origin: Path, folder: Path, base_model: str, reports: tuple[Path, ...] = ()
) -> tuple[str, ...]:
    """Write the folder; returns the names of its files.

    Args:
        heads: in the dtype to publish.
        origin: where they came from: its trees and its training record go along.
        folder: new.
        base_model: the target's hub id, or its name.
        reports: report.md files of `specdeft bench`, which the card quotes.

    Raises:
        ValueError: the folder is not new, or a file beside the heads is damaged.
    """
    record = _record(origin)
    quoted = [_report(path) for path in reports]
    with new_folder(folder) as place:
        save_heads(heads, place)
        for path in sorted(origin.glob("tree_values*.json")) if origin.is_dir() else ():
            ValuedPaths.load(member(origin, path.name)).save(place / path.name)
        if record:
            write_json(place / RECORD_NAME, record)
        write_text_atomic(place / "README.md", model_card(heads, record, base_model, quoted))
        again = load_heads(place, dtype=None).state_dict()
        state = heads.state_dict()
        if set(again) != set(state) or not all(
            same_bits(again[name], state[name].cpu()) for name in state
        ):
            raise ValueError(f"{folder}: what was read again is not what was written.")
    return tuple(sorted(path.name for path in folder.iterdir()))


def model_card(
    heads: MedusaHeads, record: dict[str, Any], base_model: str, reports: list[str]
) -> str:
    """README.md in the hub's form: a header, how to use the heads, what was measured."""
    config = heads.config
    # A name out of a file of others: it must not write the rest of the card.
    base = printable(base_model or config.base_model or "the base model")[:100]
    header = ["---", "library_name: specdeft", "tags:", "- speculative-decoding", "- medusa"]
    if _HUB_ID.fullmatch(base):
        header.append(f"base_model: {base}")
    kind = "sequential" if config.sequential else "parallel"
    vocabulary = f", drafting {config.num_logits:,} of {config.vocab_size:,} tokens"
    lines = [
        *header,
        "---",
        "",
        f"# Draft heads for {base}",
        "",
        f"{config.num_heads} {kind} Medusa heads of {config.num_layers} residual blocks, output "
        f"layer {config.output}{vocabulary if config.draft_vocab_size else ''}, "
        f"{sum(p.numel() for p in heads.parameters()):,} parameters. They change nothing in the "
        "text: the base model verifies every token they guess.",
        "",
        "```python",
        "from specdeft import SpecDecoder",
        "",
        f'decoder = SpecDecoder.from_pretrained({json.dumps(base)}, heads="path/to/this/folder")',
        'print(decoder.generate("Why is the sky blue?", max_new_tokens=200).text)',
        "```",
        "",
        *_measured(record),
    ]
    for report in reports:
        lines += ["", report]
    return "\n".join(lines).rstrip() + "\n"


def _measured(record: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    calibration = record.get("calibration")
    entries = calibration if isinstance(calibration, dict) else {}
    known = [("held-out text while training", record.get("result"), "tau")]
    known += [(f"calibration, {name}", entry, "replayed_tau") for name, entry in entries.items()]
    for title, entry, tau in known:
        if isinstance(entry, dict):
            lines += _table(title, entry, tau)
    environment = record.get("environment")
    if lines and isinstance(environment, dict):
        versions = ", ".join(f"{key} {value}" for key, value in environment.items())
        lines += ["", f"Measured with {versions}; the whole record is in `{RECORD_NAME}`."]
    return ["## Measured", *lines] if lines else ["Nothing was measured with these heads yet."]


def _table(title: str, entry: dict[str, Any], tau: str) -> list[str]:
    """Accuracies by head, and tau (tokens per target step) by tree size, as far as known."""
    rows = [(name, entry[name]) for name in ("top1", "top5", "top10") if _numbers(entry.get(name))]
    lines = [""] if rows else []
    if rows:
        heads = range(len(rows[0][1]))
        lines += [f"| {title} | " + " | ".join(f"head {head}" for head in heads) + " |"]
        lines += ["|" + "---|" * (len(heads) + 1)]
        lines += [f"| {name} | " + " | ".join(f"{x:.3f}" for x in row) + " |" for name, row in rows]
    taus = entry.get(tau)
    if isinstance(taus, dict) and _numbers(list(taus.values())):
        text = ", ".join(f"{value:.2f} with {nodes} nodes" for nodes, value in taus.items())
        lines += ["", f"Tokens a step (tau), replayed: {text}."]
    return lines


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) in (int, float) for x in value)


def _record(origin: Path) -> dict[str, Any]:
    """The training record with no path of the machine it ran on."""
    if not (origin / RECORD_NAME).is_file():
        return {}
    record = read_json(member(origin, RECORD_NAME))
    command = record.get("command")
    if isinstance(command, list):
        record["command"] = [
            Path(word).name if isinstance(word, str) and Path(word).is_absolute() else word
            for word in command
        ]
    return record


def _report(path: Path) -> str:
    try:
        # Its headings go one level below the card's.
        return re.sub(r"^#", "##", path.read_text(encoding="utf-8").strip(), flags=re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the report {path} cannot be read: give a report.md of specdeft bench."
        ) from error
