"""The command ``fedstill``.

Whatever a user gets wrong becomes one line on stderr and exit code 2. torch takes seconds to
import, so it is imported by the commands that need it, not by this module: help is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import select
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.core.version import __version__
from fedstill.runs import presets

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.compare.plan import Comparison
    from fedstill.runs.config import RunConfig

CLOSED = 128 + signal.SIGPIPE  # as a shell says it of a command that wrote into a closed pipe

# Options of `run` that people type often, and what they stand for.
SHORT = {
    "--engine": "--engine.name",
    "--startup-kit": "--engine.startup_kit",
    "--nodes": "--split.nodes",
    "--data": "--data.name",
}

HELP = """\
fedstill trains one central model from private data that stays in many places.

usage:
  fedstill run PRESET|FILE.toml [--OPTION VALUE ...] [--out DIR]   one run, from data to report
  fedstill run --resume DIR                 go on with a run that was stopped
  fedstill compare METHOD|PRESET|FILE.toml ... [--seeds N] [--base PRESET|FILE.toml] [--OPTION VALUE ...]
                                            several methods side by side, on equal terms
  fedstill compare FILE.toml                the comparison that a file describes
  fedstill compare --resume DIR             go on with a comparison that was stopped
  fedstill attack RUN [--OPTION VALUE ...]  what an adversary gets from what left the nodes in a finished run
  fedstill list [METHOD|presets|tasks]      methods, tasks, data sets, models; more of one of them
  fedstill show PRESET|FILE.toml [--OPTION VALUE ...]   all settings of a run, as TOML
  fedstill report DIR                       write the report of a run or a comparison again
  fedstill run PRESET --help                every option, with its meaning and default
  fedstill node init|check|start|answer DIR     a node of a real federation, for whoever owns its data
  fedstill server init|start|status|stop DIR    the server that they join
  fedstill privacy plan|price|audit ...         what a run will cost a node, before anything is trained
  fedstill ledger show|verify|export|settle DIR what has left a node, when, to which run, at which price
  fedstill questions make ...                   questions in a file, for nodes without a live link
  fedstill distil ANSWERS ...                   a student from the files of answers that came back
  fedstill --version

options of `run` beside those of the preset:
  --out DIR       the run's folder (default: runs/NAME-seedSEED)
  --resume DIR    go on with the run in this folder, to the figures that it would have reached
  --quiet         no progress bars
  --nodes N, --data NAME    short for --split.nodes, --data.name
  --engine flare-poc        nodes as processes of their own, deployed on this machine with NVIDIA FLARE
  --engine flare --startup-kit DIR    nodes of a deployed federation, with their own data and models;
                            beside --resume, where the kit is another by now

options of `compare`; all others are run options, and hold for every method:
  --seeds N       each method runs with seeds 0 to N-1 (default: 1)
  --base PRESET   data, split, models and local training, from a preset or a run's file (default: digits)
  --data NAME     short for --data.name
  --leakage       attack each run, as `fedstill attack` does; also of a comparison that has run without
  --out DIR       its folder (default: runs/compare, or runs/NAME for NAME.toml); --quiet, --resume as above

try:
  fedstill run demo
  fedstill compare standalone fedavg fediod --seeds 3
"""

OUR_OPTIONS = """\
Beside the options below: --out DIR is the run's folder (default: runs/NAME-seedSEED), --quiet hides
progress bars.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with 0, 2 (bad input, one line on stderr), 130 (Ctrl-C) or 141 (whoever
    read what is printed has closed the pipe, as `head` does)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            _dispatch(words)
            sys.stdout.flush()  # here, and not when the interpreter ends and nobody answers for it
        except FedstillError as error:
            _leave(str(error), 2)
        except OSError as error:  # a folder that cannot be written, a full disk
            if _unread(error):
                raise
            _leave(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 2)
        except KeyboardInterrupt:
            _leave("stopped", 130)
    except (BrokenPipeError, SystemExit) as end:
        # So rich leaves where its pipe is closed, and by then it has put another file in its place.
        rich = end.args == (1,) and isinstance(end.__context__, BrokenPipeError)
        if not rich and not _unread(end) and not _unread(end.__context__):
            raise
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED)
    sys.exit(0)


