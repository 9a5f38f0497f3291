"""State of a method's server: all attributes of the method's state are saved, whatever their type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fedstill.core.checkpoint import load_state, save_state
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.federation.inprocess import InProcess
from fedstill.methods._optimizers import adam, descend
from fedstill.methods._server import Server
from fedstill.node.node_view import NodeView
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method, build_node_side
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.payload_kinds import INPUTS, LOGITS, SCHEDULE, PayloadKind
from fedstill.protocol.queries import Query
from fedstill.tasks.classification import Classification
from tests.support.errors import raises_invalid
from tests.support.small_world import make_nodes

SHARE = PayloadKind("share", "the released share of the outputs", category="query")


class Box:
    """An object with its own state, which a method's state contains."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.seen = list(state["seen"])


@dataclass
class Everything:
    G: nn.Module
    adam: torch.optim.Optimizer
    box: Box
    several: dict[str, Any]
    none: torch.Tensor | None = None
    late: torch.Tensor | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    pair: tuple[int, str] = (0, "")


@dataclass(frozen=True, kw_only=True)
class Keeps(Method):
    title: ClassVar[str] = "Keeps"
    rounds: int = 4

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        sends = {"x": INPUTS, "t": SCHEDULE, "share": SHARE}
        yield Query(self.predict, sends=sends, releases={"logits": LOGITS})

    def predict(self, node: NodeView, x: torch.Tensor, t: int, share: float) -> dict[str, torch.Tensor]:
        assert isinstance(t, int)
        assert isinstance(share, float)
        return {"logits": node.model(x) * share + t}

    def init_state(self, server: Server) -> Everything:
        torch.manual_seed(0)
        G, other = nn.Linear(3, 2), nn.Linear(2, 2)
        several = {"net": other, "adam": torch.optim.Adam(other.parameters()), "count": 0}
        return Everything(G, torch.optim.Adam(G.parameters()), Box(), several)

    def step(self, server: Server, state: Everything, t: int) -> Mapping[str, float]:
        for net, optimizer in ((state.G, state.adam), (state.several["net"], state.several["adam"])):
            loss = net(torch.full((1, net.in_features), t + 1.0)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        logits = server.query("predict", x=torch.ones(2, 1, 2, 2), t=t, share=0.5)[
            "logits"
        ]  # (K, 2, classes)
        state.box.seen.append(logits.mean().item())
        state.late = logits.mean(0) if state.late is None else state.late + logits.mean(0)
        state.several["count"] += 1
        state.numbers[f"turn {t}"], state.pair = logits.sum().item(), (t, "so")
        with torch.no_grad():
            server.student[1].weight += logits.mean()
        return {"loss": loss.item()}


def made() -> Server:
    method, task, compute = Keeps(), Classification(2), Compute()
    torch.manual_seed(1)
    nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 2)) for _ in range(3)]
    data = TensorData(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]))
    nodes = make_nodes(nets[:2], data=lambda index: data)
    side = build_node_side(method, NodeSetting(task, LocalConfig(), compute))
    federation = InProcess(nodes, [[node] for node in nodes], side, compute)
    arguments = (federation, nets[2], task, (1, 2, 2), (0.5,), (0.5,), compute, 0, LocalConfig())
    return Server(method, *arguments)


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_saves_and_restores_whole_state(stop: int, tmp_path: Path) -> None:
    whole, first = made(), made()
    expected = [whole.step() for _ in range(4)]
    assert [first.step() for _ in range(stop)] == expected[:stop]
    save_state(tmp_path / "state", first.state_dict())
    second = made()
    second.load_state_dict(load_state(tmp_path / "state"))
    assert (second.completed_steps, second.total_steps, second.unit) == (stop, 4, "round")
    assert [second.step() for _ in range(4 - stop)] == expected[stop:]
    for name in ("numbers", "pair", "none"):
        assert getattr(second.state, name) == getattr(whole.state, name), name
    assert torch.equal(second.state.late, whole.state.late)
    assert second.state.box.seen == whole.state.box.seen
    assert second.state.several["count"] == 4
    for mine, theirs in ((second.student, whole.student), (second.state.G, whole.state.G)):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert second.federation.number == whole.federation.number == 4


def test_adam_and_descend_skip_frozen_parameters() -> None:
    network = nn.Linear(2, 1)
    network.bias.requires_grad_(False)
    optimizer, before = adam(network, 0.1), network.weight.clone()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    descend(optimizer, network(torch.ones(1, 2)).sum())
    assert not torch.equal(network.weight, before)
    with raises_invalid("loss of descend", "a tensor without gradient"):
        descend(optimizer, network(torch.ones(1, 2)).sum().detach())
    with raises_invalid("network of adam", "Linear", "a network"):
        adam(network.requires_grad_(False), 0.1)
