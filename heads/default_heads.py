"""How the heads in heads/pretrained/ were made: one command, from nothing to measured heads.

    python -m specdeft.heads.default_heads --model FOLDER --name smollm2-135m --output DIR \
        --deadline-s 540 [--questions questions.jsonl]

The target writes its texts, its hidden states are computed once and kept on the device, and heads
are trained for the rest of the time. With `--compare` several kinds of heads are trained for a few
seconds each before, and the kind with the best replayed tau on texts held out goes on.
`--questions` (lines with `category` and `turns`) are answered by the target and only ever measured
on: they are neither learnt nor used to choose.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specdeft.heads.calibration import (
    VALUES_NAME,
    calibrate,
    head_ranks,
    repeat_rate,
    replay,
    tau_by_size,
)
from specdeft.heads.calibration_texts import answers, calibration_texts
from specdeft.heads.checkpoint import write_json
from specdeft.heads.documents import Documents
from specdeft.heads.features import Features, extract
from specdeft.heads.medusa import MedusaHeads
from specdeft.heads.self_generate import GenerationPlan, self_generate
from specdeft.heads.target import Target, chat_turn, load_target
from specdeft.heads.train import (
    RECORD_NAME,
    data_report,
    environment,
    new_heads,
    shipped,
    train_heads,
)
from specdeft.heads.train_options import Shape
from specdeft.heads.trainer import FeatureSource, TrainConfig
from specdeft.trees.options import Options
from specdeft.trees.search import ValuedPaths, best_tree

_NUM_NODES = 64
_MOST_HEADS = 5


@dataclass(frozen=True)
class Candidate:
    """One kind of heads, and what differs in its training."""

    name: str
    shape: Shape
    loss: Literal["hard", "soft"] = "hard"
    learning_rate: float = 2e-3


def candidates(draft_vocab_size: int) -> list[Candidate]:
    """The kinds that are compared; all but the last fit 12 MB in 16 bits at hidden size 576."""
    reduced = {"output": "reduced", "draft_vocab_size": draft_vocab_size}
    base = Shape(num_heads=4, num_layers=2, **reduced)  # type: ignore[arg-type]
    five = replace(base, num_heads=5)
    cell = replace(five, sequential=True, cell_size=1472)
    return [
        Candidate("5 heads, one cell of 2 gated blocks", cell),
        Candidate("4 sequential heads, 2 blocks", replace(base, sequential=True)),
        Candidate("4 heads, 2 blocks", base),
        Candidate("5 heads, 1 block", replace(five, num_layers=1)),
        Candidate("5 heads, 2 blocks, no projection", replace(five, projection=False)),
        Candidate("4 heads, 2 blocks, soft loss", base, loss="soft"),
        Candidate("4 heads, 2 blocks, half the rate", base, learning_rate=1e-3),
        Candidate("4 heads, 2 blocks, no token input", replace(base, token_input=False)),
        Candidate(
            "4 heads, 2 blocks, whole vocabulary",
            replace(base, output="shared", draft_vocab_size=None),
        ),
    ]


@dataclass(frozen=True)
class Questions:
    """Prompts that are only measured on, with the target's own answers at two temperatures."""

    categories: list[str]
    greedy: Documents
    sampled: Documents


def answer_questions(target: Target, path: Path, max_new_tokens: int, limit: int) -> Questions:
    """Let the target answer the first turn of each question."""
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines if line.strip()][:limit]
    turn = chat_turn(target)
    encoded = target.tokenizer([e["turns"][0] for e in entries], add_special_tokens=False)
    prompts = [[*turn.before, *ids, *turn.after] for ids in encoded.input_ids]
    answered = [answers(target, prompts, max_new_tokens, heat) for heat in (0.0, 0.7)]
    return Questions([e["category"] for e in entries], *answered)


