"""Run the missing runs of a comparison, one after another.

Each run is an ordinary run in its own folder, so an interrupted comparison can be resumed. If the plan says
so, each finished run is attacked. It is attacked again only with other options.
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
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedstill.attacks.attack import Leakage
from fedstill.attacks.attack_runner import LeakageConfig, run_attacks
from fedstill.compare.comparison import COMPARISON_FILE, Comparison, ComparisonRun, read_comparison_folder
from fedstill.core.config_tables import Table, changed_options_as_cli_words, flatten, read_text, to_table
from fedstill.core.errors import FedstillError, RunFolderError, by_caller
from fedstill.core.hashing import fingerprint
from fedstill.core.run_writer import lock_folder, make_folder, read_object, write_text
from fedstill.core.safe_console import SafeConsole
from fedstill.core.text_format import format_seconds
from fedstill.data.loading import cache_loads, load
from fedstill.models.model_config import encoder_backbone
from fedstill.models.predictors import file_fingerprint
from fedstill.runs import run
from fedstill.runs.data_digests import digest_examples
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import RunSpec

__all__ = ["compare", "read_attack", "read_command", "read_not_attacked", "read_not_run", "read_results"]

TRAINED_FOLDER = ".trained"  # local models that several methods of a setting and seed start from
NOT_RUN_FILE = "not_run.json"
NOT_ATTACKED_FILE = "not_attacked.json"
# Fingerprints of data and weights by their options, and of custom modules by name.
FINGERPRINTS_FILE = "data.json"
# Options that name weights, by the option of the network.
WEIGHT_OPTIONS = {
    "features.backbone": ("features",),
    "student.model": ("student.model", "student.encoder_weights"),
    "nodes.models": ("nodes.models", "nodes.encoder_weights"),
    "nodes.perceptual": ("nodes.perceptual", "nodes.perceptual_weights"),
}


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
    """Run what is not finished yet, one run after another, and attack it if the plan says so.

    Args:
        comparison: the plan.
        out: folder of the comparison: a new one, or one in which the same comparison was interrupted. Attacks
            or seeds may be added to a comparison. Attacks of a comparison are kept.
        command: the command that repeats it, for the report.
        report: writes the report of a run's folder, as far as the run is.
        only: methods and settings to run now (:meth:`.Comparison.planned_runs`). The others can run later.
        quiet: print nothing about runs on standard error.
        bars: show progress bars of each run.

    Raises:
        RunFolderError: the folder holds another comparison or other files, is in use, or began with other
            data.
        UnknownName: ``only`` has a name that is not in the comparison.
        FedstillError: no method can run. Then no folder is created.
    """
    old_plan = _check_folder(out, comparison)
    if old_plan is not None and comparison.leakage is None:
        comparison = dataclasses.replace(comparison, leakage=old_plan.leakage)
    console, start = SafeConsole(stderr=True, quiet=quiet, highlight=False), time.monotonic()
    all_runs = comparison.planned_runs(only)
    with cache_loads(), ExitStack() as at_last:
        refused, fingerprints = _check_runs(comparison, all_runs, out, console)
        make_folder(out)
        at_last.enter_context(lock_folder(out, "comparison"))
        if not (out / COMPARISON_FILE).exists():
            write_text(out / COMPARISON_FILE, f"{run.COMMAND}{command}\n\n{comparison.to_toml()}")
        elif old_plan is not None and (old_plan.leakage, old_plan.seeds) != (
            comparison.leakage,
            comparison.seeds,
        ):
            extended = dataclasses.replace(old_plan, leakage=comparison.leakage, seeds=comparison.seeds)
            write_text(out / COMPARISON_FILE, f"{run.COMMAND}{command}\n\n{extended.to_toml()}")
        _write_json(out / FINGERPRINTS_FILE, fingerprints)
        for reason in dict.fromkeys(refused.values()):
            console.print(Text(f"refused: {reason}"))
        at_last.callback(shutil.rmtree, out / TRAINED_FOLDER, ignore_errors=True)
        runnable = [planned for planned in all_runs if planned.folder not in refused]
        requested = {planned.folder for planned in all_runs}
        refused.update((folder, why) for folder, why in read_not_run(out).items() if folder not in requested)
        _write_json(out / NOT_RUN_FILE, refused)
        previous: ComparisonRun | None = None
        failed = {folder: why for folder, why in read_not_attacked(out).items() if folder not in requested}
        if comparison.leakage is not None:
            _write_json(out / NOT_ATTACKED_FILE, failed)
        for count, planned in enumerate(runnable, start=1):
            folder, number = out / planned.folder, f"{count} of {len(runnable)}"
            if previous is None or (previous.setting, previous.seed) != (planned.setting, planned.seed):
                shutil.rmtree(out / TRAINED_FOLDER, ignore_errors=True)
            previous = planned
            finished = (folder / "result.json").exists()
            if not finished:
                _print_progress(console, f"run {number}", planned, time.monotonic() - start)
            check = partial(_require_same_weights, fingerprints, out)
            try:
                _run(comparison.run_config(planned), folder, bars, out / TRAINED_FOLDER, report, check)
            except RunFolderError:
                raise  # not caused by the method
            except FedstillError as error:  # for example a limit of a node's policy
                refused[planned.folder] = f"stopped: {error}"
                _write_json(out / NOT_RUN_FILE, refused)
                continue
            if not finished or not (folder / "report.html").exists():
                report(folder)
            if comparison.leakage is None or read_attack(folder, comparison.leakage) is not None:
                continue
            _print_progress(console, f"attack {number}", planned, time.monotonic() - start)
            try:
                _attack(folder, comparison.leakage, bars)
                report(folder)
            except FedstillError as error:  # for example a run that cannot be repeated here
                failed[planned.folder] = " ".join(str(error).split())
                _write_json(out / NOT_ATTACKED_FILE, failed)
                console.print(Text(f"not attacked: {failed[planned.folder]}"), soft_wrap=True)


def read_results(out: Path, comparison: Comparison) -> dict[str, Mapping[str, Any]]:
    """Return the content of ``result.json`` of each finished run, by folder."""
    files = {planned.folder: out / planned.folder / "result.json" for planned in comparison.planned_runs()}
    return {folder: read_object(file) for folder, file in files.items() if file.exists()}


def read_not_run(out: Path) -> Mapping[str, str]:
    """Return why runs of a comparison could not run, by folder."""
    return _read_string_mapping(out / NOT_RUN_FILE)


def read_not_attacked(out: Path) -> Mapping[str, str]:
    """Return why finished runs of a comparison could not be attacked, by folder."""
    return _read_string_mapping(out / NOT_ATTACKED_FILE)


def _read_string_mapping(file: Path) -> Mapping[str, str]:
    if not file.exists():
        return {}
    reasons = read_object(file)
    if not all(isinstance(reason, str) for reason in reasons.values()):
        raise RunFolderError(f"{file}: invalid value (expected a text for each folder)")
    return reasons


def read_attack(folder: Path, leakage: Mapping[str, Any]) -> Leakage | None:
    """Return the result of an attack with these options on a run, or None if there is none.

    Raises:
        RunFolderError: the folder is damaged.
    """
    result = Leakage.read(folder)
    return result if result and result.config == json.loads(json.dumps(leakage)) else None


def read_command(out: Path) -> str:
    """Return the command that created a comparison's folder."""
    return read_text(out / COMPARISON_FILE).partition("\n")[0].removeprefix(run.COMMAND)


