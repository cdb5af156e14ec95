"""Text while it arrives: whole characters, nothing past a stop string, ids and text agree."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.text import TextAssembler


class Bytes:
    """A tokenizer of one byte a token; 256 and above are special and have no text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")


class Words:
    """A tokenizer of whole pieces."""

    pieces = ("a", "b", "ab", "<st", "op>", "<stop>", "x<", "stop>y", "", " ")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(self.pieces[token] for token in token_ids)


def feed(assembler: TextAssembler, tokens: Sequence[int]) -> list[str]:
    shown = []
    for token in tokens:
        stopped = assembler.push(token)
        shown.append(assembler.take())
        if stopped:
            break
    shown.append(assembler.finish())
    return shown


@given(st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_pieces_add_up_to_the_text(text: str) -> None:
    tokens = list(text.encode("utf-8", "ignore"))
    shown = feed(TextAssembler(Bytes()), tokens)
    assert "".join(shown) == bytes(tokens).decode()
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in shown)


def test_an_incomplete_character_is_shown_only_at_the_end() -> None:
    shown = feed(TextAssembler(Bytes()), [*b"ok ", 0xF0, 0x9F])
    assert "".join(shown[:-1]) == "ok "
    assert shown[-1] == "\ufffd"


def test_special_tokens_have_no_text_and_keep_their_ids() -> None:
    assembler = TextAssembler(Bytes())
    assert "".join(feed(assembler, [65, 300, 66])) == "AB"
    assert assembler.token_ids == [65, 300, 66]


@pytest.mark.parametrize(
    ("tokens", "text", "kept"),
    [
        ([0, 5, 1], "a", [0]),  # within one token
        ([0, 3, 4, 1], "a", [0]),  # across two
        ([0, 6, 7, 1], "ax", [0, 6]),  # the match starts inside a token that is kept
        ([5, 0], "", []),  # at the very start
        ([3, 0, 3, 4], "<sta", [3, 0]),  # a false start before it
        ([0, 3], "a<st", [0, 3]),  # never completed: held back, shown at the end
    ],
)
def test_stop_strings_cut_text_and_ids(tokens: list[int], text: str, kept: list[int]) -> None:
    assembler = TextAssembler(Words(), ("<stop>",))
    shown = feed(assembler, tokens)
    assert assembler.text == text
    assert assembler.token_ids == kept
    assert "".join(shown) == text  # streaming never showed what was later cut


@given(st.lists(st.integers(0, 9), max_size=12), st.sampled_from([("<stop>",), ("aba", "b ")]))
@settings(max_examples=200, deadline=None)
def test_the_cut_is_where_the_whole_text_has_its_first_match(
    tokens: list[int], stop: tuple[str, ...]
) -> None:
    assembler = TextAssembler(Words(), stop)
    shown = feed(assembler, tokens)
    whole = Words().decode(tokens, skip_special_tokens=True)
    # The first token whose arrival completes a match decides.
    for count in range(len(tokens) + 1):
        text = Words().decode(tokens[:count], skip_special_tokens=True)
        starts = [text.find(s) for s in stop if s in text]
        if starts:
            whole = text[: min(starts)]
            break
    assert assembler.text == whole
    assert "".join(shown) == whole
    kept = Words().decode(assembler.token_ids, skip_special_tokens=True)
    assert kept.startswith(whole)
    fewer = Words().decode(assembler.token_ids[:-1], skip_special_tokens=True)
    if assembler.stopped_by and assembler.token_ids:
        assert len(fewer) < len(whole)
