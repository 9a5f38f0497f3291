"""A tracker: what hears a run's metrics, the words in which it hears them, and where it is looked up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.core.errors import ArgumentError
from fedstill.core.registry import Registry


class Tracker(ABC):
    """What a run tells its metrics to. It is made without arguments, one for each run.

    A run that was stopped tells all of it once more when it goes on, from :meth:`start`: so no step is there
    twice, and none that is void. Whoever has kept something under the same folder puts it aside there.

    An exception in :meth:`start` stops the run before anything is trained; a later one ends the tracker
    alone, and the run's result says so.
    """

    @abstractmethod
    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        """A run begins, or goes on.

        Args:
            folder: of the run.
            about: ``name`` and ``method`` of the run, and its ``options`` by dotted name
                (``"split.nodes": 5``).
        """

    @abstractmethod
    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """What was measured since the last call, every few seconds: lines of ``metrics.jsonl``, whose figures
        :func:`flatten_metrics` names."""

    @abstractmethod
    def close(self, result: Mapping[str, Any] | None) -> None:
        """The run is over.

        Args:
            result: what ``result.json`` holds, whose figures :func:`final_metrics` names; None: the run stopped.
        """


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker",
    {
        "tensorboard": "fedstill.track.tensorboard:TensorBoard",
        "mlflow": "fedstill.track.mlflow:MLflow",
        "wandb": "fedstill.track.wandb:WandB",
    },
    Tracker,
)


def flatten_metrics(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures of one line of metrics, each with the name by which trackers show it.

    >>> list(flatten_metrics({"phase": "local", "node": "north", "step": 50, "loss": 0.5}))
    [('local/north/loss', 0.5)]
    >>> list(flatten_metrics({"phase": "distillation", "step": 9, "losses": {"student": 1.5}, "accuracy": 70.0}))
    [('distillation/losses/student', 1.5), ('distillation/accuracy', 70.0)]
    """
    where = "/".join(dict.fromkeys(str(line[key]) for key in ("phase", "node") if key in line))
    for key, value in line.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        for name, number in inner.items() if key != "step" else ():
            if _is_number(number):
                yield "/".join(part for part in (where, key, str(name)) if part), float(number)


def final_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """A run's last figures: of the central model, of those beside it, bytes, seconds, and the largest epsilon
    of its nodes where each has one.

    >>> result = {"metrics": [{"key": "accuracy"}], "accuracy": 90.0, "bytes": {"up": 10, "down": 20}}
    >>> final_metrics(result)
    {'accuracy': 90.0, 'bytes/up': 10.0, 'bytes/down': 20.0}
    """
    found: dict[str, Any] = {}
    for key in (metric["key"] for metric in result.get("metrics", ())):
        found[key] = result.get(key)
        for model in ("ensemble", "centralized"):
            found[f"{model}/{key}"] = (result.get(model) or {}).get(key)
        found[f"standalone/{key}"] = ((result.get("standalone") or {}).get(key) or {}).get("mean")
    found |= {f"bytes/{way}": result.get("bytes", {}).get(way) for way in ("up", "down")}
    found["seconds"] = result.get("seconds", {}).get("total")
    privacy = result.get("privacy") or {}
    if privacy.get("guarantee"):  # else what some nodes reach would pass for what all have
        found["epsilon"] = max(node["epsilon"] for node in privacy["nodes"])
    return {name: float(value) for name, value in found.items() if _is_number(value)}


def missing_package_error(name: str, error: ImportError) -> ArgumentError:
    """That what a tracker writes with is not installed."""
    return ArgumentError(
        "track", name, f"another, or this after pip install 'fedstill[track]': {error.name} is missing"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
