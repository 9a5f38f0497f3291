"""Entry point of the command ``fedstill``: the list of commands, and one line for every mistake of a user.

A mistake is one line on standard error and exit code 2. Importing torch takes seconds, so commands import it
when they need it, and help is printed at once. To add a command, write a function and list it here.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

from fedstill.cli.console import leave
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName, closest_name
from fedstill.core.safe_output import safe_output
from fedstill.core.version import __version__

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

    from fedstill.cli.arguments import Call

CLOSED_PIPE = 128 + signal.SIGPIPE  # exit code of a shell for a command that wrote into a closed pipe
HELP_FLAGS = ("-h", "--help")
ALL_HELP = "--help-all"  # help, and then every option of a configuration with its default

# By section: commands, each with the function or group of functions that it names and a line of help.
SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "experiments": {
        "run": ("run:run", "Run one federation in simulation or on deployed nodes, and write its report."),
        "compare": (
            "compare:compare",
            "Run several methods on the same data, split and seeds, with confidence intervals.",
        ),
        "attack": (
            "attack:attack",
            "Attack a finished run with what left its nodes: membership inference, inversion and more.",
        ),
        "reproduce": (
            "reproduce:reproduce",
            "List the papers' tables and figures, or rerun one of them or the benchmark suite.",
        ),
    },
    "students": {
        "predict": ("student:predict", "Write the student's predictions for new data as a CSV file."),
        "evaluate": ("student:evaluate", "Evaluate the student on other labeled data, in total and by site."),
        "export": (
            "student:export",
            "Export the student with its preprocessing to ONNX, TorchScript or Hugging Face.",
        ),
    },
    "data owners": {
        "node": (
            "node:commands",
            "Set up, check and run a node: a folder that belongs to the owner of its data.",
        ),
        "audit": (
            "audit:commands",
            "Show, verify and export a node's audit log: every release and its privacy cost.",
        ),
        "privacy": (
            "privacy:commands",
            "Plan epsilon before training, convert noise to epsilon, and audit the mechanisms.",
        ),
    },
    "coordinators": {
        "server": ("server:commands", "Create a federation on NVIDIA FLARE and run its server."),
        "offline": (
            "offline:commands",
            "Federated distillation with signed files carried by hand, for one-shot methods.",
        ),
    },
    "tools": {
        "list": (
            "tools:list_names",
            "List methods, tasks, data sets, models, attacks and presets, or describe one method.",
        ),
        "config": ("run:config", "Print the complete configuration of a run as TOML."),
        "report": (
            "run:report",
            "Rewrite the HTML report of a run or comparison, or write its figures as files.",
        ),
        "dashboard": (
            "tools:dashboard",
            "Serve a live page of a node, a server or runs to a browser on this machine.",
        ),
        "data": ("tools:data", "Draft the schema of a table."),
        "doctor": ("tools:doctor", "Show installed versions and devices, and which extras are missing."),
        "completion": ("tools:completion", "Print a completion script for bash, zsh or fish."),
    },
}
COMMANDS = {name: command for commands in SECTIONS.values() for name, command in commands.items()}

# For --help-all: functions of a call that return every option of its configuration as text.
OPTION_LISTS = {
    "run": "run:list_run_options",
    "config": "run:list_run_options",
    "privacy plan": "run:list_run_options",
    "offline make": "run:list_run_options",
    "offline combine": "offline:list_combine_options",
    "compare": "compare:list_comparison_options",
    "reproduce": "reproduce:list_reproduction_options",
    "attack": "attack:list_attack_options",
}


def overview() -> str:
    """Return the help of ``fedstill`` itself: three examples, then one line for each command."""
    lines = [
        "fedstill: federated distillation. One global model from private data that stays with its owners.",
        "examples:",
        "  fedstill run demo                               5 nodes on this machine, one minute, a report",
        "  fedstill compare fedavg fedkd fediod --seeds 3  methods under equal conditions",
        "  fedstill attack runs/demo                       what an attacker learns from what left the nodes",
    ]
    for section, commands in SECTIONS.items():
        lines.append(f"{section}:")
        lines += [f"  {name:<11} {summary}" for name, (_, summary) in commands.items()]
    lines.append("Run `fedstill COMMAND --help` for usage, options and an example; `fedstill --version`.")
    return "\n".join(lines) + "\n"


def make_app() -> App:
    """Return all commands as one application. A command's module is imported when the command is named."""
    from cyclopts import App, Parameter

    from fedstill.cli.arguments import convert

    values = Parameter(
        converter=convert, consume_multiple=True, allow_repeating=True, negative=(), show_default=False
    )
    app = App(
        name="fedstill",
        default_parameter=values,
        help_flags=(),
        help_format="plaintext",
        version=__version__,
        version_flags=(),
    )
    for name, (target, _) in COMMANDS.items():
        app.command(f"fedstill.cli.{target}", name=name)
    return app