def _run(
    config: RunSpec, folder: Path, bars: bool, trained: Path, report: run.Report, check: run.Check
) -> None:
    command = shlex.join(["fedstill", "run", str(folder / "config.toml")])
    run.run_or_resume(
        config, folder, command=command, progress=bars, trained=trained, report=report, check=check
    )


def _attack(folder: Path, leakage: Table, bars: bool) -> None:
    options = changed_options_as_cli_words(leakage, LeakageConfig().to_table())
    command = shlex.join(["fedstill", "attack", str(folder), *options])
    run_attacks(folder, LeakageConfig.from_table(leakage), command=command, progress=bars)


def _check_runs(
    comparison: Comparison, all_runs: list[ComparisonRun], out: Path, console: Console
) -> tuple[dict[str, str], dict[str, str]]:
    """Check all runs before the first one starts.

    Returns:
        Why runs cannot run in their setting, by folder, and the fingerprints of their data, custom modules
        and weights. The fingerprints reveal replaced files when a comparison is resumed.
    """
    refused: dict[str, str] = {}
    fingerprints, seen = dict(_read_string_mapping(out / FINGERPRINTS_FILE)), set[str]()
    unfinished = [planned for planned in all_runs if not (out / planned.folder / "result.json").exists()]
    for module, (file, code) in _user_modules(comparison, all_runs).items():
        if fingerprints.setdefault(module, code) != code:
            changed = f"{out} began with another version of {file}"
            if unfinished:
                raise RunFolderError(f"{changed} (expected the same file, or another folder)")
            console.print(Text(f"{changed}: the results are of that version"), soft_wrap=True)
    with console.status("checking") as status:
        for count, planned in enumerate(unfinished, start=1):
            status.update(f"checking run {count} of {len(unfinished)}")
            config = comparison.run_config(planned)
            try:
                simulation, _ = build_simulation(config, placeholder=True)
            except FedstillError as error:
                refused[planned.folder] = str(error)
                continue
            _require_same_weights(fingerprints, out, simulation)
            # Before the data are partitioned, which depends on the seed.
            if (options := json.dumps([*map(to_table, (config.data, config.task))])) in seen:
                continue
            seen.add(options)
            dataset = load(config.data, config.task)
            digest = digest_examples([dataset.train, dataset.test])
            if fingerprints.setdefault(options, digest) != digest:
                other = f"{out} began with other data {config.data.registered_name!r}"
                raise RunFolderError(f"{other} (expected the same data, or another folder)")
    for setting in dict.fromkeys(planned.setting for planned in all_runs):
        folders = [planned.folder for planned in all_runs if planned.setting == setting]
        if all(folder in refused for folder in folders):
            location = f" in setting {setting!r}" if setting else ""
            raise FedstillError(f"no method can run{location}: {refused[folders[0]]}")
    return refused, fingerprints


