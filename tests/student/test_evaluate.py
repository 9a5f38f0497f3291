"""A loaded student reaches exactly the metrics that its run reported, on every task, also over messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from fedstill.runs.spec import RunSpec, from_dict
from fedstill.student.evaluate import evaluate
from tests import survivors
from tests.federation.test_remote import Away
from tests.methods.digits_world import digits
from tests.methods.digits_world import setting as digits_setting

SIDE, COUNT = 16, 60
TEST = np.arange(COUNT) % 3 == 0


def images(targets: str) -> Callable[[Path], tuple[str, str]]:
    """Images with a bright square: its position is the class, the labels or the mask."""

    def write(folder: Path) -> tuple[str, str]:
        draw = np.random.default_rng(0)
        pixels = draw.integers(20, 100, (COUNT, SIDE, SIDE), dtype=np.uint8)
        masks, label = np.zeros_like(pixels), draw.integers(0, 4, COUNT)
        for image, mask, one in zip(pixels, masks, label, strict=True):
            top, left = 8 * (one // 2), 8 * (one % 2)
            mask[top : top + 6, left : left + 6] = 1
            image[mask == 1] += 30
        taught = {
            "class": {"labels": label},
            "labels": {"labels": np.stack([label % 2, label // 2, draw.integers(0, 2, COUNT)], 1)},
            "map": {"masks": masks, "patient": np.arange(COUNT) // 3},
            "image": {},
        }[targets]
        split = TEST if targets != "map" else np.arange(COUNT) // 3 % 3 == 0
        whole, tested = folder / "whole.npz", folder / "tested.npz"
        np.savez(whole, images=pixels, **taught, split=split.astype(np.int64))
        np.savez(tested, images=pixels[split], **{name: each[split] for name, each in taught.items()})
        return str(whole), str(tested)

    return write


def table(target: str, kind: str) -> Callable[[Path], tuple[str, str]]:
    """Rows of two numbers that determine a class or a number."""

    def write(folder: Path) -> tuple[str, str]:
        draw = np.random.default_rng(0)
        a, b = draw.uniform(0, 1, (2, COUNT)).round(3)
        value = (a + b + draw.uniform(0, 0.4, COUNT)).round(3)
        cells = value if kind == "number" else np.where(value > 1.2, "high", "low")
        own = {"number": "range = [0.0, 2.4]", "class": 'type = "category"\ncategories = ["low", "high"]'}
        schema = f'target = "{target}"\n' + "".join(
            f'[[columns]]\nname = "{name}"\n{about}\n'
            for name, about in (("a", "range = [0.0, 1.0]"), ("b", "range = [0.0, 1.0]"), (target, own[kind]))
        )
        (folder / "schema.toml").write_text(schema, encoding="utf-8")
        for name, rows in (("whole", np.arange(COUNT)), ("tested", np.flatnonzero(TEST))):
            split = [("test" if TEST[row] else "train") for row in rows]
            head = f"a,b,{target}" + (",split" if name == "whole" else "")
            lines = [
                f"{a[row]},{b[row]},{cells[row]}" + (f",{part}" if name == "whole" else "")
                for row, part in zip(rows, split, strict=True)
            ]
            (folder / f"{name}.csv").write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
        return str(folder / "whole.csv"), str(folder / "tested.csv")

    return write


def texts(folder: Path) -> tuple[str, str]:
    draw = np.random.default_rng(0)
    words = (["good", "fine", "warm"], ["bad", "dull", "cold"])
    lines = []
    for number in range(COUNT):
        label = int(draw.integers(2))
        text = " ".join([*draw.choice(words[label], 2), *draw.choice(words[1 - label], 1), f"w{number}"])
        lines.append((text, label))
    whole = [f"{text},{label},{'test' if TEST[row] else 'train'}" for row, (text, label) in enumerate(lines)]
    tested = [f"{text},{label}" for row, (text, label) in enumerate(lines) if TEST[row]]
    (folder / "whole.csv").write_text("\n".join(["text,label,split", *whole]), encoding="utf-8")
    (folder / "tested.csv").write_text("\n".join(["text,label", *tested]), encoding="utf-8")
    return str(folder / "whole.csv"), str(folder / "tested.csv")


def survival(folder: Path) -> tuple[str, str]:
    data_folder = survivors.write(folder / "hospitals", rows=COUNT, sites=1)
    (file,) = data_folder.glob("*.csv")
    head, *rows = file.read_text(encoding="utf-8").splitlines()
    tested = [row for row, is_test in zip(rows, TEST, strict=True) if is_test]
    (data_folder / "tested.csv").write_text("\n".join([head, *tested]), encoding="utf-8")
    parts = [f"{row},{'test' if is_test else 'train'}" for row, is_test in zip(rows, TEST, strict=True)]
    file.write_text("\n".join([f"{head},split", *parts]), encoding="utf-8")
    return str(file), str(data_folder / "tested.csv")


# By task: who writes its data, its network, and the options of its data.
TASKS: dict[str, tuple[Callable[[Path], tuple[str, str]], str, dict[str, Any]]] = {
    "classification": (images("class"), "small-cnn:8", {}),
    "multi-label": (images("labels"), "small-cnn:8", {}),
    "segmentation": (images("map"), "unet:8", {}),
    "reconstruction": (images("image"), "unet:4", {}),
    "text": (texts, "transformer:16", {"words": 50, "length": 6}),
    "tabular": (table("level", "class"), "mlp:16", {}),
    "regression": (table("value", "number"), "mlp:16", {}),
    "survival": (survival, "mlp:16", {}),
}
# Maps are learned late, and a student that answers one class everywhere shows no rounding.
LOCAL = {"segmentation": {"epochs": 10, "batch": 8, "lr": 1e-3}}


def config(task: str, folder: Path, **tables: Any) -> tuple[RunSpec, str]:
    """Return a small run that trains in bfloat16, and the path of its test data."""
    write, model, data = TASKS[task]
    whole, tested = write(folder)
    table = {
        "task": {"name": task},
        "data": {"name": whole, **data},
        "split": {"name": "iid", "nodes": 3, "minimum": 1},
        "nodes": {
            "models": [model],
            "local": LOCAL.get(task, {"epochs": 2, "batch": 8, "lr": 5e-3}),
            "policy": {"outputs_only": False},
        },
        "student": {"model": model},
        "evaluation": {"centralized": False, "samples": 0},
        "engine": {"batching": "one-by-one", "precision": "bfloat16", "threads": 1},
        "method": {"name": "fedavg", "rounds": 2},
        **tables,
    }
    return from_dict(table), tested


@pytest.mark.parametrize("task", TASKS)
def test_delivered_student_reaches_reported_metrics(task: str, tmp_path: Path) -> None:
    setting, tested = config(task, tmp_path)
    result = run(setting, tmp_path / "run", command="fedstill run", progress=False)
    assert result["engine"]["precision"] == "bfloat16"
    evaluation = evaluate(tmp_path / "run", tested)
    assert evaluation["examples"] == result["data"]["test"]
    assert evaluation["metrics"] == {key: result[key] for key in evaluation["metrics"]}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1][result["metric"]] == result[result["metric"]]  # also what was measured on the way


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
