"""Reprs of public objects are a few lines."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.data import DataSet
from fedstill.data.public import PublicData
from fedstill.federation.responses import Responses
from fedstill.methods._label_histogram import LabelHistogram
from fedstill.models import MLP
from fedstill.protocol.method import QueryCall

LONGEST = 800  # characters: ten lines of a terminal


def trained(**more: Any) -> fedstill.Outcome:
    draw = torch.Generator().manual_seed(0)
    part = 2 * torch.rand(40, 1, 4, 4, generator=draw) - 1, torch.randint(3, (40,), generator=draw)
    return fedstill.distil(
        data=[part] * 20,
        models=[MLP((1, 4, 4), 3, width=4) for _ in range(20)],
        student=MLP((1, 4, 4), 3, width=4),
        test=part,
        classes=3,
        local=fedstill.LocalConfig(epochs=1),
        every=0,
        **more,
    )


def test_outcome_repr_shows_method_metrics_bytes_and_folder(tmp_path: Path) -> None:
    method = fedstill.FedIOD(
        steps=2, generator=fedstill.InputGenerator(width=8), critic=fedstill.Discriminators(width=8)
    )
    outcome = trained(method=method, out=tmp_path / "run")
    metrics, text = outcome.result, repr(outcome)
    assert len(text) < LONGEST
    assert 2 <= len(text.splitlines()) <= 6
    assert text.startswith("Outcome of FedIOD with 20 nodes")
    assert f"student (FedIOD) {metrics['accuracy']:.1f}%" in text
    assert f"standalone mean {metrics['standalone']['accuracy']['mean']:.1f}%" in text
    assert f"teachers' ensemble {metrics['ensemble']['accuracy']:.1f}%" in text
    assert "kB" in text
    assert str(tmp_path / "run") in text
    assert outcome.folder == tmp_path / "run"


def test_outcome_repr_without_student_or_files() -> None:
    outcome = trained(method=fedstill.Standalone())
    assert (outcome.student, outcome.folder) == (None, None)
    assert f"{outcome.result['standalone']['accuracy']['mean']:.1f}%" in repr(outcome)
    assert "files: none" in repr(outcome)


def test_comparison_repr_shows_mean_per_method() -> None:
    results = {
        f"method-{number}-seed{seed}": {"accuracy": 80.0 + 2 * seed, "title": "FedX"}
        for number in range(30)
        for seed in (0, 1)
    }
    compared = fedstill.Compared(Path("runs/all"), results, {f"other-{n}-seed0": "no" for n in range(30)})
    assert len(repr(compared)) < 2 * LONGEST
    assert "method-0: accuracy 81.0% over 2 seeds" in repr(compared)
    assert "runs/all" in repr(compared)
    assert "other-0-seed0" in repr(compared)


SOME = fedstill.TensorData(torch.zeros(70, 1, 8, 8), torch.zeros(70).long(), torch.arange(70))
COLUMNS = tuple(fedstill.SchemaColumn(name=f"c{number}", range=(0.0, 1.0)) for number in range(60))
HOLDERS = [
    SOME,
    DataSet("mine", SOME, SOME, tuple(map(str, range(200))), (0.5,), (0.5,)),
    PublicData("given", SOME.inputs, SOME.targets),
    LabelHistogram(tuple(map(str, range(90))), torch.zeros(90, 10), torch.zeros(90)),
    QueryCall("predict_logits", {"x": SOME.inputs}),
    Responses(0, tuple(map(str, range(90))), {"logits": torch.zeros(90, 64, 10)}),
    fedstill.TableSchema("c0", COLUMNS),
]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: type(holder).__name__)
def test_repr_shows_shapes_instead_of_values(holder: object) -> None:
    assert len(repr(holder)) < LONGEST
    assert "tensor(" not in repr(holder)


def test_repr_shows_shapes() -> None:
    assert "float32 (70, 1, 8, 8)" in repr(SOME)


def configurations() -> list[Any]:
    """Return all public configurations that need no arguments."""
    configs = []
    for name in fedstill.__all__:
        kind = getattr(fedstill, name)
        if inspect.isclass(kind) and is_dataclass(kind):
            needed = [f for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
            if not needed:
                configs.append(kind())
    return configs


def test_configuration_reprs_are_short() -> None:
    made = configurations()
    assert len(made) > 40
    assert {type(each).__name__: len(repr(each)) for each in made if len(repr(each)) >= LONGEST} == {}
