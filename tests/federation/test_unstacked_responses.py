"""Responses that are not stacked over nodes: ragged tensors and JSON values, on every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import torch

from fedstill.core.errors import ArgumentError, DataError, NodeFault
from fedstill.federation.response_checks import find_faults
from fedstill.methods._server import Server
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.request_handler import RequestHandler
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.privacy.release_rules import Exact
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method
from fedstill.protocol.node_side import NodeSetting, NodeSide
from fedstill.protocol.payload_kinds import PayloadKind
from fedstill.protocol.queries import Query, QueryDetails
from fedstill.protocol.wire_format import json_from_tensor, json_to_tensor, pack, unpack
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import RunSpec
from fedstill.tasks.classification import Classification
from tests.support.errors import raises_invalid, raises_refused
from tests.support.links import NAMES, Away, tiny
from tests.support.request_handlers import respond
from tests.support.small_world import SETTING

WISH = PayloadKind("wish", "what is wanted", category="query")
SOME = PayloadKind("some records", "as many as it has of one class", category="records")
WORDS = PayloadKind("words", "what it says of them", category="responses")


@dataclass(frozen=True, kw_only=True)
class Tells(Method):
    """Each node releases its records of one class, and a JSON description of them."""

    title: ClassVar[str] = "Tells"
    initial_training: ClassVar[None] = None
    trains_models: ClassVar[bool] = False
    evaluated_model: ClassVar[Literal["nodes"]] = "nodes"
    rounds: int = 2

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            self.tell,
            sends={"wish": WISH},
            releases={"some": SOME, "words": WORDS},
            times=2,
            details=QueryDetails(ragged=("some",), json_values=("wish", "words")),
        )

    def tell(self, node: NodeView, wish: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the records ``(n, C, H, W)`` of the requested class; n differs by node."""
        mine = node.data.inputs[node.data.targets == wish["class"]]
        return {"some": mine, "words": {"n": len(mine), "of": wish["class"]}}

    def step(self, server: Server, state: SimpleNamespace, t: int) -> Mapping[str, float]:
        """Query class t; check that descriptions and records agree."""
        responses = server.query("tell", wish={"class": t, "why": None})
        result = responses.by_node("words")
        given = {node: len(some) for node, some in responses.by_node("some").items()}
        assert given == {node: words["n"] for node, words in result.items()}
        with pytest.raises(ArgumentError, match=r"responses.by_node\('some'\)"):
            responses["some"]
        state.words = result
        return {
            "records": float(sum(given.values())),
            "of": float(sum(each["of"] for each in result.values())),
        }


def config() -> RunSpec:
    return replace(tiny("standalone"), method=Tells())


def test_ragged_responses_match_on_every_engine(tmp_path: Path) -> None:
    here = build_simulation(config())[0]
    counts = torch.stack([node.data.targets.bincount(minlength=10) for node in here.nodes])
    assert len(set(counts[:, 0].tolist())) > 1  # otherwise nothing would be ragged
    here.run()
    losses = [line["losses"] for line in here.records.metrics]
    assert losses == [{"records": float(counts[:, t].sum()), "of": 3.0 * t} for t in (0, 1)]
    assert here.server.state.words == {
        name: {"n": int(n), "of": 1} for name, n in zip(NAMES, counts[:, 1], strict=True)
    }
    remote = Away(config(), tmp_path).live()
    remote.run()
    assert [line["losses"] for line in remote.records.metrics] == losses
    sizes = [audit.traffic_totals()["by_kind"] for audit in (here.audit, remote.audit)]
    assert sizes[0] == sizes[1]
    result = [{"n": int(counts[node, t]), "of": t} for t in (0, 1) for node in range(3)]
    assert sizes[0]["words"]["up"] == sum(len(json_to_tensor(each)) for each in result)


@pytest.mark.parametrize(
    ("declared", "is_list", "message"),
    [
        ("some", False, r"^invalid shapes of some of query tell = .* \(expected equal ones, or ragged"),
        ("some", True, "^invalid some of query tell = 'a list' .expected a tensor; "),
        ("words", False, "^invalid words of query tell = 'a dict' .expected a tensor; any JSON value if"),
    ],
)
def test_rejects_undeclared_ragged_and_json_outputs(declared: str, is_list: bool, message: str) -> None:
    run = build_simulation(config())[0]
    tell = run.side.queries["tell"]
    part = {"some": "ragged", "words": "json_values"}[declared]
    remaining = tuple(name for name in getattr(tell.details, part) if name != declared)

    def as_list(node: NodeView, **sent: Any) -> Mapping[str, Any]:
        response = tell.function(node, **sent)
        return {**response, declared: [*response[declared]]}

    function = as_list if is_list else tell.function
    undeclared = replace(tell, function=function, details=replace(tell.details, **{part: remaining}))
    side = replace(run.side, queries={"tell": undeclared})
    handler = RequestHandler(NodeGroup(run.nodes), side, run.compute)
    with pytest.raises(ArgumentError, match=message):
        respond(handler, "tell", 0, {"wish": json_to_tensor({"class": 0})}, False)
    assert run.audit.traffic_totals()["queries"] == 0


