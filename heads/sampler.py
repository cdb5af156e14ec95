"""Write many texts at once with a stock Hugging Face model: the engine behind self-generated data.

All rows of a wave stand at the same position, so no padding exists: a row whose prompt is longer
than another's simply has its next token *forced* instead of drawn. Attention is a registered
function that appends to a preallocated buffer and reads it as a view (transformers' own cache
copies everything at every step). Finished rows are dropped: living rows move into their slots.

A step of a small model is bound by kernel launches, not by work (measured on an H200 with 135M
parameters: 75 ms launched from Python at 64 rows and at 4096 rows alike). On a GPU each step is
therefore a CUDA graph, one for each (rows, visible positions) pair; positions are rounded up to a
bucket and masked, rows to an eighth of the wave. On a CPU the same functions run as they are.

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
_BUCKET = 64  # visible positions of a captured step are a multiple of this
_ROW_LEVELS = 8  # a wave shrinks in steps of this share of its rows


@dataclass(frozen=True)
class Request:
    """One text to write. `writes_prompt`: `ids` stop inside the user's turn, which the model
    writes itself."""

    ids: Sequence[int]
    temperature: float
    writes_prompt: bool = False


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

    def positions(self, request: Request) -> int:
        """The most positions a request can come to need."""
        written = self.max_written_prompt + len(self.suffix) if request.writes_prompt else 0
        return len(request.ids) + written + self.max_answer + len(self.suffix) + 2


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
    """Keys and values, [rows, Hkv, S, D] for each layer, made at the first write.

    Of the forward that runs: `part` are its rows, `visible` the positions it reads, `place` int64
    [1] where its one new token goes, `bias` [S] 0 or -inf (None: all that is visible is seen)."""

    num_rows: int
    num_positions: int
    part: slice = field(default_factory=lambda: slice(0, 0))
    visible: int = 0
    place: Tensor | None = None
    bias: Tensor | None = None
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def prefill(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store key and value [b,Hkv,q,D] at positions 0 .. q-1 of `part`."""
        if layer not in self.keys:
            shape = (self.num_rows, key.shape[1], self.num_positions)
            # Zeros, not empty: a masked position has weight 0, but 0 x NaN is NaN.
            self.keys[layer] = key.new_zeros(*shape, key.shape[3])
            self.values[layer] = value.new_zeros(*shape, value.shape[3])
        self.keys[layer][self.part, :, : key.shape[2]] = key
        self.values[layer][self.part, :, : key.shape[2]] = value

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one position at `place`; return views of all that is visible."""
        keys, values = self.keys[layer][self.part], self.values[layer][self.part]
        keys.index_copy_(2, self.place, key)  # type: ignore[arg-type]
        values.index_copy_(2, self.place, value)  # type: ignore[arg-type]
        return keys[:, :, : self.visible], values[:, :, : self.visible]

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
        raise ValueError("This attention runs inside heads.sampler only: call TextWriter.write().")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(
            "Self-generation does not cover models with attention softcap or sinks: "
            "generate the texts elsewhere and train from a file."
        )
    state = generation_state
    if sliding_window is not None and state.num_positions > sliding_window:
        raise ValueError(
            f"The texts may reach {state.num_positions} tokens but the model attends to "
            f"{sliding_window}: ask for shorter texts."
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    b, Hq, q, D = query.shape
    if state.place is None:
        state.prefill(layer, key, value)
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=Hq != key.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None
    keys, values = state.append(layer, key, value)
    # The query heads of a group become rows of one product: each K/V is read once, not G times.
    grouped = query.reshape(b, keys.shape[1], Hq // keys.shape[1], D)
    bias = state.bias
    if bias is not None:
        bias = bias[: state.visible].expand(*grouped.shape[:3], -1)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
    return out.reshape(b, q, Hq, values.shape[3]), None


@contextmanager
def _writer_attention(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    AttentionInterface.register(ATTENTION_NAME, _attention)
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class TextWriter:
    """Writes waves of up to `num_rows` texts of up to `num_positions` tokens; buffers and captured
    steps are kept from wave to wave. Slots 0 .. alive-1 are the rows that still run; every tensor
    of the state is indexed by slot."""

    def __init__(
        self,
        model: Any,
        num_rows: int,
        num_positions: int,
        limits: Limits,
        seed: int,
        *,
        capture: bool = True,
    ) -> None:
        """`capture` False runs every step from Python on a GPU too."""
        device = model.device
        self.model, self.limits, self.num_rows = model, limits, num_rows
        self.captures = capture and device.type == "cuda"
        self.num_positions = -(-num_positions // _BUCKET) * _BUCKET
        self.generator = torch.Generator(device).manual_seed(seed)

        def row(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=device)

        self.tokens = row(torch.int64).unsqueeze(1).repeat(1, self.num_positions)
        # Tokens before `forced` stand already; a row answers once its prompt is complete.
        self.forced, self.prompt, self.length = (row(torch.int64) for _ in range(3))
        self.answering, self.done, self.finished = (row(torch.bool) for _ in range(3))
        self.temperature, self.source = row(torch.float32), row(torch.int64)
        self.stop_ids = torch.tensor(list(limits.stop_ids), device=device)
        self.suffix = torch.tensor(list(limits.suffix), device=device, dtype=torch.int64)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.buffer = KVBuffer(num_rows, self.num_positions)
        self.position = self.count = self.alive = 0
        self._steps: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if self.captures else None

    @torch.no_grad()  # not inference mode: layers in parts (heads/sharding.py) count versions
    def write(self, requests: Sequence[Request]) -> Written:
        """Write all requests as one wave.

        Returns the texts in no particular order. Rows still unfinished when fewer than
        `stop_fraction` of them are left are returned as they are.
        """
        self._fill(requests)
        with _writer_attention(self.model):
            self._take(self._prefill(), self.alive)
            while not self._over():
                self._step()
        return self._results()

    def _fill(self, requests: Sequence[Request]) -> None:
        if not 1 <= len(requests) <= self.num_rows:
            raise ValueError(f"{len(requests)} texts: give 1 to {self.num_rows} requests.")
        needed = max(map(self.limits.positions, requests))
        if needed > self.num_positions:
            raise ValueError(
                f"A text may need {needed} positions and there are {self.num_positions}: "
                "give shorter prompts or a larger writer."
            )
        n = self.count = self.alive = len(requests)
        lengths = torch.tensor([len(r.ids) for r in requests])
        table = torch.zeros(n, int(lengths.max()), dtype=torch.int64)
        table[torch.arange(table.shape[1]) < lengths.unsqueeze(1)] = torch.tensor(
            [token for request in requests for token in request.ids]
        )
        self.tokens[:n, : table.shape[1]] = table.to(self.tokens.device)
        self.forced[:n] = lengths.to(self.forced.device)
        self.prompt[:n] = self.forced[:n]
        self.length[:n], self.done[:n], self.finished[:n] = 0, False, False
        for column, values in (
            (self.answering, [not r.writes_prompt for r in requests]),
            (self.temperature, [r.temperature for r in requests]),
            (self.source, list(range(n))),
        ):
            column[:n] = torch.tensor(values).to(column.device)
        self.position = int(lengths.min()) - 1  # the last position that is an input in every row
        self.place.fill_(self.position)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=1,
            generation_state=self.buffer,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def _prefill(self) -> Tensor:
        """Run the positions that every row has; returns logits [B,V] of the last of them."""
        stop = self.position + 1
        positions = torch.arange(stop, device=self.tokens.device)
        self.buffer.place, logits = None, []
        for rows in torch.arange(self.count).split(max(1, _PREFILL_TOKENS // stop)):
            self.buffer.part = slice(int(rows[0]), int(rows[-1]) + 1)
            ids = self.tokens[self.buffer.part, :stop]
            logits.append(self._forward(ids, positions.expand(len(ids), -1)))
        return torch.cat(logits)

    def _step(self) -> None:
        """One more position for the running rows: captured on a GPU, plain elsewhere."""
        self.position += 1
        if not self.captures:
            self._advance(self.alive, self.position + 1, masked=False)
            return
        key = (self.alive, -(-(self.position + 1) // _BUCKET) * _BUCKET)
        if key not in self._steps:
            # The first visit runs plainly, so that nothing is loaded or tuned while capturing.
            self._steps[key] = None
            self._advance(*key, masked=True)
            return
        graph = self._steps[key]
        if graph is None:
            graph = self._steps[key] = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph, pool=self._pool):
                self._advance(*key, masked=True)
        graph.replay()

    def _advance(self, rows: int, visible: int, *, masked: bool) -> None:
        """The step itself: only device work, every size fixed by the arguments."""
        buffer, place = self.buffer, self.place
        buffer.part, buffer.visible, buffer.place = slice(0, rows), visible, place
        buffer.bias = None
        if masked:
            seen = torch.arange(self.num_positions, device=place.device) <= place
            zero = torch.zeros((), dtype=self.model.dtype, device=place.device)
            buffer.bias = torch.where(seen, zero, -torch.inf)
        ids = self.tokens[:rows].index_select(1, place)
        self._take(self._forward(ids, place.expand(rows, 1)), rows)

    def _take(self, logits: Tensor, n: int) -> None:
        """Put the next token of the first n rows in place, drawn or forced, and move on."""
        here = self.place + 1
        tokens, answering, forced = self.tokens[:n], self.answering[:n], self.forced[:n]
        temperature = torch.where(answering, self.temperature[:n], self.limits.prompt_temperature)
        min_p = torch.where(answering, 0.0, self.limits.prompt_min_p)
        drawn = sample(logits, temperature, min_p, self.generator)
        known = here < forced
        written = here - self.prompt[:n]
        too_long = ~answering & ~known & (written >= self.limits.max_written_prompt)
        drawn = torch.where(too_long, self.stop_ids[0], drawn)
        token = torch.where(known, tokens.index_select(1, here).squeeze(1), drawn)
        tokens.index_copy_(1, here, token.unsqueeze(1))
        ends = (token.unsqueeze(1) == self.stop_ids).any(1) & ~known
        last = written + 1 >= self.limits.max_answer
        stops = answering & ~known & ~self.done[:n] & (ends | last)
        self.finished[:n] |= stops & ends
        self.length[:n] = torch.where(stops, here + 1, self.length[:n])
        self.done[:n] |= stops
        self._open_answers(ends & ~answering, here + 1, n)
        self.place += 1

    def _open_answers(self, asked: Tensor, start: Tensor, n: int) -> None:
        """Rows whose own prompt just ended: force the rest of the template from `start` on, then
        let them answer."""
        tokens = self.tokens[:n]
        places = start + torch.arange(len(self.suffix), device=start.device)
        window = tokens.index_select(1, places)
        tokens.index_copy_(1, places, torch.where(asked.unsqueeze(1), self.suffix, window))
        stop = start + len(self.suffix)
        self.forced[:n] = torch.where(asked, stop, self.forced[:n])
        self.prompt[:n] = torch.where(asked, stop, self.prompt[:n])
        self.answering[:n] |= asked

    def _over(self) -> bool:
        """Whether the wave has ended; drops finished rows where that pays."""
        # `place` is one ahead of `position`: it already names the token that was drawn last.
        if self.position + len(self.suffix) + 4 >= self.num_positions:
            return True
        if self.position % _CHECK_EVERY:
            return False
        living = ~self.done[: self.alive]
        count = int(living.sum())
        if count <= self.limits.stop_fraction * self.count:
            return True
        level = -(-self.count // _ROW_LEVELS)
        fewer = min(self.alive, -(-count // level) * level)
        if fewer < self.alive:
            self._shrink(living, fewer)
        return False

    def _shrink(self, living: Tensor, alive: int) -> None:
        slots = torch.arange(self.alive, device=living.device)
        source = slots[living & (slots >= alive)]
        target = slots[~living & (slots < alive)][: len(source)]
        self.buffer.move(source, target, self.position + 1)
        for column in (
            *(self.tokens, self.forced, self.prompt, self.length, self.source),
            *(self.answering, self.done, self.finished, self.temperature),
        ):
            kept = column[target].clone()
            column[target] = column[source]
            column[source] = kept
        self.alive = alive

    def _results(self) -> Written:
        """All rows that reached their answer, cut at their end."""
        n = self.count
        length = torch.where(self.done[:n], self.length[:n], self.place + 1)
        kept = self.answering[:n] & (length > self.prompt[:n])
        columns = (self.tokens[:n], self.prompt[:n], length, self.source[:n], self.finished[:n])
        return Written(*(column[kept].cpu() for column in columns))


def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw int64 [B] from logits [B,V] at temperature [B] (0: the argmax) by Gumbel's argmax.

    Tokens less likely than `min_p` [B] times the most likely one are left out (0 leaves out none).
    """
    parts = []
    for start in range(0, logits.shape[0], _SAMPLE_ROWS):
        rows = slice(start, start + _SAMPLE_ROWS)
        scores = logits[rows].float()
        heat = temperature[rows].unsqueeze(1)
        least = min_p[rows].clamp_min(1e-30).log().unsqueeze(1)
        floor = scores.amax(dim=1, keepdim=True) + heat * least
        noise = torch.empty_like(scores).exponential_(generator=generator).clamp_min_(1e-20).log_()
        drawn = torch.addcmul(scores, heat, noise, value=-1.0)
        parts.append(drawn.masked_fill_(scores < floor, -torch.inf).argmax(dim=1))
    return torch.cat(parts)
