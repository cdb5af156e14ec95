"""The training loop: batches of rows, AdamW, warm-up and cosine, a log, a state to resume from.

The target is frozen and is not even in the graph: the loop sees its hidden states
(heads/features.py) and its output weight. What the loop does follows from (seed, step) alone, so a
run that was killed and resumed gives the same weights as one that was not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from specdeft.heads.calibration import (
    head_ranks,
    tau_by_size,
    top_accuracies,
    tree_values,
)
from specdeft.heads.curves import LOG_NAME
from specdeft.heads.documents import Documents
from specdeft.heads.features import IGNORED, Features, extract, tokens_before
from specdeft.heads.loss import HeadLosses, frozen_output_loss, head_weights, own_output_loss
from specdeft.heads.medusa import MedusaHeads
from specdeft.heads.parallel import ALONE, Processes
from specdeft.heads.training_state import STATE_NAME, TrainingState, fingerprint, read_state

# A time limit is turned into a number of steps from the speed up to the first of these steps, and
# again from that between the two: before the first kernels are still compiled and tuned.
_WARM_STEPS, _MEASURED_STEPS = 20, 100


@dataclass(frozen=True)
class TrainConfig:
    """How the heads are trained. Lengths are in steps of `batch_rows` positions, of which
    1 / `accumulate` are worked on at once."""

    loss: Literal["hard", "soft"] = "hard"
    soft_temperature: float = 0.7
    head_decay: float = 0.8
    learning_rate: float = 2e-3
    final_learning_rate_share: float = 0.02
    warmup_share: float = 0.03
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    batch_rows: int = 16_384
    accumulate: int = 1
    epochs: int = 2
    max_steps: int | None = None
    time_limit_s: float | None = None
    chunk_tokens: int = 4_000_000
    seed: int = 0
    log_every: int = 20
    evaluate_every: int = 500
    save_every: int = 500

    def __post_init__(self) -> None:
        for name in (
            "learning_rate",
            "head_decay",
            "max_gradient_norm",
            "soft_temperature",
            "batch_rows",
            "accumulate",
            "epochs",
            "chunk_tokens",
            "log_every",
            "evaluate_every",
            "save_every",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number above 0.")


@dataclass
class FeatureSource:
    """Features of documents, a chunk at a time; a single chunk is computed once and kept."""

    model: Any
    documents: Documents
    num_heads: int
    chunk_tokens: int
    seed: int
    batch_tokens: int = 65_536
    group: Processes = ALONE
    _kept: tuple[int, Features] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        order = torch.randperm(
            len(self.documents), generator=torch.Generator().manual_seed(self.seed)
        )
        ends = self.documents.lengths[order].cumsum(0)
        number = torch.div(ends - 1, self.chunk_tokens, rounding_mode="floor")
        counts = number.unique_consecutive(return_counts=True)[1].tolist()
        self.chunks = list(order.split(counts))
        self.rows = [_count_rows(self.documents, chunk) for chunk in self.chunks]

    def features(self, chunk: int) -> Features:
        """The rows of one chunk, on the model's device."""
        if self._kept is None or self._kept[0] != chunk:
            self._kept = None  # frees the last chunk before the next one is made
            documents = self.documents.select(self.chunks[chunk])
            self._kept = (
                chunk,
                extract(
                    self.model,
                    documents,
                    self.num_heads,
                    batch_tokens=self.batch_tokens,
                    group=self.group,
                ),
            )
        return self._kept[1]


def _count_rows(documents: Documents, index: Tensor) -> int:
    """Rows that `features.rows_of` makes of these documents."""
    chosen = documents.select(index)
    first = chosen.offsets[:-1][chosen.lengths > 0]
    return int(chosen.learn.sum() - chosen.learn[first].sum())


