"""Train Medusa heads for a model of your own; no data set is needed.

    python heads/train.py --model HuggingFaceTB/SmolLM2-135M-Instruct --self-generate 20000 --output
    my-heads

The target stays frozen. Its own text is the best text to learn from, so by default it writes
prompts and answers itself; `--data` takes JSON lines (messages, prompt with response, or text)
instead. What is written: model.safetensors, config.json, tree_values.json (which trees pay),
training_record.json, log.jsonl, curves.png, run.json (--config repeats the run). Under torchrun
all processes train together. Recipe: Medusa-1, https://arxiv.org/abs/2401.10774, section 2.2.1.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from specdeft.heads import curves
from specdeft.heads.calibration import calibrate
from specdeft.heads.checkpoint import save_heads, write_json
from specdeft.heads.documents import Documents, join, read_jsonl
from specdeft.heads.features import Features, extract
from specdeft.heads.joint import JointConfig, train_jointly
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.heads.parallel import ALONE, Processes, processes
from specdeft.heads.self_generate import GenerationPlan, self_generate
from specdeft.heads.sharding import load_sharded
from specdeft.heads.target import Target, load_target
from specdeft.heads.text_store import TextStore
from specdeft.heads.train_options import (
    DOCUMENTS_NAME,
    RUN_NAME,
    Shape,
    as_config,
    check_run,
    parse,
)
from specdeft.heads.trainer import FeatureSource, TrainConfig, Trainer, frequent_ids
from specdeft.trees.atomic import remove_temporaries

RECORD_NAME = "training_record.json"
TARGET_NAME = "target"  # with --joint: the target that the heads belong to


def heads_config(target: Target, shape: Shape) -> HeadsConfig:
    """What the heads of a target will be; ValueError if it cannot have such heads."""
    target.check_output_layer()
    return HeadsConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        base_model=target.name,
        **asdict(shape),
    )


def new_heads(target: Target, shape: Shape, documents: Documents) -> tuple[MedusaHeads, float]:
    """Fresh heads on the target's device, in fp32, and the share of tokens they can draft."""
    config = heads_config(target, shape)
    ids, coverage = None, 1.0
    if config.draft_vocab_size is not None:
        ids, coverage = frequent_ids(documents, config.draft_vocab_size, target.vocab_size)
    heads = MedusaHeads(config, ids).to(target.model.device)
    if config.output == "own":
        heads.init_own_output(target.model.get_output_embeddings())
    return heads, coverage


def train_heads(
    target: Target,
    heads: MedusaHeads,
    source: FeatureSource,
    config: TrainConfig,
    folder: Path,
    *,
    held_out: Features | None = None,
    label: str = "train",
    resume: bool = False,
    group: Processes = ALONE,
) -> dict[str, Any]:
    """Train, write the heads (16-bit) into `folder` at every evaluation and at the end, and return
    what happened."""

    def publish() -> None:
        save_heads(heads, folder, dtype=torch.bfloat16)

    trainer = Trainer(
        target.model,
        heads,
        source,
        config,
        folder,
        held_out,
        label,
        publish=publish,
        group=group,
    )
    result = trainer.run(resume=resume)
    if group.first:
        publish()
    return {"heads": asdict(heads.config), "training": asdict(config), "result": result}


def shipped(target: Target, folder: Path) -> MedusaHeads:
    """The heads as a user loads them: what is measured is what is on disk."""
    return MedusaHeads.load(
        folder,
        dtype=target.model.dtype,
        device=target.model.device,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )


def environment() -> dict[str, str]:
    """What the run ran on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
    }


def data_report(documents: Documents) -> dict[str, Any]:
    """Counts that say what a run learnt from; coverage is the share of tokens that carry a loss."""
    return {
        "documents": len(documents),
        "tokens": len(documents.tokens),
        "learnt_tokens": int(documents.learn.sum()),
        "coverage": round(float(documents.learn.float().mean()), 4),
        "greedy_share": round(float((documents.temperature == 0).float().mean()), 4),
    }


def _documents(options: argparse.Namespace, target: Target, group: Processes) -> Documents:
    if options.data:
        return join(
            [read_jsonl(path, target.tokenizer, options.max_length) for path in options.data]
        )
    kept = options.output / DOCUMENTS_NAME
    if not (options.resume and kept.is_file()):
        share = options.output / "waves" / str(group.rank)
        plan = GenerationPlan(
            -(-options.self_generate // group.size),
            wave_rows=options.wave_rows,
            long_wave_rows=max(1, options.wave_rows // 2),
            seed=options.seed * group.size + group.rank,  # every process writes texts of its own
            capture=not options.shard_target,  # a captured step could not wait for the others
        )
        store = TextStore.open(share, asdict(plan), target.name, resume=options.resume)
        self_generate(target, plan, store)
        group.wait()
        if group.first:
            shares = [TextStore(share.with_name(str(n))) for n in range(group.size)]
            join([wave for one in shares for wave in one.waves()]).save(kept)
        group.wait()
    if group.first:  # also what a run left that was killed right here
        TextStore(options.output / "waves").remove()
    documents = Documents.load(kept)
    if len(documents.tokens) and int(documents.tokens.max()) >= target.vocab_size:
        raise ValueError(
            f"{kept} holds tokens that {target.name} does not have: leave out --resume to write "
            "texts anew"
        )
    return documents


def _cell_size(options: argparse.Namespace, target: Target) -> int | None:
    """Without a size a cell of two blocks weighs about as much as four heads' own blocks."""
    if options.cell_size is None:
        return 64 * max(1, round(2.5 * target.hidden_size / 64))
    return options.cell_size or None