def _require_same_weights(fingerprints: dict[str, str], out: Path, simulation: Simulation) -> None:
    """Refuse a run with other pretrained weights or models in files than the comparison began with.

    Args:
        fingerprints: those of the comparison; new ones are added.
        out: folder of the comparison.
        simulation: the run.

    Raises:
        RunFolderError: naming the option whose files have changed.
    """
    config, space = simulation.setting.spec, simulation.setting.feature_space
    digests = {
        "features.backbone": "" if space is None else space.backbone.digest,
        "student.model": file_fingerprint(simulation.student),
        "nodes.models": "".join(sorted({file_fingerprint(node.model) for node in simulation.nodes})),
        "nodes.perceptual": file_fingerprint(simulation.at_nodes.perceptual),
    }
    for option, digest in digests.items():
        # Weights also depend on the shape of the data.
        parts = [attrgetter(name)(config) for name in (*WEIGHT_OPTIONS[option], "data", "task")]
        key = f"{option} {json.dumps([*map(to_table, parts)])}"
        if digest and fingerprints.setdefault(key, digest) != digest:
            names = " and ".join(WEIGHT_OPTIONS[option])
            raise RunFolderError(
                f"{out} began with other weights of {names} (expected the same files, or another folder)"
            )


def _user_modules(comparison: Comparison, all_runs: Sequence[ComparisonRun]) -> Mapping[str, tuple[str, str]]:
    """Return the custom modules that runs use, with the name and the fingerprint of their files."""
    modules: dict[str, tuple[str, str]] = {}
    for planned in all_runs:
        try:
            config = comparison.run_config(planned)
        except FedstillError:  # reported for the run itself
            continue
        choices = (config.method, config.data, config.task, config.split)
        names = {type(part).__module__ for part in choices}
        networks = (
            *config.nodes.models,
            config.student.model,
            config.features.backbone,
            config.nodes.perceptual,
        )
        names |= {(encoder_backbone(name) or name).rpartition(":")[0] for name in networks}
        for name in names:
            file = getattr(sys.modules.get(name), "__file__", None)
            if file and name.partition(".")[0] != "fedstill" and name not in modules:
                modules[name] = (Path(file).name, fingerprint(Path(file).read_bytes()))
    return modules


