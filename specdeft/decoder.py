"""SpecDecoder: a stock model, its draft heads and a token tree behind `generate` and `stream`."""

import inspect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdeft.attention import KernelChoice
from specdeft.calibration_cache import cached_values
from specdeft.config import GenerationConfig, truth
from specdeft.custom_generate import generate_rows
from specdeft.engine import Engine
from specdeft.generation import Generation
from specdeft.graphs import SMALLEST_BUCKET_TOKENS, context_buckets
from specdeft.heads.medusa import MedusaHeads
from specdeft.identity import IdentityReport, compare
from specdeft.loading import load_heads, load_target
from specdeft.memory import DEFAULT_KV_FRACTION
from specdeft.model import TargetModel
from specdeft.prompt import Prompt, encode_prompt
from specdeft.prompt_graphs import PADDED_TOKENS
from specdeft.reply import Reply
from specdeft.result import GenerationResult
from specdeft.run_state import Request, RunStates
from specdeft.step_trees import StepTrees
from specdeft.stream import Stream, Turn
from specdeft.text import TextAssembler
from specdeft.tree_choice import Asked, TreeChoice
from specdeft.trees.request import LookupRequest, TreeRequest
from specdeft.trees.search import ValuedPaths
from specdeft.trees.token_tree import TokenTree
from specdeft.trees.whole_numbers import whole_number

MAX_BATCH_SIZE = 8


