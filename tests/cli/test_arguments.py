"""Command lines are parsed into function arguments or configuration overrides, or give a one-line error."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.cli.arguments import MissingValue, UsageError, split_overrides
from fedstill.cli.main import COMMANDS, OPTION_LISTS, bind, dispatch, make_app
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName


def arguments(*words: str) -> dict[str, Any]:
    """Return the arguments with which the function of a command is called."""
    bound: Any = bind(words)
    given = inspect.signature(bound.func).bind(*bound.args, **bound.keywords)
    return given.arguments


def test_words_become_typed_arguments() -> None:
    words = (
        "predict",
        "runs/a",
        "new.csv",
        "--out=there.csv",
        "--channels",
        "0",
        "2",
        "--fit",
        "--label",
        "x",
    )
    assert arguments(*words) == {
        "run": Path("runs/a"),
        "data": Path("new.csv"),
        "out": Path("there.csv"),
        "channels": (0, 2),
        "fit": True,
        "label": "x",
    }


def test_last_of_repeated_options_is_used() -> None:
    assert arguments("audit", "show", "clinic", "--last", "3", "--last", "4")["last"] == 4


def test_options_of_a_configuration_keep_their_values() -> None:
    call = arguments("run", "demo", "--seed", "3", "--quiet", "--nodes.models", "mlp", "cnn", "--out", "x y")[
        "call"
    ]
    assert call.overrides == ["--seed", "3", "--nodes.models", "mlp", "cnn"]
    assert call.words == ["demo", "--quiet", "--out", "x y"]
    assert {"--quiet", "--out", "--resume"} <= set(call.known)
    assert call.command == "fedstill run demo --seed 3 --quiet --nodes.models mlp cnn --out 'x y'"


def test_split_overrides_keeps_words_and_own_options() -> None:
    assert split_overrides(["a", "b", "--x.y=1", "c", "--own", "d"], ["--own"]) == (
        ["a", "b", "--own", "d"],
        ["--x.y=1", "c"],
    )


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("node innit", UnknownName, "unknown command 'node innit': did you mean 'node init'?"),
        (
            "node remove",
            UnknownName,
            "unknown command 'node remove': the commands of `fedstill node` are init",
        ),
        ("node init", UsageError, "fedstill node init needs FOLDER (see `fedstill node init --help`)"),
        ("node init a b", UsageError, "fedstill node init takes no 'b' (see `fedstill node init --help`)"),
        ("node init a --name", MissingValue, "--name needs a value (expected a text)"),
        ("run demo --out --quiet", MissingValue, "--out needs a value (expected a path)"),
        ("node init a --nme x", UnknownName, "unknown option '--nme': did you mean '--name'?"),
        ("node init a -n", UnknownName, "unknown option '-n'"),
        ("server init a --host x", UsageError, "fedstill server init needs --nodes"),
        (
            "server init a --host x --nodes b --port 0",
            ArgumentError,
            "invalid --port = 0 (expected 1 to 65535)",
        ),
        ("audit show a --last 1_0", ArgumentError, "invalid --last = '1_0' (expected an integer)"),
        ("audit show a --last -1", ArgumentError, "invalid --last = -1 (expected 0 or more)"),
        ("audit show a --delta nan", ArgumentError, "invalid --delta = 'nan' (expected a number)"),
        ("predict a b --fit=3", ArgumentError, "invalid --fit = '3' (expected no value)"),
        ("completion tcsh", ArgumentError, "invalid SHELL = 'tcsh' (expected one of 'bash', 'zsh', 'fish')"),
    ],
)
def test_rejects_invalid_words_in_one_line(words: str, error: type[FedstillError], message: str) -> None:
    with pytest.raises(error) as caught:
        bind(words.split())
    assert str(caught.value).startswith(message)


def every_command() -> Iterator[tuple[str, ...]]:
    app = make_app()
    for name in COMMANDS:
        group = app[name]
        yield from [(name,)] if group.default_command else [(name, each) for each in group]


EVERY = list(every_command())


WORDS = (
    "a", "3", "-1", "nan", "1_0", "", "{}", "[1]", "[", "--", "-", "-x", "\u0663", "--x.y", "--x.y=3", "@f",
    "--no-json", "--json=1", "--json", "--out", "--out=", "--nodes", "--port=x", "--call", "--=x", "---",
    "--help=3", "--last", "--seeds=",
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(command=st.sampled_from(EVERY), words=st.lists(st.sampled_from(WORDS), max_size=5))
def test_any_words_give_arguments_or_one_line_error(command: tuple[str, ...], words: list[str]) -> None:
    line = ""
    try:
        bind([*command, *words])
    except FedstillError as error:
        line = str(error)
    assert "\n" not in line


def application(words: tuple[str, ...]) -> App:
    return reduce(App.__getitem__, words, make_app())


def help_of(words: tuple[str, ...], capsys: pytest.CaptureFixture[str], flag: str = "--help") -> str:
    dispatch([*words, flag])
    return capsys.readouterr().out


@pytest.mark.parametrize("words", EVERY)
def test_help_of_each_command_fits_and_explains_its_arguments(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    page = help_of(words, capsys)
    assert page == help_of((*words, "--zzz"), capsys, "-h")
    assert len(page.splitlines()) <= 45
    assert f"example: fedstill {' '.join(words)}" in page or "example: eval" in page
    arguments = application(words).assemble_argument_collection(parse_docstring=True)
    for argument in [each for each in arguments if each.parameter.parse is not False]:
        assert argument.parameter.help, f"{argument.name} has no help"
        assert argument.name in page


def test_summary_of_each_command_is_from_its_docstring() -> None:
    app = make_app()
    for name, (_, summary) in COMMANDS.items():
        function = app[name].default_command
        if function is not None:
            assert str(inspect.getdoc(function)).splitlines()[0] == summary


@pytest.mark.parametrize("flag", ["", "-h", "--help", "--help-all"])
def test_help_of_a_group_lists_its_commands(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["audit", *([flag] if flag else [])])
    page = capsys.readouterr().out
    assert all(f"│ {name}" in page for name in ("show", "verify", "export", "accept"))


def test_every_command_with_overrides_lists_all_options() -> None:
    listed = set()
    for words in EVERY:
        if "call" in application(words).default_command.__annotations__:  # type: ignore[union-attr]
            listed.add(" ".join(words))
    assert listed == set(OPTION_LISTS)
