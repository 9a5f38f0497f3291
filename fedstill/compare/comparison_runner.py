"""Run the missing runs of a comparison, one after another or several at once.

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
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedstill.attacks.attack import Leakage
from fedstill.attacks.attack_runner import LeakageConfig, run_attacks
from fedstill.compare.comparison import (
    COMPARISON_FILE,
    Comparison,
    ComparisonRun,
    read_comparison_folder,
    slug,
)
from fedstill.compare.ray_tasks import RAY, RAY_CLIENT, RayTasks, run_on_ray
from fedstill.compare.run_workers import (
    RunOutcome,
    RunStart,
    run_in_workers,
    serve_runs,
    take_over_stdout,
    visible_devices,
)
from fedstill.core.compute import EngineConfig
from fedstill.core.config_tables import (
    Table,
    changed_options_as_cli_words,
    flatten,
    read_table,
    read_text,
    to_table,
)
from fedstill.core.errors import ArgumentError, FedstillError, RunFolderError, by_caller
from fedstill.core.hashing import fingerprint
from fedstill.core.private_files import lock_file
from fedstill.core.run_writer import lock_folder, make_folder, read_object, write_text
from fedstill.core.safe_console import SafeConsole
from fedstill.core.text_format import format_seconds
from fedstill.data.loading import cache_loads, load
from fedstill.models.model_config import encoder_backbone
from fedstill.models.predictors import file_fingerprint
from fedstill.runs import run
from fedstill.runs.data_digests import digest_examples
from fedstill.runs.ray_simulation import simulation_class
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import RunSpec

__all__ = [
    "compare",
    "merge_comparisons",
    "numbered_runs",
    "read_attack",
    "read_command",
    "read_not_attacked",
    "read_not_run",
    "read_results",
    "run_one",
    "serve_numbered_runs",
]

TRAINED_FOLDER = ".trained"
NOT_RUN_FILE = "not_run.json"
NOT_ATTACKED_FILE = "not_attacked.json"
LOCK_FILE = ".lock"
# Fingerprints of data and weights by their options, and of custom modules by name.
FINGERPRINTS_FILE = "data.json"
# Parts of a plan that may get more entries later.
EXTENSIBLE = ("seeds", "methods", "settings", "runs", "leakage", "attacked_settings")
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
    jobs: int | str | None = None,
    devices: Sequence[str] = (),
    quiet: bool = False,
    bars: bool = False,
) -> None:
    """Run what is not finished yet, and attack it if the plan says so.

    Args:
        comparison: the plan.
        out: folder of the comparison: a new one, or one in which the same comparison was interrupted.
            Attacks, seeds, methods or settings may be added to it. Its attacks are kept.
        command: the command that repeats it, for the report.
        report: writes the report of a run's folder, as far as the run is.
        only: methods and settings to run now (:meth:`.Comparison.planned_runs`). The others can run later.
        jobs: number of runs at once. With more than one, each has a process of its own. None: one, or one for
            each device. ``ray`` or ``ray://HOST:PORT``: tasks of a Ray cluster (:mod:`.ray_tasks`).
        devices: GPUs of the processes, such as ``cuda:0``, in turn (:func:`.run_in_workers`). Empty: each
            process sees all GPUs.
        quiet: print nothing about runs on standard error.
        bars: show progress bars of each run, if they run one after another.

    Raises:
        RunFolderError: the folder holds another comparison or other files, is in use, or began with other
            data.
        UnknownName: ``only`` has a name that is not in the comparison.
        FedstillError: no method can run. Then no folder is created.
    """
    jobs = max(len(devices), 1) if jobs is None else jobs
    tasks = _ray_tasks(comparison, jobs, devices) if isinstance(jobs, str) else None
    if isinstance(jobs, int):
        _check_processes(comparison, jobs, devices)
    old_plan = _check_folder(out, comparison)
    comparison = _with_attacks_of(old_plan, comparison)
    console = SafeConsole(stderr=True, quiet=quiet, highlight=False)
    all_runs = comparison.planned_runs(only)
    with cache_loads(), ExitStack() as at_last:
        refused, fingerprints = _check_runs(comparison, all_runs, out, console)
        _require_one_method(all_runs, refused)
        make_folder(out)
        at_last.enter_context(lock_folder(out, "comparison"))
        _write_plan(comparison, out, command)
        _add_fingerprints(out, fingerprints)
        for reason in dict.fromkeys(refused.values()):
            console.print(Text(f"refused: {reason}"))
        at_last.callback(shutil.rmtree, out / TRAINED_FOLDER, ignore_errors=True)
        runnable = [planned for planned in all_runs if planned.folder not in refused]
        requested = {planned.folder for planned in all_runs}
        refused.update((folder, why) for folder, why in read_not_run(out).items() if folder not in requested)
        _write_json(out / NOT_RUN_FILE, refused)
        failed = {folder: why for folder, why in read_not_attacked(out).items() if folder not in requested}
        if comparison.leakage is not None:
            _write_json(out / NOT_ATTACKED_FILE, failed)
        progress = _Progress(console, runnable, out)
        remaining = Counter(_trained_folder(planned) for planned in runnable)
        if jobs == 1 and not devices:
            outcomes = _run_one_by_one(comparison, runnable, out, bars, report, progress)
        else:
            by_number = {number: each for number, each in numbered_runs(comparison) if each in runnable}
            if tasks is not None:
                execute = partial(execute_numbered_run, out.resolve(), report)
                events = run_on_ray(by_number, execute, tasks)
            else:
                groups = {number: (each.setting, each.seed) for number, each in by_number.items()}
                events = run_in_workers(groups, out, int(jobs), devices)
            outcomes = _run_at_once(by_number, events, progress)
        at_last.callback(outcomes.close)
        for planned, outcome in outcomes:
            if outcome.not_run:  # for example a limit of a node's policy
                _set_reason(out / NOT_RUN_FILE, planned, outcome.not_run)
            if outcome.not_attacked:  # for example a run that cannot be repeated here
                _set_reason(out / NOT_ATTACKED_FILE, planned, outcome.not_attacked)
                console.print(Text(f"not attacked: {outcome.not_attacked}"), soft_wrap=True)
            remaining[_trained_folder(planned)] -= 1
            if not remaining[_trained_folder(planned)]:
                shutil.rmtree(out / _trained_folder(planned), ignore_errors=True)


def _run_one_by_one(
    comparison: Comparison,
    runnable: Sequence[ComparisonRun],
    out: Path,
    bars: bool,
    report: run.Report,
    progress: _Progress,
) -> Generator[tuple[ComparisonRun, RunOutcome], None, None]:
    for planned in runnable:
        start, trained = partial(progress.print_start, planned), out / _trained_folder(planned)
        yield (
            planned,
            run_and_attack(comparison, planned, out, report=report, start=start, trained=trained, bars=bars),
        )
        progress.count(planned)


def _run_at_once(
    by_number: Mapping[int, ComparisonRun],
    events: Generator[tuple[int, RunStart | RunOutcome], None, None],
    progress: _Progress,
) -> Generator[tuple[ComparisonRun, RunOutcome], None, None]:
    with closing(events):
        for number, event in events:
            planned = by_number[number]
            if isinstance(event, RunStart):
                progress.print_start(planned, event.phase)
            else:
                progress.count(planned)
                yield planned, event


def run_one(
    comparison: Comparison,
    out: Path,
    number: int,
    *,
    command: str,
    report: run.Report,
    quiet: bool = False,
) -> RunOutcome:
    """Execute one run of a comparison, for example as a task of a cluster's array job.

    Several processes may do so at once in one folder.

    Args:
        comparison: the plan.
        out: folder of the comparison, created if it does not exist.
        number: number of the run, from 1 on (:func:`numbered_runs`).
        command, report, quiet: as of :func:`compare`.

    Raises:
        ArgumentError: there is no such number.
        RunFolderError: the folder holds something else, or the run is in use.
    """
    by_number = dict(numbered_runs(comparison))
    if number not in by_number:
        raise ArgumentError("--only-run", number, f"1 to {len(by_number)}")
    planned, console = by_number[number], SafeConsole(stderr=True, quiet=quiet, highlight=False)
    old_plan = _check_folder(out, comparison)
    comparison = _with_attacks_of(old_plan, comparison)
    with cache_loads():
        refused, fingerprints = _check_runs(comparison, [planned], out, console)
        make_folder(out)
        _write_plan(comparison, out, command)
        _add_fingerprints(out, fingerprints)
        if planned.folder in refused:
            outcome = RunOutcome(not_run=refused[planned.folder])
        else:
            progress = _Progress(console, comparison.planned_runs(), out)
            start = partial(progress.print_start, planned)
            outcome = run_and_attack(comparison, planned, out, report=report, start=start)
    _set_reason(out / NOT_RUN_FILE, planned, outcome.not_run)
    if comparison.leakage is not None:
        _set_reason(out / NOT_ATTACKED_FILE, planned, outcome.not_attacked)
    return outcome


def serve_numbered_runs(out: Path, report: run.Report) -> None:
    """Execute runs of a comparison for another process, which sends their numbers (:mod:`.run_workers`)."""
    output = take_over_stdout()
    with cache_loads():
        serve_runs(partial(execute_numbered_run, out, report), output)


def execute_numbered_run(
    out: Path, report: run.Report, number: int, start: Callable[[str], object]
) -> RunOutcome:
    """Execute the run of a number for another process, which writes its outcome to the comparison's files.

    Args:
        out: folder of the comparison, with its plan.
        report: as of :func:`compare`.
        number: number of the run (:func:`numbered_runs`).
        start: called with ``"run"`` or ``"attack"`` before either.
    """
    try:
        comparison = read_comparison_folder(out)
        planned = dict(numbered_runs(comparison))[number]
        trained = out / _trained_folder(planned)
        return run_and_attack(comparison, planned, out, report=report, start=start, trained=trained)
    except RunFolderError as error:
        return RunOutcome(folder_error=str(error))


def merge_comparisons(comparison: Comparison, out: Path, folders: Sequence[Path], *, command: str) -> int:
    """Copy finished runs from other folders of the same comparison.

    Args:
        comparison: the plan.
        out: folder of the comparison, created if it does not exist.
        folders: folders of the same comparison. They may have other seeds.
        command: as of :func:`compare`.

    Returns:
        Number of copied runs. Runs that ``out`` has already are not copied.

    Raises:
        RunFolderError: a folder holds another comparison, or one of other data.
    """
    plans = {folder: read_comparison_folder(folder) for folder in folders}
    for folder, plan in plans.items():
        for part in ("base", "methods", "settings", "runs", "leakage"):
            if _is_part_different(plan, comparison, part):
                difference = _first_difference(getattr(comparison, part), getattr(plan, part))
                detail = f" ({difference})" if difference else ""
                raise RunFolderError(f"{folder} holds a comparison that differs in its {part}{detail}")
    seeds = dict.fromkeys(seed for plan in (comparison, *plans.values()) for seed in plan.seeds)
    comparison = dataclasses.replace(comparison, seeds=tuple(seeds))
    _check_folder(out, comparison)
    make_folder(out)
    count = 0
    with lock_folder(out, "comparison"):
        _write_plan(comparison, out, command)
        for folder in folders:
            _add_fingerprints(out, _read_string_mapping(folder / FINGERPRINTS_FILE))
            for planned in comparison.planned_runs():
                is_copied = _copy_run(folder / planned.folder, out / planned.folder)
                count += is_copied
                for name in (NOT_RUN_FILE, NOT_ATTACKED_FILE):
                    reason = _read_string_mapping(folder / name).get(planned.folder, "")
                    if reason or (is_copied and (out / name).exists()):
                        _set_reason(out / name, planned, reason)
    return count


def _copy_run(source: Path, target: Path) -> bool:
    """Copy a finished run unless the target has a result. Return whether it was copied.

    Raises:
        RunFolderError: another process runs either of them.
    """
    if (target / "result.json").exists() or not (source / "result.json").exists():
        return False
    copied = target.with_name(f"{target.name}.part")
    shutil.rmtree(copied, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)  # an unfinished run, or a new folder
    with lock_folder(source, "run"), lock_folder(target, "run"):
        shutil.copytree(source, copied)
        shutil.rmtree(target)
        copied.replace(target)
    return True


def _write_plan(comparison: Comparison, out: Path, command: str) -> None:
    """Write the plan of a comparison, or what it adds to the plan of the folder.

    Raises:
        RunFolderError: another process began another comparison there.
    """
    with _locked(out):
        old_plan = _check_folder(out, comparison)
        comparison = _with_attacks_of(old_plan, comparison)
        if old_plan is None or any(_is_part_different(old_plan, comparison, part) for part in EXTENSIBLE):
            write_text(out / COMPARISON_FILE, f"{run.COMMAND}{command}\n\n{comparison.to_toml()}")


def _ray_tasks(comparison: Comparison, jobs: str, devices: Sequence[str]) -> RayTasks:
    """Return how the runs of a comparison are placed on a Ray cluster: one GPU for each run that uses one.

    Raises:
        ArgumentError: naming the argument.
    """
    name = by_caller("--jobs", "jobs", "jobs")
    if jobs != RAY and not jobs.startswith(RAY_CLIENT):
        raise ArgumentError(name, jobs, "a number from 1 up, ray, or ray://HOST:PORT")
    if devices:
        raise ArgumentError("devices", list(devices), f"none with jobs = {jobs}: Ray assigns GPUs")
    engine = read_table(EngineConfig, comparison.base.get("engine", {}))
    if engine.backend != "local":
        raise ArgumentError(name, jobs, f"a number, with engine.backend = {engine.backend!r}")
    return RayTasks(jobs, cpus=max(engine.threads, 1), gpus=int(engine.device.startswith("cuda")))


def _check_processes(comparison: Comparison, jobs: int, devices: Sequence[str]) -> None:
    """Refuse a number of processes or devices that cannot be used.

    Raises:
        ArgumentError: naming the argument.
    """
    if jobs < 1:
        raise ArgumentError(by_caller("--jobs", "jobs", "jobs"), jobs, "1 or more")
    if isinstance(devices, str):
        raise ArgumentError("devices", devices, "a list of devices")
    for device in devices:
        visible_devices(device)
        own = comparison.base.get("engine", {}).get("device", EngineConfig().device)
        if device.partition(":")[0] != own.partition(":")[0] and own != "auto":
            expected = (
                f"{own}, as engine.device says; engine.device = {device.partition(':')[0]!r} changes it"
            )
            raise ArgumentError("devices", device, expected)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Wait until no other process changes the files that runs of a comparison share."""
    with (out / LOCK_FILE).open("a", encoding="utf-8") as file:
        while True:
            try:
                lock_file(file.fileno())
            except BlockingIOError:
                continue  # after half a second
            break
        yield


