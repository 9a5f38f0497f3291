"""Whitened principal components, compared with scikit-learn and with values by hand."""

from __future__ import annotations

import pytest
import torch
from sklearn.decomposition import PCA

from fedstill.models.principal_components import whitening_projection
from tests.support.errors import raises_invalid


def correlated(rows: int, width: int) -> torch.Tensor:
    """Return features with standard deviations from 3 to 1/2 in a random basis, far from 0."""
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(width, width, generator=generator))
    return torch.randn(rows, width, generator=generator) * torch.linspace(3, 0.5, width) @ basis + 100


@pytest.mark.parametrize("components", [1, 4, 7])
def test_components_are_those_of_scikit_learn(components: int) -> None:
    f = correlated(200, 7)
    expected = torch.from_numpy(PCA(components, whiten=True, svd_solver="full").fit_transform(f.double()))
    found = (f.double() - f.double().mean(0)) @ whitening_projection(f, components)
    signs = (found * expected).sum(0).sign()
    torch.testing.assert_close(found * signs, expected, atol=1e-9, rtol=1e-9)


def test_covariance_of_components_is_the_identity() -> None:
    f = correlated(50, 6)
    found = (f.double() - f.double().mean(0)) @ whitening_projection(f, 4)
    torch.testing.assert_close(torch.cov(found.T), torch.eye(4).double(), atol=1e-12, rtol=0)


def test_largest_entry_of_each_direction_is_positive() -> None:
    projection = whitening_projection(correlated(200, 7), 7)
    largest = projection.abs().argmax(0)
    assert bool((projection.gather(0, largest.unsqueeze(0)) > 0).all())


@pytest.mark.parametrize("change", [1e-12, -1e-12])
def test_sign_does_not_depend_on_rounding_if_entries_are_equally_large(change: float) -> None:
    """The eigenvector is (1, -1) / sqrt(2), with variance 4."""
    f = torch.tensor([[1.0 + change, -1.0], [-1.0, 1.0 + change], [1.0, -1.0], [-1.0, 1.0]]).double()
    f[:2] += torch.tensor([[0.1, 0.1], [-0.1, -0.1]])  # in the other direction
    assert whitening_projection(f, 1)[:, 0].sign().tolist() == [1, -1]


@pytest.mark.parametrize(
    ("features", "most"),
    [
        (correlated(5, 8), 4),  # five examples span four dimensions
        # standard deviations 1.63 and 0.06
        (torch.tensor([[2.0, 0.05], [-2.0, 0.05], [0.0, -0.05], [0.0, -0.05]]), 1),
        (torch.ones(9, 3), 0),
    ],
)
def test_refuses_components_that_hardly_vary(features: torch.Tensor, most: int) -> None:
    for components in range(1, most + 1):
        assert whitening_projection(features, components).shape == (features.shape[1], components)
    with raises_invalid("features.components", most + 1, f"0 to {most}"):
        whitening_projection(features, most + 1)
