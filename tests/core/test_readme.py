"""What the README shows exists: its commands parse, its Python compiles, its links lead on."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import specdeft
from specdeft import calibrate_command, cli, export_command, generate_command, tree_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PARSERS = {
    "calibrate": calibrate_command.parser,
    "export": export_command.parser,
    "generate": generate_command.parser,
    "tree": tree_command.parser,
}
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("|")[-1].strip()
    for language, block in BLOCKS
    if not language
    for line in block.splitlines()
    if re.search(r"(^|\| )specdeft ", line)
]


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    _, command, *arguments = shlex.split(line, comments=True)
    assert command in cli._COMMANDS
    if command in PARSERS:
        PARSERS[command]().parse_args(arguments)


@pytest.mark.parametrize("block", [block for language, block in BLOCKS if language == "python"])
def test_python_compiles_and_imports_public_names(block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module == "specdeft":
            assert {alias.name for alias in node.names} <= set(specdeft.__all__)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE))
    assert {"demo", "test", "check"} <= named
    assert {target for target in named if f"\n{target}:" not in makefile} == set()


def test_links_lead_to_files():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []
