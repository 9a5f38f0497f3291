"""Nodes behind real messages: metrics equal those of nodes in this process, and faulty nodes are excluded.

Nodes of one process respond over ``Loopback``; test_faults.py kills processes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import DataError, FedstillError, NodeFault, QueryRefused
from fedstill.core.run_writer import RunWriter
from fedstill.data.data_spec import DataSpec
from fedstill.federation import remote, transport
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.remote import LinkCosts, Remote
from fedstill.federation.transport import MAX_TEXT, LinkError, parse_node_status, parse_release_cost
from fedstill.methods._label_histogram import LabelHistogram
from fedstill.methods._server import Server
from fedstill.models.module_utils import to_vector, weighted_mean
from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA
from fedstill.node.audit_log import AuditLog
from fedstill.privacy.statement import PrivacyStatement
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import PROTOCOL, RunPlan
from fedstill.protocol.wire_format import pack, unpack
from fedstill.runs.simulation import build_simulation
from fedstill.tasks.classification import Classification, ClassificationConfig
from tests.support.audit_logs import total_charged
from tests.support.errors import raises_refused
from tests.support.links import Away, Loopback, Serve, here, tiny

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{"rounds": 4, "participation": 0.67}],
    "fediod": [{"importance": "realness", "student_inputs": "fresh"}],
    "fedkd": [{"labeled": True, "levels": 0}],
    "dsfl": [{"cache_rounds": 1}],
}


# --- equal metrics ------------------------------------------------------------------------------------

CASES = [
    pytest.param(name, options, id=" ".join([name, *(f"{key}={value}" for key, value in options.items())]))
    for name in METHODS
    # Deployed nodes do not upload data, and these data have no label maps (test_remote_maps.py).
    if name not in ("centralized", "asyndgan", "fediod-maps")
    for options in ({}, *VARIANTS.get(name, []))
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("method", "options"), CASES)
def test_remote_run_equals_simulation(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = tiny(method, options)
    experiment, metrics = here(config)
    away = Away(config, tmp_path)
    live = away.live()
    result = live.run()
    assert (result["bytes"], result["queries"]) == (metrics["bytes"], metrics["queries"])
    assert result["releases"] == metrics["releases"]
    assert [node["bytes"] for node in result["nodes"]] == [node["bytes"] for node in metrics["nodes"]]
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    if METHODS[method].evaluated_model == "student":
        assert result["accuracy"] == metrics["accuracy"]
    away.same_nodes(experiment)


NOISE: dict[str, dict[str, Any]] = {
    "dp-sgd": {"training": {"noise": 0.5}, "critic": {"noise": 1.0}},
    "pate": {"pate": {"teachers": 4, "noise": 2.0}, "critic": {"noise": 1.0}, "gradients": {"noise": 0.5}},
    "noisy-outputs": {
        "outputs": {"noise": 0.5, "bound": 5.0},
        "critic": {"noise": 1.0},
        "gradients": {"noise": 0.5},
    },
}
PRIVATELY = [
    *(("fediod", mechanism) for mechanism in NOISE),
    *(("fedkd", mechanism) for mechanism in NOISE),
    ("fedavg", "dp-sgd"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("method", "mechanism"), PRIVATELY)
def test_remote_run_with_mechanism_equals_simulation(method: str, mechanism: str, tmp_path: Path) -> None:
    privacy = {"mechanism": mechanism, **NOISE[mechanism]}
    config = tiny(method, {"z_max": 20.0}, privacy)
    experiment, metrics = here(config)
    away = Away(config, tmp_path)
    live = away.live()
    result = live.run()
    assert (result["bytes"], result["queries"]) == (metrics["bytes"], metrics["queries"])
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    assert result["privacy"] == metrics["privacy"]
    assert result["privacy"]["guarantee"]
    assert all(node["epsilon"] > 0 for node in result["privacy"]["nodes"])
    for node in experiment.nodes:
        # The persistent audit log of the node's data has the same content as the run's.
        audit = AuditLog(tmp_path / "nodes" / node.name / "audit.sqlite", read_only=True)
        assert audit.spending(NODE_DATA, "one").run_events == dict(
            total_charged(experiment.audit, node.name)[0]
        )
        audit.close()
    away.same_nodes(experiment)


def test_remote_run_has_no_node_data(tmp_path: Path) -> None:
    with raises_refused("private data", query="upload_data", node="node-0"):
        Away(tiny("centralized"), tmp_path).live().run()


@pytest.mark.usefixtures("steady_adam")
def test_compressed_wire_formats_are_close_to_float32(tmp_path: Path) -> None:
    """Holds for a few steps; later, small differences lead to different images."""
    options = {"steps": 4, "student": {"steps": 4, "batch": 64, "memory": 640}}
    short = tiny("fediod", options, inputs="int8", gradients="int8")
    begun = to_vector(build_simulation(short)[0].student).clone()
    experiment, metrics = here(short)
    live = Away(short, tmp_path).live()
    result = live.run()
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    assert result["bytes"] == metrics["bytes"]
    whole, of_whole = here(tiny("fediod", options))
    moved, difference = (to_vector(whole.student) - other for other in (begun, to_vector(experiment.student)))
    assert 0 < difference.norm() < 0.3 * moved.norm()
    ratio = (64 + 4) / (64 * 4)  # each input of 64 numbers has 64 bytes and a scale of 4 bytes
    for kind, direction in (("inputs", "down"), ("gradients", "up")):
        assert (
            result["bytes"]["by_kind"][kind][direction]
            == ratio * of_whole["bytes"]["by_kind"][kind][direction]
        )


# --- a federation of scripted nodes ---------------------------------------------------------------------

SPEC = DataSpec(ClassificationConfig(), ("a", "b"), (1, 2, 2), (0.5,), (0.5,))
X = torch.arange(8.0).view(2, 1, 2, 2) / 8


class Scripted:
    """Nodes k = 1, 2, 3 that return k x_0, k x_1 of each input, or whatever a test sets."""

    most: int | None = None  # query limit of the nodes

    def __init__(self, **link: Any) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fail: dict[tuple[str, str], Callable[[], bytes]] = {}
        self.nodes = ["one", "two", "three"]
        self.checkpoints: dict[str, list[int]] = {name: [] for name in self.nodes}
        self.last = dict.fromkeys(self.nodes, -1)
        query = Query(
            lambda node: {},
            sends={"x": "inputs"},
            releases={"logits": "logits"},
            differentiable=("x",),
            name="weigh",
        )
        self.audit = AuditLog()
        self.federation = Remote(
            self,
            RunPlan("one", {"name": "fediod"}, SPEC),
            {"weigh": query},
            LinkConfig(**{"wait": 0.5, **link}),
            self.audit,
            Compute(),
        )
        self.federation.join()

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        header, tensors = unpack(message)
        do = header["operation"]
        self.calls.append((node, do))
        if (node, do) in self.fail:
            return self.fail[node, do]()
        result: dict[str, Any] = {}
        released: dict[str, torch.Tensor] = {}
        factor = self.nodes.index(node) + 1.0
        if do == "identify":
            result = {"name": node, "protocol": PROTOCOL, "versions": {}}
        elif do == "join":
            about = {"refused_queries": {}, "max_queries": self.most, "is_trained": True}
            result = {**about, "checkpoints": self.checkpoints[node], "last_query": self.last[node]}
        elif do == "answer_query":
            self.last[node] = header["number"]
            result, released = {"privacy": {}}, {"logits": factor * tensors["x"].flatten(1)[:, :2]}
        elif do == "compute_gradients":
            gradient = torch.zeros(2, 1, 2, 2)
            gradient.view(2, 4)[:, :2] = factor * tensors["logits"]
            result, released = {"privacy": {}}, {"d/dx": gradient}
        elif do == "load_checkpoint":
            self.last[node] = header["checkpoint"] - 1
        return pack({"body": result, "seconds": 0.25}, released)

    def query(self) -> Any:
        return self.federation.query("weigh", x=X)

    def breaks(self, node: str, do: str, how: Callable[[], bytes]) -> None:
        self.fail[node, do] = how

    def mends(self, node: str) -> None:
        self.fail = {key: how for key, how in self.fail.items() if key[0] != node}

    def lost(self) -> bytes:
        raise LinkError("no way")

    def events(self) -> list[tuple[str, int, str]]:
        return [(each["node"], each["number"], each["event"]) for each in self.federation.exclusions.events]


def responding(logits: torch.Tensor, seconds: float = 0.0) -> Callable[[], bytes]:
    return lambda: pack({"body": {"privacy": {}}, "seconds": seconds}, {"logits": logits})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PAUSE", 0.02)
    monkeypatch.setattr(remote, "PROBE_INTERVAL", 0.0)


def test_responses_and_gradients_by_hand() -> None:
    nodes = Scripted()
    x = X.clone().requires_grad_()
    responses = nodes.federation.query("weigh", x=x)
    assert responses.nodes == ("one", "two", "three")
    flat = X.flatten(1)[:, :2]
    torch.testing.assert_close(responses["logits"].detach(), torch.stack([flat, 2 * flat, 3 * flat]))
    responses["logits"].sum().backward()
    assert x.grad is not None
    assert x.grad.flatten(1).tolist() == [[6.0, 6.0, 0.0, 0.0]] * 2  # 1 + 2 + 3
    summary = nodes.audit.traffic_totals()
    assert (summary["down"], summary["up"]) == (3 * (32 + 16), 3 * (16 + 32))


SICK: dict[str, tuple[Callable[[], bytes], str]] = {
    "nan": (responding(torch.full((2, 2), float("nan"))), "logits hold NaN or infinity (4 of 4 numbers)"),
    "another shape": (responding(torch.zeros(2, 3)), "logits are (2, 3)"),
    "1000 times": (responding(1000 * X.flatten(1)[:, :2]), "times as large as others': link.outlier 100"),
    "nothing": (lambda: pack({"body": {"privacy": {}}, "seconds": 0.0}), "responded nothing"),
    "scale without": (
        lambda: pack({"body": {}, "seconds": 0.0}, {"logits:scale": torch.ones(2)}),
        "came without logits",
    ),
    "garbage": (lambda: b"\0garbage", "not a message of fedstill"),
    "an odd error": (lambda: pack({"error": "x"}), "error is 'x'"),
}


@pytest.mark.parametrize("sickness", SICK)
def test_faulty_node_is_excluded(sickness: str) -> None:
    how, reason = SICK[sickness]
    nodes = Scripted(quorum=0.6)
    nodes.query()
    nodes.breaks("two", "answer_query", how)
    x = X.clone().requires_grad_()
    responses = nodes.federation.query("weigh", x=x)
    assert responses.nodes == ("one", "three")
    flat = X.flatten(1)[:, :2]
    torch.testing.assert_close(responses["logits"].detach(), torch.stack([flat, 3 * flat]))
    responses["logits"].sum().backward()
    assert x.grad is not None
    assert x.grad.flatten(1).tolist() == [[4.0, 4.0, 0.0, 0.0]] * 2  # 1 + 3
    assert nodes.events() == [("two", 1, "excluded")]
    assert reason in nodes.federation.exclusions.events[0]["reason"]
    # It sent an invalid response, so it is not readmitted even if it works again.
    nodes.mends("two")
    nodes.calls.clear()
    for _ in range(3):
        assert nodes.query().nodes == ("one", "three")
    assert "two" not in {node for node, _ in nodes.calls}
    # If one more fails, the run stops.
    nodes.breaks("one", "answer_query", how)
    alone = r"1 of 3 nodes are left, link\.quorum wants 2"
    with pytest.raises(NodeFault, match=f"{alone}|it is unknown which"):  # two nodes that differ
        nodes.query()


@pytest.mark.parametrize(
    ("x", "fault"),
    [
        (torch.full((2, 1, 2, 2), float("nan")), "not finite, x hold NaN"),
        (torch.zeros(2, 1, 3, 3), r"x: torch.float32 \(2, 1, 3, 3\) \(expected float32 \(B, 1, 2, 2\)\)"),
        (torch.zeros(2, 1, 2, 2).double(), "x: torch.float64"),
    ],
)
def test_invalid_inputs_are_server_errors_and_not_sent(x: torch.Tensor, fault: str) -> None:
    nodes = Scripted(quorum=0.6)
    student, task = torch.nn.Linear(4, 2), Classification(2)
    setup = ((1, 2, 2), (0.5,), (0.5,), Compute(), 0, LocalConfig())
    server = Server(METHODS["standalone"](), nodes.federation, student, task, *setup)
    nodes.calls.clear()
    with pytest.raises(DataError, match=f"'weigh': the server sent .*{fault}"):
        server.query("weigh", x=x)
    assert nodes.calls == []
    assert nodes.events() == []


@pytest.mark.parametrize(
    ("quorum", "unwilling", "continues"), [(0.6, 1, True), (0.6, 2, False), (1.0, 1, False)]
)
def test_refusing_node_is_excluded_above_quorum(quorum: float, unwilling: int, continues: bool) -> None:
    nodes = Scripted(quorum=quorum)
    for node in nodes.nodes[:unwilling]:
        about = nodes.federation.node_status[node]
        nodes.federation.node_status[node] = dataclasses.replace(
            about, refused_queries={"weigh": "outputs_only: no logits"}
        )
    if not continues:
        with pytest.raises(QueryRefused, match="outputs_only: no logits"):
            nodes.federation.exclude_refusing_nodes(["weigh"])
        assert nodes.events() == []
        return
    nodes.federation.exclude_refusing_nodes(["weigh"])
    assert nodes.events() == [("one", 0, "excluded")]
    assert nodes.federation.exclusions.events[0]["reason"] == "refused: outputs_only: no logits"
    assert nodes.query().nodes == ("two", "three")


def test_server_knows_release_costs() -> None:
    statement = PrivacyStatement(
        "pate", "noisy votes", "one record", 1e-6, 8.0, "rdp", "any", {"pate": 5.0}, ("a", "b"), ("c",)
    )
    table = {**ABOUT, "privacy": json.loads(json.dumps(dataclasses.asdict(statement)))}
    assert parse_node_status(table, {}).privacy == statement
    assert parse_node_status(ABOUT, {}).privacy == PrivacyStatement()


def test_resends_lost_message_and_reports_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "FIRST_WARNING", 0.01)
    nodes = Scripted(wait=60.0)
    losses = iter(range(2))

    def at_first() -> bytes:
        if next(losses, None) is None:
            nodes.mends("two")
        raise LinkError("no way")

    nodes.breaks("two", "answer_query", at_first)
    waited: list[Sequence[str]] = []
    nodes.federation.on_waiting = waited.append
    assert nodes.query().nodes == ("one", "two", "three")
    assert nodes.calls.count(("two", "answer_query")) == 4
    assert nodes.events() == []
    # On a busy machine the other nodes may also be late for a moment.
    assert [record.message for record in caplog.records if "two to weigh for " in record.message]
    assert "two" in waited[-2]
    assert not waited[-1]


def test_unreachable_node_rejoins() -> None:
    nodes = Scripted(quorum=0.6, wait=0.1)
    nodes.query()
    for do in ("identify", "answer_query"):
        nodes.breaks("two", do, nodes.lost)
    assert nodes.query().nodes == ("one", "three")
    assert nodes.query().nodes == ("one", "three")
    assert nodes.events() == [("two", 1, "excluded")]
    assert "no answer within 0.1 s (link.wait): no way" in nodes.federation.exclusions.events[0]["reason"]
    nodes.mends("two")
    present = [nodes.query().nodes]
    while len(present[-1]) == 2:
        present.append(nodes.query().nodes)
        assert len(present) < 1000
    back = 3 + len(present) - 1
    assert nodes.events() == [("two", 1, "excluded"), ("two", back, "rejoined")]
    assert ("two", "load_checkpoint") not in nodes.calls  # it still has its state
    assert nodes.federation.excluded == {}


@pytest.mark.parametrize(
    ("checkpoints", "last", "recalled"),
    [
        ([3, 6], -1, 6),  # restarted: restores its latest checkpoint
        ([3, 6], 5, None),  # at its latest checkpoint
        ([3, 6], 7, None),  # after that: where it was when it was lost
        ([3, 60], 59, 3),  # ahead: the run went back during its absence
        ([], -1, None),  # at the beginning
        ([60], 59, 0),  # ahead, without any earlier checkpoint except the beginning
    ],
)
def test_rejoining_node_restores_checkpoint(checkpoints: list[int], last: int, recalled: int | None) -> None:
    nodes = Scripted(quorum=0.6, wait=0.1)
    nodes.federation.number = 9
    nodes.breaks("two", "answer_query", nodes.lost)
    nodes.query()
    nodes.mends("two")
    nodes.checkpoints["two"], nodes.last["two"] = checkpoints, last
    for _ in range(1000):
        nodes.query()
        if nodes.events()[1:]:
            break
    assert nodes.federation.excluded == {}
    assert nodes.calls.count(("two", "load_checkpoint")) == (recalled is not None)
    if recalled is not None:
        assert nodes.last["two"] >= recalled - 1


@pytest.mark.parametrize(
    ("gradient", "reason"),
    [
        (torch.full((2, 1, 2, 2), float("nan")), "hold NaN"),
        (torch.full((2, 1, 2, 2), 1e30), "gradients are inf times as large"),
        (torch.ones(2, 1, 2, 3), "not {'d/dx': (2, 1, 2, 2)}"),
        (torch.ones(2, 1, 2, 2).to(torch.complex64), "complex64"),
    ],
)
def test_invalid_gradient_adds_nothing(gradient: torch.Tensor, reason: str) -> None:
    nodes = Scripted(quorum=0.6)
    nodes.breaks("two", "compute_gradients", lambda: pack({"body": {}, "seconds": 0.0}, {"d/dx": gradient}))
    x = X.clone().requires_grad_()
    nodes.federation.query("weigh", x=x)["logits"].sum().backward()
    assert x.grad is not None
    assert x.grad.flatten(1).tolist() == [[4.0, 4.0, 0.0, 0.0]] * 2  # 1 + 3
    assert nodes.events() == [("two", 1, "excluded")]  # it took part in query 0
    assert reason in nodes.federation.excluded["two"].reason


def test_non_finite_method_gradient_is_no_node_fault() -> None:
    nodes = Scripted(quorum=0.6)
    logits = nodes.federation.query("weigh", x=X.clone().requires_grad_())["logits"]
    message = r"query 'weigh': the method's gradients of logits hold NaN .* its loss is not finite"
    with pytest.raises(DataError, match=message):
        (logits.sum() * torch.nan).backward()
    assert nodes.federation.excluded == {}


def test_refusing_node_may_not_rejoin() -> None:
    nodes = Scripted(quorum=0.6)
    error = {"kind": "QueryRefused", "rule": "max_queries: 1", "text": "x", "query": "weigh"}
    nodes.breaks("two", "answer_query", lambda: pack({"error": error}))
    assert nodes.query().nodes == ("one", "three")
    assert nodes.federation.excluded["two"].may_rejoin is False
    assert "max_queries: 1" in nodes.federation.excluded["two"].reason


def test_query_limit_zero_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Scripted().federation.query_limits() == {}
    monkeypatch.setattr(Scripted, "most", 0)
    assert Scripted().federation.query_limits() == {"one": 0, "two": 0, "three": 0}


def test_error_names_all_refusing_nodes() -> None:
    nodes = Scripted()
    none = "queries: none"
    rules = {"one": none, "two": "max_queries: 1", "three": none}
    for node, rule in rules.items():
        error = {"kind": "QueryRefused", "rule": rule, "text": "x", "query": "weigh"}
        nodes.breaks(node, "answer_query", lambda error=error: pack({"error": error}))  # type: ignore[misc]
    with pytest.raises(QueryRefused) as caught:
        nodes.query()
    assert str(caught.value) == (
        "nodes 'one', 'three' refuse query 'weigh' by rule queries: none; "
        "node 'two' refuses query 'weigh' by rule max_queries: 1"
    )


def test_error_names_all_unreachable_nodes() -> None:
    nodes = Scripted(wait=0.1)

    def silent() -> bytes:
        raise transport.ReplyTimeout("function serve timed out after 1.9565732450000723 seconds")

    nodes.breaks("one", "answer_query", silent)
    nodes.breaks("three", "answer_query", nodes.lost)
    with pytest.raises(NodeFault) as caught:
        nodes.query()
    assert str(caught.value) == (
        "node 'one, three', query 'weigh': one: no answer within 0.1 s (link.wait); "
        "three: no answer within 0.1 s (link.wait): no way; 1 of 3 nodes are left, link.quorum wants 3"
    )


def test_rejects_node_of_other_protocol_version() -> None:
    nodes = Scripted(quorum=0.6)
    nodes.breaks("two", "identify", lambda: pack({"body": {"protocol": 1, "versions": {}}, "seconds": 0.0}))
    nodes.federation.join()
    assert f"it speaks protocol 1, the server {PROTOCOL}" in nodes.federation.excluded["two"].reason


def test_repeated_query_after_others_is_charged_again() -> None:
    """A node that was reset and got queries in another order responds and is charged again."""
    nodes = Scripted()

    def after(before: object, value: float = 1.0) -> Callable[[], bytes]:
        privacy = {"mechanism": "pate", "cost": {"gaussian(2.0)": 1}, "history_hash": before}
        logits = torch.full((2, 2), value)
        return lambda: pack({"body": {"privacy": privacy}, "seconds": 0.0}, {"logits": logits})

    changed = 1.0 + 2**-23  # changes the last bit
    cases = (("a1", 1.0, 1), ("a1", 1.0, 1), ("b2", 1.0, 2), ("a1", 1.0, 2), ("a1", changed, 3))
    for before, value, count in cases:
        nodes.breaks("one", "answer_query", after(before, value))
        nodes.federation.number = 0
        nodes.query()
        assert total_charged(nodes.audit, "one") == ({"gaussian(2.0)": count}, 0)
    assert nodes.audit.spending("two", ALL_RUNS).total_queries == 1, (
        "without a history hash, equal queries count once"
    )
    nodes.breaks("one", "answer_query", after(7))
    with pytest.raises(NodeFault, match=r"privacy\.history_hash is 7"):
        nodes.query()


def test_exclusions_are_saved_in_state_dict() -> None:
    nodes = Scripted(quorum=0.3, wait=0.1)
    nodes.breaks("two", "answer_query", nodes.lost)
    nodes.breaks("three", "answer_query", SICK["nan"][0])
    nodes.query()
    state = nodes.federation.state_dict()
    assert {node: entry[2] for node, entry in state["excluded"].items()} == {"two": True, "three": False}
    again = Scripted(quorum=0.3)  # resumes later, after all have joined
    again.federation.load_state_dict(state)
    assert again.federation.number == 1
    assert again.events() == [("two", 0, "excluded"), ("three", 0, "excluded"), ("two", 1, "rejoined")]
    assert again.query().nodes == ("one", "two")


def test_end_run_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Scripted(wait=30.0)
    nodes.breaks("two", "leave", nodes.lost)
    start = time.monotonic()
    nodes.federation.end_run()
    assert time.monotonic() - start < 20
    assert sorted(node for node, do in nodes.calls if do == "leave") == sorted(nodes.nodes)  # immediately


# --- weights and link costs -----------------------------------------------------------------------------


def test_label_histogram_by_hand() -> None:
    counts = torch.tensor([[8.0, 2.0], [10.0, 20.0], [0.0, 60.0]])
    result = LabelHistogram(("one", "two", "three"), counts, counts.sum(1))
    assert result.select(("one", "two", "three")) is result
    part = result.select(("one", "three"))
    assert part.names == ("one", "three")
    assert part.sizes.tolist() == [10.0, 60.0]
    pi = part.sizes / part.sizes.sum()
    # 10 and 60 of 70; of all nodes they were 10 and 60 of 100
    torch.testing.assert_close(pi, torch.tensor([1 / 7, 6 / 7]))
    weights = Classification(2).importance_weights(part.counts)[
        :, 0
    ]  # (K, C): each node's share of each class
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2 / 62], [0.0, 60 / 62]]), rtol=0.02, atol=0.02)
    torch.testing.assert_close(weights.sum(0), torch.ones(2))
    average = weighted_mean(torch.tensor([[7.0], [0.0]]), part.sizes)
    torch.testing.assert_close(average, torch.tensor([1.0]))
    assert result.select(("three", "one")).sizes.tolist() == [60.0, 10.0]
    nodes = Scripted(quorum=0.3)
    late = LabelHistogram(("one", "three"), part.counts, part.sizes)  # two joined later
    assert late.present_nodes(nodes.federation) == ["one", "three"]
    nodes.federation.exclude("three", "weigh", "gone", may_rejoin=True)
    assert late.present_nodes(nodes.federation) == ["one"]


def test_link_costs_by_hand() -> None:
    meter = LinkCosts()
    meter.add_round(1.0, [0.2, 0.4, 0.6], 300)
    meter.add_round(0.5, [0.1, 0.1, 0.1], 100)
    metrics = meter.costs(10.0, 2.0)
    expected = {
        "messages": 2,
        "seconds_each": 0.75,
        "bytes_each": 200,
        "nodes": 0.4 + 0.1,  # computing time, on average: 0.6 + 0.1 less the waiting
        "waiting": 0.2,  # the others wait for the slowest: 0.6 - 0.4
        "link": 1.5 - 0.7,
        "training": 2.0,
        "server": 10 - 2 - 1.5,
        "share": 0.8 / 10,
    }
    assert metrics.keys() >= expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value), name
    parts = ("nodes", "waiting", "link", "training", "server")
    assert sum(metrics[name] for name in parts) == pytest.approx(10)


@pytest.mark.parametrize(("reported", "believed"), [(1e9, "all"), (-5.0, "none"), (0.0, "none")])
def test_node_seconds_are_clamped(reported: float, believed: str) -> None:
    nodes = Scripted()
    nodes.breaks("two", "answer_query", responding(2 * X.flatten(1)[:, :2], seconds=reported))
    nodes.query()
    meter = nodes.federation.link_costs
    assert 0 <= meter.waiting <= meter.nodes <= meter.seconds
    assert meter.costs(meter.seconds, 0.0)["link"] >= 0
    if believed == "none":
        assert "two" not in nodes.federation.excluded


@pytest.mark.parametrize("reported", [float("nan"), 1e300, 10**400, "1", True, None])
def test_rejects_non_numeric_seconds(reported: Any) -> None:
    nodes = Scripted(quorum=0.6)
    nodes.breaks("two", "answer_query", responding(2 * X.flatten(1)[:, :2], seconds=reported))
    assert nodes.query().nodes == ("one", "three")
    assert "seconds is" in nodes.federation.excluded["two"].reason


@pytest.mark.parametrize(
    ("cost", "fault"),
    [
        ({"gaussian(1e+300)": 1}, "noise of an event"),
        ({"gaussian(2.0)": 2**53}, "expected numbers up to"),
        (functools.reduce(lambda inner, _: [inner], range(600), 1), "deeper than 20"),
    ],
)
def test_rejects_invalid_release_cost(cost: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        parse_release_cost({"privacy": {"mechanism": "pate", "cost": cost}})


@pytest.mark.parametrize("queried", [("one", "two", "three"), ("two",)])
def test_absent_seconds_are_not_link_costs(queried: tuple[str, ...]) -> None:
    nodes = Scripted(quorum=0.6, wait=1.0)
    nodes.breaks("two", "answer_query", nodes.lost)
    with nullcontext() if len(queried) > 1 else pytest.raises(NodeFault):
        nodes.federation.query("weigh", nodes=queried, x=X)
    meter = nodes.federation.link_costs
    metrics = meter.costs(meter.seconds, 0.0)
    assert metrics["absent"] > 0.8
    assert metrics["link"] < metrics["absent"] / 2
    assert metrics["share"] < 0.5
    parts = ("nodes", "waiting", "absent", "link", "server")
    assert sum(metrics[name] for name in parts) == pytest.approx(meter.seconds)


# --- real nodes, one of them faulty ----------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["fediod", "fedmd", "fedavg", "fedmd-cg", "fens"])
def test_methods_continue_without_late_node(method: str, tmp_path: Path) -> None:
    """It was unreachable when nodes released their data sizes, and returns later."""
    config = tiny(method, {"steps": 12, "rounds": 12}, quorum=0.6, wait=0.05)
    away = Away(config, tmp_path)
    calls = iter(range(6))

    class Late(Loopback):
        def call(self, node: str, message: bytes, seconds: float) -> bytes:
            header, _ = unpack(message)
            questioned = header["operation"] not in ("identify", "join", "train_locally", "load_checkpoint")
            if node == "node-1" and questioned and next(calls, None) is not None:
                raise LinkError("no way")
            return super().call(node, message, seconds)

    live = away.live(Late(away.serve))
    metrics = live.run()
    assert [event["event"] for event in metrics["events"]][:1] == ["excluded"]
    assert all(torch.isfinite(value).all() for value in live.student.state_dict().values())


# --- interrupted runs ------------------------------------------------------------------------------------


def test_resumed_run_keeps_link_costs_and_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("fediod", {"steps": 6})
    experiment, metrics = here(config)
    away = Away(config, tmp_path)
    monkeypatch.setattr(RunWriter, "is_save_due", lambda self: True)
    count = iter(range(30))

    class Breaks(Loopback):
        def call(self, node: str, message: bytes, seconds: float) -> bytes:
            if next(count, None) is None:
                raise FedstillError("the power is off")
            return super().call(node, message, seconds)

    with pytest.raises(FedstillError, match="the power is off"):
        away.live(Breaks(away.serve)).run()
    live = away.live()
    result = live.run()
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    assert (result["accuracy"], result["bytes"]) == (metrics["accuracy"], metrics["bytes"])
    assert live.federation.link_costs.queries >= 1 + 2 * 6


# --- malicious nodes ---------------------------------------------------------------------------------------

L = 2 * X.flatten(1)[:, :2]  # the response of node two


def replying(result: Any = None, **tensors: torch.Tensor) -> Callable[[], bytes]:
    named = {name.replace("__", ":"): tensor for name, tensor in tensors.items()}
    return lambda: pack({"body": {"privacy": {}} if result is None else result, "seconds": 0.0}, named)


OF_X = {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}
HEADER = {"__metadata__": {"fedstill": json.dumps({"fedstill": {}, "strides": {}})}, "x": OF_X}
WITHOUT_BYTES = len(json.dumps(HEADER)).to_bytes(8, "little") + json.dumps(HEADER).encode()

HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a mismatch": (
        lambda: pack({"error": {"kind": "QueryMismatch", "text": "x", "number": 1}}),
        "again as number 1 with other content",
    ),
    "a shape that no memory has": (
        lambda: WITHOUT_BYTES,
        "not a message of fedstill",
    ),
    "no bytes": (lambda: cast(bytes, None), "a message is a NoneType"),
    "an error without a kind": (lambda: pack({"error": {"text": "x"}}), "error.kind is missing"),
    "float8 with a scale": (
        replying(logits=L.to(torch.float8_e4m3fn), logits__scale=torch.ones(2)),
        "logits are torch.float8_e4m3fn",
    ),
    "no table of privacy": (replying({"privacy": "abc"}, logits=L), "privacy is 'abc'"),
    "a price of no event": (
        replying({"privacy": {"cost": {"luck(2.0)": 1}}}, logits=L),
        "invalid event = 'luck(2.0)'",
    ),
    "a price paid less than once": (
        replying({"privacy": {"cost": {"gaussian(2.0)": -1}}}, logits=L),
        "invalid times of gaussian(2.0) = -1",
    ),
    "an endless price": (
        replying({"privacy": {"cost": {f"gaussian({n}.5)": 1 for n in range(101)}}}, logits=L),
        "cost is {",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_malformed_replies_do_not_stop_run_above_quorum(what: str) -> None:
    how, reason = HOSTILE[what]
    nodes = Scripted(quorum=0.6)
    nodes.breaks("two", "answer_query", how)
    assert nodes.query().nodes == ("one", "three")
    assert reason in nodes.federation.excluded["two"].reason
    assert not nodes.federation.excluded["two"].may_rejoin
    assert nodes.query().nodes == ("one", "three")


@pytest.mark.parametrize("do", ["answer_query", "compute_gradients", "leave"])
def test_unfinished_reply_excludes_node(do: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links such as FLARE's only time out on silence; a slow trickle of bytes is not silent."""
    monkeypatch.setattr(remote, "GRACE", 1.9)  # long enough for the other two
    monkeypatch.setattr(remote, "PROBE_INTERVAL", 0.1)
    nodes, over = Scripted(quorum=0.6, wait=0.1), threading.Event()

    def trickles() -> bytes:
        assert over.wait(60)
        raise LinkError("no way")

    try:
        nodes.breaks("two", do, trickles)
        responses = nodes.federation.query("weigh", x=X.clone().requires_grad_())
        if do == "compute_gradients":
            responses["logits"].sum().backward()
        if do == "leave":
            start = time.monotonic()
            nodes.federation.end_run()
            assert time.monotonic() - start < 20
        else:
            assert nodes.query().nodes == ("one", "three")
            assert "has not ended after 2.2 s" in nodes.federation.excluded["two"].reason
            assert not nodes.federation.excluded["two"].may_rejoin
    finally:
        over.set()


