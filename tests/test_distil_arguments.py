"""``distil`` with invalid arguments, under other torch defaults, and with invalid folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstill
from fedstill.core.errors import (
    ArgumentError,
    DataError,
    FedstillError,
    MethodRefused,
    ModelError,
    QueryRefused,
    RunFolderError,
    caller_context,
)
from tests.support.bright_rows import SHAPE, bright_rows, few

WRONG: dict[str, list[Any]] = {
    "data": [None, bright_rows(3, 1), {"a": bright_rows(3, 1)}],
    "models": [None, nn.Flatten(), {"a": nn.Flatten()}],
    "classes": [3.0, 0, -1, None, [], {"a": 0}, True],
    "task": [3],
    "local": [{"epochs": 1}],
    "engine": ["cuda"],
    "names": ["ab", [1, 2], ["a", " "]],
    "policies": [fedstill.PolicyConfig(), [None, None]],
    "privacies": [[1, 2], fedstill.DPSGD(epsilon=1.0)],
    "mean": [0.5],
    "std": ["x"],
    "seed": ["x", 1.5, -1, None],
    "vocabulary": ["x", -1],
    "schema": [3],
    "perceptual": [3],
    "perceptual_weights": [3],
    "every": [-1, 1.5],
    "link": [{}],
    "track": ["tensorboard"],
    "progress": ["x"],
    "out": ["", 3, "\0", "a" * 300, "~no-such-user/run"],
}


@pytest.mark.parametrize("name", WRONG)
def test_rejects_arguments_of_other_types(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ArgumentError) as caught:
            fedstill.distil(**few(**{name: value}))
        assert caught.value.name == name
        assert "\n" not in str(caught.value)


def student(**changes: Any) -> dict[str, torch.Tensor]:
    outcome = fedstill.distil(**few(method="fedkd", public=bright_rows(20, 5)[0], **changes))
    assert outcome.student is not None
    return outcome.student.state_dict()


def within(context: Callable[[], Any]) -> dict[str, torch.Tensor]:
    given = few(method="fedkd", public=bright_rows(20, 5)[0])
    with context():
        outcome = fedstill.distil(**given)
    assert outcome.student is not None
    return outcome.student.state_dict()


class OtherDefaults:
    """Default dtype and device as a notebook may set them."""

    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")

    def __exit__(self, *_: object) -> None:
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_device() == torch.device("meta")
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, OtherDefaults])
def test_ignores_torch_defaults_of_caller(context: Callable[[], Any]) -> None:
    plain, other = student(), within(context)
    assert all(torch.equal(value, other[name]) for name, value in plain.items())


def test_rejects_inference_mode_model() -> None:
    with torch.inference_mode():
        given = few()
    with pytest.raises(ModelError, match="inference_mode"):
        fedstill.distil(**given)


@pytest.mark.parametrize("below", ["file/run", "/proc/none/run"])
def test_rejects_folder_that_cannot_be_created(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for call in (
        lambda out: fedstill.distil(**few(out=out)),
        lambda out: fedstill.run_preset("demo", {"method.steps": 2}, out=out),
    ):
        with pytest.raises(RunFolderError, match=r"^out: "):
            call(tmp_path / below)


# --- batch norm ------------------------------------------------------------------------------------


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("local.batch", {"local": fedstill.LocalConfig(epochs=1, batch=1)}),
    "query": ("method.batch", {"method": fedstill.FedIOD(steps=2, batch=1)}),
    "student": (
        "method.student.batch",
        {"method": fedstill.FedIOD(steps=2, student=fedstill.ReplayTraining(batch=1))},
    ),
    "passes": (
        "method.student.batch",
        {"method": fedstill.FedKD(student=fedstill.StudentTraining(batch=1)), "public": bright_rows(5, 5)[0]},
    ),
    "digest": (
        "method.digest_batch",
        {"method": fedstill.FedMD(digest_batch=1), "public": bright_rows(5, 5)},
    ),
    "public": ("public", {"method": fedstill.FedKD(), "public": bright_rows(1, 5)[0]}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ONE)
def test_rejects_batch_norm_with_batch_of_one(case: str) -> None:
    name, changes = ONE[case]
    with pytest.raises(ArgumentError, match="batch norm") as caught:
        fedstill.distil(**few(models=[normed(), normed()], student=normed(), **changes))
    assert caught.value.name == name
    fedstill.distil(
        **few(**{"engine": fedstill.EngineConfig(batching="one-by-one"), **changes})
    )  # allowed without batch norm


def test_last_batch_has_two_examples() -> None:
    """Five public examples in batches of two do not end with a batch of one."""
    method = fedstill.FedKD(student=fedstill.StudentTraining(epochs=1, batch=2))
    given = few(models=[normed(), normed()], student=normed(), method=method, public=bright_rows(5, 5)[0])
    assert fedstill.distil(**given).student is not None


def test_node_with_one_record_trains_batch_norm() -> None:
    given = few(data=[bright_rows(1, 1), bright_rows(60, 2)], models=[normed(), normed()], student=normed())
    assert fedstill.distil(**given).student is not None


# --- advice in terms of the caller -----------------------------------------------------------------


def of_distil(**changes: Any) -> str:
    with pytest.raises(FedstillError) as caught:
        fedstill.distil(**few(**changes))
    return str(caught.value)


def test_distil_advice_uses_python_arguments() -> None:
    for changes, message in (
        ({"method": "fedavg"}, "policies=[fedstill.PolicyConfig(outputs_only=False), ...]"),
        ({"method": "fedkd"}, "pass public=..."),
        (
            {
                "method": "fedavg",
                "models": [normed(), normed()],
                "policies": [fedstill.PolicyConfig(outputs_only=False)] * 2,
            },
            "student=",
        ),
    ):
        result = of_distil(**changes)
        assert message in result
        assert "--" not in result
        assert "student.model" not in result


def test_run_preset_advice_uses_options(tmp_path: Path) -> None:
    with pytest.raises(QueryRefused) as caught:
        fedstill.run_preset("demo", {"method.name": "fedavg"}, out=tmp_path / "run")
    assert '{"nodes.policy.outputs_only": False}' in str(caught.value)
    assert "--" not in str(caught.value)


def test_caller_terms_are_reset_after_call() -> None:
    with pytest.raises(MethodRefused):
        fedstill.distil(**few(method="fedkd"))
    assert "--nodes.policy.outputs_only false" in str(QueryRefused("a", "b", "outputs_only: none"))
    with caller_context("distil"):
        assert ArgumentError("nodes.local.batch", 1, "2").name == "local.batch"
    assert ArgumentError("nodes.local.batch", 1, "2").name == "nodes.local.batch"


# --- folders of Python runs ------------------------------------------------------------------------


def test_folder_of_python_run_is_usable(tmp_path: Path) -> None:
    from fedstill.attacks.transcript import load_run
    from fedstill.report.model_card import model_card
    from fedstill.runs.run import resume

    out = tmp_path / "run"
    fedstill.distil(**few(out=out, classes=3))
    assert "0, 1 and 2" in model_card(out, "images", "")
    assert fedstill.load(out).classes == ("0", "1", "2")
    with pytest.raises(RunFolderError, match=r"fedstill\.distil.*arguments"):
        resume(out, progress=False)
    with pytest.raises(RunFolderError, match=r"fedstill\.distil.*run_preset"):
        load_run(out)


# --- faults of server and nodes --------------------------------------------------------------------


def test_non_finite_server_inputs_are_no_node_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstill.models.gan import Generator

    monkeypatch.setattr(Generator, "forward", lambda self, w: torch.full((len(w), *SHAPE), torch.nan))
    for link in (fedstill.LinkConfig(), fedstill.LinkConfig(quorum=0.5)):
        with pytest.raises(DataError, match="diverged") as caught:
            fedstill.distil(**few(link=link))
        assert "node-" not in str(caught.value)
