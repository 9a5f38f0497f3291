"""FedPFT: mixtures compared with scikit-learn, moments of samples, privacy cost and refusals."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.mixture import GaussianMixture

import fedstill
from fedstill.core.dataset import TensorData
from fedstill.federation.link_config import LinkConfig
from fedstill.methods._public_data import StudentTraining
from fedstill.methods.fedpft import Covariance, FedPFT, Mixture, one_gaussian
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import SumsConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.runs.simulation import Simulation
from tests.support.audit_logs import total_charged
from tests.support.errors import raises_invalid, raises_refused
from tests.support.vectors_world import CLASSES, by_class, setting, vectors

COVARIANCES: tuple[Covariance, ...] = ("diag", "spherical", "full")
SHORT = StudentTraining(epochs=2, batch=16)
NAMED = PolicyConfig(kinds=("feature sums",))


def finished(method: FedPFT, **changes: Any) -> Simulation:
    simulation = Simulation(setting(method, **changes))
    simulation.run()
    return simulation


# --- mixtures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_one_gaussian_from_sums_equals_a_fitted_one(covariance: Covariance) -> None:
    data = vectors()
    layout = FedPFT(covariance=covariance).layout(CLASSES)
    read = layout.read(layout.compute(data.inputs, data.targets), data.inputs.shape[1])
    for c, (n, total, products) in enumerate(zip(*read, strict=True)):
        x = data.inputs[data.targets == c].double().numpy()
        fitted = GaussianMixture(1, covariance_type=covariance, reg_covar=0.0).fit(x)
        assert n == len(x)
        _, mean, found = one_gaussian(n, total, products)
        torch.testing.assert_close(mean, torch.as_tensor(fitted.means_))
        torch.testing.assert_close(found, torch.as_tensor(fitted.covariances_))


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_samples_have_the_moments_of_the_mixture(covariance: Covariance) -> None:
    full = torch.tensor([[[4.0, 1.5], [1.5, 1.0]], [[0.25, 0.0], [0.0, 9.0]]]).double()
    given = {
        "full": full,
        "diag": full.diagonal(dim1=1, dim2=2),
        "spherical": torch.tensor([4.0, 0.25]).double(),
    }
    means = torch.tensor([[50.0, 0.0], [-50.0, 7.0]]).double()
    mixture = Mixture(torch.tensor([0.75, 0.25]), means, given[covariance])
    x = mixture.sample(40_000, torch.Generator().manual_seed(0))
    first = x[:, 0] > 0
    assert first.float().mean().item() == pytest.approx(0.75, abs=0.02)
    for g, part in enumerate((x[first], x[~first])):
        wanted = given[covariance][g]
        wanted = wanted if covariance == "full" else torch.diag(wanted.expand(2))
        torch.testing.assert_close(part.mean(0), means[g], rtol=0, atol=0.1)
        torch.testing.assert_close(part.T.cov(), wanted, rtol=0.05, atol=0.1)


def test_negative_variances_and_weights_of_a_node_are_zero() -> None:
    mixture = Mixture(torch.tensor([-1.0, 2.0]), torch.tensor([[9.0], [5.0]]), torch.tensor([[1.0], [-1.0]]))
    assert mixture.sample(3, torch.Generator().manual_seed(0)).tolist() == [[5.0]] * 3
    matrix = Mixture(torch.zeros(1), torch.zeros(1, 2), torch.tensor([[[-4.0, 0.0], [0.0, 0.0]]]))
    assert not matrix.sample(3, torch.Generator().manual_seed(0)).any()


def test_node_fits_a_mixture_to_each_class() -> None:
    """Two clusters in the first class, one example in the second, none in the third."""
    offsets = torch.tensor([[0.1, 0.0], [-0.1, 0.0], [0.0, 0.2], [0.0, -0.2]])
    x = torch.cat([offsets + 5, offsets - 5, offsets - 5, torch.tensor([[1.0, 2.0]])])
    method = FedPFT(components=2)
    clusters = method.fit_mixture(x[:12], torch.Generator().manual_seed(0))
    order = clusters.weights.argsort()
    torch.testing.assert_close(clusters.weights[order], torch.tensor([1 / 3, 2 / 3]))
    torch.testing.assert_close(clusters.means[order], torch.tensor([[5.0, 5.0], [-5.0, -5.0]]))
    spread = torch.tensor([0.005, 0.02]).expand(2, 2)
    torch.testing.assert_close(clusters.covariances[order], spread, rtol=0, atol=1e-5)
    single = method.fit_mixture(x[12:], torch.Generator())
    assert single.means.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert single.weights.tolist() == [1.0, 0.0]
    assert not any(part.any() for part in method.fit_mixture(x[:0], torch.Generator()))


# --- runs ---------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_student_learns_from_as_many_samples_as_there_are_examples(
    components: int, covariance: Covariance
) -> None:
    method = FedPFT(
        components=components, covariance=covariance, student=StudentTraining(epochs=60, batch=16, lr=0.02)
    )
    simulation = finished(method)
    labels = simulation.server.state.labels
    assert labels.bincount().tolist() == vectors().targets.bincount().tolist()
    test = vectors(60, seed=1)
    with torch.no_grad():
        right = simulation.student(test.inputs).argmax(1) == test.targets
    assert right.float().mean() > 0.75  # a third would be chance


def test_fewer_samples_have_the_shares_of_the_examples() -> None:
    data = vectors()
    parts = [data.subset(torch.nonzero(data.targets == c).flatten()[: 10 * (c + 1)]) for c in range(CLASSES)]
    simulation = finished(FedPFT(samples=30, student=SHORT), parts=parts)
    assert simulation.server.state.labels.bincount().tolist() == [5, 10, 15]


def test_features_of_bounded_length_have_a_bounded_mixture() -> None:
    x = vectors().inputs * 100
    bounded = FedPFT(components=2, clip=0.5, student=SHORT)
    parts = [TensorData(x, vectors().targets)]
    simulation = finished(bounded, parts=parts, policies=[PolicyConfig(outputs_only=False)])
    means = simulation.server.query("fit_mixtures")["means"]
    assert means.norm(dim=-1).max() <= 0.5 * math.sqrt(x.shape[1]) * 1.001


@pytest.mark.parametrize("options", [{"clip": 2.0}, {"components": 2}, {"covariance": "full"}])
def test_passes_the_checks_for_custom_methods(options: dict[str, Any]) -> None:
    method = FedPFT(**options, student=SHORT)
    fedstill.check_method(method, partial(setting, method))


@pytest.mark.parametrize("components", [1, 2])
def test_planned_queries_equal_those_of_a_run(components: int) -> None:
    """Plans allow nodes to respond with files."""
    method = FedPFT(components=components, student=SHORT)
    result = Simulation(setting(method)).run()
    assert result["queries_by_name"] == Counter(call.query for call in method.planned_queries(None, 0))


# --- releases and privacy cost --------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_noisy_sums_are_charged_as_one_event(covariance: Covariance, tmp_path: Path) -> None:
    """All classes together are one event, as an example belongs to one class."""
    method = FedPFT(clip=1.0, covariance=covariance, student=SHORT)
    private = DPSGD(epsilon=3.0, sums=SumsConfig(noise=2.5))
    simulation = Simulation(setting(method, policies=[NAMED] * 3, privacies=[private] * 3))
    assert simulation.run(tmp_path)["releases"] == ["feature sums"]
    log = AuditLog()
    log.open(tmp_path / FILE)
    for node in simulation.nodes:
        assert total_charged(log, node.name) == ({"gaussian(2.5)": 1}, 0)
    log.close()
    assert all(parameter.isfinite().all() for parameter in simulation.student.parameters())


@pytest.mark.parametrize(
    ("options", "kind", "remedy"),
    [
        ({}, "unbounded feature sums", "method.clip"),
        ({"components": 2, "clip": 1.0}, "feature mixtures", "method.components"),
    ],
)
def test_budget_needs_one_gaussian_of_bounded_features(
    options: dict[str, Any], kind: str, remedy: str
) -> None:
    with raises_refused("privacy", kind, remedy):
        Simulation(setting(FedPFT(**options), privacies=[DPSGD(epsilon=3.0)] * 3))
    with raises_refused(f"outputs_only: {kind}"):
        Simulation(setting(FedPFT(**options), policies=[PolicyConfig()] * 3))


def test_rejects_secure_aggregation() -> None:
    """A sum over nodes would be a single Gaussian for all of them."""
    with raises_invalid("link.secure_aggregation", True, "sum_features"):
        Simulation(setting(FedPFT(), link=LinkConfig(secure_aggregation=True)))


def test_rejects_no_epochs() -> None:
    with raises_invalid("method.student.epochs", 0):
        FedPFT(student=StudentTraining(epochs=0))


def test_empty_node_classes_are_not_sampled() -> None:
    simulation = finished(FedPFT(student=SHORT), parts=by_class(vectors())[:2])
    assert set(simulation.server.state.labels.tolist()) == {0, 1}