def _add_fingerprints(out: Path, fingerprints: Mapping[str, str]) -> None:
    """Add fingerprints of data and modules to those of a comparison.

    Raises:
        RunFolderError: another process began with other data.
    """
    with _locked(out):
        known = _read_string_mapping(out / FINGERPRINTS_FILE)
        if any(known.get(name, digest) != digest for name, digest in fingerprints.items()):
            raise RunFolderError(
                f"{out} has runs on other data or modules (expected the same, or another folder)"
            )
        _write_json(out / FINGERPRINTS_FILE, {**known, **fingerprints})


def _set_reason(file: Path, planned: ComparisonRun, reason: str) -> None:
    """Store why a run has no result, or remove an earlier reason."""
    with _locked(file.parent):
        reasons = dict(_read_string_mapping(file))
        reasons.pop(planned.folder, None)
        _write_json(file, {**reasons, planned.folder: reason} if reason else reasons)


def numbered_runs(comparison: Comparison) -> list[tuple[int, ComparisonRun]]:
    """Return all runs of a comparison with their numbers, from 1 on."""
    return list(enumerate(comparison.planned_runs(), start=1))


def run_and_attack(
    comparison: Comparison,
    planned: ComparisonRun,
    out: Path,
    *,
    report: run.Report,
    start: Callable[[str], object],
    trained: Path | None = None,
    bars: bool = False,
) -> RunOutcome:
    """Execute, resume or read one run, and attack it if the plan says so.

    Args:
        out: folder of the comparison.
        report: writes the report of a run's folder.
        start: called with ``"run"`` or ``"attack"`` before either.
        trained: folder of nodes' models that are shared with other runs; None: none.
        bars: show progress bars.

    Raises:
        RunFolderError: the run's folder is in use, or holds something else.
    """
    folder = out / planned.folder
    finished = (folder / "result.json").exists()
    if not finished:
        start("run")
    check = partial(_require_same_weights, dict(_read_string_mapping(out / FINGERPRINTS_FILE)), out)
    try:
        _run(comparison.run_config(planned), folder, bars, trained, report, check)
    except RunFolderError:
        raise  # not caused by the method
    except FedstillError as error:
        return RunOutcome(not_run=f"stopped: {error}")
    if not finished or not (folder / "report.html").exists():
        report(folder)
    leakage = comparison.leakage if comparison.is_attacked(planned.setting) else None
    if leakage is None or read_attack(folder, leakage) is not None:
        return RunOutcome()
    start("attack")
    try:
        _attack(folder, leakage, bars)
        report(folder)
    except FedstillError as error:
        return RunOutcome(not_attacked=" ".join(str(error).split()))
    return RunOutcome()


