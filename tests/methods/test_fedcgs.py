"""FedCGS: its head compared with scikit-learn and numpy, secure aggregation, and privacy cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import multivariate_normal
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import nn

import fedstill
from fedstill.core.dataset import TensorData
from fedstill.core.errors import MethodRefused
from fedstill.federation.link_config import LinkConfig
from fedstill.methods.fedcgs import FedCGS
from fedstill.methods.fedpft import FedPFT
from fedstill.models import MLP
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import Accountant, SumsConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.events import total_cost
from fedstill.runs.simulation import Simulation
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel
from tests.support.audit_logs import total_charged
from tests.support.errors import raises_invalid, raises_refused
from tests.support.vectors_world import CLASSES, FEATURES, by_class, setting, vectors

NAMED = PolicyConfig(kinds=("feature sums",))


def trained(method: FedCGS, parts: Sequence[TensorData] | None = None, **changes: Any) -> nn.Module:
    """Return the student of a run."""
    simulation = Simulation(setting(method, parts, **changes))
    simulation.run()
    return simulation.student


def logits(student: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return student(vectors(60, seed=1).inputs)


@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_head_equals_discriminant_analysis_of_pooled_features(shrinkage: float) -> None:
    pooled, test = vectors(), vectors(60, seed=1)
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage)
    reference.fit(pooled.inputs.numpy(), pooled.targets.numpy())
    expected = torch.as_tensor(reference.decision_function(test.inputs.numpy())).float()
    student = trained(FedCGS(covariance="within", shrinkage=shrinkage))
    torch.testing.assert_close(logits(student), expected, rtol=1e-3, atol=1e-3)


def test_head_is_bayes_classifier_of_normal_classes_with_common_covariance() -> None:
    pooled, test = vectors(), vectors(60, seed=1)
    x, y = pooled.inputs.double().numpy(), pooled.targets.numpy()
    Sigma = np.cov(x, rowvar=False)  # around the global mean, divided by N - 1
    log_posterior = np.stack(
        [
            multivariate_normal(x[y == c].mean(0), Sigma).logpdf(test.inputs.numpy())
            + np.log(np.mean(y == c))
            for c in range(CLASSES)
        ],
        1,
    )
    expected = torch.as_tensor(log_posterior).log_softmax(1).float()
    torch.testing.assert_close(logits(trained(FedCGS())).log_softmax(1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("clip", [math.inf, 1.0])
@pytest.mark.parametrize("summed", [False, True])
def test_head_does_not_depend_on_the_partition(clip: float, summed: bool) -> None:
    """The head is also the same with and without secure aggregation."""
    method = FedCGS(clip=clip)
    expected = logits(trained(method, [vectors()]))
    link = LinkConfig(secure_aggregation=summed)
    torch.testing.assert_close(logits(trained(method, link=link)), expected, rtol=1e-3, atol=1e-3)


def test_class_that_no_node_holds_is_never_predicted() -> None:
    parts = by_class(vectors())[:2]
    student = trained(FedCGS(), parts)
    assert all(parameter.isfinite().all() for parameter in student.parameters())
    assert set(logits(student).argmax(1).tolist()) == {0, 1}
    assert (logits(student)[:, 2] < logits(student)[:, :2].amin(1)).all()


def test_singular_covariance_has_a_pseudo_inverse() -> None:
    """A constant feature has no effect."""
    data, test = vectors(), vectors(60, seed=1)
    wide = [TensorData(F.pad(each.inputs, (0, 1), value=7.0), each.targets) for each in (data, test)]
    student = trained(FedCGS(), wide[:1], test=wide[1])
    with torch.no_grad():
        found = student(wide[1].inputs).softmax(1)
    expected = logits(trained(FedCGS(), [data])).softmax(1)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"clip": 2.0, "covariance": "within"}])
def test_passes_the_checks_for_custom_methods(options: dict[str, Any]) -> None:
    method = FedCGS(**options)
    fedstill.check_method(method, partial(setting, method))


def test_planned_queries_equal_those_of_a_run() -> None:
    """Plans allow nodes to respond with files."""
    method = FedCGS()
    result = Simulation(setting(method)).run()
    assert result["queries_by_name"] == Counter(call.query for call in method.planned_queries(None, 0))


# --- releases and privacy cost --------------------------------------------------------------------------


@pytest.mark.parametrize(("group_size", "event"), [(1, "gaussian(2.5)"), (2, "gaussian(1.25)")])
def test_noisy_sums_are_charged_as_one_event(tmp_path: Path, group_size: int, event: str) -> None:
    """A group of two records moves the sums twice as far."""
    private = DPSGD(epsilon=9.0, sums=SumsConfig(noise=2.5), group_size=group_size)
    pairs = [replace(part, groups=torch.arange(len(part)) // 2) for part in by_class(vectors())]
    simulation = Simulation(
        setting(FedCGS(clip=1.0, shrinkage=0.5), pairs, policies=[NAMED] * 3, privacies=[private] * 3)
    )
    result = simulation.run(tmp_path)
    assert result["releases"] == ["feature sums"]
    log = AuditLog()
    log.open(tmp_path / FILE)
    for node in simulation.nodes:
        assert total_charged(log, node.name) == ({event: 1}, 0)
    log.close()
    exact = trained(FedCGS(clip=1.0, shrinkage=0.5))
    assert all(parameter.isfinite().all() for parameter in simulation.student.parameters())
    assert not torch.allclose(logits(simulation.student), logits(exact), atol=1e-2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", [FedCGS(clip=1.0), FedPFT(clip=1.0)])
@pytest.mark.parametrize(("accountant", "group_size"), [("pld", 1), ("rdp", 3)])
def test_epsilon_calibrates_noise_on_sums(
    method: FedCGS | FedPFT, accountant: Accountant, group_size: int
) -> None:
    def noise_and_epsilon(**options: Any) -> tuple[float, float]:
        private = DPSGD(accountant=accountant, group_size=group_size, **options)
        pairs = [replace(part, groups=torch.arange(len(part)) // 2) for part in by_class(vectors())]
        simulation = Simulation(setting(method, pairs, policies=[NAMED] * 3, privacies=[private] * 3))
        budgets = simulation.nodes[0].gate.budgets
        assert budgets is not None
        cost = total_cost(budgets.mechanism.run_costs())
        assert cost is not None
        return budgets.mechanism.noise_levels["sums"], compute_epsilon(cost, 1e-5, accountant)

    for epsilon in (0.5, 8.0):
        noise, spent = noise_and_epsilon(epsilon=epsilon)
        assert 0.97 * epsilon < spent <= epsilon
        assert noise_and_epsilon(sums=SumsConfig(noise=noise))[1] == pytest.approx(spent)
        assert noise_and_epsilon(epsilon=100.0, sums=SumsConfig(noise=noise))[0] == noise
    assert noise_and_epsilon()[0] == 4.0  # without a budget


def test_budget_needs_features_of_a_bounded_length() -> None:
    private = [DPSGD(epsilon=3.0)] * 3
    with raises_refused("privacy", "unbounded feature sums", "method.clip", query="sum_features"):
        Simulation(setting(FedCGS(), privacies=private))
    Simulation(setting(FedCGS(clip=1.0), privacies=private))


def test_sums_need_policy_by_name() -> None:
    """Allowing the kind that noise can protect does not allow unbounded sums, even without a budget."""
    bounded, unbounded = FedCGS(clip=1.0), FedCGS()
    for method, kind in ((bounded, "feature sums"), (unbounded, "unbounded feature sums")):
        with raises_refused(f"outputs_only: {kind}"):
            Simulation(setting(method, policies=[PolicyConfig()] * 3))
        Simulation(setting(method, policies=[PolicyConfig(kinds=(kind,))] * 3))
    with raises_refused("outputs_only: unbounded feature sums"):
        private = [DPSGD(sums=SumsConfig(noise=2.5))] * 3
        Simulation(setting(unbounded, policies=[NAMED] * 3, privacies=private))


@pytest.mark.parametrize("method", [FedCGS, FedPFT])
def test_rejects_a_clip_whose_square_overflows(method: type[FedCGS] | type[FedPFT]) -> None:
    with raises_invalid("method.clip", 1e160, "1e+06"):
        method(clip=1e160)


def test_rejects_student_that_is_not_linear_before_any_query() -> None:
    with raises_invalid("student.model", "MLP", "linear"):
        Simulation(setting(FedCGS(), student=MLP((FEATURES,), CLASSES, width=8)))


@pytest.mark.parametrize("method", [FedCGS, FedPFT])
def test_rejects_images_and_several_labels(method: type[FedCGS] | type[FedPFT]) -> None:
    images = TensorData(torch.zeros(6, 1, 2, 2), torch.arange(6) % CLASSES)
    labels = TensorData(torch.zeros(6, FEATURES), torch.eye(CLASSES).long().repeat(2, 1))
    for data, task, expected in (
        (images, Classification(CLASSES), "features of a backbone"),
        (labels, MultiLabel(CLASSES).on_features(), "one class for each input"),
    ):
        with pytest.raises(MethodRefused, match=expected) as caught:
            Simulation(setting(method(), [data], task=task, test=data))
        assert "\n" not in str(caught.value)
