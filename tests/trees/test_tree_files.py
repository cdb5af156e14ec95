"""Tree files and named trees: published counts, round trips, one sentence for each bad file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdeft.trees.named import NAMED_TREES, named_tree
from specdeft.trees.token_tree import TokenTree


@pytest.mark.parametrize(
    ("name", "nodes_per_depth", "num_leaves", "top_k"),
    [
        ("deft-32", (1, 4, 8, 16, 3), 17, 4),
        ("deft-64", (1, 10, 28, 23, 2), 42, 10),
        ("deft-128", (1, 5, 20, 80, 22), 96, 5),
        ("chain-4", (1, 1, 1, 1, 1), 1, 1),
    ],
)
def test_named_trees_have_the_published_counts(
    name: str, nodes_per_depth: tuple[int, ...], num_leaves: int, top_k: int
) -> None:
    tree = named_tree(name)
    assert name in NAMED_TREES
    assert tree.nodes_per_depth == nodes_per_depth
    assert (tree.num_leaves, tree.top_k) == (num_leaves, top_k)


def test_names_are_unique_by_content() -> None:
    assert len({named_tree(name).content_hash for name in NAMED_TREES}) == len(NAMED_TREES)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no tree named 'deft-65'.*deft-32, deft-64, deft-128"):
        named_tree("deft-65")


def test_the_data_file_holds_the_same_trees() -> None:
    source = Path(__file__).parents[3] / "shared/data/deft_trees/token_trees.json"
    if not source.exists():
        pytest.skip("the shared data folder is not beside this checkout")
    for size, paths in json.loads(source.read_text())["token_trees"].items():
        assert TokenTree.from_paths(paths) == named_tree(f"deft-{size}")


@pytest.mark.parametrize("name", NAMED_TREES)
def test_saved_trees_load_equal(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    named_tree(name).save(path)
    assert TokenTree.load(path) == named_tree(name)
    assert [file.name for file in tmp_path.iterdir()] == ["tree.json"]


@pytest.mark.parametrize(
    "text",
    [
        "[[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]",
        '{"widths": [2, 2]}',
        '{"parents": [-1, 0, 0, 1, 1, 2, 2]}',
        '{"parents": [-1, 0, 0, 1, 1, 2, 2], "ranks": [-1, 1, 0, 0, 1, 1, 0]}',
    ],
    ids=["list", "widths", "parents", "parents with ranks"],
)
def test_the_forms_of_a_tree_file(text: str) -> None:
    assert TokenTree.from_json(text) == TokenTree.full([2, 2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is not valid JSON"),
        ("[[0],\n[1,,]]", "line 2 is not valid JSON"),
        ("7", "holds a int"),
        ('{"paths": 3}', "paths is a int"),
        ("[0, 1]", "path 0 is a int"),
        ("[[0], [0.5]]", "path 1 holds 0.5; write whole numbers only"),
        ("[[0], [true]]", "path 1 holds true"),
        ("[[0], [0]]", r"path \[0\] is listed twice"),
        ('{"nodes": []}', "must have one of the keys paths, widths, parents; it has none"),
        ('{"paths": [], "widths": []}', "it has paths and widths"),
        ('{"paths": [], "top_k": 3}', "key 'top_k' is not known"),
        ('{"paths": [], "ranks": []}', "ranks go with parents"),
        ('{"parents": []}', "no nodes"),
        ('{"parents": [-1, 2, 1]}', "form a cycle"),
        ('{"parents": [-1, 2, 0]}', "stands before its parent"),
        ("[" * 100_000, "nested too deeply|not valid JSON"),
    ],
)
def test_a_bad_file_is_named_with_its_problem(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        TokenTree.load(path)
    assert f"tree file {path} is not a token tree: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        TokenTree.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        TokenTree.load(tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.json is not a token tree"):
        TokenTree.load(binary)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tree.json"
    named_tree("chain-4").save(path)

    def full_disk(*_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        named_tree("deft-32").save(path)
    monkeypatch.undo()
    assert TokenTree.load(path) == named_tree("chain-4")
    assert [file.name for file in tmp_path.iterdir()] == ["tree.json"]
