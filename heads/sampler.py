"""Write many texts at once with a stock Hugging Face model: the engine behind self-generated data.

All rows of a wave stand at the same position, so no mask and no padding exist: a row whose prompt
is longer than another's simply has its next token *forced* instead of drawn. Attention is a
registered function that appends to a preallocated buffer and reads it as a view (transformers' own
cache copies everything at every step). Finished rows are dropped: the last living rows move into
their slots.

Shapes: B rows of a wave, S positions, V vocabulary, Hq/Hkv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "specdeft_batch_writer"
_CHECK_EVERY = 16  # steps between looks at how many rows are still alive: each is a host sync
_PREFILL_TOKENS = 131_072  # tokens of one prefill call: bounds the activations
_SAMPLE_ROWS = 2048  # rows of logits widened to fp32 at a time


@dataclass(frozen=True)
class Request:
    """One text to write. `writes_prompt`: `ids` stop inside the user's turn, which the model
    writes."""

    ids: Sequence[int]
    temperature: float
    writes_prompt: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Limits:
    """Lengths and sampling of a wave; `suffix` is forced after a prompt the model wrote itself."""

    stop_ids: Sequence[int]
    suffix: Sequence[int]
    max_answer: int
    max_written_prompt: int = 128
    prompt_temperature: float = 1.0
    prompt_min_p: float = 0.03
    stop_fraction: float = 0.04


@dataclass(frozen=True)
class Written:
    """n written texts, on the CPU. tokens int64 [n,S]: text i is `tokens[i, :length[i]]`, its
    prompt the first `prompt_length[i]` of them; `request` int64 [n]: which request it answers;
    `finished` bool [n]: it ended with a stop token."""

    tokens: Tensor
    prompt_length: Tensor
    length: Tensor
    request: Tensor
    finished: Tensor


@dataclass
class KVBuffer:
    """Keys and values of a wave, [capacity rows, Hkv, S, D] for each layer, made at the first
    write."""

    num_rows: int
    num_positions: int
    rows: slice = field(default_factory=lambda: slice(0, 0))
    start: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [b,Hkv,q,D] at `rows`, `start`..; return views of all so far."""
        if layer not in self.keys:
            shape = (self.num_rows, key.shape[1], self.num_positions, key.shape[3])
            self.keys[layer] = key.new_empty(shape)
            self.values[layer] = value.new_empty(*shape[:3], value.shape[3])
        stop = self.start + key.shape[2]
        self.keys[layer][self.rows, :, self.start : stop] = key
        self.values[layer][self.rows, :, self.start : stop] = value
        return self.keys[layer][self.rows, :, :stop], self.values[layer][self.rows, :, :stop]

    def move(self, source: Tensor, target: Tensor, num_positions: int) -> None:
        """Copy whole rows: `target` slots take over what `source` slots hold."""
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                buffer[target, :, :num_positions] = buffer[source, :, :num_positions]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    generation_state: KVBuffer | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal prefill from position 0, or one new token per row over everything written so far."""
    if generation_state is None or attention_mask is not None:
        raise ValueError("This attention runs inside heads.sampler only: call write_texts().")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(
            "Self-generation does not cover models with attention softcap or sinks: "
            "generate the texts elsewhere and train from a file."
        )
    if sliding_window is not None and generation_state.num_positions > sliding_window:
        raise ValueError(
            f"The texts may reach {generation_state.num_positions} tokens but the model attends to "
            f"{sliding_window}: ask for shorter texts."
        )
    b, Hq, q, D = query.shape
    if q > 1:
        generation_state.write(int(module.layer_idx), key, value)  # type: ignore[arg-type]
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=Hq != key.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None
    keys, values = generation_state.write(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    # The query heads of a group become rows of one product: each K/V is read once, not G times.
    grouped = query.reshape(b, keys.shape[1], Hq // keys.shape[1], D)
    out = scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return out.reshape(b, 1, Hq, values.shape[3]), None


@contextmanager
def _writer_attention(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    AttentionInterface.register(ATTENTION_NAME, _attention)
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def write_texts(
    model: Any, requests: Sequence[Request], limits: Limits, generator: torch.Generator
) -> Written:
    """Write every request as one wave; the whole wave must fit in the device's memory.

    Returns the texts in no particular order (`request` says which). A row still unfinished when
    fewer than `stop_fraction` of the rows are alive is returned as it is.
    """
    if not requests:
        raise ValueError("There is nothing to write: give at least one request.")
    with _writer_attention(model):
        wave = _Wave(model, requests, limits, generator)
        logits = wave.prefill()
        while True:
            wave.take(logits)
            if wave.full or (wave.position % _CHECK_EVERY == 0 and not wave.compact()):
                return wave.results()
            logits = wave.step()


class _Wave:
    """The state of one wave. Slots 0..alive-1 are living rows; every tensor is indexed by slot."""

    def __init__(
        self, model: Any, requests: Sequence[Request], limits: Limits, generator: torch.Generator
    ) -> None:
        self.model, self.limits, self.generator = model, limits, generator
        device = model.device
        lengths = [len(r.ids) for r in requests]
        ready = [
            n + (limits.max_written_prompt if r.writes_prompt else 0) + len(limits.suffix)
            for n, r in zip(lengths, requests, strict=True)
        ]
        S = max(ready) + limits.max_answer + 2
        self.count = self.alive = len(requests)
        table = torch.zeros(self.count, S, dtype=torch.int64)
        for row, request in enumerate(requests):
            table[row, : len(request.ids)] = torch.tensor(request.ids)
        self.tokens = table.to(device)
        # Tokens before `forced` stand already; a row answers once its prompt is complete.
        self.forced = torch.tensor(lengths, device=device)
        self.prompt = self.forced.clone()
        self.answering = torch.tensor([not r.writes_prompt for r in requests], device=device)
        self.temperature = torch.tensor([r.temperature for r in requests], device=device)
        self.done = torch.zeros(self.count, dtype=torch.bool, device=device)
        self.finished = torch.zeros_like(self.done)
        self.length = torch.zeros(self.count, dtype=torch.int64, device=device)
        self.source = torch.arange(self.count, device=device)
        self.stop_ids = torch.tensor(list(limits.stop_ids), device=device)
        self.suffix = torch.tensor(list(limits.suffix), device=device, dtype=torch.int64)
        self.position = min(lengths) - 1  # the last position whose token is an input already
        self.buffer = KVBuffer(self.count, S)

    @property
    def full(self) -> bool:
        """The buffer has no position left."""
        return self.position + len(self.limits.suffix) + 2 >= self.tokens.shape[1]

    def _forward(self, rows: slice, start: int, stop: int) -> Tensor:
        self.buffer.rows, self.buffer.start = rows, start
        ids = self.tokens[rows, start:stop]
        positions = torch.arange(start, stop, device=ids.device).expand(ids.shape[0], -1)
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=1,
            generation_state=self.buffer,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def prefill(self) -> Tensor:
        """Run the positions that every row has; returns logits [B,V] of the last of them."""
        stop = self.position + 1
        rows = max(1, _PREFILL_TOKENS // stop)
        parts = [slice(i, min(i + rows, self.count)) for i in range(0, self.count, rows)]
        return torch.cat([self._forward(part, 0, stop) for part in parts])

    def step(self) -> Tensor:
        """One more position for the living rows; returns logits [alive,V]."""
        return self._forward(slice(0, self.alive), self.position, self.position + 1)

    def take(self, logits: Tensor) -> None:
        """Put the next token of every living row in place, drawn or forced."""
        n, here = self.alive, self.position + 1
        answering, forced, done = self.answering[:n], self.forced[:n], self.done[:n]
        temperature = torch.where(answering, self.temperature[:n], self.limits.prompt_temperature)
        min_p = torch.where(answering, 0.0, self.limits.prompt_min_p)
        drawn = sample(logits, temperature, min_p, self.generator)
        known = here < forced
        too_long = ~answering & ~known & (here - self.prompt[:n] >= self.limits.max_written_prompt)
        drawn = torch.where(too_long, self.stop_ids[0], drawn)
        token = torch.where(known, self.tokens[:n, here], drawn)
        ends = torch.isin(token, self.stop_ids) & ~known
        self.tokens[:n, here] = token
        last = here + 1 - self.prompt[:n] >= self.limits.max_answer
        stops = answering & ~known & ~done & (ends | last)
        asked = ends & ~answering
        self.finished[:n] |= stops & ends
        self.length[:n] = torch.where(stops, here + 1, self.length[:n])
        self.done[:n] |= stops
        self._open_answers(asked, here)
        self.position = here

    def _open_answers(self, asked: Tensor, here: int) -> None:
        """Rows whose own prompt just ended: force the rest of the template, then let them
        answer."""
        n, stop = self.alive, here + 1 + len(self.suffix)
        window = self.tokens[:n, here + 1 : stop]
        self.tokens[:n, here + 1 : stop] = torch.where(asked.unsqueeze(1), self.suffix, window)
        self.forced[:n] = torch.where(asked, stop, self.forced[:n])
        self.prompt[:n] = torch.where(asked, stop, self.prompt[:n])
        self.answering[:n] |= asked

    def compact(self) -> bool:
        """Drop finished rows if that pays; False when too few are left to go on."""
        living = ~self.done[: self.alive]
        count = int(living.sum())
        if count <= self.limits.stop_fraction * self.count:
            return False
        if count > 0.9 * self.alive:
            return True
        slots = torch.arange(self.alive, device=living.device)
        source, target = slots[living & (slots >= count)], slots[~living & (slots < count)]
        self.buffer.move(source, target, self.position)
        for tensor in (
            self.tokens,
            self.forced,
            self.prompt,
            self.answering,
            self.temperature,
            self.done,
            self.finished,
            self.length,
            self.source,
        ):
            kept = tensor[target].clone()
            tensor[target] = tensor[source]
            tensor[source] = kept
        self.alive = count
        return True

    def results(self) -> Written:
        """All rows that reached their answer, cut at their end."""
        length = torch.where(self.done, self.length, self.position + 1)
        kept = self.answering & (length > self.prompt)
        columns = (self.tokens, self.prompt, length, self.source, self.finished)
        return Written(*(column[kept].cpu() for column in columns))


def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw int64 [B] from logits [B,V] at temperature [B] (0: the argmax) by Gumbel's argmax.

    Tokens less likely than `min_p` [B] times the most likely one are left out (0 leaves out none).
    """
    parts = []
    for rows in torch.arange(logits.shape[0], device=logits.device).split(_SAMPLE_ROWS):
        scores = logits[rows].float()
        heat = temperature[rows].unsqueeze(1)
        floor = scores.amax(dim=1, keepdim=True) + heat * min_p[rows].clamp_min(
            1e-30
        ).log().unsqueeze(1)
        noise = torch.empty_like(scores).exponential_(generator=generator).clamp_min_(1e-20).log_()
        drawn = scores - heat * noise
        parts.append(drawn.masked_fill_(scores < floor, -torch.inf).argmax(dim=1))
    return torch.cat(parts)
