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

from fedstill.cli.arguments import AsJson, Call, CalledAs, Preset, Quiet, UsageError, list_options, override
from fedstill.cli.console import leave, print_json
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


def run(
    preset: Preset | None = None,
    /,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    startup_kit: Path | None = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    call: CalledAs,
) -> None:
    """Run one federation in simulation or on deployed nodes, and write its report.

    example: fedstill run digits-fediod --nodes 10 --split.alpha 0.1 --seed 1

    options of a configuration used most (--help-all lists all with defaults):
      --method.name NAME          method (`fedstill list`)
      --method.OPTION VALUE       option of the method
      --data NAME|PATH            built-in data set, or a file or folder
      --nodes N                   number of nodes
      --split.name NAME           partitioner: iid, dirichlet, shards, ...
      --split.alpha A             Dirichlet concentration; smaller is more non-IID
      --nodes.models NAME ...     network of each node, repeated in turn
      --nodes.local.epochs N      epochs of local training
      --nodes.privacy.mechanism NAME   none, dp-sgd, pate, noisy-outputs
      --nodes.privacy.epsilon E   privacy budget of each node
      --student.model NAME        network of the student (the global model)
      --engine.device DEVICE      cpu, cuda, mps
      --seed N                    seed of all random draws

    Args:
        out: folder of the results (default: runs/NAME-seedSEED)
        resume: folder of a stopped run to resume, to the metrics of an uninterrupted run
        startup_kit: with --engine flare, the admin's kit of a deployed federation (docs/deploy.md)
    """
    from fedstill.report import write_report

    progress = not quiet
    if resume is not None:
        check_nothing_else(
            call, "fedstill run", [preset] if preset else [], ("--startup-kit", "--quiet", "--json")
        )
        from fedstill.runs.run import resume as resume_run

        folder = resume
        with resumable(folder):
            result = resume_run(folder, progress=progress, startup_kit=startup_kit, report=write_report)
    else:
        if preset is None:
            raise UsageError("fedstill run", missing="PRESET|FILE.toml")
        config = configured(preset, call, "run", startup_kit)
        folder = out_folder(out, f"runs/{config.name}-seed{config.seed}")

        from fedstill.runs.run import run as run_config

        with resumable(folder):
            result = run_config(config, folder, command=call.command, progress=progress, report=write_report)
    finish(folder, result, as_json)


def check_nothing_else(call: Call, command: str, positionals: Sequence[str], allowed: Sequence[str]) -> None:
    """Refuse what a resumed run or comparison cannot change."""
    if positionals:
        raise UsageError(f"{command} --resume", extra=positionals[0])
    for word in [*call.words, *call.overrides]:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in ("--resume", *allowed):
            raise UnknownName("option", option, allowed, see="a resumed run keeps its options")


def config(preset: Preset, /, *, call: CalledAs) -> None:
    """Print the complete configuration of a run as TOML.

    example: fedstill config digits-fedkd --nodes 10 > mine.toml

    `fedstill run mine.toml` runs it. `fedstill config PRESET --help-all` lists every option.
    """
    from fedstill.runs.spec import to_toml

    print(to_toml(configured(preset, call, "config")), end="")


def report(folder: Path, /, *, figures: str | None = None, out: Path | None = None) -> None:
    """Rewrite the HTML report of a run or comparison, or write its figures as files.

    example: fedstill report runs/demo --figures pdf

    Args:
        folder: folder of a run or a comparison
        figures: write the figures as pdf, svg or png files instead of the report
        out: folder of the figures (default: FOLDER/figures)
    """
    if figures is not None:
        _write_figures(folder, out, figures)
        return
    if out is not None:
        raise ArgumentError("--out", str(out), "none without --figures, as a report is in its run's folder")
    if (folder / "compare.toml").exists():
        from fedstill.compare.comparison import read_comparison_folder
        from fedstill.report.comparison_page import write_comparison

        print(f"Report: {write_comparison(folder, read_comparison_folder(folder))}")
        return
    from fedstill.report import write_report

    print(f"Report: {write_report(folder)}")


def _write_figures(folder: Path, out: Path | None, kind: Any) -> None:
    from fedstill.figures import write
    from fedstill.report.figures import FORMATS

    if kind not in FORMATS:
        raise ArgumentError("--figures", kind, f"one of {', '.join(FORMATS)}")
    for path in write(folder, out, kind):
        print(path)


def out_folder(out: Path | None, default: str, what: str = "run") -> Path:
    """Return the results' folder; a default is the first without a finished run, and is printed."""
    if out is not None:
        return out
    folder, number = Path(default), 2
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


def configured(target: str, call: Call, command: str, startup_kit: Path | None = None) -> RunSpec:
    """Return the run that a preset or file and the options of a call describe."""
    kit = [] if startup_kit is None else ["--engine.startup_kit", str(startup_kit)]
    words = [*map(in_full, call.overrides), *kit]
    return changed(_loaded(target, command), words, f"fedstill {command} {target}", call.known)


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


def list_run_options(call: Call) -> str:
    """Return every option of a run with its value in the last preset or file (default: demo)."""
    target = call.positionals[-1] if call.positionals else "demo"
    return run_options(_loaded(target, "run"), call.overrides, f"with the values of {target}")


def run_options(config: RunSpec, words: Sequence[str], note: str) -> str:
    """Return every option of a run under a head."""
    listed = list_options(dataclasses.replace(config, paper=()), [in_full(word) for word in words])
    return f"all options of `fedstill run`, {note}:\n\n{listed}"


def in_full(word: str) -> str:
    """An option that has a short name, by its whole one."""
    name, equals, value = word.partition("=")
    return f"{SHORT.get(name, name)}{equals}{value}"


def changed(config: RunSpec, words: Sequence[str], prog: str, also: Sequence[str] = ()) -> RunSpec:
    """The same run with options from the command line."""
    plain = dataclasses.replace(config, paper=())  # a list of tables is for files only
    made = override(plain, list(words), prog, [*also, *SHORT])
    return dataclasses.replace(made, paper=config.paper)
