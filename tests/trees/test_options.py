"""Help keeps its lines and names only defaults that say something; mistakes are one sentence."""

import pytest

from specdeft.trees.options import HelpFormatter, Options, listed, whole_numbers


def options() -> Options:
    parser = Options(
        prog="try", epilog="Examples:\n  try one\n  try two", formatter_class=HelpFormatter
    )
    parser.add_argument("--count", type=int, default=3, help="how many")
    parser.add_argument("--loud", action="store_true", help="say so")
    parser.add_argument("--name", help="whose")
    parser.add_argument("--seed", type=int, default=0, help="where from")
    parser.add_argument("--stop", action="append", default=[], help="where to")
    return parser


def test_examples_stand_on_lines_of_their_own() -> None:
    lines = options().format_help().splitlines()
    assert "  try one" in lines
    assert "  try two" in lines


def test_defaults_that_say_nothing_are_left_out() -> None:
    text = options().format_help()
    assert "how many (default: 3)" in text
    assert "where from (default: 0)" in text
    assert "[]" not in text
    assert "None" not in text
    assert "False" not in text


def test_a_wrong_number_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options().parse_args(["--count", "many"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error == "try: --count takes a whole number, not 'many' (try --help lists the options)\n"


def test_lists_have_commas_and_any_space_between() -> None:
    assert listed(" a, b ,,c,") == ("a", "b", "c")
    assert listed("") == ()


def test_whole_numbers_from_one() -> None:
    assert whole_numbers("1, 20", "sizes", "1,4") == (1, 20)
    for wrong in ("", "0", "-1", "1.5", "two", "1,x"):
        with pytest.raises(ValueError, match=r"sizes are '.*': give numbers .* like 1,4"):
            whole_numbers(wrong, "sizes", "1,4")
    for twice in ("4,4", "1,20,01"):
        with pytest.raises(ValueError, match=r"sizes are '.*': give each number once, like 1,4"):
            whole_numbers(twice, "sizes", "1,4")
