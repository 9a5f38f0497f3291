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
from fedstill.data.input_spec import InputSpec
from fedstill.methods._label_histogram import CountsLabels
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
    """A method of somebody else's."""

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
        postprocess=lambda self, told, sent: {"logits": told["logits"] * self.rounds},
    )
    def told(self, nodes: Any, x: torch.Tensor, round: int) -> dict[str, torch.Tensor]:
        return {"logits": x.sum((2, 3, 4)) + round + nodes.number}

    @query(name="begin", releases={"counts": LABEL_COUNTS}, when=lambda self, setting: self.often)
    def count(self, nodes: Any) -> dict[str, torch.Tensor]:
        return {}


class Nodes:
    setting: Any = None
    number = 0

    def for_query(self, setting: Any, number: int = 0) -> Nodes:
        self.at, self.number = setting, number
        return self


def test_a_query_is_what_its_function_is_marked_with() -> None:
    told, begin = Asks(rounds=5).queries(AT)
    assert (told.name, told.times, told.rows, told.differentiable) == ("told", 5, 4, ("x",))
    assert (begin.name, dict(begin.releases)) == ("begin", {"counts": LABEL_COUNTS})
    assert told.span is not None
    assert told.span({"round": torch.tensor(2)}) == Span(2, 3, 5)
    assert told.postprocess is not None
    assert told.postprocess({"logits": torch.ones(1)}, {})["logits"].item() == 5
    response = told.handler(Nodes(), 7, x=torch.ones(2, 3, 1, 1, 1), round=2)
    assert response["logits"].tolist() == [[10.0] * 3] * 2
    assert [each.name for each in Asks(often=False).queries(AT)] == ["told"]


def told_of(method: Method) -> Query:
    return next(each for each in method.queries(AT) if each.name == "told")


def test_a_subclass_answers_in_another_way_or_declares_anew() -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(Asks):
        def told(self, nodes: Any, x: torch.Tensor, round: int) -> dict[str, torch.Tensor]:
            return {"logits": torch.zeros(1)}

    @dataclass(frozen=True, kw_only=True)
    class Less(Asks):
        @query(releases={"sizes": "data sizes"})
        def told(self, nodes: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {}

    (more, _), (less, _) = More().queries(AT), Less().queries(AT)
    assert more.handler(Nodes(), 0, x=torch.ones(1), round=0)["logits"].item() == 0
    assert (more.times, dict(less.releases)) == (3, {"sizes": "data sizes"})
    # What the answer reads was said of another function: of this one nothing is known.
    assert (told_of(Asks()).reads, more.depends_on_records) == ((), None)


def test_gradients_are_called_nothing_else() -> None:
    with pytest.raises(ArgumentError, match=r"gradients of query told .* a kind of gradients"):
        Query("told", lambda nodes, number: {}, gradients=LABEL_COUNTS)


def test_the_packages_own_counts_keep_their_name_in_a_strangers_method() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Counting(CountsLabels, Method):
        title: ClassVar[str] = "Counting"

    @dataclass(frozen=True, kw_only=True)
    class Forging(Counting):
        def count_labels(self, nodes: Any) -> dict[str, torch.Tensor]:
            return {}

    told = {method: build_node_side(method, AT).queries["count_labels"] for method in (Counting(), Forging())}
    assert {kind.package for kind in told[Counting()].released_kinds().values()} == {""}
    assert "" not in {kind.package for kind in told[Forging()].released_kinds().values()}


def test_a_misspelt_declaration_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="a query has no release, send"):
        query(release={}, send={})


def test_what_a_strangers_method_releases_bears_its_packages_name() -> None:
    package = method_name(Asks()).partition(".")[0].partition(":")[0]
    side = build_node_side(Asks(), AT)
    kinds = side.queries["told"].released_kinds()
    assert dict(kinds) == {"logits": f"{package}: logits", "d/dx": f"{package}: gradients"}
    assert (kinds["logits"].category, kinds["d/dx"].category, kinds["logits"].package) == ("scores", "gradients", package)
    ours = build_node_side(METHODS["fediod"](), AT)
    assert {kind.package for kind in ours.leaves()} == {""}


def test_outputs_only_lets_out_no_kind_of_a_stranger_but_by_name() -> None:
    told = build_node_side(Asks(), AT).queries["told"]
    names = tuple(sorted(set(told.released_kinds().values())))

    def objection(**policy: Any) -> str | None:
        return Gate("clinic", PolicyConfig(**policy), AuditLog()).refusal_reason(told)

    assert objection() == (
        f"outputs_only: no {' and '.join(names)}, unless its owner names it in policy.kinds (now none)"
    )
    assert objection(kinds=("logits", "gradients")) is not None
    assert objection(kinds=names[:1]) is not None
    assert objection(kinds=names) is None
    assert objection(outputs_only=False) is None


def test_a_kind_is_its_name_and_keeps_what_is_known_of_it() -> None:
    assert LOGITS == "logits"
    assert json.dumps({LOGITS: 1}) == '{"logits": 1}'
    assert copy.deepcopy(LABEL_COUNTS).by_class
    assert payload_kind("gradients") is GRADIENTS
    unknown = payload_kind("dreams")
    assert (unknown.category, unknown.is_output, unknown.normal_size) == ("records", False, None), "the strictest category"
    outputs = {kind for kind in KNOWN_KINDS.values() if kind.is_output}
    assert outputs == {"logits", "critic", "gradients", "label counts", "data sizes"}
    assert {kind for kind in KNOWN_KINDS.values() if kind.from_label_maps} == {LABEL_MAPS, "difference"}
    assert PayloadKind("x", category="rows").for_package("lab").for_package("lab") == "lab: lab: x"


@pytest.mark.parametrize("name", ["antigravity:geohash", "os:system", "feddistill", 3, None])
def test_a_plan_names_only_what_a_node_has_or_allows_and_nothing_is_imported_for_it(name: Any) -> None:
    spec = InputSpec(ClassificationConfig(), ("a", "b"), (1, 8, 8), (0.5,), (0.5,))
    table = RunPlan("run", {"name": "fedavg"}, spec).to_dict()
    assert RunPlan.from_dict(table).make_method() == METHODS["fedavg"]()
    with pytest.raises(ArgumentError, match=r"invalid method\.name = .* \(expected a name that policy\.methods"):
        RunPlan.from_dict({**table, "method": {"name": name}})
    assert "antigravity" not in sys.modules
    place = f"{Asks.__module__}:Asks"
    allowed = RunPlan.from_dict({**table, "method": {"name": place, "rounds": 4}}, methods=[place])
    assert allowed.make_method() == METHODS[place](rounds=4)


def test_what_a_method_of_somebody_elses_lacks_is_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "careless.py").write_text(
        "from dataclasses import dataclass\nfrom fedstill.methods import Method\n"
        "class Bare(Method):\n    rounds: int = 3\n"
        "@dataclass\nclass Loose(Method):\n    title = 'Loose'\n"
        "@dataclass(frozen=True)\nclass Untitled(Method):\n    rounds: int = 3\n"
        "@dataclass(frozen=True)\nclass Silent(Method):\n    title = 'Silent'\n    one_round = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, said in (
        ("Bare", "a frozen dataclass"),
        ("Loose", "a frozen"),
        ("Untitled", "with title: ClassVar"),
        ("Silent", a class with planned_queries),
    ):
        with pytest.raises(ArgumentError, match=rf"^invalid method = 'careless:{name}' \(expected .*{said}"):
            METHODS[f"careless:{name}"]