def _jointly(
    options: argparse.Namespace, target: Target, training: Documents
) -> tuple[Target, dict[str, Any]]:
    """The second stage of Medusa-2, from the heads in the output folder; writes both anew."""
    config = JointConfig(options.joint, options.joint_steps, seed=options.seed)
    heads = MedusaHeads.load(options.output, device=target.model.device).requires_grad_(True)
    target, report = train_jointly(target, heads, training, config)
    save_heads(heads, options.output, dtype=torch.bfloat16)
    target.model.save_pretrained(options.output / TARGET_NAME)
    target.tokenizer.save_pretrained(options.output / TARGET_NAME)
    return target, {**asdict(config), **report}


def run(
    options: argparse.Namespace,
    command: Sequence[str],
    folder_of: Callable[[str], str],
    group: Processes = ALONE,
) -> dict[str, Any]:
    """The whole command: texts, heads, calibration, record (all but the first process: only the
    result of the training)."""
    check_run(options, group)
    if group.first:
        remove_temporaries(options.output)
    name, label = folder_of(options.model), Path(options.model).name
    if options.shard_target:
        target, group = load_sharded(name, group, label=label)
    else:
        target = load_target(name, label=label)
    sequential = not (options.parallel or options.no_token_input)
    shape = Shape(
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        output=options.heads_output,
        token_input=not options.no_token_input,
        projection=not options.no_projection,
        sequential=sequential,
        cell_size=_cell_size(options, target) if sequential else None,
        draft_vocab_size=options.draft_vocab_size if options.heads_output == "reduced" else None,
    )
    heads_config(target, shape)  # refused now rather than after the texts
    if group.first:  # not before the model is there: bad input leaves nothing behind
        write_json(options.output / RUN_NAME, as_config(options))
    documents = _documents(options, target, group)
    training, held_out = documents.split(options.held_out, options.seed)
    config = TrainConfig(
        loss=options.loss,
        learning_rate=options.learning_rate,
        batch_rows=options.batch_rows,
        accumulate=options.accumulate,
        epochs=options.epochs,
        max_steps=options.max_steps,
        time_limit_s=options.time_limit_s,
        evaluate_every=options.evaluate_every,
        save_every=options.save_every,
        seed=options.seed,
    )
    heads, coverage = new_heads(target, shape, training)
    source = FeatureSource(
        target.model, training, shape.num_heads, config.chunk_tokens, config.seed, group=group
    )
    made = train_heads(
        target,
        heads,
        source,
        config,
        options.output,
        held_out=extract(target.model, held_out, shape.num_heads, group=group),
        resume=options.resume,
        group=group,
    )
    if group.first:
        made = _measured(options, command, target, training, held_out, coverage, made)
    group.wait()  # measuring runs the target once more
    return made


def _measured(
    options: argparse.Namespace,
    command: Sequence[str],
    target: Target,
    training: Documents,
    held_out: Documents,
    coverage: float,
    made: dict[str, Any],
) -> dict[str, Any]:
    """What follows the training: the joint stage if wanted, tree values, curves and the record."""
    if options.joint:
        target, made["joint"] = _jointly(options, target, training)
    calibrated = calibrate(target.model, shipped(target, options.output), held_out, options.output)
    record = {
        "command": list(command),
        "environment": environment(),
        "data": {"training": data_report(training), "held_out": data_report(held_out)},
        "draft_vocabulary_coverage": round(coverage, 5),
        **made,
        "calibration": calibrated,
    }
    write_json(options.output / RECORD_NAME, record)
    if curves.draw(options.output) is None:
        sys.stderr.write(f"specdeft train: {curves.MISSING}\n")
    return record


def main(arguments: Sequence[str] | None = None, folder_of: Callable[[str], str] = str) -> int:
    """Entry of `specdeft train`: 0 on success, 2 with one sentence on bad input.

    `folder_of` turns a model's name into what transformers can load.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = parse(arguments)
        with processes() as group:
            record = run(options, ["specdeft", "train", *arguments], folder_of, group)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"specdeft train: {error}\n")
        return 2
    if group.first:
        sys.stdout.write(json.dumps(record["result"]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
