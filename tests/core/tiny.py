"""Small random models of the supported families, a byte tokenizer, heads that follow a script."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

VOCAB_SIZE = 97
WINDOW = 8
MAX_POSITIONS = 256
EOS_ID = 96

_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "attn_logit_softcapping": 0.5,
            "query_pre_attn_scalar": 16,
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def tiny_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A random model whose greedy text varies; every call builds its own config (they are shared
    with the model otherwise, and so is the attention choice). ``changes`` are the config's."""
    kind, extra = _FAMILIES[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**_SHARED, **extra, **changes})
    attention = "eager" if family in ("gemma2", "gpt-oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)  # the default is so small that every text is one token repeated
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))  # norms, biases, sinks
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=0)
    return model.to(dtype)


class ByteTokenizer:
    """Ids are characters from "!" on; no chat template; the surface the decoder needs."""

    eos_token_id = EOS_ID
    chat_template: str | None = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [min(ord(letter) - 32, VOCAB_SIZE - 2) for letter in text]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        kept = [token for token in token_ids if not (skip_special_tokens and token == EOS_ID)]
        return "".join(chr(32 + int(token)) for token in kept)


@dataclass
class ScriptedHeads(nn.Module):
    """Heads that know the plain continuation and propose it with planned mistakes.

    At step s the right tokens stand on ``path[:lengths[s]]`` (ranks of one path of the tree), and
    everything else is wrong, so exactly ``lengths[s]`` drafted tokens are accepted.
    """

    continuation: Sequence[int]
    path: Sequence[int]
    lengths: Sequence[int]
    num_heads: int = 5
    step: int = 0
    at: int = 0
    config: Any = field(init=False)

    def __post_init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_heads=self.num_heads, num_logits=VOCAB_SIZE, sequential=False
        )

    def __hash__(self) -> int:
        return id(self)

    def draft(
        self,
        hidden: Tensor,
        root: Tensor,
        embed: nn.Module,
        output_layer: nn.Module,
        top_k: int,
        best: Any = None,
    ) -> Tensor:
        assert int(root) == self.continuation[self.at], "the script and the decoding drifted apart"
        length = self.lengths[self.step % len(self.lengths)]
        tokens = torch.empty(self.num_heads, top_k, dtype=torch.int64)
        for head in range(self.num_heads):
            index = self.at + 1 + head
            right = self.continuation[index] if index < len(self.continuation) else 0
            wrong = [token for token in range(VOCAB_SIZE) if token != right][:top_k]
            tokens[head] = torch.tensor(wrong)
            if head < min(length, len(self.path)):
                tokens[head, self.path[head]] = right
        self.step += 1
        self.at += 1 + min(length, len(self.path))
        return tokens[None]


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """A random prompt without the end-of-text token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, EOS_ID, (length,), generator=generator).tolist()


def hf_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' own generate gives."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


class DeviceScriptedHeads(nn.Module):
    """`ScriptedHeads` without a host: its script advances on the device, so a CUDA graph holds it.

    ``reset`` starts the script over; capturing runs steps of its own, so reset after it.
    """

    def __init__(
        self, continuation: Sequence[int], path: Sequence[int], lengths: Sequence[int], device: Any
    ) -> None:
        super().__init__()
        num_heads = 5
        self.config = SimpleNamespace(num_heads=num_heads, num_logits=VOCAB_SIZE, sequential=False)
        # Past the known text anything goes: those tokens are cut.
        padded = [*continuation, *[1] * 64]
        self.continuation = torch.tensor(padded, device=device)
        self.path = torch.tensor([*path, *[0] * (num_heads - len(path))], device=device)
        self.script = torch.tensor(lengths, device=device).clamp(max=len(path))
        self.head = torch.arange(num_heads, device=device)
        self.at = torch.zeros((), dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)

    def reset(self) -> None:
        self.at.zero_()
        self.step.zero_()

    def draft(
        self,
        hidden: Tensor,
        root: Tensor,
        embed: nn.Module,
        output_layer: nn.Module,
        top_k: int,
        best: Any = None,
    ) -> Tensor:
        length = self.script.index_select(0, (self.step % len(self.script))[None])
        last = len(self.continuation) - 1
        right = self.continuation.index_select(0, (self.at + 1 + self.head).clamp(max=last))
        rank = torch.arange(top_k, device=root.device)
        wrong = (right[:, None] + 1 + rank) % VOCAB_SIZE
        hit = (rank == self.path[:, None]) & (self.head < length)[:, None]
        self.at += 1 + length[0]
        self.step += 1
        return torch.where(hit, right[:, None], wrong)[None]


class SuccessorHeads(nn.Module):
    """Heads without a state: what followed a token in known texts is guessed to follow it again.

    The guess depends on the root alone, so it is the same in a batch and alone, and a CUDA graph
    holds it; being right now and wrong then, it makes the lengths of a batch drift apart.
    """

    def __init__(self, texts: Sequence[Sequence[int]], device: Any = "cpu") -> None:
        super().__init__()
        self.config = SimpleNamespace(num_heads=5, num_logits=VOCAB_SIZE, sequential=False)
        seen: dict[int, list[int]] = {token: [] for token in range(VOCAB_SIZE)}
        for text in texts:
            for token, successor in pairwise(text):
                if successor not in seen[token]:
                    seen[token].append(successor)
        # By token, all tokens: those seen behind it first.
        rows = [
            [*seen[token], *(other for other in range(VOCAB_SIZE) if other not in seen[token])]
            for token in range(VOCAB_SIZE)
        ]
        self.table = torch.tensor(rows, device=device)

    def draft(
        self,
        hidden: Tensor,
        root: Tensor,
        embed: nn.Module,
        output_layer: nn.Module,
        top_k: int,
        best: Any = None,
    ) -> Tensor:
        heads, token = [], root
        for _ in range(self.config.num_heads):
            ranked = self.table.index_select(0, token)
            heads.append(ranked[:, :top_k])
            token = ranked[:, 0]
        return torch.stack(heads, dim=1)