def dispatch(words: Sequence[str]) -> None:
    """Run the command that the words after ``fedstill`` name, or print its help.

    Raises:
        FedstillError: the words name no command or do not fit its parameters.
    """
    app = make_app()
    names, apps, rest = app.parse_commands(words)
    function = apps[-1].default_command
    if names and (any(word in (*HELP_FLAGS, ALL_HELP) for word in rest) or (function is None and not rest)):
        options = ""
        if ALL_HELP in rest and (lister := OPTION_LISTS.get(" ".join(names))):
            module, _, name = lister.partition(":")
            call = _sort_words(words, [word for word in rest if word != ALL_HELP], apps[-1])
            options = f"\n{getattr(import_module(f'fedstill.cli.{module}'), name)(call)}"
        for position, subcommand in enumerate(apps[-1]):
            apps[-1][subcommand].sort_key = position  # else they are sorted by name
        app.help_print(names)
        print(options, end="")
    else:
        bind(words)()


def bind(words: Sequence[str]) -> Callable[[], None]:
    """Return the function of a command with the arguments that the words after ``fedstill`` give it.

    Raises:
        FedstillError: the words name no command or do not fit its parameters.
    """
    from cyclopts import CycloptsError

    app = make_app()
    names, apps, rest = app.parse_commands(words)
    name, function = " ".join(names), apps[-1].default_command
    if function is None:
        raise _unknown_command(rest[0], list(apps[-1]), name)
    call = _sort_words(words, rest, apps[-1])
    pydantic = sys.modules.pop("pydantic", None)  # with it cyclopts would check values in its own words
    try:
        _, bound, _ = app.parse_args([*names, *call.words], print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise _in_one_line(error, f"fedstill {name}", call) from error
    finally:
        if pydantic is not None:
            sys.modules["pydantic"] = pydantic
    _check_values(function, bound.arguments, call.known)
    given = {"call": call} if "call" in function.__annotations__ else {}
    return partial(function, *bound.args, **bound.kwargs, **given)


def _sort_words(words: Sequence[str], rest: Sequence[str], command: App) -> Call:
    """Return a call of a command, which has overrides only if its function takes a call."""
    from fedstill.cli.arguments import Call, split_overrides

    arguments = [each for each in command.assemble_argument_collection() if each.parameter.parse is not False]
    known = [option for argument in arguments for option in argument.names]
    takes_overrides = "call" in getattr(command.default_command, "__annotations__", {})
    own, overrides = split_overrides(rest, known) if takes_overrides else (list(rest), [])
    return Call(shlex.join(["fedstill", *words]), own, overrides, known)


def _check_values(function: Any, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check the limits that the parameters of a command declare."""
    from fedstill.core.options import check_value

    hints = get_type_hints(function, include_extras=True)
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value is not None:
            check_value(_without_none(hints[name]), value, option if option in known else name.upper())


def _without_none(hint: Any) -> Any:
    """Return the type of a value that is given, as ``int`` for ``int | None``."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    return parts[0] if type(None) in get_args(hint) else hint


def _expected(hint: Any) -> str:
    """Describe the values of an argument's type."""
    from fedstill.core.config_tables import describe_type

    kind = _without_none(hint)
    return "a path" if kind is Path else describe_type(kind)


def _unknown_command(word: str, commands: Sequence[str], group: str) -> UnknownName:
    """Return the error of a word that is no command: the closest one, or those of the group."""
    see = f"`{f'fedstill {group}'.strip()} --help` lists them"
    if word.startswith("-"):
        return UnknownName("option", word, ["--help", *(() if group else ["--version"])], see=see)
    close = closest_name(word, commands)
    meant = repr(f"{group} {close}".strip()) if close else ""
    if group:
        see = f"the commands of `fedstill {group}` are {', '.join(commands)}"
    return UnknownName("command", f"{group} {word}".strip(), commands, see=see, suggestion=meant)


def _in_one_line(error: CycloptsError, command: str, call: Call) -> FedstillError:
    """Return an error of cyclopts as one of ours."""
    from cyclopts.exceptions import (
        CoercionError,
        MissingArgumentError,
        UnknownOptionError,
        UnusedCliTokensError,
    )

    from fedstill.cli.arguments import MissingValue, UsageError

    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        return (
            MissingValue(name, _expected(error.argument.hint))
            if name in call.words
            else UsageError(command, name)
        )
    if isinstance(error, UnusedCliTokensError):
        return UsageError(command, extra=(error.unused_tokens or [""])[0])
    if isinstance(error, UnknownOptionError):
        return UnknownName(
            "option", error.token.keyword or error.token.value, call.known, see=f"`{command} --help`"
        )
    if isinstance(error, CoercionError) and error.argument is not None:
        if isinstance(cause := error.__cause__, ArgumentError) and not isinstance(cause, UnknownName):
            return ArgumentError(cause.name or error.argument.name, cause.value, cause.expected)
        return ArgumentError(error.argument.name, error.token and error.token.value, "no value")
    error.verbose = False
    return FedstillError(str(error))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and exit.

    Exit codes: 0; 1 (done in part); 2 (invalid input, one line on standard error); 130 (Ctrl+C); 141 (the
    reader of the output closed the pipe, as ``head`` does).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with safe_output():
        _main(words)


def _main(words: list[str]) -> NoReturn:
    try:
        try:
            _run(words)
            sys.stdout.flush()  # here, where errors are handled, and not at the end of the interpreter
        except FedstillError as error:
            leave(str(error), 2)
        except OSError as error:  # a folder that cannot be written, a full disk
            if _is_closed_output(error):
                raise
            leave(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 2)
        except KeyboardInterrupt:
            leave("stopped", 130)
    except (BrokenPipeError, SystemExit) as end:
        # rich exits with 1 where its pipe is closed, after it has replaced standard output.
        from_rich = end.args == (1,) and isinstance(end.__context__, BrokenPipeError)
        if not from_rich and not _is_closed_output(end) and not _is_closed_output(end.__context__):
            raise
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED_PIPE)
    sys.exit(0)


def _is_closed_output(error: BaseException | None) -> bool:
    """Return whether the reader of our output has gone; a broken connection raises the same error."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _run(words: list[str]) -> None:
    for word in words:
        if any("\ud800" <= sign <= "\udfff" for sign in word):  # bytes that the locale's encoding lacks
            encoding = sys.getfilesystemencoding()
            raise ArgumentError("argument", ascii(word), f"text in the encoding of the locale ({encoding})")
    if not words or words[0] in (*HELP_FLAGS, "help"):
        print(overview(), end="")
    elif words[:1] in (["--version"], ["-V"]):
        print(f"fedstill {__version__}")
    elif words[0] == "__complete":  # a completion script asks for names
        make_app()(words)
    else:
        dispatch(words)
