"""A command's line in the help is what it takes: places, options, and which of several lines is meant."""

from __future__ import annotations

import pytest

from fedstill.cli.arguments import Given, dispatch
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName

ABOUT = """\
usage:
  fedstill lab make DIR FILE ... --host NAME [--nodes A B]
                  [--port N] [--dry]   makes it; [--not] an option
  fedstill lab make --again DIR        once more
  fedstill lab tell PRESET [--quiet] [--OPTION VALUE ...]
                                       tells it

try:
  fedstill lab tell demo --untold
"""


def made(*words: str) -> Given:
    found: list[Given] = []
    dispatch("lab", words, ABOUT, {"make": found.append, "tell": found.append})
    (given,) = found
    return given


def test_words_are_sorted_out_by_the_line_and_those_that_go_on_from_it() -> None:
    given = made("make", "a", "--host=x", "b", "c", "--nodes", "n", "m", "--dry", "--host", "y")
    assert (given.places, given.get("--host"), given.options["--nodes"]) == (["a", "b", "c"], "y", ["n", "m"])
    assert ("--dry" in given, "--port" in given, given.get("--port")) == (True, False, None)
    assert given.known == ("--host", "--nodes", "--port", "--dry")
    assert given.command == "fedstill lab make a --host=x b c --nodes n m --dry --host y"
    assert made("make", "--again", "there").places == []


def test_options_of_a_configuration_are_left_with_their_values() -> None:
    given = made("tell", "demo", "--seed", "3", "--quiet", "--split.nodes=2")
    assert (given.places, given.rest) == (["demo"], ["--seed", "3", "--split.nodes=2"])
    assert "--quiet" in given


@pytest.mark.parametrize(
    ("words", "error", "told"),
    [
        ("mak", UnknownName, "unknown command 'lab mak': did you mean 'lab make'?"),
        ("make a --host x", ArgumentError, "fedstill lab make needs FILE: `fedstill lab make --help`"),
        ("make a b", ArgumentError, "fedstill lab make needs --host NAME"),
        ("make a b --host", ArgumentError, "invalid --host = '' (expected a value after it"),
        ("make a b --host --dry", ArgumentError, "invalid --host = '--dry' (expected a value after it"),
        ("make a b --host= c", ArgumentError, "invalid --host = '' (expected a value after it"),
        ("make a b --host x --zzz", UnknownName, "unknown option '--zzz': fedstill lab make DIR FILE"),
        ("make a b --host x --dry=1", ArgumentError, "invalid --dry = '1' (expected alone, without a value"),
        ("make a --again b", ArgumentError, "fedstill lab make --again takes no 'a'"),
        ("tell a b", ArgumentError, "fedstill lab tell takes no 'b'"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_what_would(
    words: str, error: type[FedstillError], told: str
) -> None:
    with pytest.raises(error) as caught:
        made(*words.split())
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("words", ["", "-h", "make --help", "make a --host x -h", "tell -h"])
def test_help_is_printed_and_nothing_done(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[Given] = []
    dispatch("lab", words.split(), ABOUT, {"make": done.append, "tell": done.append})
    assert done == []
    assert capsys.readouterr().out == ABOUT
