"""Atomic writing: the new content whole, or the old one untouched, and no litter either way."""

from pathlib import Path

import pytest

from specdeft.trees.atomic import write_atomic, write_text_atomic


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
