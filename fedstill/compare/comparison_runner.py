"""Running a planned comparison: what is not finished yet, one run after another.

Every run is an ordinary run in a folder of its own, so a comparison that was stopped goes on. Where the plan
says so each run is attacked as soon as it is there, and attacked again only by other options.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedstill.attacks.leakage import Leakage
from fedstill.compare.comparison_file import COMPARISON_FILE, Comparison, ComparisonRun, read_folder
from fedstill.core import toml
from fedstill.core.config_tables import flatten, to_table
from fedstill.core.console import SafeConsole
from fedstill.core.errors import FedstillError, RunFolderError, by_caller
from fedstill.core.hashing import fingerprint
from fedstill.core.run_writer import lock_folder, make_folder, read_object, write_text
from fedstill.core.text_format import format_seconds
from fedstill.core.toml import Table
from fedstill.data.loading import cache_loads, load
from fedstill.runs import run
from fedstill.runs.build import prepare
from fedstill.runs.config import RunConfig
from fedstill.runs.simulation import digest_of

__all__ = ["read_attack", "read_command", "compare", "read_not_attacked", "read_not_run", "read_results"]

TRAINED_FOLDER = (
    ".trained"  # models of nodes that several methods of a setting and seed start from, while they run
)
NOT_RUN_FILE = "not_run.json"
NOT_ATTACKED_FILE = "not_attacked.json"
# Fingerprints of what is learned from and tested on, by the options of the data; and of modules that are not
# fedstill's, by name.
FINGERPRINTS_FILE = "data.json"


def compare(
    comparison: Comparison,
    out: Path,
    *,
    command: str,
    report: Callable[[Path], object],
    only: Collection[str] = (),
    quiet: bool = False,
    bars: bool = False,
) -> None:
    """Run what is not finished yet, one run after another, and attack it where the plan says so.

    Args:
        out: its folder; a new one, or one in which the same comparison was stopped. One that has run without
            attacks, or with fewer seeds, goes on with them; one that has run with attacks keeps them.
        command: the command that repeats it, for the report.
        report: writes the report of a run's folder, as far as the run has come.
        only: methods and settings to run now (:meth:`.Comparison.places`); the others stay to be run.
        quiet: say nothing of the runs on standard error.
        bars: show each run's own progress bars.

    Raises:
        RunFolderError: the folder holds another comparison or other files, is in use, or began with other
            data.
        UnknownName: nothing in the comparison is called as ``only`` says.
        FedstillError: no method can run at all; then no folder is made.
    """
    before = _check_folder(out, comparison)
    if before is not None and comparison.leakage is None:
        comparison = dataclasses.replace(comparison, leakage=before.leakage)
    console, start = SafeConsole(stderr=True, quiet=quiet, highlight=False), time.monotonic()
    places = comparison.planned_runs(only)
    with cache_loads(), ExitStack() as at_last:
        refused, data = _check_runs(comparison, places, out, console)
        make_folder(out)
        at_last.enter_context(lock_folder(out, "comparison"))
        if not (out / COMPARISON_FILE).exists():
            write_text(out / COMPARISON_FILE, f"{run.COMMAND}{command}\n\n{comparison.to_toml()}")
        elif before is not None and (before.leakage, before.seeds) != (comparison.leakage, comparison.seeds):
            more = dataclasses.replace(before, leakage=comparison.leakage, seeds=comparison.seeds)
            write_text(out / COMPARISON_FILE, f"{run.COMMAND}{command}\n\n{more.to_toml()}")
        _write_json(out / FINGERPRINTS_FILE, data)
        for reason in dict.fromkeys(refused.values()):
            console.print(Text(f"refused: {reason}"))
        at_last.callback(shutil.rmtree, out / TRAINED_FOLDER, ignore_errors=True)
        waiting = [place for place in places if place.folder not in refused]
        asked = {place.folder for place in places}
        refused.update((folder, why) for folder, why in read_not_run(out).items() if folder not in asked)
        _write_json(out / NOT_RUN_FILE, refused)
        before_it: ComparisonRun | None = None
        failed = {folder: why for folder, why in read_not_attacked(out).items() if folder not in asked}
        if comparison.leakage is not None:
            _write_json(out / NOT_ATTACKED_FILE, failed)
        for count, place in enumerate(waiting, start=1):
            folder, number = out / place.folder, f"{count} of {len(waiting)}"
            if before_it is None or (before_it.setting, before_it.seed) != (place.setting, place.seed):
                shutil.rmtree(out / TRAINED_FOLDER, ignore_errors=True)
            before_it = place
            finished = (folder / "result.json").exists()
            if not finished:
                _print_progress(console, f"run {number}", place, time.monotonic() - start)
            try:
                _run(comparison.run_config(place), folder, bars, out / TRAINED_FOLDER, report)
            except RunFolderError:
                raise  # not the method's fault
            except FedstillError as error:  # such as a limit in a node's policy, reached
                refused[place.folder] = f"stopped: {error}"
                _write_json(out / NOT_RUN_FILE, refused)
                continue
            if not finished or not (folder / "report.html").exists():
                report(folder)
            if comparison.leakage is None or read_attack(folder, comparison.leakage) is not None:
                continue
            _print_progress(console, f"attack {number}", place, time.monotonic() - start)
            try:
                _attack(folder, comparison.leakage, bars)
                report(folder)
            except FedstillError as error:  # of one run, as it is no run that can be repeated here
                failed[place.folder] = " ".join(str(error).split())
                _write_json(out / NOT_ATTACKED_FILE, failed)
                console.print(Text(f"not attacked: {failed[place.folder]}"), soft_wrap=True)


def read_results(out: Path, comparison: Comparison) -> dict[str, Mapping[str, Any]]:
    """What ``result.json`` of each finished run holds, by the runs' folders."""
    files = {place.folder: out / place.folder / "result.json" for place in comparison.planned_runs()}
    return {folder: read_object(file) for folder, file in files.items() if file.exists()}


