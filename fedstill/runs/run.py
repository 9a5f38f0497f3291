"""One run from its configuration to its folder of results."""

from __future__ import annotations

import json
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill import models
from fedstill.core.dataset import Column, DataSet, TensorData
from fedstill.core.errors import ArgumentError, MethodRefused, RunFolderError
from fedstill.core.records import write_text
from fedstill.core.seeds import numpy_generator
from fedstill.core.version import __version__
from fedstill.data.loaders import load
from fedstill.data.public import HELD_OUT, Public, held_out, load_public
from fedstill.data.splits import conceal, split
from fedstill.data.validation import check_measured_on_test
from fedstill.protocol.method import refusal
from fedstill.runs.config import RunConfig, load_toml, to_toml
from fedstill.runs.experiment import Experiment
from fedstill.runs.result import told_cases
from fedstill.runs.setting import Setting

REHEARSED = ("flare", "flare-poc")  # engines whose nodes are processes of their own
COMMAND = "# Made by: "  # the first line of a run's config.toml, with the command that repeats it


def run(config: RunConfig, out: Path, *, command: str, progress: bool) -> dict[str, Any]:
    """Run a configuration from the start.

    Args:
        config: the run.
        out: its folder; made here, once everything has been checked.
        command: the exact command that repeats it, for the report.
        progress: show bars on a terminal.

    Returns:
        What ``result.json`` holds.

    Raises:
        RunFolderError: the folder holds something already.
        FedstillError: the configuration cannot run, or the federation cannot be reached; then no folder is
            made.
    """
    check_folder(out)
    _require_engine(config)
    if config.engine.startup_kit:
        config = _with_kit(config, Path(config.engine.startup_kit))
    made = None if config.engine.startup_kit else prepare(config)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "config.toml", f"{COMMAND}{command}\n\n{to_toml(config)}")
    return _go(config, made, out, command, progress)


def _require_engine(config: RunConfig) -> None:
    """Refuse an engine that is not installed.

    Raises:
        DeployError: it is not.
    """
    if config.engine.name in REHEARSED:
        from fedstill.federation.provision import require_flare

        require_flare()


def _with_kit(config: RunConfig, kit: Path) -> RunConfig:
    """A run at the federation that an admin's kit lets in to, wherever it will be resumed from.

    Raises:
        DeployError: the kit is none, or is not let in, or no node is there.
        ArgumentError: validation data, which those nodes would learn from.
    """
    from fedstill.runs.afar import reach

    check_measured_on_test(config.data)

    reach(kit)
    return replace(config, engine=replace(config.engine, startup_kit=str(kit.resolve())))


def resume(out: Path, *, progress: bool, startup_kit: Path | None = None) -> dict[str, Any]:
    """Go on with a run that was stopped, to the figures that it would have reached.

    Args:
        out: its folder.
        progress: show bars on a terminal.
        startup_kit: of the admin, where the one that the run began with has moved or run out.

    Raises:
        RunFolderError: there is no run in the folder.
        ArgumentError: a kit for a run that is at no deployed federation.
    """
    if not (out / "config.toml").exists():
        raise RunFolderError(f"{out} holds no run to go on with: there is no config.toml in it")
    if (out / "result.json").exists():
        result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
        return result
    config = load_toml(out / "config.toml")
    _require_engine(config)
    first = (out / "config.toml").read_text(encoding="utf-8").splitlines()[0]
    if startup_kit is not None:
        if not config.engine.startup_kit:
            raise ArgumentError("--startup-kit", str(startup_kit), "none, as this run began without one")
        config = _with_kit(config, startup_kit)
        write_text(out / "config.toml", f"{first}\n\n{to_toml(config)}")
    made = None if config.engine.startup_kit else prepare(config)
    return _go(config, made, out, first.removeprefix(COMMAND), progress)


def _go(
    config: RunConfig,
    made: tuple[Experiment, dict[str, Any]] | None,
    out: Path,
    command: str,
    progress: bool,
) -> dict[str, Any]:
    """A run in its folder, wherever its nodes are; without an experiment, at a deployed federation."""
    if made is None:
        from fedstill.runs.afar import submit

        result = {**submit(config, out, progress), "command": command, **_machine()}
        write_text(out / "result.json", json.dumps(result, indent=2) + "\n")
        return result
    experiment, about = made
    about["command"] = command
    if config.engine.name in REHEARSED:
        from fedstill.runs.afar import rehearse

        return finish(experiment, about, rehearse(config, experiment, out, progress), out)
    return finish(experiment, about, experiment.run(out, progress=progress), out)


def prepare(config: RunConfig) -> tuple[Experiment, dict[str, Any]]:
    """Data, split, models and method of a configuration, made ready and checked.

    Returns:
        The experiment, and what the result says about it beside the figures.
    """
    data = load(config.data, config.task)
    task, method = config.task.make(data.classes), config.method
    reason = refusal(method.needs(), task)
    if reason is not None:  # before all that could be mended in vain
        raise MethodRefused(method.title, "every node", reason)
    task.check(data.train, "training data")
    parts, public = divide(config, data)
    setting, specs = assemble(config, data, parts, public)
    experiment = Experiment(setting)
    if config.data.validation:
        experiment.notes.append(
            "measured on validation data (data.validation): what is called test data here is a part of the "
            "training examples that no node had"
        )
    about = {
        "fedstill": __version__,
        "name": config.name,
        "command": "",
        "data": {
            "name": data.name,
            "classes": list(data.classes),
            "train": sum(map(len, parts)),
            "test": len(data.test),
            **told_cases(data.test),
            "shape": list(data.train.inputs.shape[1:]),
            "note": data.note,
        },
        "split": _how(config, data, len(parts)),
        "values": _values(config, data),
        "models": {"nodes": specs, "student": config.student.model},
    }
    return experiment, about


