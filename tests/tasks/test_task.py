"""Properties of all tasks, and which methods support which task."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstill.cli.tools import tasks_by_method
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError, MethodRefused
from fedstill.data import make_data_config
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import load
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.node_data import load_node_data as load_private
from fedstill.data.public import PublicConfig, load_public
from fedstill.models import example_inputs
from fedstill.protocol.method import METHODS
from fedstill.protocol.needs import unmet_need
from fedstill.runs.spec import from_dict
from fedstill.tasks import TASKS, Task, TaskConfig
from fedstill.tasks.classification import Classification, ClassificationConfig, TextClassification
from fedstill.tasks.instances import Instances
from fedstill.tasks.multi_label import MultiLabel
from fedstill.tasks.reconstruction import Reconstruction
from fedstill.tasks.segmentation import Segmentation, SegmentationConfig
from fedstill.tasks.task import ENSEMBLES
from tests.support.errors import raises_invalid


def tasks() -> list[Task]:
    return [TASKS[name]().minimal_task() for name in TASKS]


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.name)
def test_primary_metric_is_a_percentage_and_higher_is_better(task: Task) -> None:
    first = task.metrics[0]
    assert (first.unit, first.better, first.key) == ("%", "higher", task.metric)
    assert len({metric.key for metric in task.metrics}) == len(task.metrics)


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.name)
def test_empty_targets_are_valid_targets(task: Task) -> None:
    shape = (1, 16, 16) if task.form == "images" else (8,)
    inputs = example_inputs(shape, task.form)
    task.check(TensorData(inputs, task.empty_targets(2, shape)), "blank")
    outputs = torch.zeros(2, *task.output_shape(shape))
    losses = task.loss(outputs.unsqueeze(0), task.empty_targets(2, shape).unsqueeze(0))
    assert losses.shape == (1,)
    assert losses.isfinite().all()


def test_rejects_options_of_another_task() -> None:
    with raises_invalid("task.acceleration", 4, "none"):
        from_dict({"method": {"name": "fedavg"}, "task": {"name": "segmentation", "acceleration": 4}})
    with pytest.raises(ArgumentError, match=r"invalid task\.dice = -1"):
        SegmentationConfig(dice=-1.0)


def test_rejects_incomplete_custom_tasks_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "careless_tasks.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedstill.tasks import Metric, Task, TaskConfig\n"
        "from fedstill.tasks.classification import Classification\n"
        "from fedstill.tasks.classification import SoftmaxTask\n"
        "class Half(SoftmaxTask):\n    name, kind, metrics = 'half', 'class', (Metric('a', 'A'),)\n"
        "class Begun(Task):\n    name, kind, metrics = 'begun', 'class', (Metric('a', 'A'),)\n"
        "class Kindless(Classification):\n    kind = 'classes'\n"
        "class Figureless(Classification):\n    metrics = ('accuracy',)\n"
        "@dataclass(frozen=True)\nclass Empty(TaskConfig):\n    rate: float = 1.0\n"
        "class Loose(TaskConfig):\n    task_class = Classification\n"
        "@dataclass(frozen=True)\nclass Abstract(TaskConfig):\n    task_class = Half\n"
        "@dataclass(frozen=True)\nclass Bare(TaskConfig):\n    task_class = Begun\n"
        "@dataclass(frozen=True)\nclass NoKind(TaskConfig):\n    task_class = Kindless\n"
        "@dataclass(frozen=True)\nclass NoFigures(TaskConfig):\n    task_class = Figureless\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, message in (
        ("Half", "a subclass of TaskConfig"),
        ("Empty", "a class with task_class: ClassVar"),
        ("Loose", "a frozen dataclass"),
        ("Abstract", "a class whose Half also has compute_metrics, counts, loss"),
        (
            "Bare",
            "a class whose Begun also has balance_loss, compute_metrics, confidence_loss, counts, ",
        ),
        ("NoKind", "a class whose Kindless has a kind, one of class, labels, map, image"),
        ("NoFigures", "a class whose Figureless has metrics, a tuple of Metric"),
    ):
        with pytest.raises(
            ArgumentError, match=rf"^invalid task = 'careless_tasks:{name}' \(expected {message}"
        ):
            TASKS[f"careless_tasks:{name}"]


@dataclass(frozen=True, kw_only=True)
class CustomConfig(TaskConfig):
    """Options of a custom task; the tests set ``task_class``."""


ARRAYS = {
    "classification": {"labels": np.arange(12) % 2},
    "multi-label": {"labels": np.eye(3, dtype=np.int64)[np.arange(12) % 3]},
    "segmentation": {"masks": np.eye(8, dtype=np.uint8)[None].repeat(12, 0)},
    "instances": {"instances": np.eye(8, dtype=np.int32)[None].repeat(12, 0)},
    "reconstruction": {},
}


@pytest.mark.parametrize("like", ARRAYS)
def test_data_of_a_task_serve_custom_tasks_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, like: str
) -> None:
    ours = TASKS[like]()
    kind = type("Mine", (type(ours.minimal_task()),), {"name": "mine"})
    monkeypatch.setattr(CustomConfig, "task_class", kind, raising=False)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=pixels, **ARRAYS[like])
    config = make_data_config(str(tmp_path / "data.npz"), **({"patch": 8} if like == "instances" else {}))
    data, mine = load(config, ours), load(config, CustomConfig())
    assert torch.equal(mine.train.inputs, data.train.inputs)
    assert torch.equal(mine.train.targets, data.train.targets)
    assert mine.classes == data.classes
    node, spec = load_private(NodeDataConfig(), tmp_path, DataSpec.from_data(CustomConfig(), mine))
    theirs, _ = load_private(NodeDataConfig(), tmp_path, DataSpec.from_data(ours, data))
    assert torch.equal(node.targets, theirs.targets)
    assert spec.make_task().name == "mine"
    if like != "instances":  # the spec comes from the run description
        assert load_private(NodeDataConfig(), tmp_path, task=CustomConfig())[1].task == CustomConfig()
    public = load_public(PublicConfig("noise", limit=3), mine, CustomConfig())[1]
    assert public is not None
    assert len(public) == 3


def test_methods_refuse_tasks_with_a_reason() -> None:
    reasons = tasks_by_method()
    assert set(reasons) == set(METHODS)
    assert all(reasons["fedavg"][name] is None for name in TASKS)
    assert "texts" in str(reasons["fediod"]["text"])
    assert "label maps" in str(reasons["fediod"]["segmentation"])
    assert reasons["fediod-maps"]["segmentation"] is None
    assert "one class for each input" in str(reasons["fedgen"]["segmentation"])
    assert "label maps" in str(reasons["asyndgan"]["classification"])
    assert reasons["asyndgan"]["segmentation"] is None
    for name in ("co-boosting", "dense", "dsfl", "fd", "fedcg", "fedgen", "fedmd-cg", "fedproto", "fedzge"):
        assert reasons[name]["multi-label"] is not None
    needs = METHODS["fedgen"]().needs()
    assert unmet_need(needs, ClassificationConfig().minimal_task()) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda task, x, maps: task.label_maps(TensorData(x, maps)),
        lambda task, x, maps: task.encode_maps(maps),
        lambda task, x, maps: task.targets_from_maps(maps, x),
        lambda task, x, maps: task.sample_maps(2, 8, 8, torch.Generator()),
    ],
    ids=["label_maps", "encode_maps", "targets_from_maps", "sample_maps"],
)
def test_task_without_label_maps_refuses_their_use(call: Callable[..., object]) -> None:
    with pytest.raises(MethodRefused, match=r"classification .*label maps"):
        call(Classification(3), torch.zeros(2, 1, 8, 8), torch.zeros(2, 8, 8, dtype=torch.uint8))


def test_rejects_ensemble_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedIOD needs these gradients to train its generator."""

    def detached(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
        return responses.detach().mean(0)

    monkeypatch.setitem(ENSEMBLES._loaded, "detached", detached)
    responses, weights = torch.zeros(2, 3, 4), torch.full((2, 1, 4), 0.5)
    assert Classification(4).ensemble(responses, weights, "detached").shape == (3, 4)
    with raises_invalid("ensemble", "detached", "gradients"):
        Classification(4).ensemble(responses.requires_grad_(), weights, "detached")


IMAGES, MAP_SHAPE = torch.zeros(2, 1, 8, 12), (2, 8, 12)
CLASSES, FINDINGS, MAPS = (
    torch.tensor([0, 2]),
    torch.tensor([[0, 1, -1], [-1, -1, -1]]),
    torch.zeros(MAP_SHAPE).long(),
)
IDS = torch.tensor([[4, 1, 0], [0, 0, 0]])  # the second text is empty
CLASSIFICATION, MULTI_LABEL, SEGMENTATION = Classification(3), MultiLabel(3), Segmentation(3)
TEXT, RECONSTRUCTION = TextClassification(3), Reconstruction()
NAN_IMAGES = IMAGES.clone()
NAN_IMAGES[1, 0, 3, 3] = math.nan
MAP_5, MAP_NEGATIVE = MAPS.clone(), MAPS.clone()
MAP_5[1, 2:4, 2:4], MAP_NEGATIVE[0, 0, 0] = 5, -1


@pytest.mark.parametrize(
    ("task", "inputs", "targets"),
    [
        (CLASSIFICATION, IMAGES, CLASSES),
        (MULTI_LABEL, IMAGES, FINDINGS),
        (SEGMENTATION, IMAGES, MAPS),
        (Instances(), IMAGES, MAPS),
        (TEXT, IDS, CLASSES),
        (RECONSTRUCTION, IMAGES, IMAGES),
        (RECONSTRUCTION, IMAGES, IMAGES + 1.0009),  # resampling exceeds the range slightly
        (RECONSTRUCTION, IMAGES, IMAGES - 1.0009),
        (CLASSIFICATION, torch.zeros(2, 3, 8, 12), CLASSES),
    ],
)
def test_accepts_valid_data(task: Task, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    task.check(TensorData(inputs, targets), "train")


@pytest.mark.parametrize(
    ("task", "inputs", "targets", "message"),
    [
        (CLASSIFICATION, IMAGES[:0], CLASSES[:0], "there are no examples"),
        (
            CLASSIFICATION,
            IMAGES[:, 0],
            CLASSES,
            r"inputs are float32 of shape \(2, 8, 12\) \(expected float32",
        ),
        (CLASSIFICATION, IMAGES.double(), CLASSES, "inputs are float64"),
        (
            CLASSIFICATION,
            IMAGES[:, :, :6],
            CLASSES,
            r"images are 6 x 12",
        ),
        (SEGMENTATION, IMAGES[..., :10], MAPS[..., :10], "images are 8 x 10"),
        (CLASSIFICATION, IMAGES[:, :0], CLASSES, r"\(2, 0, 8, 12\) \(expected one or more of each"),
        (CLASSIFICATION, IMAGES, CLASSES[:1], "2 inputs but 1 targets"),
        (MULTI_LABEL, NAN_IMAGES, FINDINGS, "1 examples hold NaN or infinity, the first is example 1"),
        (
            CLASSIFICATION,
            -1 / IMAGES.abs(),
            CLASSES,
            "2 examples hold NaN or infinity, the first is example 0",
        ),
        (
            CLASSIFICATION,
            IMAGES,
            CLASSES.int(),
            r"targets are int32 of shape .* \(expected one int64 class index",
        ),
        (CLASSIFICATION, IMAGES, CLASSES[:, None], r"targets are int64 of shape \(2, 1\)"),
        (CLASSIFICATION, IMAGES, CLASSES + 1, r"label 3 of example 1 is outside 0\.\.2 \(1 such"),
        (CLASSIFICATION, IMAGES, CLASSES - 1, r"label -1 of example 0 is outside 0\.\.2"),
        (
            MULTI_LABEL,
            IMAGES,
            CLASSES,
            r"targets are int64 of shape \(2,\) \(expected int64 of shape \(2, 3\)",
        ),
        (MULTI_LABEL, IMAGES, FINDINGS + 1, r"label 2 of example 0 is outside -1\.\.1 \(1 such"),
        (MULTI_LABEL, IMAGES, FINDINGS - 1, r"label -2 of example 0 is outside -1\.\.1 \(4 such"),
        (
            SEGMENTATION,
            IMAGES,
            MAPS.float(),
            r"targets are float32 of shape \(2, 8, 12\) \(expected int64 of shape",
        ),
        (SEGMENTATION, IMAGES, MAPS.transpose(1, 2), r"\(2, 12, 8\) \(expected int64 of shape \(2, 8, 12\)"),
        (SEGMENTATION, IMAGES, MAP_5, r"label 5 of example 1 is outside 0\.\.2 \(4 such"),
        (SEGMENTATION, IMAGES, MAP_NEGATIVE, r"label -1 of example 0 is outside 0\.\.2 \(1 such"),
        (TEXT, IDS.float(), CLASSES, r"inputs are float32 of shape \(2, 3\) \(expected int64 ids"),
        (TEXT, IDS[:, :0], CLASSES, r"\(2, 0\) \(expected one or more of each"),
        (TEXT, IDS - 1, CLASSES, "2 examples hold ids below 0, the first is example 0"),
        (TEXT, IDS, CLASSES + 1, r"label 3 of example 1 is outside 0\.\.2"),
        (RECONSTRUCTION, IMAGES.expand(2, 3, 8, 12), IMAGES, r"expected equal ones, \(N, 1, H, W\)"),
        (RECONSTRUCTION, IMAGES, IMAGES[:, 0], "targets as inputs: inputs are float32 of shape"),
        (RECONSTRUCTION, IMAGES, IMAGES[..., :8], "expected equal ones"),
        (RECONSTRUCTION, IMAGES[:, :, :4], IMAGES[:, :, :4], r"images are 4 x 12 \(expected 8 x 8 or more"),
        (RECONSTRUCTION, IMAGES, IMAGES + 1.5, r"targets lie in 1\.5\.\.1\.5"),
        (RECONSTRUCTION, IMAGES, IMAGES + 1.0011, "targets lie in"),
        (RECONSTRUCTION, IMAGES, IMAGES - 1.0011, "targets lie in"),
        (RECONSTRUCTION, IMAGES, NAN_IMAGES, "targets as inputs: 1 examples hold NaN"),
    ],
)
def test_rejects_invalid_data_in_one_line(
    task: Task, inputs: torch.Tensor, targets: torch.Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        task.check(TensorData(inputs, targets), "train of x")
    assert str(caught.value).startswith("train of x: ")
    assert "\n" not in str(caught.value)
