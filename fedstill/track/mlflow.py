"""MLflow hears a run: in the run's folder, or where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstill.track.tracker import Tracker, final_metrics, flatten_metrics, missing_package_error

EXPERIMENT = "fedstill"
MAX_METRICS = 1000  # metrics that MLflow takes at once; of parameters a hundred
MAX_PARAMETER_LENGTH = 500  # characters of a parameter


class MLflow(Tracker):
    """A run of the experiment ``fedstill`` (``MLFLOW_EXPERIMENT_NAME``) in ``mlflow.db`` of the run's folder.

    Attributes:
        id: of MLflow's run; ``mlflow.run`` in the folder keeps it, so that who goes on takes its place.
    """

    def __init__(self) -> None:
        try:
            import alembic  # noqa: F401 - without it MLflow writes no database
            from mlflow import MlflowClient, entities
        except ImportError as error:
            raise missing_package_error("mlflow", error) from error
        self._client, self._entities, self._last = MlflowClient, entities, 0

    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        """See :class:`Tracker`."""
        own, kept = folder / "mlflow.db", folder / "mlflow.run"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # that it makes tables
            if not kept.exists():  # who made it was stopped in the midst of its tables
                own.unlink(missing_ok=True)
        self._to: Any = self._client(tracking_uri=uri or f"sqlite:///{own.resolve()}")
        if kept.exists():
            with suppress(Exception):  # it may be gone, or elsewhere
                self._to.delete_run(kept.read_text(encoding="utf-8").strip())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self._to.get_experiment_by_name(name)
        place = (folder / "mlflow").resolve().as_uri()  # of files, which we send none
        experiment = found.experiment_id if found else self._to.create_experiment(name, place)
        run = self._to.create_run(experiment, run_name=about["name"], tags={"method": about["method"]})
        self.id: str = run.info.run_id
        kept.write_text(self.id + "\n", encoding="utf-8")
        told = [(key, str(value)[:MAX_PARAMETER_LENGTH]) for key, value in about["options"].items()]
        for start in range(0, len(told), 100):
            some = [self._entities.Param(*each) for each in told[start : start + 100]]
            self._to.log_batch(self.id, params=some)

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """See :class:`Tracker`."""
        self._send((*each, line["step"]) for line in lines for each in flatten_metrics(line))

    def close(self, result: Mapping[str, Any] | None) -> None:
        """See :class:`Tracker`."""
        self._send(
            (f"result/{name}", value, self._last) for name, value in final_metrics(result or {}).items()
        )
        self._to.set_terminated(self.id, "KILLED" if result is None else "FINISHED")

    def _send(self, told: Iterable[tuple[str, float, int]]) -> None:
        now, rows = int(time.time() * 1000), list(told)
        for start in range(0, len(rows), MAX_METRICS):
            some = rows[start : start + MAX_METRICS]
            self._last = some[-1][2]
            self._to.log_batch(
                self.id, metrics=[self._entities.Metric(name, value, now, step) for name, value, step in some]
            )