def test_excludes_node_with_malformed_json(tmp_path: Path) -> None:
    def bent(serve: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        def reply(message: bytes) -> bytes:
            header, tensors = unpack(serve(message))
            if "words" in tensors:
                tensors["words"] = torch.tensor([ord("{")], dtype=torch.uint8)
            return pack(header, tensors)

        return reply

    given = config()
    away = Away(replace(given, link=replace(given.link, quorum=0.5)), tmp_path, {NAMES[0]: bent})
    (event,) = away.live().run()["events"]
    assert (event["node"], event["reason"]) == (NAMES[0], "words: invalid JSON text")


def test_rejects_ragged_tensors_of_other_ndim_or_dtype() -> None:
    query = Query(None, releases={"some": SOME}, name="tell", details=QueryDetails(ragged=("some",)))  # type: ignore[arg-type]
    ones = {f"{n}": {"some": torch.ones(n, 3)} for n in (2, 3, 4)}
    assert find_faults(ones, query, 100.0) == {}
    flat = {**ones, "4": {"some": torch.ones(4)}}
    assert "float32 of shape (-1,)" in find_faults(flat, query, 100.0)["4"]
    with pytest.raises(NodeFault, match="not known"):
        find_faults({"2": ones["2"], "4": flat["4"]}, query, 100.0)


@pytest.mark.parametrize("value", [None, {"b": [1, 2.5], "a": "é"}, [], "text", 0])
def test_equal_json_values_encode_to_equal_bytes(value: Any) -> None:
    assert json_from_tensor(json_to_tensor(value)) == value
    if isinstance(value, dict):
        assert torch.equal(json_to_tensor(value), json_to_tensor(dict(reversed(list(value.items())))))


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), b"bytes", {"secret": [4, 2], "loss": float("inf")}])
def test_rejects_values_that_json_cannot_encode(value: object) -> None:
    with pytest.raises(ArgumentError, match="JSON") as caught:
        json_to_tensor(value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "NaN", "1e999", "[-Infinity]", ""])
def test_rejects_malformed_json_bytes(text: str) -> None:
    with pytest.raises(DataError, match="JSON"):
        json_from_tensor(torch.tensor(list(text.encode()), dtype=torch.uint8))


def test_invalid_json_value_is_not_charged() -> None:
    """Refused before anything is charged, admitted or trained."""
    run = build_simulation(config())[0]
    (node, *_), side = run.nodes, run.side
    handler = RequestHandler(NodeGroup([node]), side, run.compute)
    bad = {"wish": torch.tensor([ord("{")], dtype=torch.uint8)}
    with pytest.raises(DataError, match="JSON"):
        respond(handler, "tell", 0, bad, False)
    node.gate.ledger.policy = replace(node.gate.policy, max_header=20)
    with raises_refused("max_header: 20", "has 30"):
        respond(handler, "tell", 0, {"wish": json_to_tensor({"class": 1, "why": "x" * 10})}, False)
    assert run.audit.traffic_totals()["queries"] == run.audit.spending(node.name, "run").total_queries == 0
    (result,) = respond(handler, "tell", 0, {"wish": json_to_tensor({"class": 1})}, False)
    assert json_from_tensor(result["words"])["of"] == 1


@pytest.mark.parametrize("of", ["rows", "scores", "counts"])
def test_mechanisms_refuse_ragged_outputs(of: Any) -> None:
    """Under a budget the query is refused; without one, no guarantee is claimed."""
    kind = PayloadKind("some", category=of)
    for declaration in ({"ragged": ("some",)}, {"json_values": ("some",)}):
        query = Query(
            None,
            releases={"some": kind},
            depends_on_records=("some",),
            times=1,
            details=QueryDetails(**declaration),
            name="tell",
        )  # type: ignore[arg-type]
        privacy = NoisyOutputs(outputs=OutputsConfig(bound=1.0, noise=1.0))
        side = NodeSide({"tell": query}, SETTING)
        made = PrivacyMechanism("n", privacy, side, LocalConfig(), 50, Classification(3), secret=1)
        assert isinstance(made.rule(query, "some"), Exact)
        assert no_guarantee_reason(made, query) is None  # no budget is set
        tight = PrivacyMechanism(
            "n", replace(privacy, epsilon=3.0), side, LocalConfig(), 50, Classification(3), secret=1
        )
        assert "no guarantee" in str(no_guarantee_reason(tight, query))


def test_rejects_undeclared_outputs() -> None:
    for declaration, name in (({"ragged": ("sme",)}, "sme"), ({"json_values": ("wsh",)}, "wsh")):
        with raises_invalid("query tell", [name], "sent or released"):
            Query(
                Tells().tell,
                sends={"wish": WISH},
                releases={"some": SOME},
                details=QueryDetails(**declaration),  # type: ignore[arg-type]
            )
