"""Trackers: interface, names of logged metrics, registry, built-in trackers, and the trackers of one run.

TensorBoard, MLflow and Weights & Biases write into the run's folder. MLflow logs to MLFLOW_TRACKING_URI
instead, if it is set. Weights & Biases works offline: nothing is sent before ``wandb sync``.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstill.core.config_tables import flatten
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.registry import Registry, first_line

EXPERIMENT = "fedstill"
MAX_METRICS = 1000  # metrics per call to MLflow; for parameters it is 100
MAX_PARAMETER_LENGTH = 500  # characters of a parameter


class Tracker(ABC):
    """Base class of trackers, which log the metrics of a run. Each run creates one without arguments.

    A resumed run starts from :meth:`start` and logs all its metrics again, so that no step is logged twice
    and no void step remains. A tracker that has stored something for the same folder removes it in
    :meth:`start`.

    An exception in :meth:`start` stops the run before training. A later exception disables the tracker, and
    the result of the run says so.

    Example:
        A tracker that prints::

            class PrintTracker(Tracker):
                def start(self, folder, about):
                    print("run", about["name"])

                def log(self, lines):
                    for line in lines:
                        print(line["step"], dict(flatten_metrics(line)))

                def close(self, result):
                    print(final_metrics(result or {}))
    """

    @abstractmethod
    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Start a run, or a resumed run.

        Args:
            folder: folder of the run.
            about: ``name`` and ``method`` of the run, and its ``options`` by dotted name (``"split.nodes":
                5``).
        """

    @abstractmethod
    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log lines of ``metrics.jsonl`` since the last call. It is called every few seconds.

        Args:
            lines: the lines, of which :func:`flatten_metrics` returns named numbers.
        """

    @abstractmethod
    def close(self, result: Mapping[str, Any] | None) -> None:
        """End the run.

        Args:
            result: the content of ``result.json``, of which :func:`final_metrics` returns named numbers;
                None: the run was interrupted.
        """


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker",
    {
        "tensorboard": "fedstill.track.trackers:TensorBoard",
        "mlflow": "fedstill.track.trackers:MLflow",
        "wandb": "fedstill.track.trackers:WandB",
    },
    Tracker,
)


def flatten_metrics(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of one line of metrics with their names in trackers.

    >>> list(flatten_metrics({"phase": "local", "node": "north", "step": 50, "loss": 0.5}))
    [('local/north/loss', 0.5)]
    >>> line = {"phase": "distillation", "step": 9, "losses": {"student": 1.5}, "accuracy": 70.0}
    >>> list(flatten_metrics(line))
    [('distillation/losses/student', 1.5), ('distillation/accuracy', 70.0)]
    """
    prefix = "/".join(dict.fromkeys(str(line[key]) for key in ("phase", "node") if key in line))
    for key, value in line.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        for name, number in inner.items() if key != "step" else ():
            if _is_number(number):
                yield "/".join(part for part in (prefix, key, str(name)) if part), float(number)


