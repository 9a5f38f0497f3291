"""What every task has in common, and which methods run which."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.errors import ArgumentError
from fedstill.protocol.method import METHODS, refusal
from fedstill.report.matrix import tasks_by_method
from fedstill.runs.config import from_dict
from fedstill.tasks import TASKS, Task
from fedstill.tasks.classification import ClassificationConfig
from fedstill.tasks.segmentation import SegmentationConfig


def tasks() -> list[Task]:
    return [TASKS[name]().example() for name in TASKS]


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.name)
def test_a_task_is_judged_by_percent_and_higher_is_better(task: Task) -> None:
    first = task.figures[0]
    assert (first.unit, first.better, first.key) == ("%", "higher", task.metric)
    assert len({figure.key for figure in task.figures}) == len(task.figures)


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.name)
def test_blank_targets_are_targets(task: Task) -> None:
    from fedstill.core.dataset import TensorData

    shape = (8,) if task.tokens else (1, 16, 16)
    inputs = torch.ones(2, *shape, dtype=torch.int64) if task.tokens else torch.zeros(2, *shape)
    task.check(TensorData(inputs, task.blank(2, shape)), "blank")
    outputs = torch.zeros(2, *task.outputs(shape))
    losses = task.loss(outputs.unsqueeze(0), task.blank(2, shape).unsqueeze(0))
    assert losses.shape == (1,)
    assert losses.isfinite().all()


def test_options_of_another_task_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"task\.acceleration is 4: allowed is none, as task 'segmentation'"
    ):
        from_dict({"method": {"name": "fedavg"}, "task": {"name": "segmentation", "acceleration": 4}})
    with pytest.raises(ArgumentError, match=r"task\.dice is -1"):
        SegmentationConfig(dice=-1.0)


def test_methods_refuse_tasks_with_a_reason() -> None:
    found = tasks_by_method()
    assert set(found) == set(METHODS)
    assert all(found["fedavg"][name] is None for name in TASKS)
    assert "texts" in str(found["fediod"]["text"])
    assert "take fediod-maps" in str(found["fediod"]["segmentation"])
    assert found["fediod-maps"]["segmentation"] is None
    assert "one class for each input" in str(found["fedgen"]["segmentation"])
    assert "label maps" in str(found["asyndgan"]["classification"])
    assert found["asyndgan"]["segmentation"] is None
    needs = METHODS["fedgen"]().needs()
    assert refusal(needs, ClassificationConfig().example()) is None
