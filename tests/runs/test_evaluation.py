"""Metrics on the test part: in total, by site, and on shares that keep cases whole."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from fedstill.core.compute import Compute
from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.core.run_writer import RunWriter
from fedstill.core.text_format import replace_nonfinite
from fedstill.runs.evaluation import (
    DRAWS,
    Evaluation,
    Outputs,
    mean,
    resample_counts,
    resampling_units,
    standard_deviation,
)
from fedstill.tasks import TASKS
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabelConfig
from fedstill.tasks.segmentation import SegmentationConfig

NAMES, SITES = ("p0", "p1", "p2", "p3"), ("A", "B", "A", "")


def parted() -> TensorData:
    """Return eight examples of four patients, the last at no site."""
    cases = CaseIndex(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), NAMES, SITES)
    return TensorData(torch.zeros(8, 1, 4, 4), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), cases=cases)


def evaluation(data: TensorData) -> Evaluation:
    return Evaluation(Classification(2), data, Compute(), seed=0)


ALL_ZERO = torch.tensor([[1.0, 0.0]] * 8)  # predicts class 0 for all examples


def test_metrics_in_total_and_by_site() -> None:
    look = evaluation(parted())
    assert look.sites == ["A", "B"]
    assert look.compute_metrics(ALL_ZERO)["accuracy"] == look.main_metric(ALL_ZERO) == 50.0
    # A has patients 0 (class 0) and 2 (class 1), B patient 1 (class 0): one class has no AUC
    by_site = look.by_site(ALL_ZERO)
    assert {site: (each["accuracy"], each["auc"]) for site, each in by_site.items()} == {
        "A": (50.0, 50.0),
        "B": (100.0, None),
    }


def test_data_without_cases_have_no_sites() -> None:
    data = parted()
    result = evaluation(TensorData(data.inputs, data.targets)).detailed_metrics(Outputs(ALL_ZERO), ())
    assert [result[name] for name in ("cases", "sites", "labels")] == [None] * 3
    assert result["confusion"] == [[4, 0], [4, 0]]


@pytest.mark.parametrize("of", [1, 2, 3, 4])
def test_shares_keep_patients_and_cover_all(of: int) -> None:
    data = parted()
    look = evaluation(data)
    assert data.cases is not None
    patients = [set(data.cases.case_ids[look.rows_of_test_share(index, of)].tolist()) for index in range(of)]
    rows = [row for index in range(of) for row in look.rows_of_test_share(index, of).tolist()]
    assert sorted(rows) == list(range(8))
    assert sum(map(len, patients)) == len(set().union(*patients)) == 4


def test_fewer_cases_than_nodes_are_shared() -> None:
    look = evaluation(parted())
    assert sorted(look.rows_of_test_share(5, 6).tolist()) == sorted(look.rows_of_test_share(1, 6).tolist())


def test_undefined_metrics_are_skipped_in_means() -> None:
    result = [{"dice": 40.0, "hd95": math.nan}, {"dice": 60.0, "hd95": 3.0}]
    assert mean(result) == {"dice": 50.0, "hd95": 3.0}
    assert replace_nonfinite(result[0]) == {"dice": 40.0, "hd95": None}
    assert standard_deviation([1.0, 3.0, math.nan]) == 1.0
    assert math.isnan(mean([{"hd95": math.nan}])["hd95"])
    assert math.isnan(standard_deviation([math.nan]))


def test_metrics_by_case() -> None:
    """Dice of two patients with two slices each; one patient has no foreground."""
    truth = torch.zeros(4, 2, 2, dtype=torch.int64)
    truth[0, 0] = 1  # two pixels of the first patient
    cases = CaseIndex(torch.tensor([3, 3, 1, 1]), NAMES, SITES)
    data = TensorData(torch.zeros(4, 1, 2, 2), truth, cases=cases)
    look = Evaluation(SegmentationConfig().make(2), data, Compute(), seed=0)
    everything = torch.stack([torch.zeros(4, 2, 2), torch.ones(4, 2, 2)], 1)
    result = look.detailed_metrics(Outputs(everything, ensemble=-everything), ())["cases"]
    assert result["names"] == ["p1", "p3"]
    assert result["global_model"] == pytest.approx([0.0, 100 * 2 * 2 / (2 + 8)])
    assert result["ensemble"] == pytest.approx([100.0, 0.0])  # nothing predicted, and no foreground
    assert result["centralized"] is None


def test_metrics_by_label() -> None:
    task = MultiLabelConfig().make(2)
    data = TensorData(torch.zeros(4, 1, 4, 4), torch.tensor([[1, 1], [0, 1], [1, 1], [0, 1]]))
    outputs = torch.tensor([[2.0, 0.0], [1.0, 0.0], [3.0, 0.0], [0.0, 0.0]])
    result = Evaluation(task, data, Compute(), seed=0).detailed_metrics(
        Outputs(outputs, {"a": -outputs}), ("Edema", "Mass")
    )
    assert result["labels"] == {
        "names": ["Edema", "Mass"],
        "global_model": [100.0, None],  # all examples have a mass
        "centralized": None,
        "nodes": {"a": [0.0, None]},
    }


def test_node_models_are_evaluated_on_known_labels() -> None:
    """Outputs for labels without known values in a node's data are untrained."""
    task = MultiLabelConfig().make(2)
    cases = CaseIndex(torch.tensor([0, 1, 2, 3]), NAMES, ("A",) * 4)
    data = TensorData(torch.zeros(4, 1, 4, 4), torch.tensor([[1, 1], [0, 0], [1, 1], [0, 0]]), cases=cases)
    # Knows the first label of one example only.
    knows = TensorData(torch.zeros(2, 1, 4, 4), torch.tensor([[-1, -1], [0, -1]]))
    look = Evaluation(task, data, Compute(), 0, {"a": knows, "b": data})
    outputs = torch.tensor([[2.0, 0.0], [1.0, 1.0], [3.0, 0.0], [0.0, 1.0]])  # AUC 100 % and 0 %
    assert look.compute_metrics(outputs) == look.compute_metrics(outputs, node="b") == {"auc": 50.0}
    assert look.compute_metrics(outputs, node="a") == {"auc": 100.0}
    assert look.compute_metrics(outputs[:2], torch.tensor([0, 1]), node="a") == {"auc": 100.0}
    result = look.detailed_metrics(Outputs(outputs, {"a": outputs, "b": outputs}, outputs), ("Edema", "Mass"))
    assert result["labels"]["nodes"] == {"a": [100.0, None], "b": [100.0, 0.0]}
    assert result["labels"]["global_model"] == result["labels"]["centralized"] == [100.0, 0.0]
    assert result["sites"]["global_model"] == {"A": {"auc": 50.0}}
    assert result["sites"]["nodes"] == {"a": {"A": {"auc": 100.0}}, "b": {"A": {"auc": 50.0}}}


