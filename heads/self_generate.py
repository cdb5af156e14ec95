"""Training text without a data set: the target writes prompts, answers them, and reads its own
answers.

    python -m specdeft.heads.self_generate --model M --count 20000 --output texts.safetensors

The short prompts are written by the model itself (it is given the chat template up to the user's
turn and goes on from there), begun by us and completed by the model, or taken whole from seeded
templates (heads/prompts.py). Long prompts ask for summaries of, and answers from, passages put
together from earlier answers. Source of the first idea: Magpie, https://arxiv.org/abs/2406.08464,
section 2.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from specdeft.heads.documents import Documents, join
from specdeft.heads.prompts import openings, passage_prompts, short_prompts
from specdeft.heads.sampler import Limits, Request, TextWriter, Written
from specdeft.heads.target import Target, Turn, chat_turn, load_target
from specdeft.heads.text_store import TextStore
from specdeft.trees.options import Options

_MAX_PERIOD = 48  # the longest loop looked for, in tokens
_MIN_LOOP = 24  # tokens that must repeat in a row before a text counts as looping
_MAX_OPENING = 16  # tokens of a prompt's beginning that the model completes
_MIN_ANSWER = 4  # tokens; shorter answers have nothing to draft
_MIN_PASSAGE_PART = 60  # tokens; an answer this long can be part of a passage


@dataclass(frozen=True)
class GenerationPlan:
    """How much to write. A wave is one batch; every `long_every`-th wave asks about passages."""

    count: int
    wave_rows: int = 256
    long_wave_rows: int = 128
    long_every: int = 3
    max_answer: int = 256
    max_passage: int = 700
    own_prompts: float = 0.25
    begun_prompts: float = 0.45
    greedy: float = 0.6
    temperatures: tuple[float, float] = (0.6, 1.0)
    seed: int = 0
    time_limit_s: float | None = None
    capture: bool = True


@dataclass
class SelfGenerator:
    """Writes waves of texts with one target; keeps its answers as passages for later waves."""

    target: Target
    plan: GenerationPlan
    turn: Turn = field(init=False)
    wave: int = 0
    passages: list[list[int]] = field(default_factory=list)
    dropped: int = 0
    _asked_before: set[str] = field(default_factory=set, repr=False)
    _writers: dict[bool, TextWriter] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.turn = chat_turn(self.target)

    def next_wave(self) -> Documents:
        """Write one more wave; it follows from the plan and the waves before it alone."""
        is_long, requests = self._next_requests()
        writer = self._writer(is_long)
        fitting = [r for r in requests if writer.limits.positions(r) <= writer.num_positions]
        writer.generator.manual_seed(self.plan.seed * 1_000_003 + self.wave)
        texts = writer.write(fitting)
        documents = self._documents(
            texts, fitting, loop_free_lengths(texts, self.target.model.device)
        )
        self.dropped += len(requests) - len(documents)
        self._finish(documents, is_long)
        return documents

    def adopt(self, documents: Documents) -> None:
        """Take over the next wave as it was written before, and go on as if it had been written
        now."""
        is_long, _ = self._next_requests()
        self._finish(documents, is_long)

    def _next_requests(self) -> tuple[bool, list[Request]]:
        rng = random.Random(self.plan.seed * 1_000_003 + self.wave)
        # Long waves need enough answers to cut passages from.
        is_long = (self.wave + 1) % self.plan.long_every == 0 and len(self.passages) > 8
        return is_long, self._long_requests(rng) if is_long else self._short_requests(rng)

    def _finish(self, documents: Documents, is_long: bool) -> None:
        if not is_long:
            self._remember(documents)
        self.wave += 1

    def _writer(self, is_long: bool) -> TextWriter:
        """The writer of one kind of wave, kept: its buffers and captured steps are used again."""
        if is_long not in self._writers:
            limits = Limits(self.turn.stop_ids, self.turn.after[1:], self.plan.max_answer)
            frame = len(self.turn.before) + len(self.turn.after) + len(limits.suffix) + 2
            frame += _MAX_OPENING
            # Room for the words around a passage; a passage read again may have more tokens.
            prompt = self.plan.max_passage * 11 // 10 + 40 if is_long else limits.max_written_prompt
            rows = self.plan.long_wave_rows if is_long else self.plan.wave_rows
            self._writers[is_long] = TextWriter(
                self.target.model,
                rows,
                frame + prompt + self.plan.max_answer,
                limits,
                self.plan.seed * 2 + is_long,
                capture=self.plan.capture,
            )
        return self._writers[is_long]

    def _temperature(self, rng: random.Random) -> float:
        low, high = self.plan.temperatures
        return 0.0 if rng.random() < self.plan.greedy else rng.uniform(low, high)

    def _short_requests(self, rng: random.Random) -> list[Request]:
        own = round(self.plan.own_prompts * self.plan.wave_rows)
        written = [
            Request(self.turn.before, self._temperature(rng), writes_prompt=True)
            for _ in range(own)
        ]
        begun = round(self.plan.begun_prompts * self.plan.wave_rows)
        texts = openings(begun, rng.randrange(1 << 31))
        for ids in self.target.tokenizer(texts, add_special_tokens=False).input_ids:
            start = [*self.turn.before, *ids[:_MAX_OPENING]]
            written.append(Request(start, self._temperature(rng), writes_prompt=True))
        prompts = short_prompts(self.plan.wave_rows - own - begun, rng.randrange(1 << 31))
        return written + self._asked(prompts, rng)

    def _long_requests(self, rng: random.Random) -> list[Request]:
        # Passages of a wave are about as long as each other: only what all prompts have in common
        # can be read in one go.
        longest = rng.randint(self.plan.max_passage // 5, self.plan.max_passage)
        passages = [self._passage(rng, longest) for _ in range(self.plan.long_wave_rows)]
        return self._asked(passage_prompts(passages, rng.randrange(1 << 31)), rng)

    def _asked(self, prompts: Sequence[str], rng: random.Random) -> list[Request]:
        encoded = self.target.tokenizer(list(prompts), add_special_tokens=False).input_ids
        requests = []
        for prompt, ids in zip(prompts, encoded, strict=True):
            heat = self._temperature(rng)
            # A second greedy answer to a prompt would be the first one again: nothing new to learn,
            # and what is held out would have been learnt.
            if prompt in self._asked_before and heat == 0:
                heat = rng.uniform(*self.plan.temperatures)
            self._asked_before.add(prompt)
            requests.append(Request([*self.turn.before, *ids, *self.turn.after], heat))
        return requests

    def _passage(self, rng: random.Random, longest: int) -> str:
        """Earlier answers put together: 85 to 100 % of `longest` tokens."""
        wanted = rng.randint(longest * 17 // 20, longest)
        ids: list[int] = []
        while len(ids) < wanted:
            ids += rng.choice(self.passages)
        text: str = self.target.tokenizer.decode(ids[:wanted], skip_special_tokens=True)
        return " ".join(text.split()) if rng.random() < 0.7 else text.strip()

    def _remember(self, documents: Documents) -> None:
        rng = random.Random(f"passages {self.plan.seed} {self.wave}")
        # Of every document the answer is the last part: what is learnt.
        ends = documents.offsets[1:]
        counts = documents.learn.int().cumsum(0)[ends - 1].diff(prepend=ends.new_zeros(1))
        long_ones = (counts >= _MIN_PASSAGE_PART).nonzero().squeeze(1).tolist()
        rows = rng.sample(long_ones, min(len(long_ones), 4096))
        answers = [documents.tokens[ends[i] - counts[i] : ends[i]].tolist() for i in rows]
        self.passages = answers + self.passages[:8192]

    def _documents(self, texts: Written, requests: Sequence[Request], keep: Tensor) -> Documents:
        chosen = keep - texts.prompt_length >= _MIN_ANSWER
        tokens, keep, prompt = texts.tokens[chosen], keep[chosen], texts.prompt_length[chosen]
        place = torch.arange(tokens.shape[1])
        inside = place < keep.unsqueeze(1)
        heat = torch.tensor([request.temperature for request in requests])
        return Documents(
            tokens[inside].to(torch.int32),
            (place >= prompt.unsqueeze(1))[inside],
            torch.cat([keep.new_zeros(1), keep.cumsum(0)]),
            heat[texts.request[chosen]],
        )


def loop_free_lengths(texts: Written, device: torch.device | str = "cpu") -> Tensor:
    """int64 [n]: how much of each text to keep: all of it, or up to where its answer has begun to
    loop. Computed on `device`, returned on the CPU.

    A loop is the last p tokens again, for at least max(2p, 24) tokens in a row, p up to 48.
    """
    tokens, keep = texts.tokens.to(device), texts.length.to(device)
    place = torch.arange(tokens.shape[1], device=device)
    prompt = texts.prompt_length.to(device).unsqueeze(1)
    inside = (place >= prompt) & (place < keep.unsqueeze(1))
    for period in range(1, min(_MAX_PERIOD, tokens.shape[1] - 1) + 1):
        same = (
            (tokens[:, period:] == tokens[:, :-period]) & inside[:, :-period] & inside[:, period:]
        )
        ends = run_lengths(same) >= max(2 * period, _MIN_LOOP)
        first = torch.where(ends.any(1), ends.int().argmax(1) + period + 1, tokens.shape[1])
        keep = torch.minimum(keep, first)
    return keep.cpu()


def run_lengths(flags: Tensor) -> Tensor:
    """int64 of bool [B,S]: how many flags in a row are set, up to and with each place."""
    place = torch.arange(1, flags.shape[1] + 1, device=flags.device).expand_as(flags)
    return place - torch.where(flags, 0, place).cummax(dim=1).values


def self_generate(
    target: Target, plan: GenerationPlan, store: TextStore | None = None
) -> Documents:
    """Write `plan.count` texts (fewer if the time limit ends first, never less than one wave).

    With a `store` every wave is kept as soon as it is written, and the waves that are already there
    are taken over: a run that was killed goes on with the wave it died in, to the same texts.
    """
    generator, began = SelfGenerator(target, plan), time.monotonic()
    parts = [] if store is None else store.waves()
    for documents in parts:
        generator.adopt(documents)
    adopted = len(parts)
    with tqdm(total=plan.count, desc="self-generate", unit="text") as bar:
        bar.update(sum(map(len, parts)))
        while bar.n < plan.count:
            spent, written = time.monotonic() - began, len(parts) - adopted
            # The next wave takes about as long as the mean so far.
            if plan.time_limit_s and written and spent * (1 + 1 / written) > plan.time_limit_s:
                break
            documents = generator.next_wave()
            if store is not None:
                store.add(documents)
            parts.append(documents)
            bar.update(len(documents))
            bar.set_postfix(tokens=sum(len(part.tokens) for part in parts))
    return join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write training texts with a model of your own."""
    parser = Options(prog="specdeft self-generate", description=main.__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face id or folder of the target")
    parser.add_argument("--count", type=int, default=20_000, help="texts to write")
    parser.add_argument("--wave-rows", type=int, default=256, help="texts written at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    options = parser.parse_args(arguments)
    plan = GenerationPlan(
        options.count,
        wave_rows=options.wave_rows,
        long_wave_rows=max(1, options.wave_rows // 2),
        seed=options.seed,
    )
    target = load_target(options.model)
    store = TextStore.open(
        options.output.with_suffix(".waves"), asdict(plan), target.name, resume=options.resume
    )
    self_generate(target, plan, store).save(options.output)
    store.remove()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
