"""`model.generate(**inputs, custom_generate=decoder)`: speculative decoding inside transformers.

transformers prepares the generation config and hands everything over; what changes the result and
is not supported is refused by name, never ignored. The cache it has made is dropped: ours is used.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig as HFGenerationConfig
from transformers import PreTrainedModel

from specdeft.config import GenerationConfig
from specdeft.result import GenerationResult

# What these do follows from the generation config and is done by our sampler.
_KNOWN_PROCESSORS = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"}
_KNOWN_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "return_dict_in_generate": (None, False),
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
}


class _Decoder(Protocol):
    model: PreTrainedModel

    def generate(self, prompt: Any, **settings: Any) -> Any:
        """See `SpecDecoder.generate`."""


def generate_rows(
    decoder: _Decoder,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: HFGenerationConfig,
    attention_mask: Tensor | None,
) -> Tensor:
    """Prompt and new ids [B, T + most new tokens], short rows padded at the end.

    Args:
        decoder: a `SpecDecoder` of ``model``.
        model: the model whose `generate` was called.
        input_ids: [B, T] int64, padded at the left where ``attention_mask`` [B, T] is 0.
        logits_processor, stopping_criteria, generation_config, attention_mask: as transformers
            prepared them.

    Raises:
        ValueError: something that would change the text is not supported; it is named.
    """
    if model is not decoder.model:
        raise ValueError(
            "custom_generate was given a decoder of another model: build it from this one"
        )
    _refuse_others(logits_processor, _KNOWN_PROCESSORS, "logits processor")
    _refuse_others(stopping_criteria, _KNOWN_CRITERIA, "stopping criterion")
    for name, plain in _PLAIN_VALUES.items():
        value = getattr(generation_config, name, None)
        if value not in plain:
            raise ValueError(
                f"{name}={value} is not supported by speculative decoding: leave it out"
            )
    config = _config_of(generation_config, input_ids.shape[1])
    kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
    if kept.shape != input_ids.shape or bool((kept.diff(dim=1) < 0).any()):
        raise ValueError(
            "the attention mask must mark padding at the left only: pad prompts on the left"
        )
    rows = [row[mask.bool()] for row, mask in zip(input_ids, kept, strict=True)]
    results: list[GenerationResult] = decoder.generate(rows, config=config)
    return _padded(input_ids, results, generation_config)


def _config_of(config: HFGenerationConfig, num_prompt_tokens: int) -> GenerationConfig:
    max_new_tokens = config.max_new_tokens or config.max_length - num_prompt_tokens
    eos = config.eos_token_id
    eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    if not config.do_sample:
        return GenerationConfig(max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
    # The seed comes from torch's own stream, so torch.manual_seed governs it as in any generate.
    seed = int(torch.randint(2**62, ()))
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        temperature=float(1.0 if config.temperature is None else config.temperature),
        top_k=config.top_k or None,
        top_p=1.0 if config.top_p is None else float(config.top_p),
        seed=seed,
        eos_token_ids=eos_token_ids,
    )


def _refuse_others(given: Any, known: set[str], kind: str) -> None:
    for item in given or ():
        name = type(item).__name__
        if name not in known:
            raise ValueError(
                f"the {kind} {name} is not supported by speculative decoding: leave out the "
                "setting that asks for it"
            )


def _padded(
    input_ids: Tensor, results: list[GenerationResult], config: HFGenerationConfig
) -> Tensor:
    width = max(len(result.token_ids) for result in results)
    eos = config.eos_token_id
    filler = config.pad_token_id
    if filler is None:
        filler = eos[0] if isinstance(eos, list) else eos
    new = torch.full((len(results), width), int(filler or 0), dtype=input_ids.dtype)
    for row, result in zip(new, results, strict=True):
        row[: len(result.token_ids)] = torch.tensor(result.token_ids, dtype=input_ids.dtype)
    return torch.cat([input_ids, new.to(input_ids.device)], dim=1)
