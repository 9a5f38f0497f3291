"""A loaded student reaches exactly the metrics that its run reported, on every task, also over messages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
from fedstill.core.compute import Compute, EngineConfig
from fedstill.runs.evaluation import float32_outputs, student_outputs_as_reloaded
from fedstill.runs.results import write_results
from fedstill.runs.run import run
from fedstill.runs.simulation import Simulation
from fedstill.student.evaluate import evaluate
from tests.support.data_files import TASKS, config
from tests.support.digits_world import digits
from tests.support.digits_world import setting as digits_setting
from tests.support.links import Away


@pytest.mark.sample(4)
@pytest.mark.parametrize("task", TASKS)
def test_delivered_student_reaches_reported_metrics(task: str, tmp_path: Path) -> None:
    setting, tested = config(task, tmp_path)
    result = run(setting, tmp_path / "run", command="fedstill run", progress=False)
    assert result["engine"]["precision"] == "bfloat16"
    evaluation = evaluate(tmp_path / "run", tested)
    assert evaluation["examples"] == result["data"]["test"]
    assert evaluation["metrics"] == {key: result[key] for key in evaluation["metrics"]}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1][result["metric"]] == result[result["metric"]]  # also the metrics during the run


@pytest.mark.sample(1)
@pytest.mark.parametrize("task", ["classification", "segmentation", "text"])
def test_student_of_a_run_over_messages_reaches_reported_metrics(task: str, tmp_path: Path) -> None:
    setting, tested = config(task, tmp_path)
    (tmp_path / "away").mkdir()
    served = Away(setting, tmp_path / "away").live()
    metrics = served.run()
    write_results(served, {**served.describe_run(), **metrics})
    assert served.compute.precision == "bfloat16"
    evaluation = evaluate(tmp_path / "away" / "server", tested)
    assert evaluation["metrics"] == {key: metrics[key] for key in evaluation["metrics"]}


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_plain_pytorch_reaches_reported_accuracy(batch: int, tmp_path: Path) -> None:
    setting, tested = config("classification", tmp_path)
    result = run(setting, tmp_path / "run", command="fedstill run", progress=False)
    student, arrays = fedstill.load(tmp_path / "run"), np.load(tested)
    with torch.no_grad():
        parts = torch.split(torch.from_numpy(arrays["images"]), batch)
        responses = torch.cat([student(part).argmax(1) for part in parts]).numpy()
    right = int((responses == arrays["labels"]).sum())
    assert 100 * right / len(responses) == pytest.approx(result["accuracy"], abs=1e-9)


def test_evaluates_in_float32() -> None:
    """Local models, ensemble, upper bound and student, during and after training."""
    engine = EngineConfig(batching="one-by-one", precision="bfloat16")
    centralized = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    experiment = Simulation(digits_setting("fedkd", {}, engine=engine, centralized_model=centralized))
    experiment.run()
    assert experiment.centralized_node is not None
    models = {node.name: node.model for node in experiment.nodes}
    models |= {"centralized": experiment.centralized_node.model, "student": experiment.student}
    lowered: dict[str, set[bool]] = {}
    for name, model in models.items():
        model.register_forward_hook(
            lambda *_, name=name: lowered.setdefault(name, set()).add(torch.is_autocast_enabled("cpu"))
        )
    experiment.evaluate()
    experiment.results()
    assert lowered == {name: {False} for name in models}


def test_gpu_evaluation_does_not_use_tf32() -> None:
    """TF32 is torch's default. The flag can be read on any machine."""
    tf32_flags = []

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tf32_flags.append(torch.backends.cudnn.allow_tf32)
            return x

    before = torch.backends.cudnn.allow_tf32
    float32_outputs(Reads(), torch.zeros(2, 3), Compute())
    assert (tf32_flags, torch.backends.cudnn.allow_tf32) == ([False], before)


def test_student_does_not_depend_on_memory_layout() -> None:
    """A run trains it channels last; its file is contiguous."""
    torch.manual_seed(0)
    x = digits()[0][:64]
    contiguous = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.LazyLinear(10)
    )
    contiguous(x)
    before = student_outputs_as_reloaded(contiguous, x, Compute())
    other = x.contiguous(memory_format=torch.channels_last)
    last = contiguous.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert torch.equal(student_outputs_as_reloaded(last, other, Compute()), before)
    assert last[2].weight.is_contiguous(memory_format=torch.channels_last)
