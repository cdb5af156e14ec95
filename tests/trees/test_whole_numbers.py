"""Numbers of any origin make the same tree; what is no whole number is named in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdeft.trees.request import tree_of
from specdeft.trees.token_tree import TokenTree
from specdeft.trees.whole_numbers import LARGEST, typed_number, whole_number

PARENTS, RANKS = [-1, 0, 1, 0], [-1, 0, 2, 1]
TREE = TokenTree.from_parents(PARENTS, RANKS)


@pytest.mark.parametrize("of", [np.array, torch.tensor, lambda x: list(map(np.int32, x)), iter])
def test_trees_of_numpy_and_torch_numbers_are_the_same(of: Callable[[list[int]], Any]) -> None:
    made = [
        TokenTree.from_parents(of(PARENTS), of(RANKS)),
        TokenTree(of(PARENTS), of(RANKS)),
        TokenTree.from_paths([of([0]), of([0, 2]), of([1])]),
    ]
    for tree in made:
        assert tree == TREE
        assert tree.content_hash == TREE.content_hash
        assert tree.to_json() == TREE.to_json()
        assert {type(number) for number in (*tree.parents, *tree.ranks)} == {int}
    assert TokenTree.full(of([2, 1])) == TokenTree.full([2, 1])
    assert TokenTree.chain(next(iter(of([3])))) == TokenTree.chain(3)


# Python itself cannot print these, and neither can pytest.
HUGE = 10**5000
MONSTERS = [pytest.param(HUGE, id="huge"), pytest.param(-HUGE, id="minus huge")]


@pytest.mark.parametrize("number", [0.0, 1.5, "1", None, True, [1], np.array([1, 2]), *MONSTERS])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: TokenTree.from_parents([-1, x]),
        lambda x: TokenTree.from_parents([-1, 0], [-1, x]),
        lambda x: TokenTree((-1, 0), (-1, x)),
        lambda x: TokenTree.from_paths([[x]]),
        lambda x: TokenTree.full([x]),
        TokenTree.chain,
        TREE.with_lookup,
    ],
)
def test_what_is_no_whole_number_is_named(make: Callable[[Any], TokenTree], number: Any) -> None:
    with pytest.raises(ValueError, match=r"give (a|one)|holds|ranks") as caught:
        make(number)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("values", [None, 3, 1.5])
def test_what_is_no_list_is_named(values: Any) -> None:
    with pytest.raises(ValueError, match="give a list of whole numbers"):
        TokenTree.from_parents(values)


@pytest.mark.parametrize(
    "request_",
    [
        *("9" * 12, "9" * 5000, "chain-" + "9" * 5000, "lookup-" + "9" * 12),
        *("4097", "chain-4096", "lookup-4096", "x" * 5000, "a\0b", True, MONSTERS[0]),
    ],
)
def test_requests_without_measure_are_one_sentence(request_: Any) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        tree_of(request_, None)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [f"[[{'9' * 6000}]]", f'{{"parents": [-1, {"9" * 6000}]}}', "[[99999999999]]", "[" * 100_000],
)
def test_files_with_monsters_are_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="tree file") as caught:
        TokenTree.load(file)
    assert len(str(caught.value)) < 400
    assert "set_int_max" not in str(caught.value)


def test_the_largest_number_is_one() -> None:
    assert whole_number(LARGEST, "it") == typed_number(f"000{LARGEST}", "it") == LARGEST
    assert typed_number("0", "it") == 0
    with pytest.raises(ValueError, match="bits"):
        whole_number(LARGEST + 1, "it")
