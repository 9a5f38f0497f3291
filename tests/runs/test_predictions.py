"""File of predictions, from which a run's metrics can be recomputed."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.runs.results import FILE, MAX_CLASSES, TestNames, predictions_csv
from fedstill.runs.run import run
from fedstill.runs.spec import from_dict
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel
from fedstill.tasks.reconstruction import Reconstruction
from fedstill.tasks.regression import Regression
from fedstill.tasks.segmentation import Segmentation
from fedstill.tasks.survival import Survival
from tests.support.data_files import config
from tests.support.links import Away, tiny

Row = dict[str, str]


def lines(text: str | None) -> list[Row]:
    assert text is not None
    return list(csv.DictReader(io.StringIO(text)))


def of(folder: Path) -> list[Row]:
    return lines((folder / FILE).read_text(encoding="utf-8"))


def accuracy(rows: list[Row]) -> float:
    return 100 * sum(row["predicted"] == row["truth"] for row in rows) / len(rows)


def images(count: int) -> torch.Tensor:
    return torch.zeros(count, 1, 8, 8)


def test_accuracy_follows_from_predictions_file(tmp_path: Path) -> None:
    setting, _ = config("classification", tmp_path)
    result = run(setting, tmp_path / "run", command="fedstill run", progress=False)
    rows, arrays = of(tmp_path / "run"), np.load(tmp_path / "whole.npz")
    assert accuracy(rows) == pytest.approx(result["accuracy"], abs=1e-9)
    tested = [int(row["example"]) for row in rows]
    assert tested == np.flatnonzero(arrays["split"] == 1).tolist()
    assert [int(row["truth"]) for row in rows] == arrays["labels"][tested].tolist()
    for row in rows:
        p = {name: float(row[f"p_{name}"]) for name in "0123"}
        assert sum(p.values()) == pytest.approx(1)
        assert max(p, key=p.__getitem__) == row["predicted"]


def test_sampled_test_examples_keep_file_names(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name, low in (("cat", 0), ("dog", 100)):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(low, low + 150, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number:02}.png")
    table: dict[str, Any] = {
        "data": {"name": str(tmp_path / "pets"), "test_fraction": 0.3},
        "split": {"name": "iid", "nodes": 2, "minimum": 1},
        "nodes": {"models": ["linear"], "local": {"epochs": 1}, "policy": {"outputs_only": False}},
        "student": {"model": "linear"},
        "evaluation": {"centralized": False},
        "method": {"name": "fedavg", "rounds": 1},
    }
    run(from_dict(table), tmp_path / "run", command="fedstill run", progress=False)
    rows = of(tmp_path / "run")
    assert len({row["example"] for row in rows}) == len(rows) == 12
    for row in rows:
        assert (tmp_path / "pets" / row["example"]).is_file()
        assert row["example"].split("/")[0] == row["truth"]


def test_map_metric_is_mean_over_file(tmp_path: Path) -> None:
    setting, _ = config("segmentation", tmp_path)
    result = run(setting, tmp_path / "run", command="fedstill run", progress=False)
    rows = of(tmp_path / "run")
    assert [row["case"] for row in rows] == result["cases"]["names"]
    assert np.mean([float(row["dice"]) for row in rows]) == pytest.approx(result["dice"], rel=1e-7)


def test_without_student_file_has_node_predictions(tmp_path: Path) -> None:
    setting, _ = config("classification", tmp_path, method={"name": "standalone"})
    result = run(setting, tmp_path / "run", command="fedstill run", progress=False)
    rows = of(tmp_path / "run")
    models = sorted({row["model"] for row in rows})
    assert models == ["node-0", "node-1", "node-2"]
    each = [accuracy([row for row in rows if row["model"] == model]) for model in models]
    assert each == pytest.approx(result["local"]["accuracy"]["per_node"])


@pytest.mark.parametrize("method", ["fedavg", "fd"])
def test_server_writes_predictions_of_its_test_set(method: str, tmp_path: Path) -> None:
    served = Away(tiny(method), tmp_path).live()
    results = served.run()
    if method == "fd":  # the server has no predictions of the nodes' own models
        assert not (tmp_path / "server" / FILE).exists()
        return
    rows = of(tmp_path / "server")
    assert {row["model"] for row in rows} == {"student"}
    assert [row["example"] for row in rows] == list(served.setting.test_names)
    assert accuracy(rows) == pytest.approx(results["accuracy"])


def test_equal_digits_do_not_change_the_predicted_class() -> None:
    outputs = torch.tensor([[0.0, 1e-12, -1.0], [2.0, 1.0, 0.0]])
    data = TensorData(images(2), torch.tensor([0, 0]))
    for row in lines(predictions_csv(Classification(3), {"student": (outputs, data)}, TestNames())):
        p = [float(row[f"p_{name}"]) for name in "012"]
        assert str(p.index(max(p))) == row["predicted"]


def test_many_classes_have_no_column_each() -> None:
    classes = MAX_CLASSES + 1
    outputs, data = torch.eye(classes)[[3]] * 9, TensorData(images(1), torch.tensor([4]))
    (row,) = lines(predictions_csv(Classification(classes), {"student": (outputs, data)}, TestNames()))
    assert set(row) == {"model", "example", "truth", "predicted", "p_predicted", "p_truth"}
    p = outputs.double().softmax(1)[0]
    assert (row["predicted"], row["truth"]) == ("3", "4")
    assert [float(row["p_predicted"]), float(row["p_truth"])] == pytest.approx([float(p[3]), float(p[4])])


def test_unknown_labels_are_empty_in_file() -> None:
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(50, 2, generator=draw) * 6
    targets = torch.randint(-1, 2, (50, 2), generator=draw)
    task, data = MultiLabel(2), TensorData(images(50), targets)
    about = TestNames(classes=("Edema", "Mass"))
    rows = lines(predictions_csv(task, {"student": (outputs, data)}, about))
    areas = []
    for name in about.classes:
        known = [row for row in rows if row[f"truth_{name}"]]
        truth = [int(row[f"truth_{name}"]) for row in known]
        areas.append(100 * roc_auc_score(truth, [float(row[f"p_{name}"]) for row in known]))
    assert sum(row["truth_Edema"] == "" for row in rows) == int((targets[:, 0] < 0).sum()) > 0
    assert np.mean(areas) == pytest.approx(task.compute_metrics(outputs, targets)["auc"])


def test_numbers_are_in_the_unit_of_the_schema() -> None:
    schema = TableSchema(
        "days", (SchemaColumn(name="a", range=(0, 1)), SchemaColumn(name="days", range=(0, 40)))
    )
    outputs, targets = torch.tensor([[-1.0], [0.5]]), torch.tensor([[0.0], [1.0]])
    data = TensorData(torch.zeros(2, 1), targets)
    rows = lines(predictions_csv(Regression(1), {"student": (outputs, data)}, TestNames(schema=schema)))
    assert [(row["truth"], row["predicted"]) for row in rows] == [("20", "0"), ("40", "30")]


def test_survival_has_times_and_probabilities_beyond_each_interval() -> None:
    outputs, targets = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.5, 1.0]])
    data, about = TensorData(torch.zeros(1, 3), targets), TestNames(classes=("0 to 6", "6 to 12"))
    (row,) = lines(predictions_csv(Survival(2), {"student": (outputs, data)}, about))
    assert (row["intervals"], row["event"]) == ("1.5", "1")
    assert (row["p_beyond 6"], row["p_beyond 12"]) == ("0.5", "0.25")


def test_images_have_one_metric_each() -> None:
    truth = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    cases = CaseIndex(torch.tensor([0, 0, 1]), ("p", "q"), ("", ""))
    task, data = Reconstruction(), TensorData(truth, truth, cases=cases)
    outputs = truth * 0.5
    rows = lines(predictions_csv(task, {"student": (outputs, data)}, TestNames()))
    assert [row["case"] for row in rows] == ["p", "p", "q"]
    assert "site" not in rows[0]
    assert np.mean([float(row["ssim"]) for row in rows]) == pytest.approx(
        task.compute_metrics(outputs, truth)["ssim"]
    )


def test_maps_without_cases_have_one_metric_each() -> None:
    truth = torch.zeros(2, 8, 8, dtype=torch.int64)
    truth[:, :4] = 1
    outputs = torch.stack([1.0 - truth, truth.float()], 1)
    outputs[1] = outputs[1].flip(0)
    rows = lines(
        predictions_csv(Segmentation(2), {"student": (outputs, TensorData(images(2), truth))}, TestNames())
    )
    assert [(row["example"], float(row["dice"])) for row in rows] == [("0", 100.0), ("1", 0.0)]
