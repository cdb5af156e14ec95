"""Drawings compared as whole pictures."""

import pytest

from specdeft.trees.named import named_tree
from specdeft.trees.token_tree import TokenTree

TREE = TokenTree.from_paths([(0,), (0, 0), (0, 2), (0, 2, 1), (1,), (1, 0), (3,)])


def lines(text: str) -> list[str]:
    return text.split("\n")


def test_ranks_in_box_characters() -> None:
    assert lines(TREE.draw()) == [
        "●─┬─0─┬─0",
        "  │   └─2───1",
        "  ├─1───0",
        "  └─3",
    ]


def test_ranks_in_ascii() -> None:
    assert lines(TREE.draw(ascii_only=True)) == [
        "o-+-0-+-0",
        "  |   `-2---1",
        "  |-1---0",
        "  `-3",
    ]


def test_labels_are_aligned_by_terminal_columns_and_cannot_tear_the_picture() -> None:
    labels = ["The", "世界", "a\n", "big", "sky", "b", "c", "d"]
    assert lines(TREE.draw(labels)) == [
        "The─┬─世界─┬─a\\n",
        "    │      └─big───sky",
        "    ├─b──────c",
        "    └─d",
    ]
    assert TREE.draw(labels, ascii_only=True).isascii()


def test_one_line_for_every_leaf() -> None:
    for name in ("deft-32", "deft-64", "deft-128"):
        tree = named_tree(name)
        assert len(lines(tree.draw())) == tree.num_leaves
    assert TokenTree.chain(0).draw() == "●"
    assert TokenTree.chain(2).draw() == "●───0───0"


def test_wrong_number_of_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="2 labels for 8 nodes"):
        TREE.draw(["a", "b"])


def test_summary_names_size_and_content() -> None:
    assert named_tree("deft-64").summary() == (
        "64 nodes, depth 4 (10/28/23/2), 42 leaves, top-10, " + named_tree("deft-64").content_hash
    )
    assert "root only" in TokenTree.chain(0).summary()
