"""Advice of ``fedstill privacy plan`` for DP-SGD, from recorded runs and the number of records only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedstill.tasks import TaskConfig

MODEL = "random-conv:64"


@dataclass(frozen=True)
class RecordedAccuracy:
    """Accuracy of FedKD's student in runs with a preset's options, in percent, mean of three seeds: by the
    average records of a node and the epsilon of a run."""

    data: str
    preset: str
    percent: Mapping[int, Mapping[float, float]]


# From fewer records to more; docs/results.md has their spread, and a test holds these to that page.
RECORDED = (
    RecordedAccuracy(  # experiments/privacy_curves.toml and privacy_digits_linear.toml
        "digits",
        "digits-fedkd-private",
        {
            58: {1.0: 29.1, 3.0: 54.9, 8.0: 75.8},
            115: {1.0: 48.6, 3.0: 81.7, 8.0: 88.9},
            230: {1.0: 72.1, 3.0: 87.3, 8.0: 90.3},
        },
    ),
    RecordedAccuracy(  # experiments/privacy_fashion_linear.toml
        "Fashion-MNIST",
        "fashion-fedkd-private",
        {2000: {3.5: 81.4}, 11400: {3.5: 86.3, 8.0: 86.5}},
    ),
)


def advice(task: TaskConfig, records: int, epsilon: float) -> Sequence[str]:
    """Return lines that recommend model and options, with the expected accuracy; for classes of images.

    A node is held against the nearest row of :data:`RECORDED` that has no more records than it has, and of
    the first where all have more: more records and a larger epsilon do no harm.
    """
    if (task.task_class.form, task.task_class.kind) != ("images", "class"):
        return []
    below = [each for each in RECORDED if min(each.percent) <= records]
    nearest = below[-1] if below else RECORDED[0]
    least = max((count for count in nearest.percent if count <= records), default=min(nearest.percent))
    reached = nearest.percent[least]
    budgets = [each for each in reached if each <= epsilon]
    spent = max(budgets, default=min(reached))
    word = "about" if below and budgets else "less than"
    expected = f"{word} {reached[spent]:.0f} % on {nearest.data}"
    return [
        f"{MODEL}, a linear model on fixed features (docs/privacy.md),",
        f"with nodes.local and nodes.privacy as in {nearest.preset}",
        f"with {records:,} records and epsilon {epsilon:.4g}: {expected},",
        f"as measured with {least:,} records a node at epsilon {spent:g}",
    ]
