"""Label counts of a run, compared with the true counts by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedstill.attacks.label_counts import LabelCounts, compare_counts, compare_histograms
from fedstill.core.dataset import TensorData
from fedstill.methods.standalone import Standalone
from fedstill.runs.simulation import Simulation
from fedstill.tasks.multi_label import MultiLabel
from tests.support.bright_rows import SHAPE, setting


def labeled(*numbers: int) -> TensorData:
    """Create examples with given counts for each class."""
    labels = torch.repeat_interleave(torch.arange(len(numbers)), torch.tensor(numbers))
    return TensorData(torch.zeros(len(labels), *SHAPE), labels)


PARTS = [labeled(5, 0, 5), labeled(2, 4, 2), labeled(0, 0, 3)]


def test_counts_by_hand() -> None:
    """The shares of the 10 counts released by node-1 are 0.4, 0.4, 0.2; the true ones 0.25, 0.5, 0.25."""
    experiment = Simulation(setting(Standalone(), parts=PARTS, classes=("cyst", "naevus", "wart")))
    released = {"node-1": torch.tensor([4.0, 4.0, 2.0]), "node-0": torch.tensor([5.0, 0.0, 5.0])}
    exact, noised = comparison = compare_counts(released, experiment)
    assert exact == {
        "node": "node-0",
        "exact": True,
        "total_variation": 0.0,
        "largest_error": 0.0,
        "largest_class": "cyst",
        "size_error": 0.0,
        "absent": ["naevus"],
        "reported_absent": ["naevus"],
    }
    assert (noised["node"], noised["exact"], noised["size_error"]) == ("node-1", False, 2.0)
    assert noised["total_variation"] == pytest.approx((0.15 + 0.1 + 0.05) / 2)
    assert noised["largest_error"] == pytest.approx(0.15)
    assert (noised["largest_class"], noised["absent"], noised["reported_absent"]) == ("cyst", [], [])
    assert json.loads(json.dumps(comparison, allow_nan=False)) == comparison


def test_skips_node_without_findings() -> None:
    one = [TensorData(part.inputs, torch.nn.functional.one_hot(part.targets, 3)) for part in PARTS]
    one[1] = TensorData(one[1].inputs, torch.zeros_like(one[1].targets))
    experiment = Simulation(replace(setting(Standalone(), parts=one, task=MultiLabel(3)), test=one[0]))
    released = {node.name: experiment.task.counts(node.data) for node in experiment.nodes}
    assert [each["node"] for each in compare_counts(released, experiment)] == ["node-0", "node-2"]


# --- histograms ------------------------------------------------------------------------------------

TRUE = torch.tensor([50.0, 30.0, 20.0, 0.0])


def test_noisy_counts_by_hand() -> None:
    """The released counts 40, 40, 0, 0 are shares 0.5, 0.5, 0, 0; the true ones 0.5, 0.3, 0.2, 0."""
    comparison = compare_histograms(torch.tensor([40.0, 40.0, 0.0, 0.0]), TRUE, ["a", "b", "c", "d"])
    assert not comparison["exact"]
    assert comparison["total_variation"] == pytest.approx(0.2)
    assert comparison["largest_error"] == pytest.approx(0.2)
    assert (comparison["largest_class"], comparison["size_error"]) == ("b", -20)
    assert (comparison["absent"], comparison["reported_absent"]) == (["d"], ["c", "d"])
    words = {
        row.metric: (row.text, row.note)
        for row in LabelCounts().rows({"nodes": [{"node": "x", **comparison}]})
    }
    assert words["known to be absent"] == ("1 of 1 classes: d", "reported as absent, but present: c")
    assert words["shares off by, points at most"] == ("20.0", "class b")
    assert words["size off by"] == ("-20.0", "")
    assert words["off by"] == ("20.0% to 20.0%", "")


def test_negative_and_empty_counts() -> None:
    comparison = compare_histograms(torch.tensor([-4.0, 30.0, 10.0, 0.4]), TRUE)
    assert (comparison["reported_absent"], comparison["largest_class"]) == (["0", "3"], "0")
    assert comparison["total_variation"] == pytest.approx(0.5), "shares 0, 30, 10 and 0.4 of 40.4"
    nothing = compare_histograms(torch.zeros(4), TRUE)
    assert nothing["total_variation"] == pytest.approx((0.25 + 0.05 + 0.05 + 0.25) / 2)
