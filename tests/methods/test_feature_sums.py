"""Feature sums by hand, and their charged sensitivity."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedstill.methods._feature_sums import FEATURE_SUMS, FeatureSums, Products, sums_kind
from fedstill.privacy.events import Event
from fedstill.privacy.release_rules import NoisySums
from tests.support.errors import raises_invalid

PRODUCTS: tuple[Products, ...] = ("pooled", "full", "diag", "spherical")
X = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.0]])
Y = torch.tensor([0, 2, 2])


@pytest.mark.parametrize("clip", [math.inf, 10.0])
@pytest.mark.parametrize("products", PRODUCTS)
def test_sums_are_decoded_in_units_of_the_features(products: Products, clip: float) -> None:
    layout = FeatureSums(3, products, clip)
    vector = layout.compute(X, Y)
    assert layout.size((2,)) == len(vector)
    counts, sums, read = layout.read(vector, 2)
    assert counts.tolist() == pytest.approx([1, 0, 2])
    torch.testing.assert_close(sums, torch.tensor([[1.0, 2], [0, 0], [3.5, -1]]).double())
    by_class = torch.tensor([[[1.0, 2], [2, 4]], [[0, 0], [0, 0]], [[9.25, -3], [-3, 1]]]).double()
    expected = {
        "pooled": by_class.sum(0),
        "full": by_class,
        "diag": by_class.diagonal(dim1=1, dim2=2),
        "spherical": by_class.diagonal(dim1=1, dim2=2).sum(1),
    }
    torch.testing.assert_close(read, expected[products])


def test_only_long_vectors_are_clipped() -> None:
    layout = FeatureSums(1, "diag", 1.0)
    x = torch.tensor([[3.0, 4.0], [0.1, 0.2]])  # root mean squares 3.5 and 0.16
    _, sums, squares = layout.read(layout.compute(x, torch.zeros(2).long()), 2)
    short = x[0] * math.sqrt(2) / 5
    torch.testing.assert_close(sums[0], (short + x[1]).double(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(squares[0], (short**2 + x[1] ** 2).double(), rtol=1e-6, atol=1e-7)


@given(
    seed=st.integers(0, 2**31),
    clip=st.sampled_from([5e-324, 1e-300, 0.1, 1.0, 1e3, 1e300]),
    size=st.sampled_from([1e-44, 1e-3, 1.0, 1e30, math.inf, math.nan]),
    products=st.sampled_from(PRODUCTS),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_one_example_changes_sums_within_the_charged_sensitivity(
    seed: int, clip: float, size: float, products: Products
) -> None:
    """For any features and any bound chosen by the server."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 5, generator=generator)
    x[0] *= size
    y = torch.randint(3, (6,), generator=generator)
    layout = FeatureSums(3, products, clip)
    rule = NoisySums(4.0)
    assert sums_kind(clip).category == "moments"
    moved = rule.bound(layout.compute(x, y)) - rule.bound(layout.compute(x[1:], y[1:]))
    assert moved.norm() <= math.sqrt(len(moved)) * (1 + 1e-9)


@pytest.mark.parametrize("products", PRODUCTS[:2])
def test_charged_sensitivity_is_reached(products: Products) -> None:
    layout = FeatureSums(3, products, 1.0)
    moved = layout.compute(X[:1] * 9, Y[:1])
    assert moved.norm().item() == pytest.approx(math.sqrt(len(moved)))
    assert NoisySums(4.0).cost(tuple(moved.shape)) == {Event("gaussian", 4.0): 1}


def test_sums_of_unbounded_features_have_no_guarantee() -> None:
    """An owner who allows noisy sums by name does not allow exact ones."""
    assert sums_kind(1.0) == FEATURE_SUMS != sums_kind(math.inf)
    assert sums_kind(math.inf).category == "records"


def test_rejects_inputs_that_are_not_vectors() -> None:
    with raises_invalid("inputs"):
        FeatureSums(3, "diag", 1.0).compute(torch.zeros(3, 1, 8, 8), Y)


def test_rejects_sums_of_another_length() -> None:
    with raises_invalid("feature sums", (5,), "15"):
        FeatureSums(3, "diag", 1.0).read(torch.zeros(5), 2)
