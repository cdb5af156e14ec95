"""`specdeft train` as typed: its help, and one sentence for a model that is not there."""

from pathlib import Path

import pytest

from specdeft.cli import main


def test_help_names_the_choices(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in ("--self-generate", "--data", "--parallel", "--heads-output", "--resume"):
        assert option in text


def test_an_unknown_model_is_one_sentence(capsys, tmp_path: Path) -> None:
    nowhere = tmp_path / "nothing"
    code = main(["train", "--model", str(nowhere), "--output", str(tmp_path / "heads")])
    err = capsys.readouterr().err
    assert code == 2
    assert "nothing" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "heads").exists()
