"""The room stands alone: a fresh interpreter without triton and transformers imports all of it."""

import subprocess
import sys
from pathlib import Path

ROOM = Path(__file__).parents[2] / "trees"

PROGRAM = """
import importlib, sys
for name in ("triton", "transformers", "numpy"):
    sys.modules[name] = None
for module in sys.argv[1:]:
    importlib.import_module(f"specdeft.trees.{module}")
from specdeft.trees.named import named_tree
print(named_tree("deft-64").num_nodes)
"""


def test_every_module_imports_with_torch_alone() -> None:
    modules = [path.stem for path in ROOM.glob("*.py")]
    assert "plan" in modules
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *modules],
        cwd=ROOM.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "64\n"), done.stderr