def test_other_tasks_use_all_targets() -> None:
    data = parted()
    one_class = data.subset(torch.tensor([0]))
    look = Evaluation(Classification(2), data, Compute(), 0, {"a": one_class})
    assert look.compute_metrics(ALL_ZERO, node="a")["accuracy"] == 50.0


def test_only_image_tasks_have_pictures() -> None:
    look = evaluation(parted())
    assert look.save_example_predictions(Outputs(ALL_ZERO), (0.5,), (0.5,), RunWriter(None)) is None


# --- intervals ---


def test_resamples_keep_units_and_are_equal_for_all_runs() -> None:
    data = parted()
    of = resampling_units(data)
    assert of.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # patients
    owned = replace(data, groups=torch.tensor([7, 7, 7, 7, 5, 5, 5, 5]))
    assert resampling_units(owned).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    weights = resample_counts(of)
    assert weights.shape == (DRAWS, 8)
    assert (weights.sum(1) == 8).all()
    assert (weights[:, ::2] == weights[:, 1::2]).all()
    assert (weights == resample_counts(of)).all()


def test_confidence_intervals_of_each_model(tmp_path: Path) -> None:
    count = 400
    targets = torch.arange(count) % 2
    data = TensorData(torch.zeros(count, 1, 4, 4), targets)
    right = F.one_hot(targets, 2).float()
    wrong = torch.arange(count)[:, None] < 80  # 80 of 400 predictions
    result = Outputs(torch.where(wrong, 1 - right, right), {"a": right, "b": 1 - right}, right)
    intervals = Evaluation(Classification(2), data, Compute(), 0).confidence_intervals(
        result, RunWriter(tmp_path)
    )
    assert intervals is not None
    assert (intervals["level"], intervals["cases"], intervals["ensemble"]) == (95, count, None)
    assert intervals["centralized"] == [100.0, 100.0]
    assert intervals["nodes"] == [50.0, 50.0]  # one always correct, one never
    # The standard error of 80 % over 400 cases is 2 points.
    assert intervals["global_model"] == pytest.approx([80 - 1.96 * 2, 80 + 1.96 * 2], abs=0.7)
    draws = load_file(tmp_path / "draws.safetensors")["judged"]
    assert draws.shape == (DRAWS,)
    assert draws.std().item() == pytest.approx(2.0, rel=0.1)


def test_single_case_has_no_interval() -> None:
    one = parted().subset(torch.tensor([0, 1]))
    look = evaluation(one)
    assert look.confidence_intervals(Outputs(ALL_ZERO[:2]), RunWriter(None)) is None


@pytest.mark.parametrize("name", ["segmentation", "reconstruction", "multi-label"])
def test_weighted_metrics_equal_repeated_cases(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    task = TASKS[name]().make(2 if name != "reconstruction" else 1)
    # the second patient has no example here
    cases = CaseIndex(torch.tensor([0, 0, 0, 2, 2, 3]), NAMES, SITES)
    if name == "multi-label":
        outputs = torch.randn(6, 2, generator=generator)
        targets = torch.tensor([[0, 1], [1, 0], [-1, 1], [1, 0], [0, -1], [1, 1]])
    elif name == "segmentation":
        outputs = torch.randn(6, 2, 16, 16, generator=generator)
        targets = torch.randint(2, (6, 16, 16), generator=generator)
    else:
        outputs, targets = torch.randn(2, 6, 1, 16, 16, generator=generator)
    even = task.bootstrap_metric(outputs, targets, cases, np.ones((1, 6)))
    assert even is not None
    assert even[0] == pytest.approx(task.compute_primary_metric(outputs, targets, cases))
    without = torch.tensor([0, 1, 2, 5])
    weights = np.zeros((1, 6))
    weights[0, without] = 2.0
    weighted = task.bootstrap_metric(outputs, targets, cases, weights)
    assert weighted is not None
    assert weighted[0] == pytest.approx(
        task.compute_primary_metric(outputs[without], targets[without], cases.subset(without))
    )