def read_not_run(out: Path) -> Mapping[str, str]:
    """Why runs of a comparison could not run, by their folders."""
    return _read_reasons(out / NOT_RUN_FILE)


def read_not_attacked(out: Path) -> Mapping[str, str]:
    """Why finished runs of a comparison could not be attacked, by their folders."""
    return _read_reasons(out / NOT_ATTACKED_FILE)


def _read_reasons(file: Path) -> Mapping[str, str]:
    if not file.exists():
        return {}
    reasons: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return reasons


def read_attack(folder: Path, leakage: Mapping[str, Any]) -> Leakage | None:
    """What an attack with these options got from a run, or None where no such attack is in its folder.

    Raises:
        RunFolderError: what is in the folder is broken.
    """
    found = Leakage.read(folder)
    return found if found and found.config == json.loads(json.dumps(leakage)) else None


def read_command(out: Path) -> str:
    """The command that made a comparison's folder."""
    return toml.read_text(out / COMPARISON_FILE).partition("\n")[0].removeprefix(run.COMMAND)


def _run(config: RunConfig, folder: Path, bars: bool, trained: Path, report: run.Report) -> None:
    again = shlex.join(["fedstill", "run", str(folder / "config.toml")])
    run.run_or_resume(config, folder, command=again, progress=bars, trained=trained, report=report)


def _attack(folder: Path, leakage: Table, bars: bool) -> None:
    from fedstill.attacks.attack_runner import run_attacks
    from fedstill.attacks.config import LeakageConfig
    from fedstill.core.config_tables import changed_options

    options = changed_options(leakage, LeakageConfig().to_table())
    again = shlex.join(["fedstill", "attack", str(folder), *options])
    run_attacks(folder, LeakageConfig.from_table(leakage), command=again, progress=bars)


def _check_runs(
    comparison: Comparison, places: list[ComparisonRun], out: Path, console: Console
) -> tuple[dict[str, str], Mapping[str, str]]:
    """Which runs cannot run in their setting, by folder, and why: asked of all before the first one runs; and
    fingerprints of what they learn from and are tested on, and of the modules that they name, which a file
    that was replaced would change."""
    refused: dict[str, str] = {}
    data, seen = dict(_read_reasons(out / FINGERPRINTS_FILE)), set[str]()
    waiting = [place for place in places if not (out / place.folder / "result.json").exists()]
    for module, (file, code) in _user_modules(comparison, places).items():
        if data.setdefault(module, code) != code:
            changed = f"{out} began with another {file} than there is now"
            if waiting:
                raise RunFolderError(f"{changed} (expected that one, or another folder)")
            console.print(Text(f"{changed}: these are its figures"), soft_wrap=True)
    with console.status("checking") as status:
        for count, place in enumerate(waiting, start=1):
            status.update(f"checking run {count} of {len(waiting)}")
            config = comparison.run_config(place)
            try:
                prepare(config)
            except FedstillError as error:
                refused[place.folder] = str(error)
                continue
            # Before it is divided, which each seed does in its own way.
            if (options := json.dumps([*map(to_table, (config.data, config.task))])) in seen:
                continue
            seen.add(options)
            whole = load(config.data, config.task)
            found = digest_of([whole.train, whole.test])
            if data.setdefault(options, found) != found:
                other = f"{out} began with other data {config.data.registered_name!r} than there are now"
                raise RunFolderError(f"{other} (expected those, or another folder)")
    for setting in dict.fromkeys(place.setting for place in places):
        here = [place.folder for place in places if place.setting == setting]
        if all(folder in refused for folder in here):
            where = f" in setting {setting!r}" if setting else ""
            raise FedstillError(f"no method can run{where}: {refused[here[0]]}")
    return refused, data


