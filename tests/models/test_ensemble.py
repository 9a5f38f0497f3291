"""Ensembles of networks: names, aggregators, and files that import nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedstill
from fedstill.core.errors import ArgumentError
from fedstill.data.data_spec import DataSpec
from fedstill.models import build, check_name
from fedstill.models.ensemble import Ensemble, EnsembleName, make_aggregator
from fedstill.models.module_utils import parameter_count
from fedstill.runs.student_file import StudentFile
from fedstill.tasks.classification import ClassificationConfig
from tests.support.errors import raises_invalid

SHAPE, CLASSES = (1, 8, 8), 10


@pytest.mark.parametrize(
    "name",
    ["ensemble:nn8:2*mlp:4", "ensemble:linear:mlp:4,linear,mlp:4", "ensemble:weights:small-cnn"],
)
def test_name_builds_the_network_that_has_it(name: str) -> None:
    check_name(name)
    network = build(name, SHAPE, CLASSES, 0)
    assert isinstance(network, Ensemble)
    assert str(network.name) == name
    assert network(torch.zeros(3, *SHAPE)).shape == (3, CLASSES)
    assert {key for key, value in network.named_parameters() if value.requires_grad} == {
        key for key, _ in network.named_parameters() if key.startswith("aggregator.")
    }


@pytest.mark.parametrize(
    "name",
    ["ensemble", "ensemble:nn8", "ensemble:nn:linear", "ensemble:nn0:linear", "ensemble:mean:linear",
     "ensemble:linear:0*linear", "ensemble:linear:linear,", "ensemble:linear:2*3*linear"],
)  # fmt: skip
def test_rejects_other_names(name: str) -> None:
    with raises_invalid("model", name, "ensemble:AGGREGATOR:MEMBERS"):
        EnsembleName.parse(name)


def test_rejects_unknown_members() -> None:
    with pytest.raises(ArgumentError, match="mlb"):
        check_name("ensemble:linear:2*mlb:4")


def test_aggregators_of_two_members_by_hand() -> None:
    z = torch.tensor([[[1.0, 2.0], [3.0, 6.0]]])  # (1, 2, 2)
    for name, weight, expected in (
        ("linear", [[2.0], [1.0]], [[5.5, 10.5]]),
        ("weights", [[2.0, 0.0], [1.0, 1.0]], [[5.5, 6.5]]),
    ):
        aggregator = make_aggregator(name, 2, 2)
        assert torch.equal(aggregator(z), z.mean(1))
        aggregator.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor([0.5])})
        assert torch.equal(aggregator(z), torch.tensor(expected))
    perceptron = make_aggregator("nn1", 2, 2)
    assert parameter_count(perceptron) == 4 + 1 + 2 + 2
    tensors = dict(
        zip(perceptron.state_dict(), ([[1.0, 0, 0, -1]], [6.0], [[2.0], [-1.0]], [0.0, 1.0]), strict=True)
    )
    perceptron.load_state_dict({key: torch.tensor(value) for key, value in tensors.items()})
    assert torch.equal(perceptron(z), torch.tensor([[2.0, 0.0]]))  # relu(1 - 6 + 6) = 1


def test_file_with_custom_member_imports_nothing(tmp_path: Path) -> None:
    name = "ensemble:linear:2*tests.models.test_ensemble:make"
    spec = DataSpec(ClassificationConfig(), tuple(map(str, range(CLASSES))), SHAPE, (0.5,), (0.5,))
    network = Ensemble([make(SHAPE, CLASSES), make(SHAPE, CLASSES)], CLASSES, EnsembleName.parse(name))
    path = tmp_path / "student.safetensors"
    save_file(network.state_dict(), path, StudentFile(name, spec).header())
    with raises_invalid("the student's model", name, "--model"):
        fedstill.load(path)
    assert isinstance(fedstill.load(path, network).network, Ensemble)


def make(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