SAID = dataclasses.asdict(
    PrivacyStatement("pate", "one record", noise={"pate": 5.0}, rules=("a",), assumes=("b",))
)
ABOUT = {"refused_queries": {}, "max_queries": None, "is_trained": True, "checkpoints": [], "last_query": -1}


@pytest.mark.parametrize(
    ("do", "expected", "reason"),
    [
        ("identify", {}, "versions is missing"),
        ("identify", {"versions": {"torch": 2}, "protocol": PROTOCOL}, "versions.torch is 2"),
        ("join", {}, "refused_queries is missing"),
        ("join", {**ABOUT, "privacy": "pate"}, "privacy is 'pate'"),
        ("join", {**ABOUT, "privacy": {**SAID, "delta": 0.0}}, "delta is 0.0"),
        ("join", {**ABOUT, "privacy": {**SAID, "accountant": "mine"}}, "accountant is 'mine'"),
        ("join", {**ABOUT, "privacy": {**SAID, "noise": {"pate": "5"}}}, "noise.pate is '5'"),
        ("join", {**ABOUT, "refused_queries": {"weigh": 1}}, "refused_queries.weigh is 1"),
        ("join", {**ABOUT, "is_trained": 1}, "is_trained is 1"),
        ("join", {**ABOUT, "checkpoints": [0] * 10_000}, "checkpoints has 10000 entries"),
        ("join", {**ABOUT, "checkpoints": [1.5]}, "checkpoints[0] is 1.5"),
        ("join", {**ABOUT, "notes": ["x"] * 11}, "notes is ["),
        ("join", {"needs_public_data": True}, "does not take the run's public data"),
    ],
)
def test_validates_node_replies(do: str, expected: Any, reason: str) -> None:
    nodes = Scripted(quorum=0.6)
    nodes.breaks("two", do, lambda: pack({"body": expected, "seconds": 0.0}))
    nodes.federation.join()
    assert reason in nodes.federation.excluded["two"].reason
    nodes.federation.exclude_refusing_nodes(["weigh"])
    assert nodes.query().nodes == ("one", "three")


