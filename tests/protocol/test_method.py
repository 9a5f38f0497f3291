"""Methods as declarations: queries, what a stranger may call its releases, what a plan may name."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.data.data_spec import DataSpec
from fedstill.methods._label_histogram import LabelCountQuery
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.protocol.method import METHODS, Method, build_node_side, method_name
from fedstill.protocol.payload_kinds import (
    GRADIENTS,
    KNOWN_KINDS,
    LABEL_COUNTS,
    LABEL_MAPS,
    LOGITS,
    PayloadKind,
    payload_kind,
)
from fedstill.protocol.queries import NodeSetting, Query, query
from fedstill.protocol.run_plan import RunPlan
from fedstill.tasks.classification import Classification, ClassificationConfig

AT = NodeSetting(Classification(4), LocalConfig(), Compute())


@dataclass(frozen=True, kw_only=True)
class Asks(Method):
    """A custom method."""

    title: ClassVar[str] = "Asks"

    rounds: int = 3
    often: bool = True

    @query(
        sends={"x": "inputs", "round": "schedule"},
        releases={"logits": LOGITS},
        differentiable=("x",),
        times=lambda self, setting: self.rounds,
        rows=lambda self, setting: setting.task.classes,
        depends_on_records=(),
        span=lambda self, sent: Span.part(int(sent["round"]), self.rounds),
        postprocess=lambda self, predict, sent: {"logits": predict["logits"] * self.rounds},
    )
    def predict(self, nodes: Any, x: torch.Tensor, round: int) -> dict[str, torch.Tensor]:
        return {"logits": x.sum((2, 3, 4)) + round + nodes.number}

    @query(name="begin", releases={"counts": LABEL_COUNTS}, when=lambda self, setting: self.often)
    def count(self, nodes: Any) -> dict[str, torch.Tensor]:
        return {}


class Nodes:
    setting: Any = None
    number = 0

    def set_query(self, setting: Any, number: int = 0) -> Nodes:
        self.at, self.number = setting, number
        return self


def test_query_has_the_declared_fields() -> None:
    predict, begin = Asks(rounds=5).queries(AT)
    assert (predict.name, predict.times, predict.rows, predict.differentiable) == ("predict", 5, 4, ("x",))
    assert (begin.name, dict(begin.releases)) == ("begin", {"counts": LABEL_COUNTS})
    assert predict.span is not None
    assert predict.span({"round": torch.tensor(2)}) == Span(2, 3, 5)
    assert predict.postprocess is not None
    assert predict.postprocess({"logits": torch.ones(1)}, {})["logits"].item() == 5
    response = predict.handler(Nodes(), 7, x=torch.ones(2, 3, 1, 1, 1), round=2)
    assert response["logits"].tolist() == [[10.0] * 3] * 2
    assert [each.name for each in Asks(often=False).queries(AT)] == ["predict"]


def query_of(method: Method) -> Query:
    return next(each for each in method.queries(AT) if each.name == "predict")


def test_overridden_handlers_lose_their_declaration() -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(Asks):
        def predict(self, nodes: Any, x: torch.Tensor, round: int) -> dict[str, torch.Tensor]:
            return {"logits": torch.zeros(1)}

    @dataclass(frozen=True, kw_only=True)
    class Less(Asks):
        @query(releases={"sizes": "data sizes"})
        def predict(self, nodes: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {}

    (more, _), (less, _) = More().queries(AT), Less().queries(AT)
    assert more.handler(Nodes(), 0, x=torch.ones(1), round=0)["logits"].item() == 0
    assert (more.times, dict(less.releases)) == (3, {"sizes": "data sizes"})
    # What the answer reads was said of another function: of this one nothing is known.
    assert (query_of(Asks()).depends_on_records, more.depends_on_records) == ((), None)


def test_rejects_other_kinds_for_gradients() -> None:
    with pytest.raises(ArgumentError, match=r"gradients of query predict .* a kind of gradients"):
        Query("predict", lambda nodes, number: {}, gradients=LABEL_COUNTS)


def test_sealed_counts_keep_their_kind_in_plug_in_methods() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Counting(LabelCountQuery, Method):
        title: ClassVar[str] = "Counting"

    @dataclass(frozen=True, kw_only=True)
    class Forging(Counting):
        def count_labels(self, nodes: Any) -> dict[str, torch.Tensor]:
            return {}

    predict = {
        method: build_node_side(method, AT).queries["count_labels"] for method in (Counting(), Forging())
    }
    assert {kind.package for kind in predict[Counting()].released_kinds().values()} == {""}
    assert "" not in {kind.package for kind in predict[Forging()].released_kinds().values()}


def test_rejects_unknown_query_fields() -> None:
    with pytest.raises(TypeError, match="a query has no release, send"):
        query(release={}, send={})


def test_kinds_of_plug_in_methods_carry_the_package_name() -> None:
    package = method_name(Asks()).partition(".")[0].partition(":")[0]
    side = build_node_side(Asks(), AT)
    kinds = side.queries["predict"].released_kinds()
    assert dict(kinds) == {"logits": f"{package}: logits", "d/dx": f"{package}: gradients"}
    assert (kinds["logits"].category, kinds["d/dx"].category, kinds["logits"].package) == (
        "scores",
        "gradients",
        package,
    )
    ours = build_node_side(METHODS["fediod"](), AT)
    assert {kind.package for kind in ours.released_kinds()} == {""}


def test_outputs_only_releases_plug_in_kinds_by_name_only() -> None:
    predict = build_node_side(Asks(), AT).queries["predict"]
    names = tuple(sorted(set(predict.released_kinds().values())))

    def objection(**policy: Any) -> str | None:
        return Gate("clinic", PolicyConfig(**policy), AuditLog()).refusal_reason(predict)

    assert objection() == (
        f"outputs_only: {' and '.join(names)} may not leave, "
        "unless its owner names it in policy.kinds (now none)"
    )
    assert objection(kinds=("logits", "gradients")) is not None
    assert objection(kinds=names[:1]) is not None
    assert objection(kinds=names) is None
    assert objection(outputs_only=False) is None


def test_payload_kind_equals_its_name_and_keeps_its_attributes() -> None:
    assert LOGITS == "logits"
    assert json.dumps({LOGITS: 1}) == '{"logits": 1}'
    assert copy.deepcopy(LABEL_COUNTS).by_class
    assert payload_kind("gradients") is GRADIENTS
    unknown = payload_kind("dreams")
    assert (unknown.category, unknown.is_output, unknown.normal_size) == ("records", False, None), (
        "the strictest category"
    )
    outputs = {kind for kind in KNOWN_KINDS.values() if kind.is_output}
    assert outputs == {"logits", "critic", "gradients", "label counts", "data sizes"}
    assert {kind for kind in KNOWN_KINDS.values() if kind.from_label_maps} == {LABEL_MAPS, "difference"}
    assert PayloadKind("x", category="rows").for_package("lab").for_package("lab") == "lab: lab: x"


@pytest.mark.parametrize("name", ["antigravity:geohash", "os:system", "feddistill", 3, None])
def test_plan_imports_no_method_that_the_node_does_not_allow(name: Any) -> None:
    spec = DataSpec(ClassificationConfig(), ("a", "b"), (1, 8, 8), (0.5,), (0.5,))
    table = RunPlan("run", {"name": "fedavg"}, spec).to_dict()
    assert RunPlan.from_dict(table).make_method() == METHODS["fedavg"]()
    with pytest.raises(
        ArgumentError, match=r"invalid method\.name = .* \(expected a name that policy\.methods"
    ):
        RunPlan.from_dict({**table, "method": {"name": name}})
    assert "antigravity" not in sys.modules
    class_path = f"{Asks.__module__}:Asks"
    allowed = RunPlan.from_dict({**table, "method": {"name": class_path, "rounds": 4}}, methods=[class_path])
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
