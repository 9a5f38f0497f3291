"""Built-in trackers: TensorBoard, MLflow and Weights & Biases.

Each writes into the run's folder. MLflow logs to MLFLOW_TRACKING_URI instead, if it is set. Weights & Biases
works offline: nothing is sent before ``wandb sync``.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstill.track.tracker import Tracker, final_metrics, flatten_metrics, missing_package_error


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


EXPERIMENT = "fedstill"
MAX_METRICS = 1000  # metrics per call to MLflow; for parameters it is 100
MAX_PARAMETER_LENGTH = 500  # characters of a parameter


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