def question_report(
    target: Target, heads: MedusaHeads, questions: Questions, values: ValuedPaths
) -> dict[str, Any]:
    """Replayed tau on the questions, by tree size, by category, and with repeats beside it."""
    report: dict[str, Any] = {}
    for name, documents in (("greedy", questions.greedy), ("t0.7", questions.sampled)):
        features = extract(target.model, documents, heads.config.num_heads, batch_tokens=32_768)
        ranks = head_ranks(target.model, heads, features)
        nodes = min(_NUM_NODES, len(values.paths) + 1)
        result = replay(ranks, features.document, best_tree(values, nodes))
        repeats = repeat_rate(documents)
        calm = repeats[result.documents] < 0.1
        report[name] = {
            "tau": tau_by_size(ranks, features.document, values),
            "mean_of_documents": round(float(result.per_document.mean()), 4),
            "by_category": _by_category(
                questions.categories, result.documents, result.per_document
            ),
            "repeat_rate": round(float(repeats.mean()), 4),
            "mean_of_documents_repeating_less_than_0.1": round(
                float(result.per_document[calm].mean()) if bool(calm.any()) else 0.0, 4
            ),
        }
    return report


def _by_category(categories: list[str], documents: Tensor, taus: Tensor) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for document, tau in zip(documents.tolist(), taus.tolist(), strict=True):
        groups.setdefault(categories[document], []).append(tau)
    return {name: round(sum(group) / len(group), 3) for name, group in sorted(groups.items())}


