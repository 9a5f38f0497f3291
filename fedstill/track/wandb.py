"""Log a run to Weights & Biases offline. Nothing is sent before ``wandb sync``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.track.tracker import Tracker, final_metrics, flatten_metrics, missing_package_error


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
