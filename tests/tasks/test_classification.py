"""Classification: loss, counts, ensembles, and metrics against scikit-learn and torchmetrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedstill.core.dataset import TensorData
from fedstill.tasks import TASKS, classification
from fedstill.tasks.classification import Classification, ClassificationConfig, TextClassification, TextConfig
from tests.support.errors import raises_invalid

TASK = Classification(3)
SURE = 1e4


def test_loss_is_mean_cross_entropy_per_model() -> None:
    outputs = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])
    expected = torch.stack([F.cross_entropy(outputs[g], targets[g]) for g in range(2)])
    losses = TASK.loss(outputs, targets)
    assert losses.shape == (2,)
    torch.testing.assert_close(losses, expected)


def test_label_smoothing_spreads_share_over_all_classes() -> None:
    outputs = torch.tensor([[[2.0, 0.0, 0.0]]])
    log_q = outputs[0, 0].log_softmax(0)
    expected = -(0.7 * log_q[0] + 0.3 * log_q.mean())
    torch.testing.assert_close(TASK.loss(outputs, torch.tensor([[0]]), 0.3), expected[None])


def test_counts_include_absent_classes() -> None:
    data = TensorData(torch.zeros(4, 1, 8, 8), torch.tensor([1, 1, 0, 1]))
    counts = TASK.counts(data)
    assert counts.tolist() == [1.0, 3.0, 0.0]
    assert counts.dtype == torch.float32


def test_confidence_and_uniqueness_losses_by_hand() -> None:
    pi = torch.tensor([0.5, 0.5])
    unsure, sure = torch.zeros(2, 1, 3), torch.tensor([[[SURE, 0.0, 0.0]], [[SURE, 0.0, 0.0]]])
    split = torch.tensor([[[SURE, 0.0, 0.0]], [[0.0, SURE, 0.0]]])
    assert TASK.confidence_loss(sure, pi).item() == pytest.approx(0)
    assert TASK.confidence_loss(unsure, pi).item() == pytest.approx(math.log(3))
    assert TASK.uniqueness_loss(sure, pi).item() == pytest.approx(0, abs=1e-6)
    assert TASK.uniqueness_loss(split, pi).item() == pytest.approx(-math.log(2))


def test_balance_loss_is_lowest_for_even_batch() -> None:
    each_once = SURE * torch.eye(3)
    assert TASK.balance_loss(each_once).item() == pytest.approx(-math.log(3))
    lopsided = SURE * torch.eye(3)[[0, 0, 1]]
    expected = -(2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3))
    assert TASK.balance_loss(lopsided).item() == pytest.approx(expected)
    assert TASK.balance_loss(SURE * torch.eye(3)[[0, 0, 0]]).item() == pytest.approx(0, abs=1e-6)


def test_expertise_by_hand() -> None:
    weights = torch.tensor([[[1.0, 0.25, 0.5]], [[0.0, 0.75, 0.5]]])  # (2 nodes, 1, 3)
    shows = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    expertise = TASK.expertise((shows + 1e-30).log(), weights)  # two inputs
    torch.testing.assert_close(expertise, torch.tensor([[0.625, 0.5], [0.375, 0.5]]))


# Three classes; the last example of class 2 is classified as class 0.
OUTPUTS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
TARGETS = torch.tensor([0, 1, 2, 2])


def test_classification_metrics_by_hand() -> None:
    metrics = TASK.compute_metrics(OUTPUTS, TARGETS)
    assert list(metrics) == [metric.key for metric in TASK.metrics]
    assert metrics["accuracy"] == 75.0
    assert metrics["balanced_accuracy"] == pytest.approx(100 * (1 + 1 + 1 / 2) / 3)
    assert metrics["macro_f1"] == pytest.approx(100 * (2 / 3 + 1 + 2 / 3) / 3)
    # Classes 0 and 1 are ranked above all others. For class 2, one of four pairs is tied (both 0.212).
    assert metrics["auc"] == pytest.approx(100 * (1 + 1 + 3.5 / 4) / 3)
    # the second and the last share a bin, in which half are correct
    sure = OUTPUTS.double().softmax(1).amax(1)
    off = (1 - sure[0]) + (1 - sure[2]) + 2 * (sure[1] - 0.5)
    assert metrics["ece"] == pytest.approx(100 * off.item() / 4)


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_equal_scikit_learn_and_torchmetrics(classes: int) -> None:
    from sklearn import metrics
    from torchmetrics.functional.classification import multiclass_calibration_error

    rng = np.random.default_rng(0)
    # no examples of the last class
    p, true = rng.dirichlet(np.full(classes + 1, 0.5), 200), rng.integers(0, classes, 200)
    p[:60] = p[60:120]  # tied scores
    present, ranked = range(classes), range(1, 2) if classes == 2 else range(classes)
    if classes == 2:
        p = p[:, :2] / p[:, :2].sum(1, keepdims=True)
    expected = {
        "macro_f1": metrics.f1_score(true, p.argmax(1), average="macro"),
        "auc": np.mean([metrics.roc_auc_score(true == c, p[:, c]) for c in present]),
        "auprc": np.mean([metrics.average_precision_score(true == c, p[:, c]) for c in ranked]),
        "ece": multiclass_calibration_error(
            torch.from_numpy(p), torch.from_numpy(true), num_classes=p.shape[1], n_bins=15
        ).item(),
    }
    values = {name: classification.METRIC_FUNCTIONS[name](p, true) for name in expected}
    assert values == pytest.approx({name: 100 * value for name, value in expected.items()})
    labels = range(p.shape[1])
    counts = metrics.confusion_matrix(true, p.argmax(1), labels=labels).tolist()
    assert classification.confusion_counts(p, true) == counts


def test_auprc_of_two_classes_is_of_the_second() -> None:
    p = torch.tensor([0.9, 0.8, 0.3, 0.1])  # of class 1; ranks 1 and 3 are positive: precision 1 and 2/3
    outputs = torch.stack([(1 - p).log(), p.log()], 1)
    metrics = Classification(2).compute_metrics(outputs, torch.tensor([1, 0, 1, 0]))
    assert metrics["auprc"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert metrics["auc"] == pytest.approx(75.0)


def test_ranking_works_for_saturated_probabilities() -> None:
    task, targets = Classification(2), torch.tensor([0, 1, 1, 0])
    margins = torch.tensor([40.0, 60.0, 80.0, 45.0])
    for offset in (0.0, 1e4):
        metrics = task.compute_metrics(torch.stack([torch.full((4,), offset), offset + margins], 1), targets)
        assert (metrics["auc"], metrics["auprc"]) == (100.0, 100.0)
    # Equal differences are ties, whatever their offset.
    alike = torch.tensor([[0.0, 1.5], [7.25, 8.75], [-3.5, -2.0], [0.0, 1.5]])
    assert task.compute_metrics(alike, targets)["auc"] == 50.0


def test_undefined_metrics_are_nan() -> None:
    one_class = TASK.compute_metrics(OUTPUTS, torch.zeros(4, dtype=torch.int64))
    assert math.isnan(one_class["auc"])
    assert math.isnan(one_class["auprc"])
    assert one_class["balanced_accuracy"] == one_class["accuracy"] == 50.0
    broken = TASK.compute_metrics(torch.full((4, 3), math.nan), TARGETS)
    assert math.isnan(broken["auc"])
    assert math.isnan(broken["ece"])
    assert all(map(math.isnan, broken.values()))
    for metric in ("accuracy", "balanced_accuracy", "macro_f1", "auc", "auprc"):
        resampled = Classification(
            3, metric
        ).bootstrap_metric(  # type: ignore[arg-type]
            torch.cat([OUTPUTS[:3], torch.full((1, 3), math.nan)]), TARGETS, None, np.ones((2, 4))
        )
        assert np.isnan(resampled).all()
    assert TASK.compute_metrics(torch.tensor([[math.inf, 0.0, 0.0]]), torch.tensor([0]))["accuracy"] == 100.0


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy", "macro_f1", "auc", "auprc"])
@pytest.mark.parametrize("classes", [2, 4])
def test_chosen_metric_is_primary_and_weights_repeat_inputs(metric: str, classes: int) -> None:
    task = ClassificationConfig(metric=metric).make(classes)  # type: ignore[arg-type]
    assert (task.metric, len(task.metrics)) == (metric, 6)
    rng = np.random.default_rng(0)
    # few distinct values, so that scores are tied
    logits = torch.from_numpy(rng.integers(-1, 2, (40, classes))).double()
    p, true = logits.softmax(1).numpy().round(12), rng.integers(0, classes, 40)
    assert task.compute_primary_metric(logits, torch.from_numpy(true)) == classification.METRIC_FUNCTIONS[
        metric
    ](p, true)
    weights = rng.integers(0, 3, (5, 40))
    weights[0, true == 0] = 0  # a resample without one class
    values = classification.weighted_metric(metric, p, true, weights.astype(float))
    expected = [
        classification.METRIC_FUNCTIONS[metric](p.repeat(times, 0), true.repeat(times)) for times in weights
    ]
    assert values == pytest.approx(expected, nan_ok=True)


def test_prior_outputs_use_class_frequencies_only() -> None:
    metrics = TASK.compute_metrics(TASK.prior_outputs(TARGETS), TARGETS)
    assert metrics == pytest.approx(
        {"accuracy": 50.0, "balanced_accuracy": 100 / 3, "macro_f1": 200 / 9, "auc": 50.0,
         "auprc": 100 / 3, "ece": 0.0}
    )  # fmt: skip


def test_confusion_matrix_and_calibration_curve_by_hand() -> None:
    results = TASK.extra_results(OUTPUTS, TARGETS)
    assert results["confusion"] == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    assert [bin["examples"] for bin in results["calibration"]] == [2, 1, 1]  # two have a confidence of 58 %
    assert [bin["accuracy"] for bin in results["calibration"]] == [50.0, 100.0, 100.0]
    assert Classification(31).extra_results(torch.zeros(1, 31), torch.tensor([0]))["confusion"] is None


def test_advice_for_uneven_classes_names_their_shares() -> None:
    names = ("clear", "ill")
    assert Classification(2).metric_warning(torch.tensor([0, 1, 1, 0, 1]), names) is None
    uneven = torch.tensor([1] * 9 + [0])
    advice = Classification(2).metric_warning(uneven, names)
    assert advice is not None
    assert "ill is 90.0% of the examples and clear 10.0%, where an even share is 50.0%" in advice
    assert "consider the metric auc or balanced_accuracy" in advice
    assert "no test examples" not in advice
    assert Classification(2, "auc").metric_warning(uneven, names) is None
    advice = Classification(3).metric_warning(torch.tensor([0, 1]), ("cat", "deer", "dog"))
    assert advice is not None
    assert "no test examples of dog:" in advice


@pytest.mark.parametrize(
    ("counts", "warns"),
    [
        ((48, 26, 26), False),
        ((54, 23, 23), True),  # above 1.5 / 3 = 50 %
        ((40, 40, 20), True),  # below 1 / 3 / 1.5 = 22.2 %
    ],
)
def test_one_frequent_or_one_rare_class_is_uneven(counts: tuple[int, ...], warns: bool) -> None:
    targets = torch.arange(3).repeat_interleave(torch.tensor(counts))
    assert (Classification(3).metric_warning(targets, ("a", "b", "c")) is not None) == warns


def test_task_is_made_by_name() -> None:
    assert ClassificationConfig().make(7).classes == 7
    with raises_invalid("task", "juggling"):
        TASKS["juggling"]


def test_text_task_has_token_inputs() -> None:
    task = TextConfig().make(("negative", "positive"))
    assert isinstance(task, TextClassification)
    assert (task.name, task.metric, task.form == "texts", task.condition_channels, task.classes) == (
        "text",
        "accuracy",
        True,
        0,
        2,
    )
    assert task.output_shape((64,)) == (2,)