def _write_json(file: Path, reasons: Mapping[str, str]) -> None:
    write_text(file, json.dumps(reasons, indent=2) + "\n")


def _check_folder(out: Path, comparison: Comparison) -> Comparison | None:
    """Refuse a folder with anything but this comparison, and return the plan in the folder.

    That plan may have no attacks or fewer seeds, and it may have attacks that are not requested now, as runs
    are unchanged. Attacks with other options are refused, as they would replace existing results, perhaps
    with weaker ones.
    """
    if not out.exists():
        return None
    if not out.is_dir():
        raise RunFolderError(f"{out} is a file: choose another folder")
    if (out / COMPARISON_FILE).exists():
        old_plan = read_comparison_folder(out)
        for part in dataclasses.fields(Comparison):
            if part.name == "leakage" and None in (old_plan.leakage, comparison.leakage):
                continue
            if part.name == "seeds" and set(old_plan.seeds) < set(comparison.seeds):
                continue
            if part.name not in ("name", "about", "note", "forms") and _is_part_different(
                old_plan, comparison, part.name
            ):
                difference = _first_difference(getattr(old_plan, part.name), getattr(comparison, part.name))
                detail = f" ({difference})" if difference else ""
                advice = by_caller(f"fedstill compare --resume {out}", *2 * ("the same arguments",))
                raise RunFolderError(
                    f"{out} holds a comparison that differs in its {part.name}{detail}: choose another "
                    f"folder, or resume it ({advice})"
                )
        return old_plan
    if {file.name for file in out.iterdir()} - {f"{COMPARISON_FILE}.part"}:
        raise RunFolderError(f"{out} holds a run or other files: choose another folder, or empty it")
    return None


def _first_difference(before: object, now: object) -> str:
    """Describe the first value in which two tables differ; empty if they are not tables.

    >>> _first_difference({"engine": {"threads": 1}}, {"engine": {"threads": 0}})
    'engine.threads was 1 and is now 0'
    """
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return ""
    one, other = flatten(before), flatten(now)
    key = next((key for key in (*one, *other) if one.get(key) != other.get(key)), None)
    if key is None:  # they differ in order only
        return ""
    old, new = ("not set" if table.get(key) is None else table[key] for table in (one, other))
    return f"{key} was {old} and is now {new}"


def _is_part_different(first: Comparison, second: Comparison, part: str) -> bool:
    """Return whether a part of two comparisons differs, including the order of methods and settings."""
    one, other = getattr(first, part), getattr(second, part)
    return bool(one != other or (isinstance(one, Mapping) and list(one) != list(other)))


def _print_progress(console: Console, count: str, planned: ComparisonRun, elapsed: float) -> None:
    parts = (planned.setting, planned.label, f"seed {planned.seed}")
    line = Text.assemble(
        (f"{count}  ", "dim"),
        (", ".join(part for part in parts if part), "bold"),
        (f"  {format_seconds(elapsed)} elapsed", "dim"),
    )
    console.print(line, soft_wrap=True)
