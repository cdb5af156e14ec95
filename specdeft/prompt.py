"""From what a user has (text, a chat, ids) to the token ids the target is given."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
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
    if isinstance(prompt, str):
        ids = _encode_text(tokenizer, prompt, raw=raw)
    elif isinstance(prompt, Tensor) or hasattr(prompt, "__array__"):
        ids = _row_of_ids(torch.as_tensor(prompt))
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        ids = _encode_items(tokenizer, list(prompt))
    else:
        raise ValueError(
            f"a prompt cannot be {type(prompt).__name__}: give text, a list of messages, or "
            "token ids"
        )
    if not ids:
        raise ValueError("the prompt is empty: give at least one character or token")
    return ids


def _row_of_ids(ids: Tensor) -> list[int]:
    is_row = ids.dim() == 1 or (ids.dim() == 2 and ids.shape[0] == 1)
    if not is_row or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(
            f"a prompt tensor must be one row of token ids, not {ids.dtype} of shape "
            f"{tuple(ids.shape)}: pass rows of a batch as a list"
        )
    return [int(token) for token in ids.reshape(-1).tolist()]


def _encode_items(tokenizer: PreTrainedTokenizerBase, items: list[Any]) -> list[int]:
    if all(isinstance(item, Mapping) for item in items):
        return _encode_chat(tokenizer, [dict(item) for item in items])
    if all(isinstance(item, str) for item in items):
        raise ValueError(
            "a list of texts is a batch, and one prompt is taken here: give a list to generate, or "
            "its prompts one by one"
        )
    try:
        if any(isinstance(item, bool) for item in items):
            raise TypeError
        return [operator.index(item) for item in items]
    except TypeError as error:
        raise ValueError(
            "a prompt must be text, a list of messages, or token ids: got a list of mixed items"
        ) from error


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
    try:
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except Exception as error:  # a template is a program of its own and raises what it likes
        raise ValueError(
            f"the model's chat template refuses these messages ({error}): check their roles and "
            "contents"
        ) from error
    return [int(token) for token in encoded["input_ids"]]
