"""Multi-label classification: values by hand, unknown labels, and binary classification as a reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.dataset import TensorData
from fedstill.tasks import logit_formulas
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel, MultiLabelConfig

TASK = MultiLabel(3)
SURE = 1e4
ENSEMBLES = ("logits", "log_probs", "probs", "consensus")


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def pairs(z: torch.Tensor) -> torch.Tensor:
    """Return each log-odds z as the logits (z, 0) of two classes: ``(..., C)`` to ``(..., 2, C)``."""
    return torch.stack([z, torch.zeros_like(z)], -2)


# --- loss -------------------------------------------------------------------------------------------


def test_loss_by_hand_ignores_unknown_labels() -> None:
    outputs = torch.tensor([[[0.0, logit(0.8), SURE], [logit(0.25), 7.0, -7.0]]])
    targets = torch.tensor([[[1, 0, -1], [1, -1, -1]]])
    first = (math.log(2) - math.log(0.2)) / 2  # including the third label would add 10,000
    second = -math.log(0.25)
    torch.testing.assert_close(TASK.loss(outputs, targets), torch.tensor([(first + second) / 2]))


def test_example_without_known_labels_has_no_loss_or_gradient() -> None:
    outputs = random_logits(1, 2, 3).requires_grad_()
    targets = torch.tensor([[[-1, -1, -1], [1, 0, 0]]])
    loss = TASK.loss(outputs, targets)
    expected = F.binary_cross_entropy_with_logits(outputs[0, 1], torch.tensor([1.0, 0, 0])) / 2
    torch.testing.assert_close(loss[0], expected)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    assert outputs.grad[0, 0].tolist() == [0, 0, 0]
    assert (outputs.grad[0, 1] != 0).all()


def test_label_smoothing_spreads_share_over_both_values() -> None:
    outputs, targets = random_logits(1, 5, 3), torch.randint(0, 2, (1, 5, 3), generator=torch.Generator())
    two = F.cross_entropy(pairs(outputs[0]), 1 - targets[0], label_smoothing=0.3)  # class 0 is "present"
    torch.testing.assert_close(TASK.loss(outputs, targets, 0.3)[0], two)


# --- counts -----------------------------------------------------------------------------------------


def test_counts_are_examples_with_the_label() -> None:
    targets = torch.tensor([[1, 0, -1], [1, 1, -1], [0, -1, -1]])
    counts = TASK.counts(TensorData(torch.zeros(3, 1, 8, 8), targets))
    assert counts.tolist() == [2, 1, 0]
    assert counts.dtype == torch.float32


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_one_record_changes_counts_by_at_most_the_sensitivity(seed: int, labels: int, records: int) -> None:
    targets = torch.randint(-1, 2, (records, labels), generator=torch.Generator().manual_seed(seed))
    targets[0] = 1 if seed % 2 else targets[0]
    task, x = MultiLabel(labels), torch.zeros(records, 1, 4, 4)
    moved = task.counts(TensorData(x, targets)) - task.counts(TensorData(x[1:], targets[1:]))
    assert moved.abs().sum().item() <= task.count_sensitivity
    if seed % 2:
        assert moved.abs().sum().item() == task.count_sensitivity, "a record with every label"


def test_node_without_a_label_has_weight_zero() -> None:
    counts = torch.tensor([[3.0, 0.0, 0.0], [1.0, 2.0, 0.0]])
    weights = TASK.importance_weights(counts).squeeze(1)
    assert weights.tolist() == [[0.75, 0.0, 0.5], [0.25, 1.0, 0.5]]
    responses = torch.tensor([[[1.0, SURE, 1.0]], [[1.0, -2.0, 3.0]]])
    for how in ENSEMBLES:
        assert TASK.ensemble(responses, TASK.importance_weights(counts), how)[0, 1].item() == pytest.approx(
            -2
        )


# --- FedIOD's losses ------------------------------------------------------------------------------------


def test_confidence_and_uniqueness_losses_equal_binary_classification() -> None:
    responses, pi = random_logits(3, 4, 3), torch.tensor([0.5, 0.2, 0.3])
    two = pairs(responses)  # (K, B, 2, C): labels in place of pixels
    torch.testing.assert_close(TASK.confidence_loss(responses, pi), logit_formulas.mean_entropy(two, pi))
    torch.testing.assert_close(TASK.uniqueness_loss(responses, pi), -logit_formulas.js_divergence(two, pi))


def test_balance_loss_is_lowest_for_labels_in_half_of_the_batch() -> None:
    half = SURE * torch.tensor([[1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    rare = SURE * torch.tensor([[1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    assert TASK.balance_loss(half).item() == pytest.approx(-math.log(2))
    assert TASK.balance_loss(rare).item() == pytest.approx(-math.log(2) / 3)


def test_gradients_are_finite_for_certain_responses() -> None:
    responses = torch.tensor([[[SURE, -SURE, 200.0]], [[-SURE, -200.0, 0.0]]]).requires_grad_()
    pi = torch.tensor([0.5, 0.5])
    weights = TASK.importance_weights(torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]))
    ensembled = TASK.ensemble(responses, weights, "probs")
    losses = (
        TASK.confidence_loss(responses, pi)
        + TASK.uniqueness_loss(responses, pi)
        + TASK.balance_loss(ensembled)
        + ensembled.sum()
    )
    for tau in (1.0, 1e3, math.inf):
        losses = losses + TASK.distillation_loss(ensembled, responses[0], tau).sum()
    losses.backward()  # type: ignore[no-untyped-call]
    assert losses.isfinite()
    assert responses.grad is not None
    assert responses.grad.isfinite().all()


# --- ensembles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ENSEMBLES)
def test_ensembles_equal_binary_classification(how: str) -> None:
    responses = random_logits(3, 4, 3)
    weights = TASK.importance_weights(torch.randint(1, 5, (3, 3), generator=torch.Generator()).float())
    flat = pairs(responses).movedim(2, 3).flatten(1, 2)  # (K, B C, 2)
    two = Classification(2).ensemble(flat, repeat_weights(weights, 4), how)  # (B C, 2)
    odds = (two[:, 0] - two[:, 1]).view(4, 3)
    torch.testing.assert_close(TASK.ensemble(responses, weights, how), odds, rtol=1e-4, atol=1e-5)


def repeat_weights(weights: torch.Tensor, inputs: int) -> torch.Tensor:
    """Repeat the weight of each label for both of its values: ``(K, 1, C)`` to ``(K, B C, 2)``."""
    return weights.expand(-1, inputs, -1).flatten(1).unsqueeze(2).expand(-1, -1, 2)


def test_expertise_by_hand() -> None:
    weights = torch.tensor([[[1.0, 0.25, 0.5]], [[0.0, 0.75, 0.5]]])
    shows = torch.tensor([[SURE, SURE, -SURE], [-SURE, -SURE, SURE]])  # the first two labels; the third label
    torch.testing.assert_close(TASK.expertise(shows, weights), torch.tensor([[0.625, 0.5], [0.375, 0.5]]))
    nothing = TASK.expertise(torch.full((1, 3), -SURE), weights)
    assert nothing.sum().item() == pytest.approx(1)


# --- distance -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 3.0, 1e3])
def test_distillation_loss_equals_binary_classification(tau: float) -> None:
    student, target = random_logits(4, 3), random_logits(4, 3, seed=1)
    expected = logit_formulas.distillation_loss(pairs(student), pairs(target), tau)
    torch.testing.assert_close(TASK.distillation_loss(student, target, tau), expected, rtol=1e-4, atol=1e-6)


def test_distillation_loss_limit_is_an_eighth_of_the_square() -> None:
    student, target = random_logits(4, 3), random_logits(4, 3, seed=1)
    at_last = TASK.distillation_loss(student, target, math.inf)
    torch.testing.assert_close(at_last, (student - target).square().mean(1) / 8)
    torch.testing.assert_close(TASK.distillation_loss(student, target, 1e4), at_last, rtol=1e-4, atol=1e-6)


# --- metrics ------------------------------------------------------------------------------------------


def test_auc_by_hand() -> None:
    outputs = torch.tensor([[3.0, 0.0], [1.0, 5.0], [2.0, 5.0], [0.0, 5.0]])
    # Label 0: three of four pairs (present, absent) are ordered. Label 1: one pair is ordered, one tied.
    targets = torch.tensor([[1, -1], [1, 1], [0, 0], [0, -1]])
    assert MultiLabel(2).metric_per_class(outputs, targets) == [75.0, 50.0]
    assert MultiLabel(2).compute_metrics(outputs, targets) == {"auc": 62.5}


@given(st.integers(0, 2**31), st.integers(2, 12))
@settings(max_examples=40, deadline=None)
def test_auc_is_share_of_ordered_pairs(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(-3, 4, (count, 1), generator=generator).float()  # with ties
    y = torch.randint(-1, 2, (count, 1), generator=generator)
    present, absent = z[y == 1], z[y == 0]
    (auc,) = MultiLabel(1).metric_per_class(z, y) or []
    if len(present) == 0 or len(absent) == 0:
        assert math.isnan(auc)
        return
    ahead = present[:, None] - absent
    assert auc == pytest.approx(100 * ((ahead > 0).double() + 0.5 * (ahead == 0)).mean().item())


def test_mean_auc_leaves_out_labels_with_one_value() -> None:
    outputs = random_logits(4, 3)
    targets = torch.tensor([[1, 1, -1], [0, 1, -1], [1, 1, -1], [0, -1, -1]])
    each = TASK.metric_per_class(outputs, targets)
    assert each is not None
    assert [math.isnan(one) for one in each] == [False, True, True]
    assert TASK.compute_metrics(outputs, targets)["auc"] == each[0]
    assert math.isnan(TASK.compute_metrics(outputs, torch.ones(4, 3, dtype=torch.int64))["auc"])


def test_auc_is_nan_for_nan_outputs_but_not_for_infinity() -> None:
    targets = torch.tensor([[1, 1, 0], [0, 0, 1]])
    outputs = torch.tensor([[math.inf, math.nan, 0.0], [-math.inf, 0.0, 1.0]])
    each = TASK.metric_per_class(outputs, targets)
    assert each is not None
    assert (each[0], math.isnan(each[1]), each[2]) == (100.0, True, 100.0)
    assert math.isnan(TASK.compute_metrics(outputs, targets)["auc"]), "not the mean over the other labels"
    assert np.isnan(TASK.bootstrap_metric(outputs, targets, None, np.ones((2, 2)))).all()


def test_multi_label_task_is_made_from_its_config() -> None:
    task = MultiLabelConfig().make(("Edema", "Mass"))
    assert isinstance(task, MultiLabel)
    assert (task.classes, task.count_sensitivity, task.output_shape((1, 64, 64)), task.metric) == (
        2,
        2,
        (2,),
        "auc",
    )