def _trained_folder(planned: ComparisonRun) -> Path:
    """Return the folder of local models that several methods of a setting and seed start from."""
    return Path(TRAINED_FOLDER) / f"{slug(planned.setting)}-seed{planned.seed}"


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
    config: RunSpec, folder: Path, bars: bool, trained: Path | None, report: run.Report, check: run.Check
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
    """Check all runs before the first one starts: one seed of each method and setting.

    Returns:
        Why runs cannot run in their setting, by folder, and the fingerprints of their data, custom modules
        and weights. The fingerprints reveal replaced files when a comparison is resumed.
    """
    refused: dict[str, str] = {}
    fingerprints, seen = dict(_read_string_mapping(out / FINGERPRINTS_FILE)), set[str]()
    unfinished = [planned for planned in all_runs if not (out / planned.folder / "result.json").exists()]
    first_seeds = {(planned.setting, planned.label): planned for planned in reversed(unfinished)}
    checked = list(reversed(first_seeds.values()))
    for module, (file, code) in _user_modules(comparison, all_runs).items():
        if fingerprints.setdefault(module, code) != code:
            changed = f"{out} began with another version of {file}"
            if unfinished:
                raise RunFolderError(f"{changed} (expected the same file, or another folder)")
            console.print(Text(f"{changed}: the results are of that version"), soft_wrap=True)
    with console.status("checking") as status:
        for count, planned in enumerate(checked, start=1):
            status.update(f"checking run {count} of {len(checked)}")
            config = comparison.run_config(planned)
            try:
                simulation, _ = build_simulation(config, simulation_class(config), placeholder=True)
            except FedstillError as error:
                seeds = [dataclasses.replace(planned, seed=seed) for seed in comparison.seeds]
                refused.update((other.folder, str(error)) for other in seeds if other in unfinished)
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
    return refused, fingerprints


