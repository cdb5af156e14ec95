"""From what a user has (text, a chat, ids) to the token ids the target is given."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int] | Tensor


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, raw: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: the target's.
        prompt: text, a chat (messages with "role" and "content"), or token ids.
        raw: take text as it is instead of as a user's turn of a chat.

    Raises:
        ValueError: the prompt is empty, or is none of these.
    """
    if isinstance(prompt, Tensor):
        if prompt.is_floating_point() or prompt.squeeze().dim() > 1:
            raise ValueError(
                f"a prompt tensor must be one row of token ids, not {prompt.dtype} of shape "
                f"{tuple(prompt.shape)}: pass rows of a batch as a list"
            )
        ids = [int(token) for token in prompt.reshape(-1).tolist()]
    elif isinstance(prompt, str):
        ids = _encode_text(tokenizer, prompt, raw=raw)
    else:
        ids = _encode_items(tokenizer, list(prompt))
    if not ids:
        raise ValueError("the prompt is empty: give at least one character or token")
    return ids


def _encode_items(tokenizer: PreTrainedTokenizerBase, items: list[Any]) -> list[int]:
    if all(isinstance(item, Mapping) for item in items):
        return _encode_chat(tokenizer, [dict(item) for item in items])
    if all(isinstance(item, int) for item in items):
        return [int(item) for item in items]
    raise ValueError(
        "a prompt must be text, a list of messages, or token ids: got a list of mixed items"
    )


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, raw: bool) -> list[int]:
    if not text.strip() and not raw:
        raise ValueError("the prompt is empty: give at least one character")
    if raw or not tokenizer.chat_template:
        return [int(token) for token in tokenizer(text)["input_ids"]]
    return _encode_chat(tokenizer, [{"role": "user", "content": text}])


def _encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    if messages and not tokenizer.chat_template:
        raise ValueError(
            "messages were given but this tokenizer has no chat template: give plain text"
        )
    if not messages:
        return []
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return [int(token) for token in encoded["input_ids"]]
