"""Method declarations: queries, releases of custom methods, and methods that plans may name."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import ANY

import pytest
import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.data.data_spec import DataSpec
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.protocol.method import METHODS, Method, build_node_side, method_name
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.payload_kinds import (
    GRADIENTS,
    KNOWN_KINDS,
    LABEL_COUNTS,
    LABEL_MAPS,
    LOGITS,
    PayloadKind,
    payload_kind,
)
from fedstill.protocol.queries import Query, QueryDetails
from fedstill.protocol.run_plan import RunPlan
from fedstill.tasks.classification import Classification, ClassificationConfig
from tests.support.errors import raises_invalid

AT = NodeSetting(Classification(4), LocalConfig(), Compute())


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Asks(Method):
    """A custom method."""

    title: ClassVar[str] = "Asks"

    rounds: int = 3
    often: bool = True

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            self.predict,
            sends={"x": payload_kind("inputs"), "round": payload_kind("schedule")},
            releases={"logits": LOGITS},
            differentiable=("x",),
            times=self.rounds,
            rows=setting.task.classes,
            depends_on_records=(),
            span=lambda sent: Span.part(int(sent["round"]), self.rounds),
            stackable=True,
            details=QueryDetails(postprocess=self.multiply),
        )
        if self.often:
            yield Query(self.count, releases={"counts": LABEL_COUNTS}, name="begin")

    def predict(self, node: Any, x: torch.Tensor, round: int) -> Tensors:
        return {"logits": x.sum((1, 2, 3)) + round + node.query_number}

    def multiply(self, response: Tensors, sent: Tensors) -> Tensors:
        return {"logits": response["logits"] * self.rounds}

    def count(self, node: Any) -> Tensors:
        return {}


def test_query_has_the_declared_fields() -> None:
    predict, begin = Asks(rounds=5).queries(AT)
    assert (predict.name, predict.times, predict.rows, predict.differentiable) == ("predict", 5, 4, ("x",))
    assert (begin.name, dict(begin.releases)) == ("begin", {"counts": LABEL_COUNTS})
    assert predict.span is not None
    assert predict.span({"round": torch.tensor(2)}) == Span(2, 3, 5)
    assert predict.details.postprocess is not None
    assert predict.details.postprocess({"logits": torch.ones(1)}, {})["logits"].item() == 5
    response = predict.function(SimpleNamespace(query_number=7), x=torch.ones(2, 3, 1, 1), round=2)
    assert response["logits"].tolist() == [12.0, 12.0]
    assert [each.name for each in Asks(often=False).queries(AT)] == ["predict"]


def query_of(method: Method) -> Query:
    return build_node_side(method, AT).queries["predict"]


def test_overridden_functions_lose_their_declaration() -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(Asks):
        def predict(self, node: Any, x: torch.Tensor, round: int) -> Tensors:
            return {"logits": torch.zeros(1)}

    @dataclass(frozen=True, kw_only=True)
    class Less(Asks):
        def queries(self, setting: NodeSetting) -> Iterable[Query]:
            yield Query(self.predict, releases={"sizes": payload_kind("data sizes")}, depends_on_records=())

        def predict(self, node: Any) -> Tensors:  # type: ignore[override]
            return {}

    asks, more, less = query_of(Asks()), query_of(More()), query_of(Less())
    assert more.function(SimpleNamespace(query_number=0), x=torch.ones(1), round=0)["logits"].item() == 0
    assert (more.times, [*less.releases]) == (3, ["sizes"])
    # ``depends_on_records`` was declared for another function, so it is unknown for this one.
    assert (asks.depends_on_records, more.depends_on_records, less.depends_on_records) == ((), None, ())
    assert (asks.stackable, more.stackable) == (True, False)


def test_rejects_other_kinds_for_gradients() -> None:
    with raises_invalid("gradients of query predict", ANY, "gradients"):
        Query(Asks().predict, details=QueryDetails(gradients=LABEL_COUNTS))


def test_rejects_unknown_query_fields() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'release'"):
        Query(Asks().predict, release={})  # type: ignore[call-arg]


def test_node_side_names_plug_ins() -> None:
    assert build_node_side(Asks(), AT).plugin == method_name(Asks())
    assert build_node_side(METHODS["fediod"](), AT).plugin == ""


def test_outputs_only_decides_by_category() -> None:
    predict = build_node_side(Asks(), AT).queries["predict"]
    features = replace(predict, releases={"logits": PayloadKind("features")})

    def objection(query: Query, **policy: Any) -> str | None:
        return Gate("clinic", PolicyConfig(**policy), AuditLog()).refusal_reason(query)

    assert objection(predict) is None
    assert objection(features) == "outputs_only: features may not leave"
    assert objection(features, kinds=("features",)) is None
    assert objection(features, outputs_only=False) is None


def test_payload_kind_equals_its_name_and_keeps_its_attributes() -> None:
    assert LOGITS == "logits"
    assert json.dumps({LOGITS: 1}) == '{"logits": 1}'
    assert copy.deepcopy(LABEL_COUNTS).by_class
    assert payload_kind("gradients") is GRADIENTS
    unknown = payload_kind("dreams")
    assert (unknown.category, unknown.is_output, unknown.normal_size) == ("records", False, None), (
        "unknown kinds have the strictest category"
    )
    outputs = {kind for kind in KNOWN_KINDS.values() if kind.is_output}
    assert outputs == {"logits", "critic", "gradients", "label counts", "data sizes"}
    assert {kind for kind in KNOWN_KINDS.values() if kind.from_label_maps} == {LABEL_MAPS, "difference"}


@pytest.mark.parametrize("name", ["antigravity:geohash", "os:system", "feddistill", 3, None])
def test_plan_imports_no_method_that_the_node_does_not_allow(name: Any) -> None:
    spec = DataSpec(ClassificationConfig(), ("a", "b"), (1, 8, 8), (0.5,), (0.5,))
    table = RunPlan("run", {"name": "fedavg"}, spec).to_dict()
    assert RunPlan.from_dict(table).make_method() == METHODS["fedavg"]()
    with raises_invalid("method.name", ANY, "policy.plugins"):
        RunPlan.from_dict({**table, "method": {"name": name}})
    assert "antigravity" not in sys.modules
    class_path = f"{Asks.__module__}:Asks"
    allowed = RunPlan.from_dict({**table, "method": {"name": class_path, "rounds": 4}}, plugins=[class_path])
    assert allowed.make_method() == METHODS[class_path](rounds=4)


def test_faulty_plug_in_method_gives_one_line_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "careless.py").write_text(
        "from dataclasses import dataclass\nfrom fedstill.methods import Method\n"
        "class Bare(Method):\n    rounds: int = 3\n"
        "@dataclass\nclass Loose(Method):\n    title = 'Loose'\n"
        "@dataclass(frozen=True)\nclass Untitled(Method):\n    rounds: int = 3\n"
        "@dataclass(frozen=True)\nclass Silent(Method):\n    title = 'Silent'\n    one_round = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, message in (
        ("Bare", "a frozen dataclass"),
        ("Loose", "a frozen"),
        ("Untitled", "with title: ClassVar"),
        ("Silent", "a class with planned_queries"),
    ):
        with pytest.raises(
            ArgumentError, match=rf"^invalid method = 'careless:{name}' \(expected .*{message}"
        ):
            METHODS[f"careless:{name}"]