def _require_one_method(all_runs: Sequence[ComparisonRun], refused: Mapping[str, str]) -> None:
    """Refuse a comparison with a setting in which no method can run."""
    for setting in dict.fromkeys(planned.setting for planned in all_runs):
        folders = [planned.folder for planned in all_runs if planned.setting == setting]
        if all(folder in refused for folder in folders):
            location = f" in setting {setting!r}" if setting else ""
            raise FedstillError(f"no method can run{location}: {refused[folders[0]]}")


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
            if part.name in ("name", "about", "note", "forms") or (
                part.name in EXTENSIBLE and _is_extended(old_plan, comparison, part.name)
            ):
                continue
            if _is_part_different(old_plan, comparison, part.name):
                difference = _first_difference(getattr(old_plan, part.name), getattr(comparison, part.name))
                detail = f" ({difference})" if difference else ""
                advice = by_caller(f"fedstill compare --resume {out}", *2 * ("the same arguments",))
                raise RunFolderError(
                    f"{out} holds a comparison that differs in its {part.name}{detail}: choose another "
                    f"folder, or resume it ({advice})"
                )
        return old_plan
    if {file.name for file in out.iterdir()} - {f"{COMPARISON_FILE}.part", LOCK_FILE}:
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


def _with_attacks_of(old_plan: Comparison | None, comparison: Comparison) -> Comparison:
    """Return a plan with the attacks of the plan in its folder, if it has none itself."""
    if old_plan is None or comparison.leakage is not None:
        return comparison
    leakage, attacked = old_plan.leakage, old_plan.attacked_settings
    return dataclasses.replace(comparison, leakage=leakage, attacked_settings=attacked)