def batches(
    source: FeatureSource, config: TrainConfig, first_step: int, num_steps: int
) -> Iterator[tuple[int, Features, Tensor]]:
    """(step, features, row numbers) for steps first_step .. num_steps-1; the same for every
    start."""
    step, epoch = 0, 0
    while step < num_steps:
        for chunk, rows in enumerate(source.rows):
            count = _batches_in(rows, config.batch_rows)
            if step + count > first_step and step < num_steps:
                features = source.features(chunk)
                seed = (config.seed * 10_007 + epoch) * 10_007 + chunk
                generator = torch.Generator(features.root.device).manual_seed(seed)
                order = torch.randperm(
                    len(features), generator=generator, device=features.root.device
                )
                for number in range(max(0, first_step - step), min(count, num_steps - step)):
                    start = number * config.batch_rows
                    yield step + number, features, order[start : start + config.batch_rows]
            step += count
        epoch += 1


def _batches_in(rows: int, batch_rows: int) -> int:
    """Full batches only, unless there is none."""
    return max(1, rows // batch_rows) if rows else 0


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a small share of the peak."""
    warmup = max(1, round(config.warmup_share * num_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    floor = config.final_learning_rate_share
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def known_labels(heads: MedusaHeads, features: Features, index: Tensor) -> Tensor:
    """int64 [K]: how many labels of the rows `index` each head can learn."""
    labels = features.labels[index, : heads.config.num_heads]
    if heads.draft_ids is not None:
        labels = in_draft_vocabulary(labels, heads.draft_ids, heads.config.vocab_size)
    return (labels != IGNORED).sum(dim=0)


def batch_loss(
    model: Any,
    heads: MedusaHeads,
    config: TrainConfig,
    features: Features,
    index: Tensor,
    counts: Tensor | None = None,
) -> HeadLosses:
    """Loss of the rows `index`, a part of a batch with `counts` known labels (None: all of it);
    gradients reach the heads and nothing else."""
    K = heads.config.num_heads
    output = model.get_output_embeddings()
    labels = features.labels[index, :K]
    tokens = tokens_before(features.root[index], labels)
    embeddings = model.get_input_embeddings()(tokens.T).detach()
    states = heads.states_along(features.hidden[index], embeddings)
    weights = head_weights(K, config.head_decay, labels.device)
    if heads.draft_ids is not None:
        labels = in_draft_vocabulary(labels, heads.draft_ids, heads.config.vocab_size)
    if heads.config.output == "own":
        return own_output_loss(heads.logits(states, output), labels, weights, counts)
    teacher = None
    if config.loss == "soft":
        # Row i+1+k decided label k of row i; where there is no such row there is no label either.
        ahead = index.unsqueeze(0) + 1 + torch.arange(K, device=index.device).unsqueeze(1)
        teacher = features.hidden[ahead.clamp(max=len(features) - 1)]
    bias = getattr(output, "bias", None)
    if bias is not None and heads.draft_ids is not None:
        bias = bias[heads.draft_ids]
    return frozen_output_loss(
        states,
        labels,
        heads.output_rows(output).detach(),
        weights,
        counts=counts,
        bias=bias,
        teacher=teacher,
        temperature=config.soft_temperature,
    )


def in_draft_vocabulary(labels: Tensor, draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Labels as rows of the draft vocabulary; those outside it are IGNORED."""
    row_of = torch.full((vocab_size,), IGNORED, device=labels.device)
    row_of[draft_ids] = torch.arange(len(draft_ids), device=labels.device)
    return torch.where(labels == IGNORED, IGNORED, row_of[labels.clamp(min=0)])


def frequent_ids(documents: Documents, size: int, vocab_size: int) -> tuple[Tensor, float]:
    """(ids int64 [size], the share of learnt tokens they cover): the most frequent tokens of the
    model's own text, ties by id, in the order of their ids."""
    learnt = documents.tokens[documents.learn].to(torch.int64)
    counts = learnt.bincount(minlength=vocab_size)
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    return ids, float(counts[ids].sum() / counts.sum().clamp(min=1))


@dataclass
class Trainer:
    """Trains `heads` in place on `source`, evaluating on `held_out` rows; logs into `folder`."""

    model: Any
    heads: MedusaHeads
    source: FeatureSource
    config: TrainConfig
    folder: Path
    held_out: Features | None = None
    label: str = "train"
    say: Callable[[str], None] = tqdm.write
    publish: Callable[[], None] = lambda: None  # called at every evaluation: heads to use already
    group: Processes = ALONE
    skipped: int = 0
    num_steps: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    _texts: str = ""
    _marks: tuple[int, float, float] = (0, 0.0, 0.0)  # a step, its time, the run's beginning

    def run(self, *, resume: bool = False) -> dict[str, Any]:
        """Train to the end; returns the record of losses and accuracies."""
        self.folder.mkdir(parents=True, exist_ok=True)
        optimizer = torch.optim.AdamW(
            self.heads.parameters(),
            lr=self.config.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=self.config.weight_decay,
            fused=self.heads.block_bias.is_cuda,
        )
        first = self._resume(optimizer) if resume else 0
        if first == 0:
            self.num_steps = self._planned_steps()
        if first == 0 and self.group.first:
            (self.folder / LOG_NAME).write_text("", encoding="utf-8")
            (self.folder / STATE_NAME).unlink(missing_ok=True)
        began, steps = time.monotonic(), self._steps(first)
        self._marks = (first, began, began)
        with tqdm(
            total=self.num_steps,
            initial=first,
            desc=self.label,
            unit="step",
            disable=not self.group.first,
        ) as bar:
            for step, features, index in steps:
                self._step(optimizer, step, features, index)
                bar.update()
                self._limit_time(bar, step + 1)
                if (step + 1) % self.config.evaluate_every == 0 and self.group.first:
                    self._evaluate(step + 1)
                    self.publish()
                if (step + 1) % self.config.save_every == 0:
                    self._save(optimizer, step + 1)
        if self.group.first:
            self._evaluate(self.num_steps)
        seconds = round(time.monotonic() - began, 1)
        return {
            "steps": self.num_steps,
            "skipped_batches": self.skipped,
            "seconds": seconds,
            "positions_per_epoch": sum(self.source.rows),
            **self.last,
        }

    def _planned_steps(self) -> int:
        planned = self.config.epochs * sum(
            _batches_in(rows, self.config.batch_rows) for rows in self.source.rows
        )
        if planned == 0:
            raise ValueError("The documents hold no token to learn: check the loss mask.")
        return min(planned, self.config.max_steps or planned)

    def _steps(self, first: int) -> Iterator[tuple[int, Features, Tensor]]:
        for item in batches(self.source, self.config, first, self.num_steps):
            if item[0] >= self.num_steps:  # a time limit lowered it on the way
                return
            yield item

    def _step(
        self, optimizer: torch.optim.Optimizer, step: int, features: Features, index: Tensor
    ) -> None:
        rate = learning_rate(self.config, step, self.num_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        device = features.hidden.device.type
        low = features.hidden.dtype == torch.bfloat16
        counts = known_labels(self.heads, features, index)
        if not bool(counts.any()):  # nothing to learn here: the optimizer would still move
            self.skipped += 1
            return
        optimizer.zero_grad(set_to_none=True)
        mine = index.tensor_split(self.group.size)[self.group.rank]
        per_head = torch.zeros(len(counts), device=counts.device)
        for part in mine.tensor_split(self.config.accumulate):
            with torch.autocast(device, torch.bfloat16, enabled=low):
                losses = batch_loss(self.model, self.heads, self.config, features, part, counts)
            losses.total.backward()
            per_head += losses.per_head
        for parameter in self.heads.parameters():
            if parameter.grad is not None:
                self.group.add(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(
            self.heads.parameters(), self.config.max_gradient_norm, error_if_nonfinite=False
        )
        if step % self.config.log_every == 0:
            if not bool(torch.isfinite(norm)):
                raise ValueError(
                    f"The gradient is not finite at step {step}: lower the learning rate "
                    f"(now {self.config.learning_rate}) or check the target's hidden states."
                )
            self.group.add(per_head)
            weights = head_weights(len(per_head), self.config.head_decay, per_head.device)
            self._log(
                {
                    "step": step,
                    "loss": round(float((weights * per_head).sum()), 5),
                    "lr": rate,
                    "per_head": [round(x, 4) for x in per_head.tolist()],
                    "gradient_norm": round(float(norm), 4),
                }
            )
        optimizer.step()

    def _limit_time(self, bar: Any, done: int) -> None:
        """Turn the time limit into a number of steps once the speed is known; a resumed run keeps
        the number it had."""
        if self.config.time_limit_s is None or done not in (_WARM_STEPS, _MEASURED_STEPS):
            return
        if self.heads.block_bias.is_cuda:
            torch.cuda.synchronize()
        now = time.monotonic()
        marked, marked_at, began = self._marks
        left_s = self.config.time_limit_s - (now - began)
        affordable = done + int(left_s * (done - marked) / max(now - marked_at, 1e-9))
        self.num_steps = self.group.agree(max(done, min(self._planned_steps(), affordable)))
        bar.total = self.num_steps
        bar.refresh()
        self._marks = (done, now, began)

    def _evaluate(self, step: int) -> None:
        if self.held_out is None:
            return
        self.last = {**self.last, **evaluate(self.model, self.heads, self.held_out)}
        self._log({"step": step, "held_out": self.last})
        self.say(f"{self.label} step {step}: top-1 {self.last['top1']}, tau {self.last['tau']}")

    def _log(self, entry: dict[str, Any]) -> None:
        if "loss" in entry:
            self.last = {
                **self.last,
                "last_loss": entry["loss"],
                "last_per_head": entry["per_head"],
            }
        if not self.group.first:
            return
        with (self.folder / LOG_NAME).open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")

    def _origin(self) -> dict[str, Any]:
        """What a state to resume from belongs to, beside the configuration."""
        if not self._texts:
            self._texts = fingerprint(self.source.documents)
        return {"heads": asdict(self.heads.config), "texts": self._texts}

    def _save(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        if not self.group.first:
            return
        TrainingState(
            step=step,
            num_steps=self.num_steps,
            skipped=self.skipped,
            log_bytes=(self.folder / LOG_NAME).stat().st_size,
            config=asdict(self.config),
            origin=self._origin(),
            last=self.last,
            heads=self.heads.state_dict(),
            optimizer=optimizer.state_dict(),
        ).save(self.folder)

    def _resume(self, optimizer: torch.optim.Optimizer) -> int:
        path, log = self.folder / STATE_NAME, self.folder / LOG_NAME
        if not path.exists():
            return 0
        log_bytes = log.stat().st_size if log.is_file() else 0
        state = read_state(
            path, asdict(self.config), self._origin(), self.heads, optimizer, log_bytes
        )
        self.group.wait()  # the log is as it was until all have read its length
        self.heads.load_state_dict(state.heads, strict=True)
        optimizer.load_state_dict(state.optimizer)
        self.num_steps, self.skipped, self.last = state.num_steps, state.skipped, state.last
        # What was logged after the state was saved is about to be logged again.
        if self.group.first:
            with log.open("rb+") as file:
                file.truncate(state.log_bytes)
        return state.step


def evaluate(model: Any, heads: MedusaHeads, held_out: Features) -> dict[str, Any]:
    """Head accuracies and replayed tau by tree size on held-out rows; trees are chosen on every
    second document and replayed on the others, so that tau is not flattered."""
    heads.eval()
    with torch.autocast(
        held_out.hidden.device.type, torch.bfloat16, enabled=held_out.hidden.dtype == torch.bfloat16
    ):
        ranks = head_ranks(model, heads, held_out)
    known = held_out.num_known().cpu()
    document = held_out.document.cpu()
    choose = document % 2 == 0
    values = tree_values(ranks[choose], known[choose])
    test = ~choose if bool((~choose).any()) else choose
    heads.train()
    return {
        **top_accuracies(ranks, known),
        "tau": tau_by_size(ranks[test], document[test], values),
    }
