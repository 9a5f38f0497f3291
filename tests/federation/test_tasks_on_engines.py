"""Every task gives equal metrics stacked, one by one and over messages, also under DP-SGD.

Mechanisms that cannot protect a task are refused.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core.config_tables import to_table
from fedstill.core.errors import FedstillError
from fedstill.models.module_utils import to_vector
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import RunSpec, from_dict
from tests.support.digits_world import config_of
from tests.support.links import Away, here

pytestmark = pytest.mark.usefixtures("steady_adam")

SIDE, COUNT, PICTURES = 16, 60, 16


def maps(folder: Path) -> str:
    """Write bright squares on noise, ten patients at two sites."""
    draw = np.random.default_rng(0)
    images = draw.integers(20, 90, (COUNT, SIDE, SIDE), dtype=np.uint8)
    masks = np.zeros_like(images)
    for image, mask in zip(images, masks, strict=True):
        top, left = draw.integers(2, 9, 2)
        mask[top : top + 5, left : left + 5] = 1
        image[mask == 1] += 120
    path = folder / "maps.npz"
    patient = np.arange(COUNT) // 6
    np.savez(path, images=images, masks=masks, patient=patient, site=np.where(patient % 2, "east", "west"))
    return str(path)


def pictures(folder: Path) -> str:
    """Write pictures of two sites with bright discs, two of which touch; each is cut into four patches."""
    draw, side = np.random.default_rng(3), 24
    rows, columns = np.mgrid[:side, :side]
    images = draw.integers(20, 60, (PICTURES, side, side), dtype=np.uint8)
    instances = np.zeros((PICTURES, side, side), dtype=np.int32)
    for image, objects in zip(images, instances, strict=True):
        top, left = draw.integers(5, 18, 2)
        for number, (y, x) in enumerate(((top, left), (top, left + 7), (23 - top, 23 - left)), start=1):
            objects[(rows - y) ** 2 + (columns - x) ** 2 <= 12] = number
        image[objects > 0] += 150
    path = folder / "pictures.npz"
    site = np.where(np.arange(PICTURES) % 2, "east", "west")
    np.savez(path, images=images, instances=instances, site=site)
    return str(path)


def findings(folder: Path) -> str:
    """Write images with three findings, each a bright corner."""
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 2, (COUNT, 3)).astype(np.int64)
    images = draw.integers(0, 60, (COUNT, SIDE, SIDE)).astype(np.uint8)
    for image, has in zip(images, labels, strict=True):
        for finding, corner in enumerate(((0, 0), (0, 8), (8, 0))):
            image[corner[0] : corner[0] + 8, corner[1] : corner[1] + 8] += np.uint8(150 * has[finding])
    path = folder / "findings.npz"
    np.savez(path, images=images, labels=labels, patient=np.arange(COUNT) // 2)
    return str(path)


def texts(folder: Path) -> str:
    draw = np.random.default_rng(2)
    words = (["good", "fine", "warm"], ["bad", "dull", "cold"])
    path = folder / "texts.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(["text", "label", "split"])
        for number in range(COUNT):
            label = int(draw.integers(2))
            text = " ".join([*draw.choice(words[label], 3), f"word{draw.integers(9)}"])
            rows.writerow([text, label, "test" if number % 4 == 0 else "train"])
    return str(path)


Make = Callable[[Path], str]
TASKS: dict[str, tuple[Make, str, dict[str, Any]]] = {
    "segmentation": (maps, "unet:4", {}),
    "instances": (pictures, "unet:4", {"patch": SIDE}),
    "reconstruction": (maps, "unet:4", {}),
    "multi-label": (findings, "small-cnn:4", {}),
    "text": (texts, "bag:8", {"words": 50, "length": 6}),
}


def fediod(task: str) -> str:
    """Return the form of FedIOD for a task; images are generated from label maps where there are any."""
    return "fediod" if task in ("multi-label", "text") else "fediod-maps"


CASES = [
    *((task, "fedavg") for task in TASKS),
    *((task, "fedkd") for task in TASKS),
    *((task, fediod(task)) for task in TASKS if task != "text"),
]


def tiny(
    task: str, method: str, folder: Path, engine: str = "one-by-one", privacy: Mapping[str, Any] | None = None
) -> RunSpec:
    make, model, data = TASKS[task]
    return from_dict(
        {
            "task": {"name": task},
            "data": {"name": make(folder), **data},
            "split": {"name": "iid", "nodes": 3, "minimum": 1},
            "nodes": {
                "models": [model],
                "local": {"epochs": 1, "batch": 8, "lr": 5e-3},
                "policy": {"outputs_only": False},
                "privacy": dict(privacy or {}),
            },
            "student": {"model": model},
            "public": {"name": "held-out"} if method == "fedkd" else {},
            "evaluation": {"centralized": False, "samples": 2},
            # Engines differ in the last digits, which are far larger in bfloat16.
            "engine": {"batching": engine, "precision": "float32"},
            "method": to_table(config_of(method, batch=4, student={"batch": 4}, levels=0)),
        }
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("task", "method"), CASES)
def test_remote_run_equals_simulation(task: str, method: str, tmp_path: Path) -> None:
    config = tiny(task, method, tmp_path)
    experiment, metrics = here(config)
    live = Away(config, tmp_path / "away").live() if (tmp_path / "away").mkdir() is None else None
    assert live is not None
    result = live.run()
    assert (result["bytes"], result["queries"]) == (metrics["bytes"], metrics["queries"])
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    for metric in experiment.task.metrics:
        assert result[metric.key] == metrics[metric.key] == metrics["student"][metric.key]
    assert result["sites"] is None or result["sites"]["global_model"] == metrics["sites"]["global_model"]
    assert (result["labels"] or {}).get("global_model") == (metrics["labels"] or {}).get("global_model")


def test_instance_metrics_use_whole_pictures(tmp_path: Path) -> None:
    """The metrics above are of pictures assembled from their patches, also by site."""
    experiment, metrics = here(tiny("instances", "fedavg", tmp_path))
    cases = experiment.test.cases
    assert cases is not None
    assert cases.corners is not None
    assert len(experiment.test) == 4 * len(cases.present_ids())
    assert {cases.sizes[case] for case in cases.present_ids()} == {(24, 24)}
    outputs = experiment.evaluation.outputs(experiment.student)
    assert metrics["dice"] == experiment.task.compute_metrics(outputs, experiment.test.targets, cases)["dice"]
    assert metrics["dice"] != experiment.task.compute_metrics(outputs, experiment.test.targets)["dice"]
    assert set(metrics["sites"]["global_model"]) == {"east", "west"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("task", "method"), CASES)
def test_stacked_equals_one_by_one(task: str, method: str, tmp_path: Path) -> None:
    stacked, alone = (here(tiny(task, method, tmp_path, engine))[0] for engine in ("stacked", "one-by-one"))
    assert [len(group) for group in stacked.groups["distillation"]] == [3]
    first = build_simulation(tiny(task, method, tmp_path))[0].student
    change, difference = (to_vector(other) - to_vector(alone.student) for other in (first, stacked.student))
    # Engines differ by 1e-5 of the change in training, or more if a number is at the edge of a ReLU or of an
    # absolute error, the loss of reconstruction. With swapped nodes they differ by at least 0.17.
    assert difference.norm() <= (0.1 if task == "reconstruction" else 0.025) * change.norm()


@pytest.mark.sample(1)
@pytest.mark.parametrize("task", TASKS)
def test_dp_sgd_keeps_budget_on_every_engine(task: str, tmp_path: Path) -> None:
    privacy = {"mechanism": "dp-sgd", "epsilon": 20.0, "delta": 1e-3}
    config = tiny(task, "fedavg", tmp_path, privacy=privacy)
    experiment, metrics = here(config)
    (tmp_path / "away").mkdir()
    live = Away(config, tmp_path / "away").live()
    result = live.run()
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    assert result["privacy"] == metrics["privacy"]
    assert all(0 < node["epsilon"] <= 20.0 for node in result["privacy"]["nodes"])


@pytest.mark.parametrize("mechanism", ["pate", "noisy-outputs"])
@pytest.mark.parametrize("task", ["segmentation", "reconstruction"])
def test_mechanisms_refuse_label_maps(task: str, mechanism: str, tmp_path: Path) -> None:
    own = {"pate": {"teachers": 2}} if mechanism == "pate" else {"outputs": {"bound": 5.0}}
    privacy = {"mechanism": mechanism, "epsilon": 5.0, **own}
    with pytest.raises(FedstillError, match="dp-sgd"):
        build_simulation(tiny(task, "fedkd", tmp_path, privacy=privacy))


@pytest.mark.parametrize("task", ["segmentation", "reconstruction"])
def test_budget_refuses_label_maps(task: str, tmp_path: Path) -> None:
    privacy = {"mechanism": "dp-sgd", "epsilon": 20.0, "delta": 1e-3}
    with pytest.raises(FedstillError, match=r"conditions = .?.?drawn"):
        build_simulation(tiny(task, fediod(task), tmp_path, privacy=privacy))


def test_generating_methods_refuse_texts(tmp_path: Path) -> None:
    with pytest.raises(FedstillError, match=r"FedIOD .*texts"):
        build_simulation(tiny("text", "fediod", tmp_path))
