"""The sum, and robust ensembles against values by hand, independent solvers and invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel
from fedstill.tasks.regression import Regression

TASK = Classification(3)
ROBUST = ["median", "trimmed_mean", "geometric_median", "cronus", "expguard"]


def random_logits(nodes: int, inputs: int = 6, *rest: int) -> torch.Tensor:
    return 2 * torch.randn(nodes, inputs, 3, *rest, generator=torch.Generator().manual_seed(nodes))


def equal(nodes: int) -> torch.Tensor:
    return torch.full((nodes, 1, 3), 1 / nodes)


def ensembled(z: torch.Tensor, name: str, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the ensemble's probabilities."""
    return TASK.ensemble(z, equal(len(z)) if weights is None else weights, name).softmax(1)


def test_sum_ignores_weights() -> None:
    z = torch.tensor([[[1.0, 2.0, 3.0]], [[10.0, 0.0, -1.0]]])
    weights = torch.tensor([0.9, 0.1]).view(2, 1, 1).expand(2, 1, 3)
    assert TASK.ensemble(z, weights, "sum").tolist() == [[11.0, 2.0, 2.0]]


@pytest.mark.parametrize("nodes", [4, 5])
def test_median_is_that_of_numpy(nodes: int) -> None:
    """With an even number, the mean of the two in the middle."""
    z = random_logits(nodes)
    middle = np.median(z.softmax(2).numpy(), axis=0)
    expected = middle / middle.sum(1, keepdims=True)
    np.testing.assert_allclose(ensembled(z, "median").numpy(), expected, atol=1e-6)


def test_weighted_median_and_trimmed_mean_by_hand() -> None:
    """Probabilities 0.1, 0.4 and 0.8 have weights 0.3, 0.3 and 0.4. Between 0.2 and 0.8 of the weight lie 0.1
    of the first, 0.3 of the second and 0.2 of the third."""
    task = MultiLabel(1)
    p, w = torch.tensor([0.1, 0.8, 0.4]), torch.tensor([0.3, 0.4, 0.3]).view(3, 1, 1)
    z = p.logit().view(3, 1, 1)
    assert task.ensemble(z, w, "median").sigmoid().item() == pytest.approx(0.4)
    mean = (0.1 * 0.1 + 0.3 * 0.4 + 0.2 * 0.8) / 0.6
    assert task.ensemble(z, w, "trimmed_mean").sigmoid().item() == pytest.approx(mean)


def test_geometric_median_minimizes_the_sum_of_distances() -> None:
    z = random_logits(5)
    weights = torch.rand(5, 1, 3, generator=torch.Generator().manual_seed(0))
    weights = weights / weights.sum(0)
    p, w = z.softmax(2).double().numpy(), weights.mean(2).double().numpy()  # (K, B, C), (K, 1)
    found = ensembled(z, "geometric_median", weights).numpy()

    def distances(m: np.ndarray, b: int) -> float:
        return float((w[:, 0] * np.linalg.norm(p[:, b] - m, axis=1)).sum())

    for b in range(z.shape[1]):
        best = minimize(
            distances, p[:, b].mean(0), (b,), "Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-12}
        )
        assert distances(found[b], b) <= best.fun + 2e-4


def test_cronus_leaves_out_the_nodes_furthest_along_the_main_direction() -> None:
    """The first pass leaves out the two liars of ten nodes, and the second two more."""
    z = 0.1 * random_logits(10)
    z[8:] = torch.tensor([-9.0, -9.0, 9.0])
    kept = z[:8].softmax(2)
    for b, p in enumerate(kept.transpose(0, 1)):  # (8, C)
        centered = (p - p.mean(0)).double()
        direction = torch.linalg.svd(centered).Vh[0]
        rows = (centered @ direction).abs().argsort()[:6]
        torch.testing.assert_close(ensembled(z, "cronus")[b], p[rows].mean(0), rtol=1e-4, atol=1e-5)


def test_expguard_weights_fall_exponentially_with_the_distance() -> None:
    """Four equal nodes are the geometric median; the fifth is at distance sqrt(2) from it for each input."""
    z = torch.full((5, 2, 3), -50.0)
    z[:4, :, 0], z[4, :, 1] = 50, 50
    share = np.exp(-10 * np.sqrt(2))
    np.testing.assert_allclose(ensembled(z, "expguard")[:, 1].numpy(), share / (4 + share), rtol=0.02)


@pytest.mark.parametrize("name", ROBUST)
def test_two_liars_of_ten_hardly_change_a_robust_ensemble(name: str) -> None:
    """They turn the mean to their class."""
    z = torch.zeros(10, 4, 3)
    z[:, :, 0] = 2.0
    z[:8] += 0.1 * random_logits(8, 4)
    honest = z[:8]
    z[8:] = torch.tensor([0.0, 0.0, 60.0])
    assert (TASK.ensemble(z, equal(10), "logits").argmax(1) == 2).all()
    difference = ensembled(z, name) - ensembled(honest, "probs")
    assert difference.abs().max() < 0.05


@pytest.mark.parametrize("name", ROBUST)
def test_order_of_the_nodes_has_no_effect_and_gradients_flow(name: str) -> None:
    z = random_logits(5, 4, 2, 2).requires_grad_()
    weights = torch.rand(5, 4, 3, generator=torch.Generator().manual_seed(1))
    weights = weights / weights.sum(0)
    order = torch.tensor([3, 0, 4, 1, 2])
    outputs = TASK.ensemble(z, weights, name)
    assert outputs.shape == (4, 3, 2, 2)
    torch.testing.assert_close(TASK.ensemble(z[order], weights[order], name), outputs)
    outputs[:, 0].sum().backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("name", ROBUST)
def test_equal_nodes_give_their_own_prediction(name: str) -> None:
    z = random_logits(1).expand(6, -1, -1)
    torch.testing.assert_close(ensembled(z, name), z[0].softmax(1))
    numbers = torch.tensor([0.3]).expand(6, 4, 1)
    weights = torch.full((6, 1, 1), 1 / 6)
    torch.testing.assert_close(Regression().ensemble(numbers, weights, name), numbers[0])
