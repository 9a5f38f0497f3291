"""A plan that asks a node for huge networks gets none, and the node keeps its memory."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.errors import ArgumentError, QueryRefused
from fedstill.node.limits import wrap_with_parameter_limit
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import GENERATOR_PARAMETERS
from fedstill.protocol.queries import Query
from tests.support.node_services import FEDIOD, PLAN, Clinic
from tests.support.small_world import SETTING

HUGE = {
    "critic": {**FEDIOD, "critic": {"width": 10**6}},  # 1.3e14 bytes
    "overflow": {**FEDIOD, "critic": {"width": 10**12}},
    "generator": {"name": "fedmd-cg", "rounds": 1, "generator": {"width": 10**6}},
}
OPEN = "outputs_only = false"


def joined(folder: Path, method: dict[str, Any], policy: str = OPEN) -> Any:
    """What a node says to a plan."""
    clinic = Clinic(folder, policy, dataclasses.replace(PLAN, method=method))
    reply = clinic.say("join", plan=clinic.plan.to_dict())
    if clinic.host.session is not None:
        clinic.say("leave")
    return reply


@pytest.mark.parametrize("which", HUGE)
def test_plan_with_huge_networks_is_refused_before_they_have_memory(tmp_path: Path, which: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reply = joined(tmp_path / "clinic", HUGE[which])
    assert reply["kind"] == "QueryRefused"
    assert reply["rule"] == "max_parameters: 50000000, and the plan's networks have more"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_parameter_limit_is_exact(tmp_path: Path) -> None:
    """FedIOD's critic of width 4 on one channel: 68 + (520 + 16) + 9 parameters."""
    assert "rule" in joined(tmp_path / "less", FEDIOD, "max_parameters = 612")
    reply, _ = joined(tmp_path / "enough", FEDIOD, "max_parameters = 613")
    assert reply["refused_queries"] == {}
    reply, _ = joined(tmp_path / "none", FEDIOD, "max_parameters = 0")
    assert reply["refused_queries"] == {}
    with pytest.raises(ArgumentError, match="max_parameters = -1"):
        PolicyConfig(max_parameters=-1)


def test_query_with_large_network_is_refused() -> None:
    """FedGEN makes the server's generator at each round."""
    made: list[nn.Module] = []

    def function(node: object) -> dict[str, torch.Tensor]:
        made.append(nn.Linear(100, 100))
        return {}

    sends = {"generator": GENERATOR_PARAMETERS}
    queries = {"train": Query(function, sends=sends, name="train"), "other": Query(function, name="other")}
    side = wrap_with_parameter_limit(NodeSide(queries, SETTING), 10_000, "clinic")
    with pytest.raises(QueryRefused, match="'train' by rule max_parameters: 10000"):
        side.queries["train"].function(None)
    assert not made
    side.queries["other"].function(None)
    wrap_with_parameter_limit(NodeSide(queries, SETTING), 10_100, "clinic").queries["train"].function(None)
    assert len(made) == 2
