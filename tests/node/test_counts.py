"""Released numbers of examples for every task: their sensitivity is at most the charged one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill import tasks
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.models import example_inputs
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.noise import seeded_sampler
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting, NodeSide
from fedstill.tasks import Task
from tests.support.small_world import SETTING, count_labels, count_samples

SIDE, SCALE = 8, 5.0
TASKS: tuple[str, ...] = (
    "classification",
    "text",
    "tabular",
    "multi-label",
    "segmentation",
    "instances",
    "reconstruction",
)


def records(task: Task, count: int, seed: int) -> TensorData:
    draw = torch.Generator().manual_seed(seed)
    shape = {"class": (), "labels": (task.classes,), "map": (SIDE, SIDE), "image": (1, SIDE, SIDE)}[task.kind]
    lowest, high = (-1, 2) if task.kind == "labels" else (0, task.classes)
    targets = torch.randint(lowest, max(high, 1), (count, *shape), generator=draw)
    if task.kind == "labels":
        targets[:2] = 1  # records that have every label
    inputs = example_inputs((1, SIDE, SIDE) if task.form == "images" else (4,), task.form, count)
    return TensorData(inputs, targets.float() if task.kind == "image" else targets)


def released(task: Task, data: TensorData) -> dict[str, torch.Tensor]:
    """Return the tensors that the query's function computes from a node's records."""
    setting = NodeSetting(task, LocalConfig(), Compute())
    node = SimpleNamespace(data=data, task=task, setting=setting, device=torch.device("cpu"))
    return dict(count_labels(task).function(node))


@pytest.mark.parametrize("name", TASKS)
@given(seed=st.integers(0, 2**31), count=st.integers(3, 40), group=st.integers(1, 2))
@settings(max_examples=15, deadline=None)
def test_count_sensitivity_matches_charge(name: str, seed: int, count: int, group: int) -> None:
    task = tasks.TASKS[name]().make(1 if name == "reconstruction" else 3)
    data, query = records(task, count, seed), count_labels(task)
    config = DPSGD(counts_noise=SCALE, group_size=group)
    made = PrivacyMechanism(
        "clinic", config, NodeSide({query.name: query}, SETTING), LocalConfig(), count, task
    )
    before, after = released(task, data), released(task, data.subset(torch.arange(group, count)))
    reading = query.depends_on_records or ()
    assert set(before) == set(reading), "all reads are noised"
    for each in reading:
        rule = made.rule(query, each)
        moved = (rule.bound(before[each]).double() - rule.bound(after[each]).double()).abs().sum().item()
        ((event, times),) = (rule.cost(tuple(before[each].shape)) or {}).items()
        assert (event.kind, times) == ("laplace", 1)
        assert moved / SCALE <= 1 / event.noise, "bounded by the charged sensitivity"
        assert moved / SCALE >= 0.95 / event.noise, "the charged sensitivity is nearly attained"


@pytest.mark.parametrize("name", TASKS)
def test_size_is_number_of_examples(name: str) -> None:
    task = tasks.TASKS[name]().make(1 if name == "reconstruction" else 3)
    query, response = count_labels(task), released(task, records(task, 12, 0))
    response = dict(query.details.postprocess(response, {})) if query.details.postprocess else response
    assert response["sizes"].item() == pytest.approx(12)
    assert response["counts"].shape == (task.classes,)


@pytest.mark.parametrize("name", TASKS)
def test_noisy_size_is_at_least_one(name: str) -> None:
    """With 0 from all nodes the server would divide by zero."""
    task = tasks.TASKS[name]().make(1 if name == "reconstruction" else 3)
    least, all_zero = [], False
    for query in (count_labels(task), count_samples()):
        config = DPSGD(counts_noise=SCALE)
        made = PrivacyMechanism(
            "clinic", config, NodeSide({query.name: query}, SETTING), LocalConfig(), 3, task
        )
        for draw in range(40):
            blank = {"counts": torch.zeros(task.classes), "sizes": torch.tensor(0.0)}
            noised = {
                each: made.rule(query, each).noise(blank[each], seeded_sampler(draw))
                for each in query.depends_on_records or ()
            }
            released = dict(query.details.postprocess(noised, {})) if query.details.postprocess else noised
            least.append(released["sizes"].item())
            all_zero = all_zero or ("counts" in released and not released["counts"].any())
    assert min(least) == 1
    assert all_zero or name == "reconstruction", "counts may all be 0, sizes may not"


def test_class_share_sensitivity_matches_charge() -> None:
    """Sums of shares rounded to float32 would also change by rounding."""
    task = tasks.TASKS["segmentation"]().make(2)
    targets = torch.zeros(300_001, 1, 3, dtype=torch.int64)
    targets[::3, 0, 0] = 1
    query = count_labels(task)
    config, side = DPSGD(counts_noise=SCALE), NodeSide({query.name: query}, SETTING)
    rule = PrivacyMechanism("clinic", config, side, LocalConfig(), 3, task).rule(query, "counts")

    def bounded(targets: torch.Tensor) -> torch.Tensor:
        return rule.bound(task.counts(TensorData(torch.zeros(len(targets), 1), targets)))

    for less in range(1, 40):
        moved = (bounded(targets[less - 1 :]) - bounded(targets[less:])).abs().sum()
        assert abs(float(moved) - 1) < 1e-6
    assert rule.noise(bounded(targets), seeded_sampler(0)).dtype == torch.float32