def assemble(
    config: RunConfig, data: DataSet, parts: Sequence[TensorData], public: Public | None
) -> tuple[Setting, list[str]]:
    """What an experiment is made of, from data that have been divided; and the names of the nodes' models.

    Args:
        config: the run.
        data: its classes, test part and normalisation.
        parts: each node's own examples.
        public: public data, or None.

    Raises:
        ArgumentError: more models than nodes.
    """
    shape = tuple(data.test.inputs.shape[1:])
    classes, names = len(data.classes), config.nodes.models
    if len(names) > len(parts):
        raise ArgumentError("nodes.models", list(names), f"at most one for each of the {len(parts)} nodes")

    def network(spec: str, *purpose: str | int) -> torch.nn.Module:
        return models.build(spec, shape, classes, config.seed, *purpose, vocabulary=data.vocabulary)

    specs = [names[index % len(names)] for index in range(len(parts))]
    setting = Setting(
        task=config.task.make(data.classes),
        parts=parts,
        models=[network(spec, "model", index) for index, spec in enumerate(specs)],
        student=network(config.student.model, "student"),
        test=data.test,
        method=config.method,
        mark=network(config.student.model, "student") if config.evaluation.centralised else None,
        policies=[config.nodes.policy] * len(parts),
        privacies=[config.nodes.privacy] * len(parts),
        local=config.nodes.local,
        engine=config.engine,
        mean=data.mean,
        std=data.std,
        seed=config.seed,
        every=config.evaluation.every,
        samples=config.evaluation.samples,
        public=public,
        link=config.link,
        classes=data.classes,
        vocabulary=data.vocabulary,
        perceptual=config.nodes.perceptual,
    )
    return setting, specs


def divide(config: RunConfig, data: DataSet) -> tuple[list[TensorData], Public | None]:
    """Each node's own part of the training data, as a run divides them, and what is public."""
    train, public = load_public(config.public, data, config.task)
    columns = _columns(config, data)
    generator = numpy_generator(config.seed, "split")
    units = columns[data.unit] if data.unit else None
    indices = split(train.targets, len(data.classes), config.split, generator, columns, units)
    return conceal([train.subset(part) for part in indices], config.split, generator), public


def _columns(config: RunConfig, data: DataSet) -> dict[str, Column]:
    """What is known of the examples that are divided over the nodes."""
    kept = held_out(config.public, data)[0] if config.public.name == HELD_OUT else slice(None)
    return {name: column[kept] for name, column in data.columns.items()}


def _values(config: RunConfig, data: DataSet) -> list[str] | None:
    """Which value of the split's column each node has; None where a node is no value of a column."""
    if config.split.how != "column":
        return None
    return [str(value) for value in np.unique(_columns(config, data)[config.split.column]).tolist()]


def _how(config: RunConfig, data: DataSet, nodes: int) -> dict[str, Any]:
    """What a result says of the split; with a node for each value of a column, which node has which."""
    split = config.split
    told: dict[str, Any] = {"how": split.how, "alpha": None, "nodes": nodes}
    if split.how in ("dirichlet", "positives"):
        told["alpha"] = split.alpha
    if split.how == "column":
        told |= {"column": split.column, "values": _values(config, data)}
    return told


def check_folder(out: Path) -> None:
    """Refuse a folder that holds something already.

    Raises:
        RunFolderError: it does.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        resumable = (out / "config.toml").exists()
        how = f"go on with it (fedstill run --resume {out})" if resumable else "empty it"
        raise RunFolderError(f"{out} holds another run or other files: choose another folder, or {how}")


def finish(
    experiment: Experiment, about: dict[str, Any], figures: dict[str, Any], out: Path
) -> dict[str, Any]:
    """Write the result of an experiment that has come to its end.

    Args:
        experiment: the run.
        about: what the result says beside the figures.
        figures: that it came to.
        out: the run's folder.

    Returns:
        What ``result.json`` holds.
    """
    if "models" in about:  # the names that the user knows them by
        for node, spec in zip(figures["nodes"], about["models"]["nodes"], strict=True):
            node["model"] = spec
        if figures["student"] is not None:
            figures["student"]["model"] = about["models"]["student"]
    if about.get("values") is not None:  # what whoever divided the data knows, and no node was told
        for node, value in zip(figures["nodes"], about["values"], strict=True):
            node["site"] = value
    known = {key: value for key, value in about.items() if key not in ("models", "values")}
    result = {**known, **figures, **_machine()}
    experiment.records.finish(result, experiment.setting.student if experiment.has_student else None)
    return result


def _machine() -> dict[str, Any]:
    """Where and when a result was made."""
    return {
        # ru_maxrss is in kB on Linux and in bytes on macOS.
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        / (1e6 if sys.platform == "darwin" else 1e3),
        "machine": machine(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fedstill": __version__,
        },
    }


def machine() -> str:
    """What computes here, in words."""
    return f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} CPU threads in use"