class SpecDecoder:
    """Speculative decoding of one model; the text is the one plain decoding gives.

    Attributes:
        model, tokenizer: the stock Hugging Face objects, usable on their own at any time.
        heads: the draft heads, or None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        heads: MedusaHeads | None = None,
        *,
        tree: TreeRequest = "auto",
        lookup: LookupRequest = "auto",
        tree_values: ValuedPaths | None = None,
        kernels: KernelChoice | None = None,
        cuda_graphs: bool | None = None,
        compile: bool = False,
        max_batch_size: int = MAX_BATCH_SIZE,
        max_context: int | None = None,
        kv_memory_fraction: float = DEFAULT_KV_FRACTION,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Put a loaded model, its tokenizer and heads together.

        Args:
            model: a decoder-only causal LM.
            tokenizer: its tokenizer.
            heads: draft heads made for this model; None drafts by lookup alone.
            tree: "auto" (the size with the most tokens per second by measured step cost), a
                number of nodes, a tree's name, a JSON file, or a `TokenTree`.
            lookup: whether trees hold guesses copied from where the same words stood earlier in
                the text: "auto" where measured values say that it pays, "on" in every tree, "off".
            tree_values: the heads' rank paths by value, which "auto" and a number need.
            kernels: which attention kernels; by default those of the model's device.
            cuda_graphs: replay steps from CUDA graphs; by default wherever the model is on CUDA.
            compile: fuse the model's pointwise work by torch.compile (CUDA, tens of seconds per
                tree size the first time).
            max_batch_size: prompts of a list that are decoded together.
            max_context: most tokens of a sequence, the prompt included; by default the model's.
            kv_memory_fraction: of the free memory, what the KV cache may take.
            clock: seconds; for tests.

        Raises:
            ValueError: the model or the tree is not supported, or the heads are another model's.
        """
        target = TargetModel(model)
        if heads is not None:
            _check_heads(heads, target)
        self.model = model
        self.tokenizer = tokenizer
        self.heads = heads
        on_cuda = target.device.type == "cuda"
        if cuda_graphs is not None:
            truth(cuda_graphs, "cuda_graphs")
        if cuda_graphs and not on_cuda:
            raise ValueError("cuda_graphs=True needs a model on CUDA: leave it out on the CPU")
        if truth(compile, "compile"):
            target.compile()
        self._engine = Engine(
            target,
            heads,
            kernels or KernelChoice.for_device(target.device),
            on_cuda if cuda_graphs is None else cuda_graphs,
        )
        max_batch_size = whole_number(max_batch_size, "max_batch_size")
        if max_context is not None:
            max_context = whole_number(max_context, "max_context")
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}: give a whole number from 1")
        if max_context is not None and not 2 <= max_context <= target.max_context:
            raise ValueError(
                f"max_context is {max_context}: give 2 to {target.max_context}, the model's own"
            )
        self._max_batch_size = max_batch_size
        self._max_context = max_context or target.max_context
        self._clock = clock
        self._tree_values = tree_values
        self._lookup = lookup
        self._choice = self._choose(tree)
        self._states = RunStates(self._engine, kv_memory_fraction)
        self._turn = Turn()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        heads: str | Path | None = "auto",
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "auto",
        tree: TreeRequest = "auto",
        lookup: LookupRequest = "auto",
        cuda_graphs: bool | None = None,
        compile: bool = False,
        max_batch_size: int = MAX_BATCH_SIZE,
        max_context: int | None = None,
        kv_memory_fraction: float = DEFAULT_KV_FRACTION,
        **model_arguments: Any,
    ) -> "SpecDecoder":
        """Load a model by name, Hugging Face id or path, and the heads that belong to it.

        Args:
            name: "smollm2-135m" (embedded, no download) or anything `AutoModelForCausalLM` loads.
            heads: a folder, file or Hugging Face id of heads, ours or in another project's format
                (docs/formats.md); "auto" takes the shipped ones where there are any; None drafts
                by lookup alone.
            dtype: "auto" is bfloat16 where the device computes in it, else float32.
            device: "auto" is CUDA where there is a GPU, else the CPU.
            tree, lookup, cuda_graphs, compile, max_batch_size, max_context, kv_memory_fraction:
                see `__init__`.
            model_arguments: passed to `from_pretrained` of transformers.

        Raises:
            ValueError: the model cannot be loaded, or the heads are missing or another model's.
        """
        loaded = load_target(name, dtype=dtype, device=device, **model_arguments)
        found = load_heads(heads, loaded)
        module, shipped = found or (None, None)
        return cls(
            loaded.model,
            loaded.tokenizer,
            module,
            tree=tree,
            lookup=lookup,
            tree_values=cached_values(loaded.model, module) or shipped,
            cuda_graphs=cuda_graphs,
            compile=compile,
            max_batch_size=max_batch_size,
            max_context=max_context,
            kv_memory_fraction=kv_memory_fraction,
        )

    @overload
    def generate(self, prompt: Prompt, **settings: Any) -> GenerationResult: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], **settings: Any) -> list[GenerationResult]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], **settings: Any
    ) -> GenerationResult | list[GenerationResult]:
        """Generate for one prompt, or for a list of them as batches; results in their order.

        Each result is what the prompt gives alone (token for token in float32). What prompts of a
        batch begin with in common is read once, and kept once where the cache has small pages.

        Args:
            prompt: text (put through the model's chat template where it has one), `raw=True` text,
                a chat as a list of messages, or a tensor of token ids; or a list of these.
            settings: `config=GenerationConfig(...)` or its fields (max_new_tokens, temperature,
                top_k, top_p, seed, stop, ignore_eos, eos_token_ids), plus `tree`, `raw` and
                `sequence` (the number that keys the noise beside the seed: 0, and in a list the
                row's, so that equal prompts of a list are sampled independently).

        Raises:
            ValueError: bad input; nothing was computed.
            RuntimeError: this decoder is generating in another thread.
        """
        if not _is_batch(prompt):
            return self.stream(cast(Prompt, prompt), **settings).exhaust()[0]
        prompts = list(cast(Sequence[Prompt], prompt))
        size = self._max_batch_size
        # All are checked before the first is computed.
        streams = [
            self._stream(prompts[first : first + size], first, **settings)
            for first in range(0, len(prompts), size)
        ]
        return [result for stream in streams for result in stream.exhaust()]

    def stream(
        self,
        prompt: Prompt,
        *,
        config: GenerationConfig | None = None,
        tree: TreeRequest | None = None,
        raw: bool = False,
        sequence: int = 0,
        **fields: Any,
    ) -> Stream:
        """Generate piece by piece: iterate for text, then read ``.result``.

        Arguments and errors as for `generate`; they are checked here, before the first piece.
        """
        return self._stream(
            [prompt], 0, config=config, tree=tree, raw=raw, sequence=sequence, **fields
        )

    def _stream(
        self,
        prompts: list[Prompt],
        first: int,
        *,
        config: GenerationConfig | None = None,
        tree: TreeRequest | None = None,
        raw: bool = False,
        sequence: int | None = None,
        **fields: Any,
    ) -> Stream:
        """The generation of prompts first, first + 1, .. of a list, checked and not begun."""
        if config is not None and fields:
            raise ValueError(
                f"config and {', '.join(sorted(fields))} were both given: put them in the config"
            )
        config = config or _config_from(fields)
        truth(raw, "raw")
        if sequence is not None and whole_number(sequence, "sequence") < 0:
            raise ValueError(f"sequence is {sequence}: give a whole number from 0")
        requests = []
        for row, prompt in enumerate(prompts, first):
            prompt_ids = encode_prompt(self.tokenizer, prompt, raw=raw)
            self._check_ids(prompt_ids)
            budget = config.token_budget(len(prompt_ids), self._max_context)
            requests.append(Request(prompt_ids, budget, row if sequence is None else sequence))
        choice = self._choice if tree is None else self._choose(tree)
        return Stream(self._turn, lambda: self._start(requests, config, choice))

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **prepared: Any,
    ) -> torch.Tensor:
        """For `model.generate(**inputs, custom_generate=decoder)`: see `custom_generate`.

        Returns:
            [B, T + new] int64, as `generate` returns it.

        Raises:
            ValueError: a setting that would change the text is not supported; it is named.
        """
        return generate_rows(
            self,
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config or model.generation_config,
            # Not a named parameter: transformers would pass those twice.
            prepared.get("attention_mask"),
        )

    def warmup(
        self, num_tokens: int = 1024, *, batch_size: int = 1, temperature: float = 0.0
    ) -> float:
        """Do ahead what first generations would wait for: the tree's and the plain steps of
        sequences of up to ``num_tokens`` tokens are compiled and captured, by decoding a little,
        and their prompts; steps of several sequences with and without a common beginning.

        Args:
            num_tokens: prompt and new tokens of the longest sequence to come, 16 or more.
            batch_size: prompts decoded together.
            temperature: above 0 the steps of sampling are made ready.

        Returns:
            The seconds it took.

        Raises:
            ValueError: such sequences do not fit the context or the memory.
        """
        began = self._clock()
        if num_tokens < 16 or batch_size < 1:
            raise ValueError(
                f"warmup of {batch_size} sequences of {num_tokens} tokens: give at least 1 "
                "sequence of at least 16 tokens"
            )
        settings = {"max_new_tokens": 2, "temperature": temperature, "ignore_eos": True}
        # The largest first: what comes later fits the memory that it took.
        for bucket in reversed(context_buckets(num_tokens)):
            for tree in self._trees_within(bucket, num_tokens, batch_size, temperature):
                # A step's graph serves up to its bucket's end: just below it, nothing is left out.
                beyond = 2 + 2 * (tree.max_depth + 1)
                length = max(min(bucket, num_tokens) - beyond, 1)
                alike = torch.zeros(batch_size, length, dtype=torch.int64)
                apart = alike.clone()  # takes more memory, so it comes first
                apart[:, 0] = torch.arange(batch_size)
                for prompts in (apart, alike) if batch_size > 1 else (alike,):
                    self.generate(list(prompts), tree=tree, **settings)
        if self._engine.cuda_graphs:
            for length in PADDED_TOKENS:
                if length < num_tokens:
                    self.plain(torch.zeros(length, dtype=torch.int64), max_new_tokens=1)
        return self._clock() - began

    def _trees_within(
        self, bucket: int, num_tokens: int, batch_size: int, temperature: float
    ) -> list[TokenTree]:
        """The trees of steps whose context lies in a bucket: "auto" may choose several."""
        longest = min(bucket, num_tokens)
        # The smallest bucket holds the contexts of more than one place.
        contexts = (1, longest) if bucket == SMALLEST_BUCKET_TOKENS else (longest,)
        places = [self._choice.place(context, batch_size) for context in contexts]
        trees = [self._choice.tree_at(place, Asked(temperature)) for place in places]
        return list(dict.fromkeys([*trees, TokenTree.chain(0)]))

    def plain(self, prompt: Prompt, **settings: Any) -> GenerationResult:
        """`generate` with the one-node tree: plain decoding by the same engine, the baseline."""
        return self.stream(prompt, **{**settings, "tree": TokenTree.chain(0)}).exhaust()[0]

    @property
    def device(self) -> torch.device:
        """Where the target runs."""
        return self._engine.target.device

    def compare(
        self,
        speculative: GenerationResult,
        plain: GenerationResult,
        config: GenerationConfig,
        *,
        sequence: int = 0,
    ) -> IdentityReport:
        """Whether two results of one prompt are the same text, and if not, by how much.

        Args:
            speculative, plain: the results.
            config: both requests'.
            sequence: the number both were sampled with: a prompt's place in its list.
        """
        return compare(
            self._engine,
            speculative.prompt_ids,
            speculative.token_ids,
            plain.token_ids,
            config,
            sequence,
        )

    @property
    def engine(self) -> Engine:
        """The decoding steps themselves, for benchmarks."""
        return self._engine

    @property
    def dtype_name(self) -> str:
        """Of the target, for people: "bfloat16"."""
        return str(self._engine.target.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        """Of the target, for people: the GPU's name or the CPU's thread count."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"CPU ({torch.get_num_threads()} threads)"

    @property
    def expected_tau(self) -> float | None:
        """Tokens a greedy step is expected to bring, where the drafts were calibrated."""
        return self._choice.expected_tau()

    def expected_tau_of(self, config: GenerationConfig, num_prompt_tokens: int) -> float | None:
        """`expected_tau` in what such a request generates: less in a short text, which has little
        to look up, and less above temperature 0."""
        asked = self._asked(config, num_prompt_tokens)
        return self._choice.expected_tau(asked, self._choice.place(num_prompt_tokens))

    def tree_of(self, config: GenerationConfig, num_prompt_tokens: int) -> TokenTree:
        """The tree that such a request starts with; "auto" chooses by its prompt, its length and
        its temperature."""
        asked = self._asked(config, num_prompt_tokens)
        return self._choice.tree_at(self._choice.place(num_prompt_tokens), asked)

    def tree_report_of(self, config: GenerationConfig, num_prompt_tokens: int) -> str:
        """One line that says which tree such a request starts with and why."""
        asked = self._asked(config, num_prompt_tokens)
        return self._choice.report_at(self._choice.place(num_prompt_tokens), asked)

    def _asked(self, config: GenerationConfig, num_prompt_tokens: int) -> Asked:
        budget = config.token_budget(num_prompt_tokens, self._max_context)
        return Asked(config.temperature, budget)

    @property
    def tree(self) -> TokenTree:
        """The token tree in use; "auto" is resolved (and measured if need be) by asking."""
        return self._choice.tree

    @property
    def tree_report(self) -> str:
        """One line that says which tree was chosen and why."""
        return self._choice.report

    def _choose(self, tree: TreeRequest) -> TreeChoice:
        return TreeChoice(self._engine, tree, self._tree_values, self._clock, self._lookup)

    def _start(
        self, requests: list[Request], config: GenerationConfig, choice: TreeChoice
    ) -> Generation:
        eos_ids = self._eos_ids(config)
        replies = [
            Reply(
                request.prompt_ids,
                request.budget,
                budget_reason="context" if config.is_cut(request.budget) else "length",
                eos_ids=eos_ids,
                text=TextAssembler(self.tokenizer, config.stop),
            )
            for request in requests
        ]
        trees = StepTrees(
            choice,
            [len(request.prompt_ids) for request in requests],
            [request.budget for request in requests],
            config.temperature,
            # Steps of another tree would be captured or compiled for a text's last tokens.
            whole=self._engine.cuda_graphs or self._engine.is_compiled,
        )
        return Generation(
            replies,
            self._states.fresh(requests, config, trees.largest),
            trees=trees,
            clock=self._clock,
        )

    def _check_ids(self, prompt_ids: Sequence[int]) -> None:
        vocab_size = self._engine.target.vocab_size
        wrong = next((token for token in prompt_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"token id {wrong} is not in the vocabulary of {vocab_size}: was the prompt "
                "encoded by another model's tokenizer?"
            )

    def _eos_ids(self, config: GenerationConfig) -> frozenset[int]:
        """Every id that ends a text: as asked, else the generation config's and the tokenizer's."""
        if config.ignore_eos:
            return frozenset()
        if config.eos_token_ids is not None:
            return frozenset(config.eos_token_ids)
        configured = self.model.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return frozenset(
            int(token) for token in [*listed, self.tokenizer.eos_token_id] if token is not None
        )


def _check_heads(heads: MedusaHeads, target: TargetModel) -> None:
    """Refuse heads of another model or dtype; `load_heads` gives ones that fit."""
    for name in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(heads.config, name, None), getattr(target, name)
        if theirs is not None and theirs != ours:
            raise ValueError(
                f"the heads are for a {name} of {theirs} and this model has {ours}: they belong "
                "to another model"
            )
    dtypes = {parameter.dtype for parameter in heads.parameters()}
    if dtypes - {target.dtype}:
        found = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"the heads are in {found} and the model in {target.dtype}: convert the heads with "
            ".to(model.dtype)"
        )


def _is_batch(prompt: Any) -> bool:
    """A list is a batch unless it is one chat (messages) or one row of ids."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    first = prompt[0]
    is_message = isinstance(first, dict)
    return not (is_message or hasattr(first, "__index__")) or isinstance(first, torch.Tensor)


def _config_from(fields: dict[str, Any]) -> GenerationConfig:
    known = GenerationConfig.__dataclass_fields__
    unknown = sorted(set(fields) - set(known))
    of_decoder = [name for name in unknown if name in inspect.signature(SpecDecoder).parameters]
    if of_decoder:
        raise ValueError(
            f"{', '.join(of_decoder)} is set once for a decoder, not for a text: give it to "
            "SpecDecoder or SpecDecoder.from_pretrained"
        )
    if unknown:
        raise ValueError(
            f"generate has no setting {', '.join(unknown)}: it takes {', '.join(known)}, tree, "
            "raw, sequence"
        )
    return GenerationConfig(**fields)