def _unread(error: BaseException | None) -> bool:
    """Whether it is that nobody reads any more what is printed here; a connection may break off too."""
    if not isinstance(error, BrokenPipeError):
        return False
    gone = select.poll()
    for number in (1, 2):
        gone.register(number, 0)
    return any(told & (select.POLLERR | select.POLLHUP) for _, told in gone.poll(0))


def _leave(message: str, code: int) -> NoReturn:
    print(f"fedstill: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _dispatch(words: list[str]) -> None:
    commands: dict[str, Callable[[list[str]], None]] = {
        "run": _run,
        "compare": _compare,
        "list": _list,
        "show": _show,
        "report": _report,
        "node": _afar("node"),
        "ledger": _afar("ledger"),
        "privacy": _afar("privacy"),
        "attack": _afar("attack"),
        "server": _afar("server"),
        "questions": _afar("bundles"),
        "distil": _afar("bundles", "distil"),
        "distill": _afar("bundles", "distil"),
    }
    helps = ("-h", "--help")
    own_help = ("attack", "node", "ledger", "privacy", "server", "questions", "distil", "distill")
    asked = len(words) > 1 and words[0] in commands and words[0] not in own_help and words[1] in helps
    if not words or words[0] in helps or asked:
        print(HELP, end="")
    elif words[0] == "--version":
        print(f"fedstill {__version__}")
    elif words[0] in commands:
        commands[words[0]](words[1:])
    else:
        raise UnknownName("command", words[0], commands)


def _afar(file: str, function: str = "main") -> Callable[[list[str]], None]:
    """A command of real federations, imported when it is called."""

    def command(words: list[str]) -> None:
        getattr(importlib.import_module(f"fedstill.cli.{file}"), function)(words)

    return command


def _run(words: list[str]) -> None:
    command = shlex.join(["fedstill", "run", *words])
    quiet = "--quiet" in words
    rest = [word for word in words if word != "--quiet"]
    progress = not quiet and sys.stderr.isatty()
    resume, rest = _take("--resume", rest)
    out, rest = _take("--out", rest)
    if resume is not None:
        kit, rest = _take("--startup-kit", rest)
        if rest or out is not None:
            allowed = "a run's folder alone, or with --startup-kit: a run keeps its settings"
            raise ArgumentError("--resume", resume, allowed)
        _go_on(Path(resume), progress, None if kit is None else Path(kit))
        return
    config = _configure(rest, "run")
    folder = Path(f"runs/{config.name}-seed{config.seed}") if out is None else Path(out)
    if out is None:
        print(f"The run's folder is {folder}; --out DIR chooses another.", file=sys.stderr)

    from fedstill.runs.run import run

    with _resumable(folder):
        result = run(config, folder, command=command, progress=progress)
    _finish(folder, result)


def _go_on(folder: Path, progress: bool, kit: Path | None) -> None:
    from fedstill.runs.run import resume

    with _resumable(folder):
        result = resume(folder, progress=progress, startup_kit=kit)
    _finish(folder, result)


@contextlib.contextmanager
def _resumable(folder: Path, what: str = "run") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        again = shlex.join(["fedstill", what, "--resume", str(folder)])
        _leave(f"stopped; to go on: {again}" if folder.exists() else "stopped; nothing was written", 130)


def _finish(folder: Path, result: dict[str, Any]) -> None:
    from rich.console import Console

    from fedstill.report import print_table, write_report

    report = write_report(folder)
    print_table(result, Console())
    for note in result.get("notes", ()):
        print(f"Note: {note}")
    print(f"Report: {report}")


def _compare(words: list[str]) -> None:
    command = shlex.join(["fedstill", "compare", *words])
    quiet = "--quiet" in words
    rest = [word for word in words if word != "--quiet"]
    bars = not quiet and sys.stderr.isatty()
    resume, rest = _take("--resume", rest)
    out, rest = _take("--out", rest)
    if resume is not None:
        if rest or out is not None:
            raise ArgumentError("--resume", resume, "a comparison's folder alone: it keeps its settings")
        folder = Path(resume)
        with _resumable(folder, "compare"):
            from fedstill.compare import running
            from fedstill.report import write_report

            running.resume(folder, report=write_report, quiet=quiet, bars=bars)
    else:
        comparison = _plan(rest)
        from fedstill.compare import running
        from fedstill.report import write_report

        folder = Path(f"runs/{comparison.name}") if out is None else Path(out)
        if out is None:
            print(f"The comparison's folder is {folder}; --out DIR chooses another.", file=sys.stderr)
        with _resumable(folder, "compare"):
            running.compare(comparison, folder, command=command, report=write_report, quiet=quiet, bars=bars)
    _show_comparison(folder)


def _plan(words: list[str]) -> Comparison:
    """The comparison that the words describe."""
    leakage, words = "--leakage" in words, [word for word in words if word != "--leakage"]
    seeds, words = _take("--seeds", words)
    base, words = _take("--base", words)
    data, words = _take("--data", words)
    end = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    names, rest = words[:end], words[end:]
    if not names:
        raise ArgumentError(
            "fedstill compare", "", "methods, presets or .toml files, or one comparison's file"
        )
    if seeds is not None and not (seeds.isdecimal() and int(seeds) >= 1):
        raise ArgumentError("--seeds", seeds, "how many: 1 or more")
    rest += [] if data is None else ["--data.name", data]

    from fedstill.compare import plan as compare

    changes = _changes(rest, compare.base_run(names, base))

    count = None if seeds is None else int(seeds)
    if not any(compare.is_plan(name) for name in names):
        return compare.plan(names, base=base, seeds=count or 1, changes=changes, leakage=leakage)
    if len(names) > 1 or base is not None:
        raise ArgumentError("fedstill compare", " ".join(names), "one comparison's file alone, or methods")
    return compare.read(Path(names[0]), seeds=count, changes=changes, leakage=leakage)


def _changes(words: list[str], base: RunConfig) -> dict[str, Any]:
    """Run options that hold for all methods, by dotted name, read and checked as those of a run are."""
    from fedstill.cli.options import choose, group
    from fedstill.compare.plan import shared_options
    from fedstill.core.tables import refuse_anothers
    from fedstill.runs.config import to_dict

    given = group(words)
    changed = choose(base, given)[0]
    known = shared_options(changed)
    for option in given:
        if option.name not in known:
            if not option.name.startswith("method."):
                refuse_anothers(changed, option.name, " ".join(option.values))
            names = [f"--{name}" for name in ("seeds", "base", "data", "leakage", "out", *known)]
            see = "the options of one method belong to a preset or to a comparison's file"
            if option.name.startswith(("inversion.", "membership.", "copying.")):
                see = "the options of attacks belong to the table [leakage] of a comparison's file"
            raise UnknownName("option", option.option, names, see=see)
    run = to_dict(_override(base, words, "fedstill run PRESET"))
    return {option.name: reduce(dict.__getitem__, option.name.split("."), run) for option in given}


def _show_comparison(folder: Path) -> None:
    from rich.console import Console

    from fedstill.compare import plan as compare
    from fedstill.report.compare import print_comparison, summarise, write_comparison

    comparison = compare.read_folder(folder)
    page = write_comparison(folder, comparison)
    print_comparison(summarise(folder, comparison), Console())
    print(f"Report: {page}")


def _list(words: list[str]) -> None:
    from rich.console import Console

    from fedstill.protocol.method import METHODS
    from fedstill.report.matrix import print_tasks
    from fedstill.report.methods import print_method, print_methods

    console = Console()
    if not words:
        print_methods(console)
        _print_names(console)
    elif len(words) > 1:
        raise ArgumentError("fedstill list", " ".join(words), "one method, or presets or tasks, or nothing")
    elif words[0] == "presets":
        for name in presets.names():
            console.print(f"{name:<30} {presets.describe(name)}", soft_wrap=True, highlight=False)
    elif words[0] == "tasks":
        print_tasks(console)
    elif words[0] in METHODS:
        print_method(words[0], console)
    else:
        raise UnknownName("method", words[0], [*METHODS, "presets", "tasks"])


def _print_names(console: Console) -> None:
    """What else can be named, a line each."""
    from rich.table import Table

    from fedstill.attacks.attack import ATTACKS
    from fedstill.data.config import DATA
    from fedstill.data.dividing import SPLITS
    from fedstill.models import MODELS
    from fedstill.privacy.config import MECHANISMS
    from fedstill.tasks import ENSEMBLES, TASKS

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for what, names in (
        ("tasks", TASKS),
        ("data sets", DATA),
        ("splits", SPLITS),
        ("models", MODELS),
        ("ensembles", ENSEMBLES),
        ("mechanisms", MECHANISMS),
        ("attacks", ATTACKS),
    ):
        table.add_row(what, ", ".join(names))
    table.add_row("presets", f"{len(presets.names())}, as demo and digits-fediod: fedstill list presets")
    console.print(table)
    console.print("\nMore of one method: fedstill list METHOD; which runs which task: fedstill list tasks")


def _show(words: list[str]) -> None:
    from fedstill.runs.config import to_toml

    print(to_toml(_configure(words, "show")), end="")


def _report(words: list[str]) -> None:
    if len(words) != 1 or words[0].startswith("-"):
        raise ArgumentError("fedstill report", " ".join(words), "the folder of one run or comparison")
    if (Path(words[0]) / "compare.toml").exists():
        from fedstill.compare import plan as compare
        from fedstill.report.compare import write_comparison

        print(f"Report: {write_comparison(Path(words[0]), compare.read_folder(Path(words[0])))}")
        return
    from fedstill.report import write_report

    print(f"Report: {write_report(Path(words[0]))}")


def _in_full(word: str) -> str:
    """An option that has a short name, by its whole one."""
    name, equals, value = word.partition("=")
    return f"{SHORT.get(name, name)}{equals}{value}"


def _take(option: str, words: list[str]) -> tuple[str | None, list[str]]:
    """The value of one option (the last, if it is there more than once), and the other words."""
    value: str | None = None
    rest: list[str] = []
    queue = iter(words)
    for word in queue:
        if word == option:
            value = next(queue, "")
            if not value or value.startswith("--"):
                raise ArgumentError(option, value, "a value after it")
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return value, rest


def _configure(words: list[str], command: str, also: Sequence[str] = ()) -> RunConfig:
    """The run that a preset or file and the options behind it describe; also are options of the command."""
    if not words or words[0].startswith("-"):
        given = words[0] if words else ""
        raise ArgumentError(f"fedstill {command}", given, "a preset or a .toml file, then its options")
    target, *rest = words

    from fedstill.runs.config import load

    return _override(load(target), [_in_full(word) for word in rest], f"fedstill {command} {target}", also)


def _override(config: RunConfig, words: list[str], prog: str, also: Sequence[str] = ()) -> RunConfig:
    """The same run with options from the command line.

    Raises:
        FedstillError: an option that does not exist, or a value that it cannot have.
    """
    from fedstill.cli.options import override

    plain = dataclasses.replace(config, paper=())  # a list of tables is for files only
    changed = override(plain, words, prog, f"{type(config).__doc__}\n\n{OUR_OPTIONS}", also)
    return dataclasses.replace(changed, paper=config.paper)
