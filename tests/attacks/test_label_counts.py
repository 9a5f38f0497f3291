"""The label counts of a run beside the truth, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedstill.attacks.label_counts import counts
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.methods.standalone import Standalone
from fedstill.runs.simulation import Simulation
from fedstill.tasks.multi_label import MultiLabel
from tests.runs.test_simulation import SHAPE, setting


def labelled(*numbers: int) -> TensorData:
    """So many examples of each class."""
    labels = torch.repeat_interleave(torch.arange(len(numbers)), torch.tensor(numbers))
    return TensorData(torch.zeros(len(labels), *SHAPE), labels)


PARTS = [labelled(5, 0, 5), labelled(2, 4, 2), labelled(0, 0, 3)]


def test_counts_by_hand() -> None:
    """Of node-1's 10 told, shares are 0.4, 0.4 and 0.2 against 0.25, 0.5 and 0.25."""
    experiment = Simulation(setting(Standalone(), parts=PARTS, classes=("cyst", "naevus", "wart")))
    told = {"node-1": torch.tensor([4.0, 4.0, 2.0]), "node-0": torch.tensor([5.0, 0.0, 5.0])}
    exact, noised = found = counts(told, experiment)
    assert exact == {
        "node": "node-0",
        "exact": True,
        "total_variation": 0.0,
        "largest_error": 0.0,
        "largest_class": "cyst",
        "size_error": 0.0,
        "absent": ["naevus"],
        "told_absent": ["naevus"],
        "line": "node-0 told exactly how many examples of each class it holds; "
        "1 of 1 classes that it lacks are told as 0",
    }
    assert (noised["node"], noised["exact"], noised["size_error"]) == ("node-1", False, 2.0)
    assert noised["total_variation"] == pytest.approx((0.15 + 0.1 + 0.05) / 2)
    assert noised["largest_error"] == pytest.approx(0.15)
    assert (noised["largest_class"], noised["absent"], noised["told_absent"]) == ("cyst", [], [])
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_classes_without_names_are_numbers() -> None:
    experiment = Simulation(setting(Standalone(), parts=PARTS))
    (found,) = counts({"node-2": torch.tensor([0.2, 1.0, 3.0])}, experiment)
    assert (found["absent"], found["told_absent"]) == (["0", "1"], ["0"])


def test_a_node_without_findings_has_no_entry() -> None:
    one = [TensorData(part.inputs, torch.nn.functional.one_hot(part.targets, 3)) for part in PARTS]
    one[1] = TensorData(one[1].inputs, torch.zeros_like(one[1].targets))
    experiment = Simulation(replace(setting(Standalone(), parts=one, task=MultiLabel(3)), test=one[0]))
    told = {node.name: experiment.task.counts(node.data) for node in experiment.nodes}
    assert [each["node"] for each in counts(told, experiment)] == ["node-0", "node-2"]


def test_what_no_node_told_is_refused() -> None:
    experiment = Simulation(setting(Standalone(), parts=PARTS))
    with pytest.raises(UnknownName, match="node-7"):
        counts({"node-7": torch.zeros(3)}, experiment)
    with pytest.raises(ArgumentError, match="told counts"):
        counts({"node-0": torch.zeros(4)}, experiment)
