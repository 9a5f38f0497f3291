"""Input gradients of responses: their weights in sums, and invalid output gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import QueryMismatch
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.request_handler import RequestHandler
from fedstill.node.secure_aggregation import MaskedReleases, SumEncoder, SumMasks
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting, NodeSide
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import (
    GRADIENT_FRACTION_BITS,
    SumRequest,
    SumWeighting,
    add_contributions,
    from_ring,
)
from fedstill.protocol.wire_format import Tensors, pack, unpack
from fedstill.tasks.classification import Classification
from tests.support.errors import raises_refused
from tests.support.kits import Party
from tests.support.node_services import CLASSES, MAP, B, Clinic
from tests.support.node_services import gradients as valid_gradients
from tests.support.request_handlers import backward, respond

NAMES = ("a", "b", "c")
SETTING = NodeSetting(Classification(2), LocalConfig(), Compute())
# Linear models z = W x of two inputs and two classes, and each node's released counts.
WEIGHTS = {"a": [[1.0, 0.0], [0.0, 1.0]], "b": [[2.0, 1.0], [0.0, 1.0]], "c": [[0.0, 1.0], [1.0, 0.0]]}
SIZES = {"a": 4.0, "b": 2.0, "c": 5.0}
COUNTS = {"a": [1.0, 3.0], "b": [2.0, 0.0], "c": [4.0, 1.0]}
# Input gradients of 2 sum_k (w_k g) W_k by hand, with output gradients g = (1/2, -1/4) of the weighted sum of
# logits: size:   4 (1, -1/2) + 2 (2, 1/2) + 5 (-1/2, 1) = (5.5, 4) counts: (1, -3/2) + (4, 2) + (-1/2, 4)
# = (4.5, 4.5) mean:   (1, -1/2) + (2, 1/2) + (-1/2, 1)       = (2.5, 1)
OUTPUT_GRADIENTS = torch.tensor([[0.5, -0.25]])
BY_HAND: dict[SumWeighting, list[float]] = {"size": [2.75, 2.0], "counts": [2.25, 2.25], "mean": [1.25, 0.5]}


def response(node: NodeView, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"logits": node.model(x)}


def build_node_side(how: SumWeighting) -> NodeSide:
    query = Query(
        response,
        sends={"x": INPUTS},
        releases={"logits": LOGITS},
        differentiable=("x",),
        sums={"logits": how},
        stackable=True,
        name="predict_logits",
    )
    return NodeSide({"predict_logits": query}, setting=SETTING)


def node_of(name: str) -> Node:
    model = nn.Linear(2, 2, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(WEIGHTS[name]))
    data = TensorData(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    return Node(name, data, model, Gate(name, PolicyConfig(), AuditLog(), "one"), 0)


def set_counts(encoder: SumEncoder, name: str) -> None:
    encoder.counts = {"size": torch.tensor(SIZES[name]), "counts": torch.tensor(COUNTS[name])}


class Masked:
    """A deployed node that releases under masks."""

    def __init__(self, masks: SumMasks, how: SumWeighting) -> None:
        self.node, side = node_of(masks.name), build_node_side(how)
        self.sums = MaskedReleases(masks, self.node.gate, side)
        self.handler = RequestHandler(NodeGroup([self.node]), side, Compute())
        set_counts(self.sums, masks.name)

    def respond(self, number: int, x: torch.Tensor, call: SumRequest) -> None:
        received = ReceivedTensors.of_query(self.handler.side.queries["predict_logits"], {"x": x})
        self.sums.respond(self.handler, number, received, True, call)

    def backward(self, number: int, gradient: torch.Tensor, call: SumRequest) -> Tensors:
        received = ReceivedTensors.of_gradients("predict_logits", {"logits": gradient})
        return self.sums.backward(self.handler, number, received, call)


@pytest.mark.parametrize("how", BY_HAND)
def test_masked_gradients_are_weighted_like_responses(how: SumWeighting, tmp_path: Path) -> None:
    party = Party(tmp_path, NAMES)
    x, parts = torch.tensor([[3.0, -1.0]]), []
    for name in NAMES:
        node = Masked(party.masks[name], how)
        node.respond(0, x, SumRequest(1, NAMES))
        parts.append(node.backward(0, OUTPUT_GRADIENTS, SumRequest(2, NAMES)))
    assert from_ring(add_contributions(parts)["d/dx"], GRADIENT_FRACTION_BITS).tolist() == [BY_HAND[how]]


@pytest.mark.parametrize("how", BY_HAND)
def test_summed_gradients_are_weighted_in_process(how: SumWeighting) -> None:
    nodes = [node_of(name) for name in NAMES]
    for node in nodes:
        set_counts(SumEncoder(node.gate), node.name)
    handler = RequestHandler(NodeGroup(nodes), build_node_side(how), Compute())
    respond(handler, "predict_logits", 0, {"x": torch.tensor([[3.0, -1.0]])}, True)
    output_gradients = {name: {"logits": OUTPUT_GRADIENTS} for name in NAMES}
    parts = list(backward(handler, 0, output_gradients).values())
    assert from_ring(add_contributions(parts)["d/dx"], GRADIENT_FRACTION_BITS).tolist() == [BY_HAND[how]]


def test_output_that_does_not_depend_on_the_inputs_has_zero_gradients() -> None:
    def rate(node: NodeView, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"logits": node.model(x), "own": node.model(torch.ones_like(x))}

    releases = {"logits": LOGITS, "own": LOGITS}
    query = Query(rate, sends={"x": INPUTS}, releases=releases, differentiable=("x",), name="rate")
    handler = RequestHandler(NodeGroup([node_of("a")]), NodeSide({"rate": query}, setting=SETTING), Compute())
    respond(handler, "rate", 0, {"x": torch.tensor([[3.0, -1.0]])}, True)
    (released,) = backward(handler, 0, {"a": {"own": OUTPUT_GRADIENTS}}).values()
    assert released["d/dx"].tolist() == [[0.0, 0.0]]


# --- refusals -------------------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
SHAPES = st.one_of(
    st.sampled_from([(B, CLASSES), (B, *MAP), (), (B,), (B, CLASSES, 1), (1, B, CLASSES), (0, CLASSES)]),
    st.lists(st.integers(0, 11), max_size=4).map(tuple),
)
TENSORS = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), SHAPES, st.sampled_from(DTYPES))
PULLS = st.dictionaries(
    st.sampled_from(["logits", "critic", "d/dx", "", "logits:scale", "critic:scale", "x"]),
    TENSORS,
    max_size=4,
)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Clinic:
    node = Clinic(tmp_path_factory.mktemp("fuzzed") / "clinic").ready()
    node.query(0)
    return node


def fits(node_gradients: Mapping[str, torch.Tensor]) -> bool:
    shapes = {"logits": (B, CLASSES), "critic": (B, *MAP)}
    return bool(node_gradients) and all(
        shapes.get(name) == tuple(tensor.shape) and tensor.dtype == torch.float32
        for name, tensor in node_gradients.items()
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(node_gradients=PULLS)
def test_malformed_gradients_are_refused(node_gradients: dict[str, torch.Tensor], clinic: Clinic) -> None:
    if fits(node_gradients) or any(name.endswith(":scale") for name in node_gradients):
        return
    header = {"operation": "compute_gradients", "run": "one", "number": 0, "query": "gradient"}
    reply, released = unpack(clinic.host.serve(pack(header, node_gradients)))
    assert reply["error"]["kind"] == "QueryRefused"
    assert not released


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(node_gradients=PULLS)
def test_malformed_scales_raise_typed_errors(node_gradients: dict[str, torch.Tensor], clinic: Clinic) -> None:
    header = {"operation": "compute_gradients", "run": "one", "number": 0, "query": "gradient"}
    if fits({name: tensor for name, tensor in node_gradients.items() if not name.endswith(":scale")}):
        return
    reply, _ = unpack(clinic.host.serve(pack(header, node_gradients)))
    assert reply["error"]["kind"] in ("QueryRefused", "DataError")


def test_valid_gradients_work_after_malformed_ones(clinic: Clinic) -> None:
    clinic.query(7)
    assert clinic.say("compute_gradients", {}, number=7)["kind"] == "QueryRefused"
    _, released = clinic.say("compute_gradients", valid_gradients(0.5), number=7)
    assert released["d/dx"].shape == (B, 1, 8, 8)


def test_gradients_of_a_query_without_differentiable_inputs_are_refused() -> None:
    query = Query(response, sends={"x": INPUTS}, releases={"logits": LOGITS}, name="predict_logits")
    handler = RequestHandler(
        NodeGroup([node_of("a")]), NodeSide({"predict_logits": query}, setting=SETTING), Compute()
    )
    respond(handler, "predict_logits", 0, {"x": torch.ones(1, 2)}, True)
    with raises_refused("gradients: ", "no differentiable inputs", node="a"):
        backward(handler, 0, {"a": {"logits": OUTPUT_GRADIENTS}})


def test_refused_gradients_use_no_sum_number(tmp_path: Path) -> None:
    party = Party(tmp_path, NAMES)
    node, x = Masked(party.masks["a"], "size"), torch.ones(1, 2)
    node.respond(0, x, SumRequest(1, NAMES))
    for wrong, rule in (
        (OUTPUT_GRADIENTS.double(), "gradients: logits is torch.float64"),
        (OUTPUT_GRADIENTS[:, :1], "gradients: logits is torch.float32 (1, 1)"),
        (4 * OUTPUT_GRADIENTS, "sums: "),
    ):
        with raises_refused(rule, node="a"):
            node.backward(0, wrong, SumRequest(2, NAMES))
    assert node.backward(0, OUTPUT_GRADIENTS, SumRequest(2, NAMES))
    node.respond(1, x, SumRequest(3, NAMES))
    node.respond(2, x, SumRequest(4, NAMES))
    with pytest.raises(QueryMismatch):  # the graph of query 1 was freed
        node.backward(1, OUTPUT_GRADIENTS, SumRequest(5, NAMES))
