"""Masked sums compared with a slow reference: exact weighted means over the remaining nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import NodeFault, QueryMismatch
from fedstill.federation.federation import Federation, SentQuery
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.secure_aggregation import MaskExchange, SecureAggregation
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.protocol.messages import Message
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import SUM, SumWeighting, from_ring
from fedstill.protocol.wire_format import Tensors
from tests.support.errors import raises_refused
from tests.support.kits import Deployed, Party

NAMES = ("n0", "n1", "n2", "n3", "n4")
CLASSES = 2
NUMBERS = st.floats(-100, 100, width=32)


class Nearby(Federation):
    """Deployed nodes that are called directly; ``lost`` ones fail before their contribution arrives."""

    def __init__(self, members: Mapping[str, Deployed], quorum: float, lost: Sequence[str] = ()) -> None:
        side = next(iter(members.values())).side
        super().__init__(list(members), side.queries, LinkConfig(secure_aggregation=True, quorum=quorum))
        self.members, self.lost, self.received = members, set(lost), list[Tensors]()
        self.node_status, self.sender = {name: object() for name in members}, self

    def collect_responses(self, queried: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        responses: dict[str, Tensors] = {}
        for name in queried:
            node = self.members[name]
            received = ReceivedTensors.of_query(node.side.queries[sent.query], sent.tensors)
            response = node.sums.respond(
                node.handler, sent.number, received, sent.differentiable, sent.encoding
            )
            if name in self.lost:
                self.exclude(name, sent.query, "it is gone", may_rejoin=True)
            else:
                responses[name] = response
        self.received += responses.values()
        return responses

    def collect_gradients(
        self, number: int, query: str, pulls: Mapping[str, Tensors], encoding: Any = None
    ) -> Mapping[str, Tensors]:
        gradients = {}
        for name, pull in pulls.items():
            node, received = self.members[name], ReceivedTensors.of_gradients(query, pull)
            gradients[name] = node.sums.backward(node.handler, number, received, encoding)
        self.received += gradients.values()
        return gradients

    def call_nodes(self, nodes: Sequence[str], operation: str, call: Any) -> dict[str, Any]:
        return {name: call(name) for name in nodes}

    def pack(self, message: Message) -> Message:
        return message

    def deliver(self, node: str, operation: str, message: Any) -> Any:
        return SimpleNamespace(tensors=self.members[node].sums.serve(message, {})[1])

    def send(self, node: str, message: Any, tensors: Tensors | None = None) -> dict[str, Any]:
        reply, _ = self.members[node].sums.serve(message, tensors or {})
        return {} if reply is None else asdict(reply)

    def _refusal_rule(self, node: str, query: Query) -> str | None:
        return None

    def _query_limit(self, node: str) -> int | None:
        return None


@pytest.fixture(scope="module")
def party(tmp_path_factory: pytest.TempPathFactory) -> Party:
    return Party(tmp_path_factory.mktemp("nodes"), NAMES)


def deploy(
    party: Party, z: Mapping[str, torch.Tensor], weighting: SumWeighting, counts: Mapping[str, list[float]]
) -> dict[str, Deployed]:
    members = {}
    for name in NAMES:
        members[name] = Deployed(party.start_node(name), z[name], weighting, multiplies=True)
        own = torch.tensor(counts[name])
        members[name].sums.counts = {"counts": own, "size": own.sum()}
    return members


def weighted_sum(
    values: Mapping[str, torch.Tensor], weights: Mapping[str, list[Fraction]]
) -> tuple[list[Fraction], list[Fraction]]:
    """Return the exact sums of weighted values and of weights, by class."""
    total, weight = [Fraction(0)] * CLASSES, [Fraction(0)] * CLASSES
    for name, value in values.items():
        for c in range(CLASSES):
            total[c] += weights[name][c] * Fraction(value[0, c].item())
            weight[c] += weights[name][c]
    return total, weight


@settings(max_examples=20, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=CLASSES * len(NAMES), max_size=CLASSES * len(NAMES)),
    sizes=st.lists(st.integers(1, 5000), min_size=CLASSES * len(NAMES), max_size=CLASSES * len(NAMES)),
    x=st.lists(st.floats(-4, 4, width=32), min_size=CLASSES, max_size=CLASSES),
    weighting=st.sampled_from(["sum", "mean", "size", "counts"]),
    lost=st.sets(st.sampled_from(NAMES), max_size=2),
)
def test_masked_sum_equals_slow_reference(
    numbers: list[float],
    sizes: list[int],
    x: list[float],
    weighting: SumWeighting,
    lost: set[str],
    party: Party,
) -> None:
    """Also with nodes that drop out between the query and their response, and for gradients."""
    z = {name: torch.tensor([numbers[CLASSES * k :][:CLASSES]]) for k, name in enumerate(NAMES)}
    counts = {name: [float(n) for n in sizes[CLASSES * k :][:CLASSES]] for k, name in enumerate(NAMES)}
    members = deploy(party, z, weighting, counts)
    engine = Nearby(members, quorum=0.5, lost=sorted(lost))
    server = SecureAggregation(engine, MaskExchange(engine))  # type: ignore[arg-type]
    inputs, pull = torch.tensor([x], requires_grad=True), torch.tensor([[0.5, -0.75]])

    responses = server.query("predict", x=inputs)
    (responses["z"] * pull).sum().backward()

    remaining = [name for name in NAMES if name not in lost]
    assert (responses.nodes, list(engine.excluded)) == ((SUM,), sorted(lost))
    size = {name: [Fraction(sum(counts[name]))] * CLASSES for name in NAMES}
    one = {name: [Fraction(1)] * CLASSES for name in NAMES}
    by_class = {name: [Fraction(n) for n in counts[name]] for name in NAMES}
    weights = {"sum": one, "mean": one, "size": size, "counts": by_class}[weighting]
    assert inputs.grad is not None
    responses_alone = {name: z[name] * torch.tensor([x]) for name in remaining}
    gradients_alone = {name: z[name] * pull for name in remaining}
    for read, each, bits in (
        (responses["z"][0, 0].detach(), responses_alone, 32),
        (inputs.grad[0], gradients_alone, 36),
    ):
        total, weight = weighted_sum(each, weights)
        for c in range(CLASSES):
            divisor = Fraction(1) if weighting == "sum" else weight[c]
            largest = max(abs(Fraction(value[0, c].item())) for value in each.values())
            # Rounding to the ring, and rounding of float32: of the result, and of a gradient's factors.
            ring = len(remaining) * Fraction(2, 2 ** (bits + 1))
            rounding = 8 * largest * weight[c] / 2**23
            assert abs(Fraction(read[c].item()) - total[c] / divisor) <= (ring + rounding) / divisor
    for tensors in engine.received:
        masked = from_ring(next(iter(tensors.values())))
        assert bool((masked.abs() > 1).any()), "all contributions are masked"


def test_node_that_drops_out_without_recovery_loses_the_sum(party: Party) -> None:
    z = {name: torch.ones(1, CLASSES) for name in NAMES}
    members = deploy(party, z, "sum", {name: [1.0, 1.0] for name in NAMES})
    engine = Nearby(members, quorum=1.0, lost=["n1"])
    server = SecureAggregation(engine, MaskExchange(engine))  # type: ignore[arg-type]

    with pytest.raises(NodeFault, match="it is gone; 4 of 5 nodes"):
        server.query("predict", x=torch.ones(1, CLASSES))


def test_server_cannot_read_less_than_three_survivors(party: Party) -> None:
    z = {name: torch.ones(1, CLASSES) for name in NAMES}
    members = deploy(party, z, "sum", {name: [1.0, 1.0] for name in NAMES})
    engine = Nearby(members, quorum=0.2, lost=["n1", "n2", "n3"])
    server = SecureAggregation(engine, MaskExchange(engine))  # type: ignore[arg-type]

    with raises_refused("sums: 2", "3 or more"):
        server.query("predict", x=torch.ones(1, CLASSES))


def test_repeated_query_gives_no_other_sum(party: Party) -> None:
    """The nodes' masks belong to the first sum; they refuse to use the same number for another one."""
    z = {name: torch.ones(1, CLASSES) for name in NAMES}
    members = deploy(party, z, "sum", {name: [1.0, 1.0] for name in NAMES})
    engine = Nearby(members, quorum=0.5)
    server = SecureAggregation(engine, MaskExchange(engine))  # type: ignore[arg-type]
    x = torch.ones(1, CLASSES)
    first = server.query("predict", number=0, x=x)["z"]

    with pytest.raises(QueryMismatch):
        server.query("predict", number=0, x=x)
    assert torch.equal(server.query("predict", x=x)["z"], first)
