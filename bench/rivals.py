"""Other packages as rows, run when they are installed, through one small protocol.

A rival is a function ``load(model, tokenizer)`` that returns

    generate(prompt_ids, max_new_tokens, eos_ids) -> iterator of lists of new token ids

Greedy; an end-of-text id is kept and is the last; the lists come as the rival emits them. One that
hands over its text at the end yields one list, and then only end-to-end times are known of it.
`--baselines package.module:load` adds any such function.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from specdeft.bench.metrics import Run
from specdeft.bench.workbench import Workbench
from specdeft.config import GenerationConfig

Generate = Callable[[list[int], int, list[int]], Iterator[list[int]]]
Load = Callable[[Any, Any], Generate]


def load_economize(model: Any, _tokenizer: Any) -> Generate:
    """economize 0.3 with prompt lookup, its only drafter that needs no training; CUDA graphs on."""
    economize = import_module("economize")
    lookup = import_module("economize.techniques.lookup")
    rival = economize.apply(model, lookup.LookupConfig())
    decoding = economize.DecodeConfig(cycle_length=5, cuda_graphs=model.device.type == "cuda")

    def generate(
        prompt_ids: list[int], max_new_tokens: int, eos_ids: list[int]
    ) -> Iterator[list[int]]:
        prompt = torch.tensor(prompt_ids, device=model.device)
        result = rival.decode(prompt, max_new_tokens, decoding=decoding, stop=eos_ids or None)
        yield result.tokens.tolist()

    return generate


def load_flashspec(model: Any, _tokenizer: Any) -> Generate:
    """flashspec 0.3 with prompt lookup of up to 6 tokens, which needs no second model."""
    flashspec = import_module("flashspec")
    engine = import_module("flashspec.engine")
    sampling = flashspec.SamplingConfig(temperature=0.0, gamma=6)
    config = flashspec.FlashSpecConfig(
        device=str(model.device),
        drafter_strategy="bandit",
        bandit=flashspec.BanditConfig(n_arms=1),
        sampling=sampling,
    )
    target = engine.TargetModel("", model.device, model.dtype, model=model)
    rival = flashspec.SpeculativeEngine(config, [engine.NgramDrafter()], target)

    def generate(
        prompt_ids: list[int], max_new_tokens: int, eos_ids: list[int]
    ) -> Iterator[list[int]]:
        prompt = torch.tensor([prompt_ids], device=model.device)
        result = rival.generate(prompt, max_new_tokens=max_new_tokens, eos_token_ids=eos_ids)
        yield result.output_ids[0, : result.n_tokens_generated].tolist()

    return generate


RIVALS: dict[str, Load] = {"economize": load_economize, "flashspec": load_flashspec}


class RivalRow:
    """A rival on the model object that all rows share; greedy only."""

    is_ours = False

    def __init__(self, name: str, bench: Workbench) -> None:
        """Args: a name of `RIVALS` or "package.module:function"; what it runs on.

        Raises:
            ValueError: it is not installed, or there is no such function.
        """
        self.name = name
        self._generate = find_rival(name)(bench.model, bench.tokenizer)
        self._eos_ids = sorted(bench.eos_ids())
        self._clock = bench.clock

    def run(self, prompt_ids: Sequence[int], config: GenerationConfig) -> Run:
        """Generate.

        Raises:
            ValueError: a temperature above 0.
        """
        if not config.is_greedy or config.max_new_tokens is None:
            raise ValueError(f"{self.name} is compared at temperature 0 and a known length only")
        eos_ids = [] if config.ignore_eos else self._eos_ids
        token_ids: list[int] = []
        counts: list[int] = []
        emission_s: list[float] = []
        began = self._clock()
        for piece in self._generate(list(prompt_ids), config.max_new_tokens, eos_ids):
            emission_s.append(self._clock() - began)
            counts.append(len(piece))
            token_ids += piece
        e2e_s = self._clock() - began
        return Run(
            token_ids=tuple(token_ids),
            finish_reason="eos" if token_ids[-1] in eos_ids else "length",
            num_nodes=1,
            max_depth=max(counts) - 1 if len(counts) > 1 else 0,
            per_step_accepted=tuple(count - 1 for count in counts[1:]),
            emission_s=tuple(emission_s),
            e2e_s=e2e_s,
        )


def find_rival(name: str) -> Load:
    """The loading function of a rival.

    Raises:
        ValueError: it is not installed (how to install it is said), or there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        if name in RIVALS:
            import_module(name)
            return RIVALS[name]
        found: Load = getattr(import_module(module), function)
    except ImportError as error:
        package = module.split(".")[0]
        raise ValueError(
            f"the rival {name} cannot be imported ({error}): pip install {package}, or leave it out"
        ) from error
    except AttributeError as error:
        raise ValueError(
            f"the rival {name} has no function {function!r}: give package.module:function"
        ) from error
    return found
