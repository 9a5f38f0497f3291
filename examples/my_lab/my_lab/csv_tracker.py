"""A run's metrics as a CSV table for spreadsheets: step, metric, value."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.track import Tracker, final_metrics, flatten_metrics


class CsvTracker(Tracker):
    """Tracker that writes ``tracked.csv`` into the run's folder."""

    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.file = (folder / "tracked.csv").open("w", newline="")  # a resumed run logs all lines again
        self.csv = csv.writer(self.file)
        self.csv.writerow(["step", "metric", "value"])

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.csv.writerows([line["step"], *metric] for line in lines for metric in flatten_metrics(line))
        self.file.flush()

    def close(self, result: Mapping[str, Any] | None) -> None:
        self.csv.writerows(
            ["", f"result/{name}", value] for name, value in final_metrics(result or {}).items()
        )
        self.file.close()
