"""``fedstill run``, ``config`` and ``report``: one run, its settings and its report."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import ParsedArgs, leave
from fedstill.cli.console import print_json
from fedstill.core.errors import ArgumentError, UnknownName

if TYPE_CHECKING:
    from fedstill.runs.spec import RunSpec

# Options of `run` that people type often, and what they stand for.
SHORT = {
    "--engine": "--engine.backend",
    "--startup-kit": "--engine.startup_kit",
    "--nodes": "--split.nodes",
    "--data": "--data.name",
}


def run(args: ParsedArgs) -> None:
    """Run one federation, or resume a stopped run."""
    folder = args.path("--resume")
    if folder is not None:
        from fedstill.report import write_report
        from fedstill.runs.run import resume

        with resumable(folder):
            kit = args.path("--startup-kit")
            result = resume(folder, progress=args.show_progress, startup_kit=kit, report=write_report)
    else:
        config = configured(args.positionals[0], args, "run")
        folder = out_folder(args, f"runs/{config.name}-seed{config.seed}")

        from fedstill.report import write_report
        from fedstill.runs.run import run

        with resumable(folder):
            result = run(
                config, folder, command=args.command, progress=args.show_progress, report=write_report
            )
    finish(folder, result, "--json" in args)


def config(args: ParsedArgs) -> None:
    """Print all settings of a run as TOML."""
    from fedstill.runs.spec import to_toml

    print(to_toml(configured(args.positionals[0], args, "config")), end="")


def report(args: ParsedArgs) -> None:
    """Rewrite the report of a run or a comparison, or write its figures."""
    folder = Path(args.positionals[0])
    if (kind := args.get("--figures")) is not None:
        _write_figures(folder, args, kind)
        return
    if "--out" in args:
        raise ArgumentError(
            "--out", args.get("--out"), "none without --figures, as a report is in its run's folder"
        )
    if (folder / "compare.toml").exists():
        from fedstill.compare.comparison import read_comparison_folder
        from fedstill.report.comparison_page import write_comparison

        print(f"Report: {write_comparison(folder, read_comparison_folder(folder))}")
        return
    from fedstill.report import write_report

    print(f"Report: {write_report(folder)}")


def _write_figures(folder: Path, args: ParsedArgs, kind: Any) -> None:
    from fedstill.figures import write
    from fedstill.report.figures import FORMATS

    if kind not in FORMATS:
        raise ArgumentError("--figures", kind, f"one of {', '.join(FORMATS)}")
    for path in write(folder, args.path("--out"), kind):
        print(path)


def out_folder(args: ParsedArgs, default: str, what: str = "run") -> Path:
    """Return the results' folder; a default is the first without a finished run, and is printed."""
    folder: Path = args.path("--out", default)
    if "--out" not in args:
        number = 2
        while what == "run" and (folder / "result.json").exists():
            folder, number = Path(f"{default}-{number}"), number + 1
        print(f"The {what}'s folder is {folder}; --out DIR chooses another.", file=sys.stderr)
    return folder


@contextlib.contextmanager
def resumable(folder: Path, what: str = "run", again: str = "") -> Iterator[None]:
    """Print how to resume if the block is stopped: by ``--resume``, or another command.

    A scheduler's SIGTERM stops it as Ctrl-C does.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        again = again or shlex.join(["fedstill", what, "--resume", str(folder)])
        leave(f"stopped; to resume: {again}" if folder.exists() else "stopped; nothing was written", 130)
    finally:
        signal.signal(signal.SIGTERM, before)


def finish(folder: Path, result: dict[str, Any], as_json: bool = False) -> None:
    """Write a run's report, and print its table, or its result as JSON."""
    from fedstill.core.safe_console import SafeConsole
    from fedstill.report import print_table, write_report

    report = write_report(folder)
    if as_json:
        print_json(result)
        return
    print_table(result, SafeConsole())
    for note in result.get("notes", ()):
        print(f"Note: {note}")
    print(f"Report: {report}")


def configured(target: str, args: ParsedArgs, command: str) -> RunSpec:
    """The run that a preset or file and the options behind it describe."""
    words = [in_full(word) for word in args.overrides]
    return changed(_loaded(target, command), words, f"fedstill {command} {target}", args.known)


def _loaded(target: str, command: str) -> RunSpec:
    """Return the run of a preset or file."""
    from fedstill.runs.spec import load

    try:
        return load(target)
    except UnknownName as error:
        from fedstill.compare.comparison import is_comparison_file

        if not is_comparison_file(target):
            raise
        allowed = f"a run's file: this one compares runs (fedstill compare {target}, or reproduce)"
        raise ArgumentError(f"fedstill {command}", target, allowed) from error


def all_options(name: str, args: ParsedArgs) -> str:
    """Return every option of a run with its value in the last preset or file (default: demo)."""
    target = args.positionals[-1] if args.positionals else "demo"
    return run_options(_loaded(target, name), args.overrides, f"with the values of {target}")


def run_options(config: RunSpec, words: Sequence[str], note: str) -> str:
    """Return every option of a run under a head."""
    from fedstill.cli.options import list_options

    listed = list_options(dataclasses.replace(config, paper=()), [in_full(word) for word in words])
    return f"all options of `fedstill run`, {note}:\n\n{listed}"


def in_full(word: str) -> str:
    """An option that has a short name, by its whole one."""
    name, equals, value = word.partition("=")
    return f"{SHORT.get(name, name)}{equals}{value}"


def changed(config: RunSpec, words: list[str], prog: str, also: Sequence[str] = ()) -> RunSpec:
    """The same run with options from the command line."""
    from fedstill.cli.options import override

    plain = dataclasses.replace(config, paper=())  # a list of tables is for files only
    made = override(plain, words, prog, [*also, *SHORT])
    return dataclasses.replace(made, paper=config.paper)
