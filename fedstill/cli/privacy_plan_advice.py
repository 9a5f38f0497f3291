"""What ``fedstill privacy plan`` recommends where networks learn with DP-SGD: from recorded runs, never from
a node's own data, of which it knows how many records there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedstill.tasks import TaskConfig

MODEL = "random-conv:64"
# Percent right of FedKD's student on digits, by records a node (on average) and epsilon of a run: means of
# three seeds, experiments/privacy_curves.toml and privacy_digits.toml; docs/results.md has their spread.
RECORDED: Mapping[int, Mapping[float, float]] = {
    58: {1.0: 28.2, 3.0: 59.5, 8.0: 76.7},
    115: {1.0: 47.4, 3.0: 79.2, 8.0: 84.3},
    230: {1.0: 71.1, 3.0: 85.3, 8.0: 87.9},
}


def advice(task: TaskConfig, records: int, epsilon: float) -> Sequence[str]:
    """Which model, and what to expect of it; nothing but for images of classes, of which there are records.

    A node is held against the nearest row of :data:`RECORDED` that has no more than it has: more records and
    a larger epsilon do no harm.
    """
    if (task.makes.form, task.makes.kind) != ("images", "class"):
        return []
    below = [count for count in RECORDED if count <= records]
    least = max(below, default=min(RECORDED))
    budgets = [each for each in RECORDED[least] if each <= epsilon]
    spent = max(budgets, default=min(RECORDED[least]))
    word = "about" if below and budgets else "less than"
    percent = RECORDED[least][spent]
    return [
        f"{MODEL}, a linear model on fixed features (docs/privacy.md)",
        f"with {records:,} records and epsilon {epsilon:.4g}: {word} {percent:.0f} % on digits,",
        f"as measured with {least} records a node at epsilon {spent:g}",
    ]