def _is_extended(old_plan: Comparison, comparison: Comparison, part: str) -> bool:
    """Return whether a part of a comparison only adds to that of an older plan."""
    before, now = getattr(old_plan, part), getattr(comparison, part)
    if part in ("leakage", "attacked_settings"):
        return None in (old_plan.leakage, comparison.leakage)
    if not isinstance(before, Mapping):
        return set(before) < set(now)
    if part == "runs" and any(label in old_plan.methods for label in now.keys() - before.keys()):
        return False  # other options of a method that may have run already
    return len(before) < len(now) and all(key in now and now[key] == before[key] for key in before)


def _is_part_different(first: Comparison, second: Comparison, part: str) -> bool:
    """Return whether a part of two comparisons differs, including the order of methods and settings."""
    one, other = getattr(first, part), getattr(second, part)
    return bool(one != other or (isinstance(one, Mapping) and list(one) != list(other)))


class _Progress:
    """Lines about the runs of a comparison, with an estimate of the remaining time.

    Args:
        console: prints the lines.
        runnable: the runs. Finished ones have a number, but take no time.
        out: folder of the comparison.
    """

    def __init__(self, console: Console, runnable: Sequence[ComparisonRun], out: Path) -> None:
        self._console, self._start = console, time.monotonic()
        self._numbers = {planned: number for number, planned in enumerate(runnable, start=1)}
        self._unfinished = {each for each in runnable if not (out / each.folder / "result.json").exists()}
        self._done = 0

    def print_start(self, planned: ComparisonRun, phase: str) -> None:
        """Print the start of a run or an attack."""
        elapsed = time.monotonic() - self._start
        clock = f"{format_seconds(elapsed)} elapsed"
        if self._done:
            clock += f", about {format_seconds(elapsed / self._done * len(self._unfinished))} left"
        parts = (planned.setting, planned.label, f"seed {planned.seed}")
        line = Text.assemble(
            (f"{phase} {self._numbers[planned]} of {len(self._numbers)}  ", "dim"),
            (", ".join(part for part in parts if part), "bold"),
            (f"  {clock}", "dim"),
        )
        self._console.print(line, soft_wrap=True)

    def count(self, planned: ComparisonRun) -> None:
        """Count a run that has ended."""
        if planned in self._unfinished:
            self._unfinished.remove(planned)
            self._done += 1