def test_node_texts_are_truncated() -> None:
    nodes = Scripted(quorum=0.6)
    text = "\x1b[31mred\ud800\n" + "long " * 10**5
    nodes.breaks("two", "answer_query", lambda: pack({"error": {"kind": "X" * 10**5, "text": text}}))
    nodes.query()
    reason = nodes.federation.excluded["two"].reason
    assert reason.startswith("[31mred long long")
    assert len(reason) == 300
    assert nodes.federation.exclusions.events[0]["reason"] == reason
    versions = {str(number): "v" * 10**4 for number in range(3)}
    nodes.breaks("one", "identify", lambda: pack({"body": {"protocol": PROTOCOL, "versions": versions}}))
    nodes.federation.excluded.clear()
    nodes.federation.join()
    assert [len(version) for version in nodes.federation.node_status["one"].versions.values()] == [
        MAX_TEXT
    ] * 3


def test_rule_of_a_refusal_is_checked() -> None:
    """The rule appears in the server's errors, results and pages, so a node must not control its form."""
    nodes = Scripted()
    error = {"kind": "QueryRefused", "rule": "\x1b[31mhours:\n" + "never " * 10**5}
    nodes.breaks("two", "answer_query", lambda: pack({"error": error}))
    with pytest.raises(QueryRefused) as caught:
        nodes.query()
    assert caught.value.rule.startswith("[31mhours: never never")
    assert len(caught.value.rule) == MAX_TEXT
    for rule in ({}, {"rule": ""}, {"rule": "\x1b\n"}, {"rule": ["hours"]}):
        refused = {"kind": "QueryRefused", "text": "not today", **rule}
        nodes = Scripted(quorum=0.6)
        nodes.breaks("two", "answer_query", lambda refused=refused: pack({"error": refused}))  # type: ignore[misc]
        assert nodes.query().nodes == ("one", "three")
        assert "its reply: " in nodes.federation.excluded["two"].reason


