"""Atomic writing: the new content whole, or the old one untouched, and no litter either way."""

from pathlib import Path

import pytest

from specdeft.trees.atomic import remove_temporaries, write_atomic, write_text_atomic


def test_a_file_is_written_and_replaced_in_a_folder_that_need_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    for text in ("first", "second: ä"):
        write_text_atomic(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file.txt"
    write_text_atomic(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_atomic(path, fail)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_only_leftovers_of_this_writer_are_removed(tmp_path: Path) -> None:
    kept = ["notes.tmp", ".editor.tmp", ".a.0123456789abcdef.tmp", ".b." + "0" * 32, "c.txt"]
    left = [f".model.safetensors.{'0a' * 16}.tmp", f"below/.log.jsonl.{'f1' * 16}.tmp"]
    for name in kept + left:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    # The name that a writer really uses is one of them.
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "d", lambda temporary: _leave_a_copy(temporary))
    remove_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "below"])
    assert not list((tmp_path / "below").iterdir())


def _leave_a_copy(temporary: Path) -> None:
    """What a kill leaves behind, which no handler can show."""
    stem, digits, _ = temporary.name.rsplit(".", 2)
    (temporary.parent / f"{stem}.{digits[::-1]}.tmp").write_text("half")
    raise KeyboardInterrupt
