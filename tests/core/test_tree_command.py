"""`specdeft tree` as typed: what it draws, writes, and refuses in one sentence."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from specdeft.cli import main
from specdeft.trees.named import named_tree
from specdeft.trees.search import ReplayedTau, ValuedPaths
from specdeft.trees.token_tree import TokenTree

VALUES = ValuedPaths(
    ((0,), (0, 0), (1,), (2,)), (0.5, 0.3, 0.2, 0.1), (0.5, 0.3, 0.2), (0.3, 0.1, 0.15, 0.1)
)


@pytest.fixture
def values(tmp_path: Path) -> list[str]:
    VALUES.save(tmp_path / "tree_values.json")
    return ["--values", str(tmp_path)]


def run(arguments: list[str], capsys) -> str:
    assert main(["tree", *arguments]) == 0
    out: str = capsys.readouterr().out
    return out


def test_show_draws_a_tree_and_says_what_it_brings(values: list[str], capsys) -> None:
    out = run(["show", "4", "--lookup", "off", "--ascii", *values], capsys)
    assert out.startswith("o-+-0---0\n  `-1\n")
    assert "4 nodes, depth 2" in out
    assert "expected tau 2.00 tokens a step" in out
    # 0.5 by the chain, and 0.3 + 0.3 beside it, are more than the heads' 0.5 + 0.3 + 0.2.
    out = run(["show", "4", "--ascii", *values], capsys)
    assert out.startswith("o-+-=\n  `-0---0\n")
    assert "expected tau 2.10 tokens a step" in out


def test_what_lookup_brings_is_unknown_where_it_was_not_measured(tmp_path: Path, capsys) -> None:
    replace(VALUES, lookup=(), unlooked=()).save(tmp_path / "tree_values.json")
    values = ["--values", str(tmp_path)]
    *rows, why = run(["compare", "lookup-4", "3", "chain-1", *values], capsys).splitlines()[2:]
    assert [row.split()[-1] for row in rows] == ["-", "1.80", "1.50"]
    assert why == "-: unknown: these values know nothing of lookup, run specdeft calibrate"
    known = run(["compare", "3", "chain-1", *values], capsys)
    assert "unknown" not in known
    out = run(["show", "lookup-4", *values], capsys)
    assert "expected tau unknown: these values know nothing of lookup, run" in out


def test_search_lists_sizes_and_writes_the_tree_of_one(
    values: list[str], tmp_path: Path, capsys
) -> None:
    path = tmp_path / "best.json"
    out = run(["search", "--nodes", "5", "--output", str(path), *values], capsys)
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["2", "4", "8"]
    assert TokenTree.load(path).num_nodes == 5


def test_search_shows_what_replays_brought(tmp_path: Path, capsys) -> None:
    taus = tuple(
        ReplayedTau(heat, True, size, tau)
        for heat, size, tau in ((0.0, 2, 1.5), (0.0, 8, 2.5), (0.7, 2, 1.25), (0.7, 8, 2.0))
    )
    replace(VALUES, taus=taus).save(tmp_path / "tree_values.json")
    out = run(["search", "--values", str(tmp_path)], capsys)
    assert "replayed tau  T = 0     T = 0.7" in out
    rows = [line.split() for line in out.splitlines() if " nodes " in line and "tree" not in line]
    assert rows == [
        ["2", "nodes", "1.50", "1.25"],
        ["4", "nodes", "2.00", "1.62"],  # between two sizes by the logarithm
        ["8", "nodes", "2.50", "2.00"],
    ]


def test_compare_puts_trees_beside_each_other(values: list[str], capsys) -> None:
    out = run(["compare", "1", "chain-4", "deft-32", "lookup-2", *values], capsys)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[2:]}
    assert rows["1"] == ["1", "0", "0", "1", "0", "1.00"]
    assert rows["chain-4"][-1] == "1.80"
    assert rows["lookup-2"] == ["3", "2", "2", "1", "0", "1.80"]


def test_pictures(values: list[str], tmp_path: Path, capsys) -> None:
    svg = tmp_path / "tree.svg"
    run(["show", "deft-32", "--lookup", "on", "--output", str(svg), *values], capsys)
    root = ElementTree.fromstring(svg.read_text())
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == named_tree("deft-32").num_nodes + 8
    titles = [circle[0].text for circle in circles]
    assert titles[0] == "root: 100.0%"
    assert titles[1] == "lookup 1: 50.0%"
    pytest.importorskip("matplotlib")
    png = tmp_path / "tree.png"
    run(["show", "deft-32", "--output", str(png), *values], capsys)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_help_teaches(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["tree", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for word in ("root", "rank", "lookup", "tau", "show", "search", "compare", "Examples"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "none-such"], "there is no tree 'none-such'"),
        (["show", "0"], "empty"),
        (["show", "999"], "give a size from 1 to 8"),
        (["show", "lookup-3", "--lookup", "off"], "lookup is off"),
        (["show", "4", "--lookup", "maybe"], "give auto, on, off"),
        (["show", "4", "--output", "tree.gif"], "ends in .svg or .png"),
        (["search", "--output", "x.json"], "--output needs --nodes"),
        (["compare", "4", "--values", "nowhere"], "no calibrated values in nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], message: str, values: list[str], capsys
) -> None:
    given = arguments if "--values" in arguments else [*arguments, *values]
    assert main(["tree", *given]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_saved_tree_holds_what_a_file_may_hold(values: list[str], tmp_path: Path, capsys) -> None:
    path = tmp_path / "tree.json"
    run(["show", "lookup-4", "--output", str(path), *values], capsys)
    assert json.loads(path.read_text()) == {"paths": [], "lookup": 4}
    assert "lookup 4" in run(["show", str(path), *values], capsys)
