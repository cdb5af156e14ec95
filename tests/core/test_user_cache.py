"""The cache of built folders: whole or absent, checked, repaired aloud, built by one process."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdeft.user_cache import MANIFEST_NAME, CacheError, cache_root, cached_folder, damage

NEEDED_BYTES = 1000


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Build:
    """Writes two files and counts how often it ran."""

    def __init__(self):
        self.count = 0

    def __call__(self, folder: Path) -> None:
        self.count += 1
        (folder / "weights.bin").write_bytes(b"x" * 100)
        (folder / "sub").mkdir()
        (folder / "sub" / "config.json").write_text("{}")


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_builds_once_and_finds_again(root):
    build = Build()
    first = cached_folder("thing", build, needed_bytes=NEEDED_BYTES)
    second = cached_folder("thing", build, needed_bytes=NEEDED_BYTES, verify=True)
    assert first == second == root / "thing"
    assert build.count == 1
    assert names_in(root) == ["thing"]
    assert (first / "sub" / "config.json").read_text() == "{}"


def overwrite(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"y" * 100)


def truncate(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"x" * 99)


def remove(folder: Path) -> None:
    (folder / "sub" / "config.json").unlink()


def break_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text('{"files": {"weights.bin": 3}}')


@pytest.mark.parametrize("harm", [overwrite, truncate, remove, break_manifest])
def test_damage_is_said_and_repaired(root, harm, capsys):
    build = Build()
    folder = cached_folder("thing", build, needed_bytes=NEEDED_BYTES)
    harm(folder)
    assert damage(folder) is not None
    cached_folder("thing", build, needed_bytes=NEEDED_BYTES)
    assert build.count == 2
    assert damage(folder, verify=True) is None
    assert names_in(root) == ["thing"]
    assert "the cached thing is damaged" in capsys.readouterr().err


def test_only_the_full_check_reads_what_kept_size_and_time(root):
    folder = cached_folder("thing", Build(), needed_bytes=NEEDED_BYTES)
    weights = folder / "weights.bin"
    before = weights.stat()
    weights.write_bytes(b"y" * 100)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert damage(folder) is None
    assert damage(folder, verify=True) == "weights.bin does not match its checksum"


def test_a_copied_cache_is_hashed_once_and_kept(root):
    build = Build()
    folder = cached_folder("thing", build, needed_bytes=NEEDED_BYTES)
    manifest = (folder / MANIFEST_NAME).read_text()
    os.utime(folder / "weights.bin", ns=(1, 1))
    cached_folder("thing", build, needed_bytes=NEEDED_BYTES)
    assert build.count == 1
    assert (folder / MANIFEST_NAME).read_text() != manifest
    assert names_in(root) == ["thing"]


def test_a_failed_build_leaves_nothing(root):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("thing", fail, needed_bytes=NEEDED_BYTES)
    assert names_in(root) == []


def test_what_a_killed_build_left_is_removed(root):
    (root / "thing.partial-killed").mkdir(parents=True)
    cached_folder("thing", Build(), needed_bytes=NEEDED_BYTES)
    assert names_in(root) == ["thing"]


def test_too_little_space_is_one_sentence_before_anything_is_built(root):
    build = Build()
    with pytest.raises(CacheError, match=r"MB free and 1000000000000 MB are needed: free some"):
        cached_folder("thing", build, needed_bytes=10**18)
    assert build.count == 0
    assert names_in(root) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)"),
    ],
    ids=["system", "library"],
)
def test_a_disk_that_fills_during_the_build_leaves_nothing(root, error):
    def fill(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(CacheError, match=r"filled up, .* MB free and 0 MB are needed"):
        cached_folder("thing", fill, needed_bytes=NEEDED_BYTES)
    assert names_in(root) == []


def test_a_cache_that_is_no_directory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheError, match=r"cannot be written .*SPECDEFT_CACHE"):
        cached_folder("thing", Build(), needed_bytes=NEEDED_BYTES)


def test_other_errors_of_a_build_pass_through(root):
    def fail(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached_folder("thing", fail, needed_bytes=NEEDED_BYTES)


SLOW_BUILD = """
import sys, time
from specdeft.user_cache import cached_folder
def build(folder):
    (folder / "a").write_text("a")
    print("built", flush=True)
    time.sleep(float(sys.argv[1]))
cached_folder("thing", build, needed_bytes=1)
print("done", flush=True)
"""


def start_build(seconds: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SLOW_BUILD, str(seconds)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


def test_two_processes_build_once(root):
    first = start_build(1.0)
    assert first.stdout is not None
    assert first.stdout.readline() == "built\n"
    second = start_build(0.0)
    assert second.communicate(timeout=60)[0] == "done\n"
    assert first.communicate(timeout=60)[0] == "done\n"
    assert names_in(root) == ["thing"]


def test_a_killed_process_leaves_no_lock_behind(root):
    killed = start_build(600.0)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "built\n"
    killed.kill()
    killed.communicate(timeout=60)
    next_one = start_build(0.0)
    assert next_one.communicate(timeout=60)[0] == "built\ndone\n"
    assert names_in(root) == ["thing"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECDEFT_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "specdeft"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_root().is_relative_to(tmp_path)
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"
