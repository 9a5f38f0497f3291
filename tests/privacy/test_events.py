"""Privacy costs as text: read exactly, or refused in one line."""

from __future__ import annotations

import pytest

from fedstill.core.errors import ArgumentError
from fedstill.privacy.events import MAX_COUNT, MAX_GROUP, Event, cost_from_dict


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"gaussian(1e300)": 1}, "above 0, up to 1e+12"),
        ({"laplace(nan)": 1}, "above 0, up to 1e+12"),
        ({f"gaussian(1.0, rate=0.5, group={MAX_GROUP + 1})": 1}, "for a sampled statistic"),
        ({f"gaussian(1.0, rate=0.5, group={'9' * 5000})": 1}, "numbers in it"),
        ({"gaussian(1.0, group=2)": 1}, "for a sampled statistic"),
        ({"laplace(1.0, rate=0.5)": 1}, "1 for laplace"),
        ({"gaussian(1.0": 1}, "such as gaussian"),
        ({"gaussian(1.0)": MAX_COUNT + 1}, "1 to 2147483648"),
        ({"gaussian(1.0)": 0}, "1 to 2147483648"),
        ({"gaussian(1.0)": True}, "1 to 2147483648"),
    ],
)
def test_rejects_invalid_cost_in_one_line(table: dict[str, int], expected: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        cost_from_dict(table)
    assert expected in str(refused.value)
    assert len(str(refused.value)) < 600


def test_equal_events_are_added() -> None:
    assert cost_from_dict({"gaussian(2.0)": 1, "gaussian(2.00)": 3}) == {Event("gaussian", 2.0): 4}
