"""Errors of custom methods before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal
from unittest.mock import ANY

import pytest
import torch

from fedstill.compare.comparison import plan_comparison
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.errors import ArgumentError
from fedstill.methods._label_histogram import count_labels_query
from fedstill.methods._public_data import StudentTraining
from fedstill.methods._server import Server
from fedstill.methods.fedad import FedAD
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedkd import FedKD
from fedstill.methods.fedmd import FedMD
from fedstill.node.node_view import NodeView
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, Method
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.queries import Query
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import RunSpec, from_dict
from fedstill.tasks.classification import Classification
from tests.support.errors import raises_invalid


@dataclass(frozen=True, kw_only=True)
class Idle(Method):
    """A method without queries."""

    title: ClassVar[str] = "Idle"
    initial_training: ClassVar[None] = None
    evaluated_model: ClassVar[Literal["nodes"]] = "nodes"
    rounds: int = 1


@dataclass(frozen=True, kw_only=True)
class Keeps(Idle):
    """A method whose state is set by a test."""

    def init_state(self, server: Server) -> Any:
        return KEPT.pop()


KEPT: list[Any] = []


def config(method: Method, engine: str = "one-by-one") -> RunSpec:
    table: Mapping[str, Any] = {
        "method": {"name": "standalone"},
        "split": {"nodes": 3},
        "nodes": {"models": ["mlp:4"]},
        "student": {"model": "mlp:4"},
        "evaluation": {"centralized": False},
    }
    return replace(from_dict(table), method=method, engine=EngineConfig(batching=engine))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (
            {"a": 1},
            r"^invalid state of method .*:Keeps = 'dict' \(expected an object with attributes",
        ),
        (
            SimpleNamespace(a=1, seen={1, 2}),
            r"^invalid state\.seen of method .*:Keeps = 'set' \(expected tensors",
        ),
        (SimpleNamespace(deep=[{"x": object()}]), r"^invalid state\.deep of method .*state holds a object"),
    ],
)
def test_rejects_state_that_cannot_be_saved(state: Any, line: str) -> None:
    KEPT.append(state)
    with pytest.raises(ArgumentError, match=line):
        build_simulation(config(Keeps()))


def test_accepts_state_that_can_be_saved() -> None:
    KEPT.append(SimpleNamespace(a=None, net=torch.nn.Linear(2, 1), table={1: torch.ones(2)}, word="x"))
    build_simulation(config(Keeps()))
    assert not KEPT


@dataclass(frozen=True, kw_only=True)
class Hasty(Idle):
    """Queries in init_state, before nodes are trained and charged for it."""

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield count_labels_query(setting)

    def init_state(self, server: Server) -> Any:
        return SimpleNamespace(counts=server.query("count_labels")["counts"])


def test_rejects_query_in_init_state() -> None:
    line = r"^invalid query in init_state of .*:Hasty = 'count_labels' \(expected none, .*query in step"
    with pytest.raises(ArgumentError, match=line):
        build_simulation(config(Hasty()))


@pytest.mark.parametrize("rounds", [0, -3])
def test_method_without_rounds_is_refused(rounds: int) -> None:
    """The field has no range, and a student without a round would count as trained."""
    with pytest.raises(ArgumentError, match=rf"invalid method.rounds = {rounds} \(expected 1 or more"):
        build_simulation(config(Idle(rounds=rounds)))


def test_comparison_labels_custom_method_by_class() -> None:
    comparison = plan_comparison([f"{__name__}:Idle", "fedavg"])
    assert [planned_run.folder for planned_run in comparison.planned_runs()] == ["Idle-seed0", "fedavg-seed0"]
    assert comparison.run_config(comparison.planned_runs()[0]).method == Idle()


@dataclass(frozen=True, kw_only=True)
class Asks(Idle):
    """A method with a required option."""

    strength: float


def test_rejects_options_without_defaults() -> None:
    with raises_invalid("method", ANY, "a default", "strength"):
        METHODS[f"{__name__}:Asks"]


@dataclass(frozen=True, kw_only=True)
class Posing(Idle):
    """A method with an option called ``name``."""

    name: str = "fedavg"


def test_rejects_option_called_name() -> None:
    with raises_invalid("method", ANY, "options named name"):
        METHODS[f"{__name__}:Posing"]
    assert Posing().registered_name == f"{__name__}:Posing"


def test_false_module_name_does_not_make_method_built_in() -> None:
    posing: Any = type("FedAvg", (Idle,), {"__module__": FedAvg.__module__, "__qualname__": "FedAvg"})
    assert posing().registered_name != "fedavg"
    assert posing().registered_name not in METHODS.builtin
    assert FedAvg().registered_name in METHODS.builtin


def _return_records(self: Any, node: NodeView, rows: torch.Tensor, view: int, z_max: float = 0.0) -> Any:
    return {"logits": node.data.inputs}


@dataclass(frozen=True, kw_only=True)
class Renamed(FedKD):
    """An override whose function has another name."""

    levels: int = 0
    predict = _return_records


def test_override_under_another_name_inherits_no_declaration() -> None:
    setting = NodeSetting(Classification(3), LocalConfig(), Compute())
    declared = [each for each in Renamed().node_side(setting).queries.values() if each.name != "count_labels"]
    assert [(each.depends_on_records, each.stackable) for each in declared] == [(None, False)]
    plain = FedKD(levels=0).node_side(setting).queries["predict"]
    assert (plain.depends_on_records, plain.stackable) == ((), True)


def test_function_without_name_is_refused() -> None:
    with raises_invalid("name of a query", ""):
        Query(partial(_return_records, None))


@pytest.mark.parametrize("kind", [FedKD, FedAD])
def test_student_without_epochs_is_refused(kind: type[FedKD | FedAD]) -> None:
    """The student would count as trained, and no node would be queried."""
    with raises_invalid("method.student.epochs", 0, "1 or more"):
        kind(student=StudentTraining(epochs=0))


@pytest.mark.parametrize(("method", "name"), [(FedAD(), "predict"), (FedMD(public_epochs=1), "transfer")])
def test_query_that_reads_values_is_not_captured(method: Method, name: str) -> None:
    query = method.node_side(NodeSetting(Classification(3), LocalConfig(), Compute())).queries[name]
    assert query.stackable
    assert not query.is_capturable
