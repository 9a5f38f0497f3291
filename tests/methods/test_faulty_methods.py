"""Faulty tensors of a method are refused before any node computes, and attributed to the server."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import fedstill
from fedstill.core.compute import Compute
from fedstill.core.errors import DataError, QueryRefused
from fedstill.methods import Method, NodeSetting, NodeView, Query, Server, payload_kinds
from fedstill.models import build
from fedstill.node.node_group import NodeGroup
from fedstill.node.request_handler import RequestHandler
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks.classification import Classification
from tests.support.bright_rows import SHAPE, few
from tests.support.request_handlers import respond
from tests.support.small_world import make_nodes

CALLS: list[str] = []  # nodes that have computed
SOUND = {
    "x": torch.zeros(4, *SHAPE),
    "consensus": torch.zeros(4, 3),
    "rows": torch.zeros(4, dtype=torch.int64),
    "round": torch.tensor(0),
}
NAN, INF = float("nan"), float("inf")
FAULTS = {
    "NaN": ("consensus", torch.full((4, 3), NAN), "not finite, consensus hold NaN"),
    "one infinity": ("x", torch.full((4, *SHAPE), INF), "not finite, x hold NaN or infinity"),
    "wrong width": (
        "consensus",
        torch.zeros(4, 2),
        "consensus: torch.float32 (4, 2) (expected float32 (B, 3))",
    ),
    "wrong shape": ("x", torch.zeros(4, 1, 5, 5), "x: torch.float32 (4, 1, 5, 5) (expected float32 (B, 1, "),
    "wrong dtype": ("consensus", torch.zeros(4, 3).double(), "consensus: torch.float64 (4, 3)"),
    "rows with fractions": (
        "rows",
        torch.zeros(4),
        "rows: torch.float32 (4,) (expected int32 or int64 (N,))",
    ),
    "several rounds": ("round", torch.zeros(2).long(), "round: torch.int64 (2,) (expected int64 ())"),
}


@dataclass(frozen=True, kw_only=True)
class Faulty(Method):
    """Sends one query with a faulty tensor."""

    title: ClassVar[str] = "Faulty"
    initial_training: ClassVar[None] = None
    rounds: int = 1
    fault: str = ""

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        kinds = payload_kinds
        sends = {"x": kinds.INPUTS, "consensus": kinds.LOGITS, "rows": kinds.INDICES, "round": kinds.SCHEDULE}
        yield Query(self.respond, sends=sends, releases={"logits": kinds.LOGITS}, times=1)

    def respond(self, node: NodeView, x: torch.Tensor, **sent: Any) -> Mapping[str, torch.Tensor]:
        CALLS.append(node.name)
        return {"logits": node.model(x)}

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        return {"mean": server.query("respond", **self.tensors())["logits"].mean().item()}

    def tensors(self) -> dict[str, torch.Tensor]:
        if not self.fault:
            return SOUND
        name, tensor, _ = FAULTS[self.fault]
        return {**SOUND, name: tensor}


def run(method: Faulty, **changes: Any) -> None:
    policies = [fedstill.PolicyConfig(outputs_only=False)] * 2
    fedstill.distil(**few(method=method, policies=policies, **changes))


@pytest.mark.parametrize("quorum", [0.5, 1.0])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_method_are_server_errors(fault: str, quorum: float) -> None:
    CALLS.clear()
    with pytest.raises(DataError, match=f"the server sent .*{re.escape(FAULTS[fault][2])}") as caught:
        run(Faulty(fault=fault), link=fedstill.LinkConfig(quorum=quorum))
    assert "node-" not in str(caught.value)
    assert CALLS == []


def test_valid_tensors_are_accepted() -> None:
    CALLS.clear()
    run(Faulty())
    assert CALLS == ["node-0", "node-1"]


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "not finite" not in FAULTS[fault][2]])
def test_node_refuses_invalid_tensors_before_computation(fault: str) -> None:
    """For servers that do not check what they send."""
    CALLS.clear()
    nodes = make_nodes([build("mlp:4", SHAPE, 3, 0)])
    nodes[0].gate.output_shape = (3,)
    side = Faulty().node_side(NodeSetting(Classification(3), LocalConfig(), Compute()))
    handler = RequestHandler(NodeGroup(nodes), side, Compute())
    with pytest.raises(QueryRefused, match=f"the server sent {re.escape(FAULTS[fault][2])}"):
        respond(handler, "respond", 0, Faulty(fault=fault).tensors(), False)
    assert CALLS == []
    respond(handler, "respond", 0, Faulty().tensors(), False)
    assert len(CALLS) == 1
