"""Prompt lookup: what followed the same words earlier in the text is guessed to follow again.

The last n tokens of a text are looked for earlier in it, the longest match first and the latest of
equally long ones; the tokens behind that place are the guess. Everything is index arithmetic on
static shapes: the lengths stay on the device and nothing waits for the host.

Source of the idea: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_MATCH = 4  # tokens compared: longer matches are told apart by recency, at no loss of tau


def look_up(
    history: Tensor, lengths: Tensor, num_tokens: int, max_match: int = MAX_MATCH
) -> Tensor:
    """The tokens guessed to follow each text, int64 [B, num_tokens].

    history: int64 [B, C], tokens by position. lengths: int [B], the position of the last token of
    each text; what stands behind it is not read. A guess that reaches the end of its text goes on
    with its own beginning: a text that repeats itself is continued. Where nothing matches, the last
    token is repeated: a legal guess like any other.
    """
    last = lengths.to(torch.int64)[:, None]
    found = _latest_longest_match(history, last, max_match)
    period = last - found
    ahead = torch.arange(num_tokens, device=history.device)
    source = found + 1 + ahead % period.clamp(min=1)
    return history.gather(1, torch.minimum(source, last))  # a text of one token has nothing before


def _latest_longest_match(history: Tensor, last: Tensor, max_match: int) -> Tensor:
    """int64 [B, 1]: the place before ``last`` [B, 1] whose tokens up to it agree longest with those
    up to ``last``, the latest of several; ``last`` - 1 where no token agrees."""
    num_places = history.shape[1]
    place = torch.arange(num_places, device=history.device)
    back = torch.arange(max_match, device=history.device)
    # Outside the text stand numbers that are no tokens: -1 on one side, -2 on the other.
    suffix = history.gather(1, (last - back).clamp(min=0)).masked_fill(back > last, -2)
    padded = torch.nn.functional.pad(history, (max_match, 0), value=-1)
    agrees = place < last
    length = torch.zeros_like(history)
    for step in range(max_match):
        start = max_match - step
        agrees = agrees & (padded[:, start : start + num_places] == suffix[:, step : step + 1])
        length += agrees
    # A longer match beats every place; places are told apart by being later.
    score = length * num_places + torch.where(place < last, place, -1)
    return score.argmax(dim=1, keepdim=True)
