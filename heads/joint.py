"""Medusa-2: heads and target trained together, after the heads have been trained alone.

    loss = KL(target as it was || target) + weight * s(t) * sum over heads k of decay^k CE_k

The first term keeps the target what it was; the second bends its hidden states towards what the
heads can read. s(t) rises from 0 as a quarter sine, so that the target is not torn by the heads at
the start. The target learns by low-rank adapters (the extra `peft`), merged at the end, or as a
whole. Source: Medusa-2, https://arxiv.org/abs/2401.10774, section 2.2.2 and 2.3.2.

Shapes: M rows, K heads, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from tqdm import tqdm

from specdeft.heads.documents import Documents
from specdeft.heads.features import rows_of, tokens_before
from specdeft.heads.loss import frozen_output_loss, head_weights, own_output_loss
from specdeft.heads.medusa import MedusaHeads
from specdeft.heads.target import Target
from specdeft.heads.trainer import in_draft_vocabulary

How = Literal["lora", "full"]


@dataclass(frozen=True)
class JointConfig:
    """How heads and target are trained together; a step is `batch_tokens` padded tokens."""

    how: How = "lora"
    steps: int = 500
    learning_rate: float = 1e-4
    heads_rate_factor: float = 4.0
    heads_weight: float = 0.2
    head_decay: float = 0.8
    warmup_share: float = 0.05
    max_gradient_norm: float = 1.0
    batch_tokens: int = 8192
    lora_rank: int = 32
    lora_alpha: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "learning_rate", "heads_rate_factor", "heads_weight", "batch_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number above 0.")
        if self.how not in ("lora", "full"):
            raise ValueError(f"--joint is {self.how!r}: choose lora or full.")


class Batch(NamedTuple):
    """tokens int64 [B,S]; where int64 [M,2]: the rows to learn; root [M]; labels [M,K]."""

    tokens: Tensor
    where: Tensor
    root: Tensor
    labels: Tensor


def check_available(how: str) -> None:
    """Refuse early what this installation cannot do."""
    if how == "lora" and find_spec("peft") is None:
        raise ValueError("--joint lora needs peft: pip install 'specdeft[peft]', or --joint full")


class _Learner(NamedTuple):
    """The model that learns, how it is asked for what it was, and how it becomes a plain model."""

    model: Any
    as_before: Callable[[], AbstractContextManager[Any]]
    plain: Callable[[], Any]


def _learner(model: Any, config: JointConfig) -> _Learner:
    if config.how == "full":
        before, dtype = copy.deepcopy(model), model.dtype
        model.float().requires_grad_(True)  # steps this small vanish in 16 bits
        return _Learner(model, lambda: nullcontext(before), lambda: model.to(dtype))
    check_available(config.how)
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, settings)

    @contextmanager
    def without_adapters() -> Iterator[Any]:
        with adapted.disable_adapter():
            yield model

    return _Learner(model, without_adapters, adapted.merge_and_unload)


def train_jointly(
    target: Target,
    heads: MedusaHeads,
    documents: Documents,
    config: JointConfig,
    log: Callable[[dict[str, Any]], None] = lambda _: None,
) -> tuple[Target, dict[str, Any]]:
    """Train `heads` in place and a target that starts as `target`; returns the new target, frozen,
    and what happened. The model of `target` is changed: use the new one from here on."""
    torch.manual_seed(config.seed)
    device, dtype = target.model.device, target.model.dtype
    learner = _learner(target.model, config)
    learnt = [p for p in learner.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": learnt, "share": 1.0},
            {"params": list(heads.parameters()), "share": config.heads_rate_factor},
        ],
        lr=config.learning_rate,
        weight_decay=0.0,
    )
    heads.train()
    last: dict[str, Any] = {}
    low = dtype == torch.bfloat16
    numbered = zip(range(config.steps), _batches(documents, config, heads), strict=False)
    for step, batch in tqdm(numbered, total=config.steps, desc="joint", unit="step"):
        for group in optimizer.param_groups:
            group["lr"] = _rate(config, step) * group["share"]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            kept, heads_loss, per_head = _losses(learner, heads, batch, config)
        rise = math.sin(0.5 * math.pi * (step + 1) / config.steps)
        (kept + config.heads_weight * rise * heads_loss).backward()
        torch.nn.utils.clip_grad_norm_(
            [*learnt, *heads.parameters()], config.max_gradient_norm, error_if_nonfinite=True
        )
        optimizer.step()
        if step % 20 == 0 or step + 1 == config.steps:
            last = {"target_kl": round(float(kept.detach()), 5), "per_head": _rounded(per_head)}
            log({"joint_step": step, **last})
    model = learner.plain().eval().requires_grad_(False)
    return Target(model, target.tokenizer, target.name), {"steps": config.steps, **last}


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def _rate(config: JointConfig, step: int) -> float:
    warmup = max(1, round(config.warmup_share * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def _batches(documents: Documents, config: JointConfig, heads: MedusaHeads) -> Iterator[Batch]:
    """Batches of documents of like length, in a seeded order, again and again."""
    batches = documents.batches(config.batch_tokens)
    generator = torch.Generator().manual_seed(config.seed)
    usable = 0
    while True:
        for number in torch.randperm(len(batches), generator=generator).tolist():
            tokens, learn, lengths = documents.padded(batches[number])
            rows = rows_of(tokens, learn, lengths, heads.config.num_heads)
            if len(rows[0]):
                usable += 1
                device = heads.block_bias.device
                yield Batch(*(part.to(device) for part in (tokens, *rows)))
        if not usable:
            raise ValueError("The documents hold no token to learn: check the loss mask.")


def _hidden(model: Any, batch: Batch) -> Tensor:
    """[M,H] at the rows to learn."""
    states = model.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    chosen: Tensor = states[batch.where[:, 0], batch.where[:, 1]]
    return chosen


def _losses(
    learner: _Learner, heads: MedusaHeads, batch: Batch, config: JointConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """(divergence from the target as it was, the heads' loss, the latter by head [K])."""
    with torch.no_grad(), learner.as_before() as before:
        wanted = before.get_output_embeddings()(_hidden(before, batch)).float().log_softmax(-1)
    output = learner.model.get_output_embeddings()
    hidden = _hidden(learner.model, batch)
    said = output(hidden).float().log_softmax(-1)
    kept = kl_div(said, wanted, reduction="batchmean", log_target=True)
    tokens = tokens_before(batch.root, batch.labels)
    embeddings = learner.model.get_input_embeddings()(tokens.T).detach()
    states = heads.states_along(hidden, embeddings)
    weights = head_weights(heads.config.num_heads, config.head_decay, hidden.device)
    labels = batch.labels
    if heads.draft_ids is not None:
        labels = in_draft_vocabulary(labels, heads.draft_ids, heads.config.vocab_size)
    if heads.config.output == "own":
        losses = own_output_loss(heads.logits(states, output), labels, weights)
    else:
        bias = getattr(output, "bias", None)
        rows = output.weight if heads.draft_ids is None else output.weight[heads.draft_ids]
        if bias is not None and heads.draft_ids is not None:
            bias = bias[heads.draft_ids]
        losses = frozen_output_loss(states, labels, rows.detach(), weights, bias=bias)
    return kept, losses.total, losses.per_head
