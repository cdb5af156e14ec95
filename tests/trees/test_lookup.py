"""Prompt lookup against a search in plain Python, and in cases that can be read by eye."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdeft.trees.lookup import MAX_MATCH, look_up

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=70)


def searched(text: list[int], num_tokens: int, max_match: int) -> list[int]:
    """The same guess, found by comparing every earlier place with the end, token by token."""
    last = len(text) - 1
    best = (0, last - 1)
    for place in range(last):
        agreeing = 0
        while agreeing < min(max_match, place + 1) and (
            text[place - agreeing] == text[last - agreeing]
        ):
            agreeing += 1
        best = max(best, (agreeing, place))
    behind = text[best[1] + 1 :] if last else text
    return [behind[index % len(behind)] for index in range(num_tokens)]


def guess(
    texts: list[list[int]], num_tokens: int, max_match: int, junk: int = 1
) -> list[list[int]]:
    """Texts as a batch: each is followed by junk that must not be read."""
    width = max(map(len, texts)) + 5
    history = torch.tensor([text + [junk] * (width - len(text)) for text in texts])
    lengths = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
    return look_up(history, lengths, num_tokens, max_match).tolist()


@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 9))
def test_equals_a_plain_search(texts: list[list[int]], num_tokens: int, max_match: int) -> None:
    expected = [searched(text, num_tokens, max_match) for text in texts]
    assert guess(texts, num_tokens, max_match) == expected
    # What stands behind a text, however tempting, changes nothing.
    assert guess(texts, num_tokens, max_match, junk=texts[0][-1]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3]),  # copied, then from its own beginning
        ([1, 2, 7, 2, 8, 1, 2], [7, 2, 8, 1, 2]),  # a longer match beats a later one
        ([5, 6, 9, 5, 7, 9, 5], [7, 9, 5, 7, 9]),  # the later of two as long
        ([4, 4, 4], [4, 4, 4, 4, 4]),
        ([1, 2, 3], [3, 3, 3, 3, 3]),  # nothing matches
        ([8], [8, 8, 8, 8, 8]),
    ],
)
def test_by_eye(text: list[int], expected: list[int]) -> None:
    assert guess([text], 5, MAX_MATCH) == [expected]


def test_a_long_text_is_searched_to_its_beginning() -> None:
    text = torch.randperm(8191, generator=torch.Generator().manual_seed(0)).tolist()
    assert guess([[*text, *text[:3]]], 4, MAX_MATCH) == [text[3:7]]