def final_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the final numbers of a run: metrics of the student and the baselines, bytes, and seconds.

    If every node has a privacy guarantee, the largest epsilon is included.

    >>> result = {"metrics": [{"key": "accuracy"}], "accuracy": 90.0, "bytes": {"up": 10, "down": 20}}
    >>> final_metrics(result)
    {'accuracy': 90.0, 'bytes/up': 10.0, 'bytes/down': 20.0}
    """
    values: dict[str, Any] = {}
    for key in (metric["key"] for metric in result.get("metrics", ())):
        values[key] = result.get(key)
        for model in ("ensemble", "centralized"):
            values[f"{model}/{key}"] = (result.get(model) or {}).get(key)
        values[f"standalone/{key}"] = ((result.get("standalone") or {}).get(key) or {}).get("mean")
    values |= {f"bytes/{direction}": result.get("bytes", {}).get(direction) for direction in ("up", "down")}
    values["seconds"] = result.get("seconds", {}).get("total")
    privacy = result.get("privacy") or {}
    if privacy.get("guarantee"):  # the maximum is a guarantee only if all nodes have one
        values["epsilon"] = max(node["epsilon"] for node in privacy["nodes"])
    return {name: float(value) for name, value in values.items() if _is_number(value)}


class TensorBoard(Tracker):
    """Writes event files to ``tensorboard/`` in the run's folder."""

    def __init__(self) -> None:
        try:
            import tensorboard  # noqa: F401 - torch's writer needs it
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package_error("tensorboard", error) from error
        self._writer_class, self._last = SummaryWriter, 0

    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        """See :meth:`.Tracker.start`."""
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._writer: Any = self._writer_class(str(folder / "tensorboard"))
        lines = [f"    {name} = {value}" for name, value in about["options"].items()]  # Markdown for code
        self._writer.add_text("options", "\n".join(lines))

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`.Tracker.log`."""
        for line in lines:
            self._last = line["step"]
            for name, value in flatten_metrics(line):
                self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def close(self, result: Mapping[str, Any] | None) -> None:
        """See :meth:`.Tracker.close`."""
        for name, value in final_metrics(result or {}).items():
            self._writer.add_scalar(f"result/{name}", value, self._last)
        self._writer.close()


class MLflow(Tracker):
    """Logs a run to MLflow, by default to ``mlflow.db`` in the run's folder.

    The experiment is ``fedstill``, or ``MLFLOW_EXPERIMENT_NAME``.

    Attributes:
        id: id of the MLflow run. The file ``mlflow.run`` in the folder holds it, so that a resumed run
            replaces it.
    """

    def __init__(self) -> None:
        try:
            import alembic  # noqa: F401 - without it MLflow writes no database
            from mlflow import MlflowClient, entities
        except ImportError as error:
            raise missing_package_error("mlflow", error) from error
        self._client, self._entities, self._last = MlflowClient, entities, 0

    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        """See :meth:`.Tracker.start`."""
        database, id_file = folder / "mlflow.db", folder / "mlflow.run"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            logging.getLogger("mlflow.store.db.utils").setLevel(
                logging.WARNING
            )  # suppress messages about new tables
            if not id_file.exists():  # creation of the tables was interrupted
                database.unlink(missing_ok=True)
        self._to: Any = self._client(tracking_uri=uri or f"sqlite:///{database.resolve()}")
        if id_file.exists():
            with suppress(Exception):  # it may not exist any more
                self._to.delete_run(id_file.read_text(encoding="utf-8").strip())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment_info = self._to.get_experiment_by_name(name)
        artifacts = (folder / "mlflow").resolve().as_uri()  # for artifacts, of which there are none
        experiment = (
            experiment_info.experiment_id if experiment_info else self._to.create_experiment(name, artifacts)
        )
        run = self._to.create_run(experiment, run_name=about["name"], tags={"method": about["method"]})
        self.id: str = run.info.run_id
        id_file.write_text(self.id + "\n", encoding="utf-8")
        parameters = [(key, str(value)[:MAX_PARAMETER_LENGTH]) for key, value in about["options"].items()]
        for start in range(0, len(parameters), 100):
            batch = [self._entities.Param(*parameter) for parameter in parameters[start : start + 100]]
            self._to.log_batch(self.id, params=batch)

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`.Tracker.log`."""
        self._send((*metric, line["step"]) for line in lines for metric in flatten_metrics(line))

    def close(self, result: Mapping[str, Any] | None) -> None:
        """See :meth:`.Tracker.close`."""
        self._send(
            (f"result/{name}", value, self._last) for name, value in final_metrics(result or {}).items()
        )
        self._to.set_terminated(self.id, "KILLED" if result is None else "FINISHED")

    def _send(self, metrics: Iterable[tuple[str, float, int]]) -> None:
        now, rows = int(time.time() * 1000), list(metrics)
        for start in range(0, len(rows), MAX_METRICS):
            batch = rows[start : start + MAX_METRICS]
            self._last = batch[-1][2]
            self._to.log_batch(
                self.id,
                metrics=[self._entities.Metric(name, value, now, step) for name, value, step in batch],
            )


