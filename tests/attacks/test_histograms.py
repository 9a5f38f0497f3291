"""What label counts reveal, by hand, and as nodes tell it with and without noise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.attacks.histograms import histogram
from fedstill.core.errors import ArgumentError
from fedstill.privacy.randomness import seeded
from fedstill.privacy.rules import NoisyCounts

TRUE = torch.tensor([50.0, 30.0, 20.0, 0.0])


def test_exact_counts_reveal_all() -> None:
    found = histogram("clinic", TRUE.clone(), TRUE, ["a", "b", "c", "d"])
    assert found.exact
    assert (found.total_variation, found.largest_error, found.size_error) == (0.0, 0.0, 0.0)
    assert found.absent == found.told_absent == found.found_absent == ("d",)
    assert found.wrongly_absent == ()
    assert found.line == (
        "clinic told exactly how many examples of each class it holds; "
        "1 of 1 classes that it lacks are told as 0"
    )


def test_noised_counts_by_hand() -> None:
    """Of 80 told: 40, 40, 0 and 0 are shares 0.5, 0.5, 0, 0 against 0.5, 0.3, 0.2, 0."""
    found = histogram("clinic", torch.tensor([40.0, 40.0, 0.0, 0.0]), TRUE, ["a", "b", "c", "d"])
    assert not found.exact
    assert found.total_variation == pytest.approx(0.2)
    assert found.largest_error == pytest.approx(0.2)
    assert found.largest_class == "b"
    assert found.size_error == -20
    assert (found.found_absent, found.wrongly_absent) == (("d",), ("c",))
    assert found.line == (
        "clinic told its class shares up to 20.0 points (class b; total variation 0.200) "
        "and its size up to 20; "
        "1 of 1 classes that it lacks are told as 0, and 1 that it holds"
    )


def test_noise_may_hide_that_a_class_is_not_there() -> None:
    found = histogram("clinic", torch.tensor([50.0, 30.0, 20.0, 3.0]), TRUE)
    assert (found.absent, found.told_absent, found.found_absent) == (("3",), (), ())
    assert "0 of 1 classes" in found.line
    assert "it lacks no class" in histogram("clinic", torch.ones(2), torch.ones(2)).line


def test_counts_below_zero_and_none_at_all() -> None:
    found = histogram("clinic", torch.tensor([-4.0, 30.0, 10.0, 0.4]), TRUE)
    assert found.told_absent == ("0", "3")
    assert found.largest_class == "0"
    assert found.total_variation == pytest.approx(0.5), "shares 0, 30, 10 and 0.4 of 40.4"
    nothing = histogram("clinic", torch.zeros(4), TRUE)
    assert nothing.total_variation == pytest.approx((0.25 + 0.05 + 0.05 + 0.25) / 2)
    assert nothing.wrongly_absent == ("0", "1", "2")


counts = st.lists(st.integers(0, 1000), min_size=2, max_size=12)


@given(counts.filter(any), st.data())
def test_distances_lie_where_they_must(true: list[int], data: st.DataObject) -> None:
    told = data.draw(st.lists(st.integers(-5, 1000), min_size=len(true), max_size=len(true)))
    found = histogram("clinic", torch.tensor(told), torch.tensor(true))
    assert 0 <= found.total_variation <= 1 + 1e-12
    # Shares sum to 1, so that one error is made up for by others.
    assert found.largest_error <= found.total_variation + 1e-12 <= len(true) * found.largest_error / 2 + 2e-12
    assert set(found.found_absent) <= set(found.absent)
    assert set(found.found_absent) | set(found.wrongly_absent) == set(found.told_absent)
    larger = histogram("clinic", 3 * torch.tensor(told), torch.tensor(true))
    assert larger.total_variation == pytest.approx(found.total_variation)


def test_more_noise_reveals_less() -> None:
    """Through the rule by which a node's gate noises counts."""

    def error(scale: float) -> float:
        total = 0.0
        for run in range(200):
            told = NoisyCounts(scale).noise(TRUE, seeded(run, "counts"))
            total += histogram("clinic", told, TRUE).total_variation
        return total / 200

    errors = [error(scale) for scale in (0.0, 1.0, 5.0, 25.0)]
    assert errors[0] == 0
    assert errors == sorted(errors)
    # Each of four counts moves by the scale on average: half of 4 over 100, less what sums take up.
    assert 0.005 < errors[1] < 0.02
    assert errors[3] > 10 * errors[1]


def test_what_is_no_histogram_is_refused() -> None:
    with pytest.raises(ArgumentError, match="true counts"):
        histogram("clinic", torch.zeros(2), torch.zeros(2))
    with pytest.raises(ArgumentError, match="true counts"):
        histogram("clinic", torch.ones(2), torch.tensor([1.0, -1.0]))
    with pytest.raises(ArgumentError, match="told counts"):
        histogram("clinic", torch.ones(3), torch.ones(2))
    with pytest.raises(ArgumentError, match="told counts"):
        histogram("clinic", torch.tensor([1.0, float("nan")]), torch.ones(2))
    with pytest.raises(ArgumentError, match="classes"):
        histogram("clinic", torch.ones(2), torch.ones(2), ["a"])