@pytest.mark.parametrize("percent", [0, 100])
def test_excludes_node_without_training_progress(percent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PAUSE", 0.1)
    nodes = Scripted(quorum=0.6, wait=1.0)
    unlearned = {"body": {**ABOUT, "is_trained": False}, "seconds": 0.0}
    nodes.breaks("two", "join", lambda: pack(unlearned))
    nodes.breaks("two", "train_locally", lambda: pack({"body": {"percent": percent, "is_trained": False}}))
    nodes.federation.join()
    nodes.calls.clear()
    shown: list[int] = []
    nodes.federation.train_nodes(shown.append)
    assert f"its local training stays at {percent}%" in nodes.federation.excluded["two"].reason
    assert 2 < len(nodes.calls) < 30  # one second of calls with a pause between them
    assert shown[0] == percent


def test_slow_local_training_is_not_excluded() -> None:
    nodes = Scripted(wait=1.0)  # the total takes longer, each step far less
    nodes.breaks("two", "join", lambda: pack({"body": {**ABOUT, "is_trained": False}}))
    steps = iter(range(0, 101, 10))

    def slowly() -> bytes:
        time.sleep(0.12)
        percent = next(steps)
        return pack({"body": {"percent": percent, "is_trained": percent == 100}})

    nodes.breaks("two", "train_locally", slowly)
    nodes.federation.join()
    nodes.federation.train_nodes(lambda percent: None)
    assert nodes.federation.excluded == {}


def test_probe_ends_with_run() -> None:
    nodes = Scripted(quorum=0.6, wait=0.1)
    nodes.breaks("two", "answer_query", nodes.lost)
    nodes.query()
    nodes.breaks("two", "join", lambda: pack({"body": {**ABOUT, "is_trained": False}}))
    nodes.breaks("two", "train_locally", lambda: pack({"body": {"percent": 0, "is_trained": False}}))
    nodes.federation.link = LinkConfig(quorum=0.6, wait=3600.0)
    nodes.query()
    (probe,) = nodes.federation._probes.values()
    nodes.federation.end_run()
    assert isinstance(probe.exception(60.0), LinkError)


BENT: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("fediod", "counts", lambda counts: -counts),
    ("fediod", "critic", lambda critic: critic * 0 + 1e30),
    ("fedavg", "parameters", lambda parameters: parameters * 1e6),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("method", "part", "how"), BENT)
def test_detects_poisoned_responses(
    method: str, part: str, how: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    def bend(serve: Serve) -> Serve:
        def serving(message: bytes) -> bytes:
            result, released = unpack(serve(message))
            return pack(
                result, {name: how(each) if name == part else each for name, each in released.items()}
            )

        return serving

    away = Away(tiny(method, quorum=0.6), tmp_path, {"node-1": bend})
    (event,) = away.live().run()["events"]
    assert (event["node"], event["event"]) == ("node-1", "excluded")
    assert event["reason"].startswith(part)
