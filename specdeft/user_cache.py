"""Folders that are costly to make, kept in the user's cache: made once, whole or not at all.

A folder is built under a temporary name beside its final place and renamed when it is complete,
so a reader never sees half of it. ``manifest.json`` inside holds size, modification time and
SHA-256 of every file. A start compares sizes and times (microseconds); where a time differs, or on
request, the contents are read and hashed.

The place is ``SPECDEFT_CACHE``, else the platform's cache directory.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm import tqdm

MANIFEST_NAME = "manifest.json"


class CacheError(ValueError):
    """The cache cannot be used; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of one file."""

    size: int  # bytes
    mtime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, sha256_of(path))


def cache_root() -> Path:
    """The directory specdeft keeps its files in; it need not exist yet."""
    if chosen := os.environ.get("SPECDEFT_CACHE"):
        return Path(chosen).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    if Path(xdg).is_absolute():
        return Path(xdg) / "specdeft"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specdeft"
    return Path.home() / ".cache" / "specdeft"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's contents, as hexadecimal digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def cached_folder(
    name: str,
    build: Callable[[Path], None],
    *,
    needed_bytes: int,
    verify: bool = False,
) -> Path:
    """Return the complete folder ``name`` of the cache, building it where it is missing or damaged.

    build: fills the empty directory it is given; runs at most once at a time on a machine.
    needed_bytes: free space the build wants, checked before it starts.
    verify: hash every file instead of trusting sizes and times.
    Raises CacheError when the cache cannot be written or the disk is too small.
    """
    root = cache_root()
    folder = root / name
    if folder.is_dir() and damage(folder, verify=verify) is None:
        return folder
    with _usable(root, needed_bytes), _only_one(root, name):
        # Another process may have finished it while this one waited.
        if folder.is_dir():
            found = damage(folder, verify=verify)
            if found is None:
                return folder
            tell(f"the cached {name} is damaged ({found}) and is made again")
        _remove_leftovers(root, name)
        _require_space(root, needed_bytes)
        _build_and_publish(folder, build)
    return folder


def damage(folder: Path, *, verify: bool = False) -> str | None:
    """What is wrong with a cached folder, in a few words; None where nothing is.

    A changed time alone is no damage (a copied or restored cache): the contents then decide, and
    the manifest learns the new times.
    """
    try:
        records = _read_manifest(folder)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return f"{MANIFEST_NAME} is missing or unreadable"
    if not records:
        return f"{MANIFEST_NAME} names no file"
    current = dict(records)
    for name, record in records.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        status = path.stat()
        if status.st_size != record.size:
            return f"{name} has {status.st_size} bytes instead of {record.size}"
        same_time = status.st_mtime_ns == record.mtime_ns
        if (verify or not same_time) and sha256_of(path) != record.sha256:
            return f"{name} does not match its checksum"
        current[name] = replace(record, mtime_ns=status.st_mtime_ns)
    if current != records:
        # A cache that may only be read is still good; it is then hashed at every start.
        with contextlib.suppress(OSError):
            _write_manifest(folder, current)
    return None


def tell(message: str) -> None:
    """Say a line on standard error, beside any progress bar."""
    tqdm.write(f"specdeft: {message}", file=sys.stderr)


def _read_manifest(folder: Path) -> dict[str, FileRecord]:
    content = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    return {name: FileRecord(**record) for name, record in content["files"].items()}


def _write_manifest(folder: Path, records: dict[str, FileRecord]) -> None:
    content = {"files": {name: asdict(record) for name, record in records.items()}}
    partial = folder.with_name(f"{folder.name}.partial-manifest-{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / MANIFEST_NAME)


def _records_of(folder: Path) -> dict[str, FileRecord]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): FileRecord.of(path) for path in paths}


def _build_and_publish(folder: Path, build: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        build(partial)
        _write_manifest(partial, _records_of(partial))
        _make_readable(partial)
        if folder.exists():
            folder.rename(folder.with_name(f"{folder.name}.partial-old-{os.getpid()}"))
        partial.rename(folder)
    finally:
        _remove_leftovers(folder.parent, folder.name)


def _make_readable(folder: Path) -> None:
    """Undo the privacy of temporary files, so that a cache can be shared between users."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _remove_leftovers(root: Path, name: str) -> None:
    """Remove what a killed build left; only ever called by the holder of the lock."""
    for left in root.glob(f"{name}.partial-*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _require_space(root: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < needed_bytes:
        raise CacheError(_no_space(root, needed_bytes, free_bytes))


def _no_space(root: Path, needed_bytes: int, free_bytes: int) -> str:
    return (
        f"{root} has {free_bytes / 1e6:.0f} MB free and {needed_bytes / 1e6:.0f} MB are needed: "
        "free some space or set SPECDEFT_CACHE to a directory on a larger disk"
    )


@contextlib.contextmanager
def _usable(root: Path, needed_bytes: int) -> Iterator[None]:
    """Create the cache, and turn what the file system refuses into one sentence."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except CacheError:
        raise
    except Exception as error:
        # safetensors reports a full disk as an error of its own, with the system's words in it.
        text = str(error)
        if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in text:
            state = _no_space(root, needed_bytes, shutil.disk_usage(root).free)
            raise CacheError(
                f"the disk filled up, and what was written is removed: {state}"
            ) from error
        if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
            raise CacheError(
                f"the cache directory {root} cannot be written ({error.strerror}): "
                "set SPECDEFT_CACHE to a directory of yours"
            ) from error
        raise


_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def _only_one(root: Path, name: str) -> Iterator[None]:
    """Hold the build lock of ``name``.

    A lock of the kernel, not a file that exists: it ends with its process, so none goes stale.
    """
    try:
        import fcntl
    except ImportError:  # Windows: two builds at once waste time, the rename still keeps them whole
        yield
        return
    with (root / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"waiting for another process that prepares {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
