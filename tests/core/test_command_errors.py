"""Mistakes on the command line: one sentence with the remedy on standard error, exit code 2."""

import re
from pathlib import Path
from typing import Any

import pytest

from specdeft.cli import main

ROOT = Path(__file__).parents[2]
ROOMS = ("trees", "kernels", "heads", "specdeft", "bench")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("generate a --max-new-tokens abc", "--max-new-tokens takes a whole number, not 'abc'"),
        ("generate a --max-new-tokens 1.5", "--max-new-tokens takes a whole number, not '1.5'"),
        ("generate a --max-new-tokens " + "9" * 9000, "--max-new-tokens takes a whole number"),
        ("generate a --temperature warm", "--temperature takes a number, not 'warm'"),
        ("generate a --nothing", "unrecognized arguments: --nothing"),
        ("train --model a", "required: --output"),
        ("train --model a --output b --epochs x", "--epochs takes a whole number, not 'x'"),
        ("export a --to x --out b", "argument --to: invalid choice: 'x'"),
        ("tree show", "required: TREE"),
        ("bench latency --num-prompts x", "--num-prompts takes a whole number, not 'x'"),
        ("bench nothing", "invalid choice: 'nothing'"),
        ("nothing", "invalid choice: 'nothing'"),
        ("", "required: COMMAND"),
    ],
)
def test_one_sentence_and_exit_code_2(arguments: str, sentence: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1
    assert len(err) < 400
    assert re.search(r"\(specdeft.* --help lists the options\)$", err.strip())


def test_every_parser_is_of_that_kind() -> None:
    found = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if "ArgumentParser(" in path.read_text(encoding="utf-8")
    ]
    assert found == []
