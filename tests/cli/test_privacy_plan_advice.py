"""What ``fedstill privacy plan`` recommends: of the recorded runs the nearest that promises too little."""

from __future__ import annotations

import pytest

from fedstill.cli.privacy_plan_advice import RECORDED, advice
from fedstill.tasks import TASKS


@pytest.mark.parametrize(
    ("records", "epsilon", "row", "budget", "word"),
    [
        (230, 3.0, 230, 3.0, "about"),
        (5700, 20.0, 230, 8.0, "about"),
        (229, 7.9, 115, 3.0, "about"),
        (57, 8.0, 58, 8.0, "less than"),
        (400, 0.5, 230, 1.0, "less than"),
    ],
)
def test_a_node_is_held_against_what_was_recorded_with_no_more(
    records: int, epsilon: float, row: int, budget: float, word: str
) -> None:
    told = " ".join(advice(TASKS["classification"](), records, epsilon))
    assert f"{word} {RECORDED[row][budget]:.0f} %" in told
    assert f"measured with {row} records a node at epsilon {budget:g}" in told


def test_nothing_is_recommended_for_what_was_not_measured() -> None:
    assert not advice(TASKS["segmentation"](), 230, 3.0)
    assert not advice(TASKS["tabular"](), 230, 3.0)
