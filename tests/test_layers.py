"""The rule of the house: who may import whom, and what an import may do.

    trees  <-  kernels | heads (side by side, they never meet)  <-  specdeft  <-  bench, commands

Read from the syntax trees, so that an import inside a function counts too; what importing does is
tried in fresh processes.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("trees", "kernels", "heads", "bench")

# The rooms that a module of a room may import from.
MAY_IMPORT = {
    "trees": {"trees"},
    "kernels": {"kernels", "trees"},
    "heads": {"heads", "trees"},
    "core": {"core", "kernels", "heads", "trees"},
    "bench": {"bench", "core", "kernels", "heads", "trees"},
    # Commands reach bench by name only, when they are called (see below).
    "commands": {"commands", "core", "kernels", "heads", "trees"},
}
# All of trees that a kernel knows: the index arrays it reads.
TREES_FOR_KERNELS = {"specdeft.trees.plan"}
# What a room must do without.
MUST_NOT_USE = {
    "trees": {"triton", "transformers", "safetensors"},
    "kernels": {"transformers"},
    "heads": {"triton"},
    "core": {"triton"},
    "commands": {"triton"},
    "bench": set[str](),
}
# Clocks belong to bench and the commands. The others say why they have one.
CLOCKS = {
    "specdeft.decoder": "result.stats says what the user waited; the clock is an argument",
    "specdeft.step_cost": "the tree is chosen by the measured cost of a step",
    "specdeft.heads.trainer": "the training record states its duration",
    "specdeft.heads.default_heads": "the training record states the duration of each stage",
    "specdeft.heads.self_generate": "progress of a run of many minutes",
}


def room_of(module: str) -> str:
    parts = module.split(".")
    if len(parts) > 2 and parts[1] in ROOMS:
        return parts[1]
    return "commands" if re.fullmatch(r"cli|__main__|\w+_command", parts[-1]) else "core"


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the product by its full name."""
    paths = {path: f"specdeft.{path.stem}" for path in (ROOT / "specdeft").glob("*.py")}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            inner = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            paths[path] = f"specdeft.{inner}"
    return {name: ast.parse(path.read_text(encoding="utf-8")) for path, name in paths.items()}


def imported(node: ast.AST) -> Iterator[str]:
    """The full names one statement imports; modules of ours are named down to the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import in line {node.lineno}"
        assert node.module is not None
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in modules() or node.module == "specdeft" else node.module


def all_imports(module: str) -> set[str]:
    return {name for node in ast.walk(modules()[module]) for name in imported(node)}


def imports_at_start(body: list[ast.stmt]) -> Iterator[str]:
    """What runs when the module is imported: neither function bodies nor TYPE_CHECKING blocks."""
    for node in body:
        yield from imported(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_at_start(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from imports_at_start(node.body)
            for handler in getattr(node, "handlers", []):
                yield from imports_at_start(handler.body)
            yield from imports_at_start(getattr(node, "orelse", []))


def test_imports_point_one_way():
    breaches = [
        f"{module} imports {name}"
        for module in modules()
        if module != "specdeft.__init__"
        for name in all_imports(module)
        if name.startswith("specdeft.") and name != "specdeft.__version__"
        if room_of(name) not in MAY_IMPORT[room_of(module)]
    ]
    assert breaches == []


def test_kernels_know_of_trees_only_the_plan():
    breaches = [
        f"{module} imports {name}"
        for module in modules()
        if room_of(module) == "kernels"
        for name in all_imports(module)
        if name.startswith("specdeft.trees.") and name not in TREES_FOR_KERNELS
    ]
    assert breaches == []


def test_each_room_does_without_what_is_not_its_own():
    breaches = [
        f"{module} imports {name}"
        for module in modules()
        for name in all_imports(module)
        if name.split(".")[0] in MUST_NOT_USE[room_of(module)] | {*ROOMS, "tests"}
    ]
    assert breaches == []


def test_only_commands_and_public_names_are_reached_by_name():
    breaches = [
        f"{module}, line {node.lineno}"
        for module, tree in modules().items()
        if room_of(module) not in ("commands", "bench") and module != "specdeft.__init__"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
    ]
    assert breaches == []


def test_no_module_waits_for_itself():
    graph = {m: set(imports_at_start(t.body)) & set(modules()) for m, t in modules().items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def has_clock(tree: ast.Module) -> bool:
    names = {name for node in ast.walk(tree) for name in imported(node)}
    keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    return bool(names & {"time", "datetime", "timeit"}) or "enable_timing" in keywords


def test_only_bench_and_commands_have_a_clock():
    clocks = {
        module
        for module, tree in modules().items()
        if room_of(module) not in ("bench", "commands") and has_clock(tree)
    }
    assert clocks - set(CLOCKS) == set()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_relative_links_to_namespace_folders(room):
    link = ROOT / "specdeft" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room
    # With this file the folder would shadow any other top-level package of that name.
    assert list((ROOT / room).rglob("__init__.py")) == []


def run_without(blocked: tuple[str, ...], code: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a fresh interpreter in which the packages ``blocked`` are not installed."""
    preamble = f"""
import sys
class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.split(".")[0] in {blocked!r} else self.finder.find_spec(name, *rest)
    def __getattr__(self, name): return getattr(self.finder, name)
sys.meta_path = [Without(finder) for finder in sys.meta_path]
"""
    command = [sys.executable, "-c", preamble + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def import_all(names: list[str]) -> str:
    return "".join(f"import {name}\n" for name in sorted(names))


def test_trees_import_without_triton_and_transformers():
    names = [module for module in modules() if room_of(module) == "trees"]
    assert "specdeft.trees.token_tree" in names
    result = run_without(("triton", "transformers"), import_all(names))
    assert result.returncode == 0, result.stderr


def test_kernel_room_imports_without_triton_but_for_the_kernel_files():
    names = [
        module
        for module, tree in modules().items()
        if room_of(module) == "kernels"
        and not any(name.split(".")[0] == "triton" for name in imports_at_start(tree.body))
    ]
    assert {"specdeft.kernels.reference", "specdeft.kernels.cpu"} <= set(names)
    result = run_without(("triton", "transformers"), import_all(names))
    assert result.returncode == 0, result.stderr


def test_the_decoder_imports_without_triton():
    result = run_without(("triton",), "import specdeft.decoder, specdeft.cli")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["specdeft", "specdeft.cli"])
def test_the_package_and_its_command_import_nothing_heavy(name):
    heavy = ("torch", "triton", "transformers", "numpy")
    code = f"import {name}, sys; print([n for n in {heavy!r} if n in sys.modules])"
    assert run_without((), code).stdout == "[]\n"


def test_every_test_module_has_a_test():
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    empty = [
        path.name
        for path in paths
        if not any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    assert empty == []


def test_test_files_have_names_of_their_own():
    counts = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    shared = {name for name, count in counts.items() if count > 1}
    assert shared <= {"conftest.py"}  # the one name that pytest itself gives to several
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout: no list of tracked files")
    names = listing.stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_path_of_one_machine():
    # Assembled, so that this file does not hold what it looks for.
    homes = "|".join(["work", "root", "farm", "Users", "home/[a-z]"])
    pattern = re.compile(rf"(?<![\w.])/(?:{homes})/|/tm[p]/[a-z]")
    hits = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content:
            hits += [
                f"{path.relative_to(ROOT)}: {line.strip()[:80]}"
                for line in content.decode("utf-8").splitlines()
                if pattern.search(line)
            ]
    assert hits == []