class WandB(Tracker):
    """Writes an offline run to ``wandb/`` in the run's folder: options and metrics, no code and output.

    Review what wandb itself records about the machine before you sync.
    """

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing_package_error("wandb", error) from error
        self._wandb, self._axes = wandb, set[str]()

    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        """See :meth:`.Tracker.start`."""
        shutil.rmtree(folder / "wandb", ignore_errors=True)
        (folder / "wandb").mkdir()
        quiet = self._wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, save_code=False,
            x_disable_meta=True, x_disable_stats=True,
        )  # fmt: skip
        self._run: Any = self._wandb.init(
            project="fedstill",
            name=about["name"],
            group=about["method"],
            dir=str(folder),
            mode="offline",
            config=dict(about["options"]),
            settings=quiet,
        )

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`.Tracker.log`. Each phase has its own step axis."""
        for line in lines:
            axis = f"{line['phase']}/step"
            if axis not in self._axes:
                self._axes.add(axis)
                self._run.define_metric(axis)
                self._run.define_metric(f"{line['phase']}/*", step_metric=axis)
            self._run.log({axis: line["step"], **dict(flatten_metrics(line))})

    def close(self, result: Mapping[str, Any] | None) -> None:
        """See :meth:`.Tracker.close`."""
        self._run.summary.update(
            {f"result/{name}": value for name, value in final_metrics(result or {}).items()}
        )
        self._run.finish(exit_code=int(result is None))


class TrackerGroup:
    """The trackers of one run.

    Args:
        trackers: names of trackers, or trackers.
        options: options of the run, which trackers log.

    Attributes:
        notes: why trackers were disabled.

    Raises:
        ArgumentError: a name is unknown, or the tracker's package is not installed.
    """

    def __init__(
        self, trackers: Sequence[str | Tracker] = (), options: Mapping[str, Any] | None = None
    ) -> None:
        self._trackers = {_tracker_name(tracker): _make_tracker(tracker) for tracker in trackers}
        if len(self._trackers) < len(trackers):
            raise ArgumentError(
                "track", [_tracker_name(tracker) for tracker in trackers], "each tracker once"
            )
        self._options = {name: _shorten_path(value) for name, value in flatten(options or {}).items()}
        self._started: dict[str, Tracker] = {}  # trackers that have started
        self.notes: list[str] = []

    def start(self, folder: Path, title: str, *, finished: bool = False) -> None:
        """Start all trackers for a new or resumed run.

        Args:
            folder: folder of the run; its name is the name of the run.
            title: the method.
            finished: training has finished elsewhere: a tracker that cannot start is disabled.

        Raises:
            FedstillError: a tracker cannot start.
        """
        run_info = {"name": folder.resolve().name, "method": title, "options": self._options}
        for name, tracker in self._trackers.items():
            try:
                tracker.start(folder, run_info)
            except Exception as error:  # custom trackers may raise anything
                if finished:
                    self._disable(name, error)
                    continue
                raise FedstillError(f"tracker {name!r} cannot start: {first_line(error)}") from error
            self._started[name] = tracker

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log lines of metrics."""
        if lines:
            self._call_all(lambda tracker: tracker.log(lines))

    def close(self, result: Mapping[str, Any] | None) -> None:
        """Close all trackers. Nothing is logged afterwards.

        Args:
            result: the result of the run; None: the run was interrupted.
        """
        self._call_all(lambda tracker: tracker.close(result))
        self._started = {}

    def _call_all(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._started.items()):
            try:
                action(tracker)
            except Exception as error:  # a failing tracker must not stop the run
                del self._started[name]
                self._disable(name, error)

    def _disable(self, name: str, error: Exception) -> None:
        self.notes.append(f"tracker {name!r} failed and was disabled: {first_line(error)}")
        print(f"Note: {self.notes[-1]}", file=sys.stderr)


def missing_package_error(name: str, error: ImportError) -> ArgumentError:
    """Return the error for a tracker whose package is not installed."""
    return ArgumentError(
        "track", name, f"another, or this after pip install 'fedstill[track]': {error.name} is missing"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _tracker_name(tracker: str | Tracker) -> str:
    return tracker if isinstance(tracker, str) else type(tracker).__name__


def _make_tracker(tracker: str | Tracker) -> Tracker:
    if isinstance(tracker, Tracker):
        return tracker
    try:
        return TRACKERS[tracker]()
    except ArgumentError as error:
        raise ArgumentError("track", tracker, error.expected) from error


def _shorten_path(value: Any) -> Any:
    """Return an option as others may read it: only the last part of an absolute path."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