class Maker:
    """The stages of one run, each within its share of the time that is left."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]) -> None:
        self.options, self.began = options, time.monotonic()
        self.folder: Path = options.output
        self.target = load_target(options.model, label=options.name)
        self.record: dict[str, Any] = {
            "command": list(command),
            "environment": environment(),
            "seed": options.seed,
        }
        self.note("loaded")

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return float(self.options.deadline_s) - (time.monotonic() - self.began)

    def note(self, stage: str, **facts: Any) -> None:
        """Say and record how far the run is; the record is on disk after every stage."""
        entry = {"at_s": round(time.monotonic() - self.began, 1), **facts}
        self.record.setdefault("stages", {})[stage] = entry
        write_json(self.folder / RECORD_NAME, self.record)
        sys.stdout.write(f"[{entry['at_s']:7.1f} s] {stage}: {json.dumps(facts)}\n")
        sys.stdout.flush()

    def questions(self) -> Questions | None:
        """The target's answers to the questions, if any are given."""
        if self.options.questions is None:
            return None
        questions = answer_questions(
            self.target,
            self.options.questions,
            self.options.question_tokens,
            self.options.question_limit,
        )
        questions.greedy.save(self.folder / "questions_greedy.safetensors")
        self.note("answered questions", documents=len(questions.greedy))
        return questions

    def texts(self) -> tuple[Documents, Documents]:
        """(training, held-out) texts."""
        plan = GenerationPlan(
            self.options.count,
            wave_rows=self.options.wave_rows,
            long_wave_rows=self.options.long_wave_rows,
            max_answer=self.options.max_answer,
            max_passage=self.options.max_passage,
            long_every=4,
            seed=self.options.seed,
            time_limit_s=self.options.generate_share * self.left_s,
            capture=not self.options.no_capture,
        )
        training, held_out = self_generate(self.target, plan).split(
            self.options.held_out, self.options.seed
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        training = _at_most(training, self.options.max_tokens)
        held_out.save(self.folder / "held_out.safetensors")
        self.record["plan"] = asdict(plan)
        self.record["data"] = {"training": data_report(training), "held_out": data_report(held_out)}
        self.note("texts", **self.record["data"]["training"])
        return training, held_out

    def features(self, training: Documents, held_out: Documents) -> tuple[FeatureSource, Features]:
        """Hidden states of all texts, kept on the device."""
        source = FeatureSource(
            self.target.model, training, _MOST_HEADS, len(training.tokens) + 1, self.options.seed
        )
        rows = len(source.features(0))
        self.note("features", rows=rows)
        return source, extract(self.target.model, held_out, _MOST_HEADS)

    def train(
        self,
        candidate: Candidate,
        source: FeatureSource,
        held_out: Features,
        folder: Path,
        time_limit_s: float,
        epochs: int,
    ) -> dict[str, Any]:
        """Train one candidate for so long."""
        heads, coverage = new_heads(self.target, candidate.shape, source.documents)
        config = TrainConfig(
            loss=self.options.loss or candidate.loss,
            learning_rate=candidate.learning_rate,
            batch_rows=self.options.batch_rows,
            epochs=epochs,
            time_limit_s=time_limit_s,
            chunk_tokens=source.chunk_tokens,
            seed=self.options.seed,
            evaluate_every=4000,
            save_every=1 << 30,
        )
        made = train_heads(
            self.target, heads, source, config, folder, held_out=held_out, label=candidate.name
        )
        return {"name": candidate.name, "draft_vocabulary_coverage": round(coverage, 5), **made}

    def run(self) -> dict[str, Any]:
        """Everything, in order."""
        questions = self.questions()
        source, held_out = self.features(*self.texts())
        kinds = candidates(self.options.draft_vocab_size)
        if not self.options.compare:
            kinds = kinds[:1]
        each = self.options.compare_share * self.left_s / len(kinds)
        tried = []
        for number, kind in enumerate(kinds if len(kinds) > 1 else ()):
            made = self.train(
                kind, source, held_out, self.folder / "work" / str(number), each, epochs=50
            )
            tried.append(made)
            self.record["compared"] = tried
            self.note(f"tried {kind.name}", **_short(made))
        best = max(range(len(tried)), key=lambda i: _tau(tried[i]), default=0)
        budget = self.left_s - self.options.reserve_s
        made = self.train(kinds[best], source, held_out, self.folder, budget, epochs=200)
        self.record.update(made)
        self.note(f"trained {kinds[best].name}", **_short(made))
        heads = shipped(self.target, self.folder)
        self.record["calibration"] = calibrate(
            self.target.model, heads, calibration_texts(self.target), self.folder
        )
        self.note("calibrated")
        if questions is not None:
            values = ValuedPaths.load(self.folder / VALUES_NAME)
            self.record["questions"] = question_report(self.target, heads, questions, values)
            self.note("measured on the questions", **self.record["questions"])
        return self.record


def _at_most(documents: Documents, max_tokens: int) -> Documents:
    ends = documents.lengths.cumsum(0)
    return documents.select(torch.arange(int((ends <= max_tokens).sum())))


def _tau(made: dict[str, Any]) -> float:
    taus: dict[str, float] = made["result"]["tau"]
    return list(taus.values())[-1]


def _short(made: dict[str, Any]) -> dict[str, Any]:
    result = made["result"]
    return {key: result[key] for key in ("steps", "seconds", "top1", "tau", "last_per_head")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the default heads of a model within a deadline."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Options(prog="default_heads", description=main.__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder or Hugging Face id of the target")
    add("--name", required=True, help="what the record calls the target")
    add("--output", type=Path, required=True)
    add("--deadline-s", type=float, default=540.0)
    add("--reserve-s", type=float, default=30.0, help="left for calibration and measuring")
    add("--generate-share", type=float, default=0.48, help="of the time left, for writing texts")
    add("--compare-share", type=float, default=0.4, help="of the time left, for the comparison")
    add("--count", type=int, default=10_000_000, help="texts to write at most")
    add("--max-tokens", type=int, default=60_000_000, help="tokens to learn from at most")
    add("--wave-rows", type=int, default=5120)
    add("--long-wave-rows", type=int, default=2048)
    add("--compare", action="store_true", help="compare several kinds of heads first")
    add("--no-capture", action="store_true", help="write texts without CUDA graphs")
    add("--loss", choices=("hard", "soft"), help="for every kind, in place of its own")
    add("--max-answer", type=int, default=192)
    add("--max-passage", type=int, default=700)
    add("--held-out", type=float, default=0.006)
    add("--batch-rows", type=int, default=16_384)
    add("--draft-vocab-size", type=int, default=16_384)
    add("--questions", type=Path)
    add("--question-tokens", type=int, default=256)
    add("--question-limit", type=int, default=1_000_000)
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    Maker(options, ["default_heads", *arguments]).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
