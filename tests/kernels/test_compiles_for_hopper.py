"""The kernels compile for sm_90 without a GPU: no spills, the matrix units that were meant."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED_OF_AN_SM = 228 << 10
REGISTERS_OF_AN_SM = 65536


def test_main_configurations_fit_and_do_not_spill() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 22
    # The wide kernel at D = 256 keeps two words on the stack under Triton 3.9, none under 3.6; both
    # are written once, before the parts separate. With a prefix it keeps ten, or twelve under 3.6.
    assert found.pop("hopper-wide-256")["stack"] <= 8
    assert found.pop("hopper-wide-256-prefix")["stack"] <= 48
    assert all(row["stack"] == 0 for row in found.values()), found
    for name in ("flatten-64", "hopper-64", "hopper-256", "hopper-wide-128", "hopper-128-prefix"):
        assert found[name]["hgmma"] > 0, name
    assert found["flatten-16"]["hmma"] > 0
    # Two programs of 128 threads on an SM.
    for name in ("flatten-64", "hopper-128", "hopper-128-prefix", "hopper-long-64"):
        assert 2 * (found[name]["shared"] + 1024) <= SHARED_OF_AN_SM, name
        assert 2 * 128 * found[name]["registers"] <= REGISTERS_OF_AN_SM, name