def _user_modules(comparison: Comparison, places: Sequence[ComparisonRun]) -> Mapping[str, tuple[str, str]]:
    """The modules beside fedstill that runs name (methods, data, tasks, splits, networks): each one's file,
    and a fingerprint of its text."""
    found: dict[str, tuple[str, str]] = {}
    for place in places:
        try:
            config = comparison.run_config(place)
        except FedstillError:  # said of the run itself
            continue
        parts = (config.method, config.data, config.task, config.split)
        names = {type(part).__module__ for part in parts}
        names |= {name.rpartition(":")[0] for name in (*config.nodes.models, config.student.model)}
        for name in names:
            file = getattr(sys.modules.get(name), "__file__", None)
            if file and name.partition(".")[0] != "fedstill" and name not in found:
                found[name] = (Path(file).name, fingerprint(Path(file).read_bytes()))
    return found


def _write_json(file: Path, reasons: Mapping[str, str]) -> None:
    write_text(file, json.dumps(reasons, indent=2) + "\n")


def _check_folder(out: Path, comparison: Comparison) -> Comparison | None:
    """Refuse a folder with anything but this comparison in it; returns the plan that is there.

    It may be there without attacks or with fewer seeds, and attacks may be there that are not asked for now:
    runs stay as they are. Attacks with other options are refused, as they would replace what is there,
    perhaps by weaker ones.
    """
    if not out.exists():
        return None
    if not out.is_dir():
        raise RunFolderError(f"{out} is a file: choose another folder")
    if (out / COMPARISON_FILE).exists():
        before = read_folder(out)
        for part in dataclasses.fields(Comparison):
            if part.name == "leakage" and None in (before.leakage, comparison.leakage):
                continue
            if part.name == "seeds" and set(before.seeds) < set(comparison.seeds):
                continue
            if part.name not in ("name", "about", "note") and _differs(before, comparison, part.name):
                apart = _first_difference(getattr(before, part.name), getattr(comparison, part.name))
                told = f" ({apart})" if apart else ""
                again = by_caller(f"fedstill compare --resume {out}", *2 * ("the same arguments",))
                raise RunFolderError(
                    f"{out} holds a comparison that differs in its {part.name}{told}: choose another folder, "
                    f"or go on with it ({again})"
                )
        return before
    if {file.name for file in out.iterdir()} - {f"{COMPARISON_FILE}.part"}:
        raise RunFolderError(f"{out} holds a run or other files: choose another folder, or empty it")
    return None


def _first_difference(before: object, now: object) -> str:
    """The first value in which two tables differ, in words; empty where they are no tables.

    >>> _first_difference({"engine": {"threads": 1}}, {"engine": {"threads": 0}})
    'engine.threads is 1 there, and 0 now'
    """
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return ""
    one, other = flatten(before), flatten(now)
    key = next((key for key in (*one, *other) if one.get(key) != other.get(key)), None)
    if key is None:  # in their order alone
        return ""
    there, here = ("not set" if of.get(key) is None else of[key] for of in (one, other))
    return f"{key} is {there} there, and {here} now"


def _differs(first: Comparison, second: Comparison, part: str) -> bool:
    """Whether a part differs, the order of methods and settings included."""
    one, other = getattr(first, part), getattr(second, part)
    return bool(one != other or (isinstance(one, Mapping) and list(one) != list(other)))


def _print_progress(console: Console, count: str, place: ComparisonRun, elapsed: float) -> None:
    parts = (place.setting, place.label, f"seed {place.seed}")
    line = Text.assemble(
        (f"{count}  ", "dim"),
        (", ".join(part for part in parts if part), "bold"),
        (f"  {format_seconds(elapsed)} so far", "dim"),
    )
    console.print(line, soft_wrap=True)
