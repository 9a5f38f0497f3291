"""Words of a command are parsed by its usage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedstill.cli import arguments
from fedstill.cli.arguments import MissingValue, ParsedArgs, dispatch
from fedstill.cli.commands import COMMANDS, Command, CommandGroup
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName

LAB = {
    "lab": CommandGroup(
        "Works in a lab.",
        {
            "make": Command(
                "tests.cli.test_arguments:record",
                "Makes it.",
                ("DIR FILE ... --host NAME [--nodes A B] [--port N] [--dry]", "--again DIR"),
                "options:\n  --dry  changes nothing",
                "fedstill lab make a b --host x",
            ),
            "print": Command(
                "tests.cli.test_arguments:record",
                "Prints it.",
                ("PRESET [--quiet] [--OPTION VALUE ...]",),
                all_options="tests.cli.test_arguments:record_all",
            ),
        },
    )
}
calls: list[ParsedArgs] = []
all_calls: list[tuple[str, ParsedArgs]] = []


def record(args: ParsedArgs) -> None:
    calls.append(args)


def record_all(name: str, args: ParsedArgs) -> str:
    all_calls.append((name, args))
    return "every option\n"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of this module are not imported a second time under another name."""
    functions = {"record": record, "record_all": record_all}
    monkeypatch.setattr(arguments, "load_function", lambda name: functions[name.partition(":")[2]])
    calls.clear()
    all_calls.clear()


def parsed(*words: str) -> ParsedArgs:
    dispatch(["lab", *words], LAB)
    (args,) = calls
    return args


def test_sorts_words_by_usage() -> None:
    args = parsed("make", "a", "--host=x", "b", "c", "--nodes", "n", "m", "--dry", "--host", "y")
    assert (args.positionals, args.get("--host"), args.options["--nodes"]) == (
        ["a", "b", "c"],
        "y",
        ["n", "m"],
    )
    assert ("--dry" in args, "--port" in args, args.get("--port")) == (True, False, None)
    assert args.known == ("--host", "--nodes", "--port", "--dry")
    assert args.command == "fedstill lab make a --host=x b c --nodes n m --dry --host y"


def test_second_usage_is_chosen_by_its_required_option() -> None:
    assert parsed("make", "--again", "there").positionals == []


def test_options_of_a_configuration_keep_their_values() -> None:
    args = parsed("print", "demo", "--seed", "3", "--quiet", "--split.nodes=2")
    assert (args.positionals, args.overrides) == (["demo"], ["--seed", "3", "--split.nodes=2"])
    assert "--quiet" in args


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("mak", UnknownName, "unknown command 'lab mak': did you mean 'lab make'?"),
        ("make a --host x", ArgumentError, "fedstill lab make needs FILE (see `fedstill lab make --help`)"),
        ("make a b", ArgumentError, "fedstill lab make needs --host NAME"),
        ("remove", UnknownName, "unknown command 'lab remove': the commands of `fedstill lab` are make"),
        ("make a b --host", MissingValue, "--host needs a value (expected NAME)"),
        ("make a b --host --dry", MissingValue, "--host needs a value (expected NAME)"),
        ("make a b --host= c", MissingValue, "--host needs a value (expected NAME)"),
        ("make a b --host x --zzz", UnknownName, "unknown option '--zzz': fedstill lab make DIR FILE"),
        ("make a b --host x --dry=1", ArgumentError, "invalid --dry = '1' (expected no value)"),
        ("make a --again b", ArgumentError, "fedstill lab make --again takes no 'a'"),
        ("print a b", ArgumentError, "fedstill lab print takes no 'b'"),
    ],
)
def test_rejects_words_that_do_not_fit(words: str, error: type[FedstillError], message: str) -> None:
    with pytest.raises(error) as caught:
        parsed(*words.split())
    assert str(caught.value).startswith(message)
    assert calls == []


@pytest.mark.parametrize("words", ["make --help", "make a --host x -h", "make -h --zzz"])
def test_help_of_a_command_runs_nothing(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["lab", *words.split()], LAB)
    page = capsys.readouterr().out
    assert calls == []
    assert page.startswith("usage:\n  fedstill lab make DIR FILE ... --host NAME")
    for part in (
        "fedstill lab make --again DIR\n",
        "Makes it.",
        "--dry  changes nothing",
        "example:\n  fedstill",
    ):
        assert part in page


@pytest.mark.parametrize("words", ["", "-h", "--help"])
def test_help_of_a_group_lists_its_commands(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["lab", *words.split()], LAB)
    page = capsys.readouterr().out
    assert "  make   Makes it.\n  print  Prints it.\n" in page


@pytest.mark.parametrize("words", ["demo --quiet --help-all --seed 3", "--help-all demo --seed 3 --quiet"])
def test_help_all_shows_the_command_and_then_every_option(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatch(["lab", "print", *words.split()], LAB)
    page = capsys.readouterr().out
    assert page.index("Prints it.") < page.index("every option")
    [(name, args)] = all_calls
    assert (name, args.positionals, args.overrides, calls) == ("lab print", ["demo"], ["--seed", "3"], [])


@pytest.mark.parametrize("words", ["make --help-all", "--help-all"])
def test_help_all_without_a_configuration_is_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["lab", *words.split()], LAB)
    page = capsys.readouterr().out
    dispatch(["lab", *words.replace("-all", "").split()], LAB)
    assert (page, calls, all_calls) == (capsys.readouterr().out, [], [])


def every_command() -> Iterator[tuple[str, Command]]:
    for name, command in COMMANDS.items():
        if isinstance(command, CommandGroup):
            yield from ((f"{name} {sub}", each) for sub, each in command.commands.items())
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(every_command()))
def test_help_of_each_command_fits_and_names_its_options(name: str, command: Command) -> None:
    page = command.help(name)
    assert len(page.splitlines()) <= 45
    assert max(map(len, page.splitlines())) <= 110
    assert "example:" in page
    options = {option for usage in command.usage for option in arguments._parse_usage(usage)[1]}
    described = page.partition("\n\n")[2]
    missing = [option for option in options - {"--json", "--OPTION"} if option not in described]
    assert missing == []


@pytest.mark.parametrize(("name", "command"), list(every_command()))
def test_function_of_each_command_exists(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert callable(arguments.load_function(command.function))
