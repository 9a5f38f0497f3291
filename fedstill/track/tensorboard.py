"""Log a run to TensorBoard: event files in the run's folder. ``tensorboard --logdir runs`` shows all runs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
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
