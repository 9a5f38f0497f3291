"""The same seed gives the same metrics on every engine, and ``auto`` selects the right engine."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedstill.core.compute import Compute, EngineConfig, Workers
from fedstill.core.dataset import TensorData
from fedstill.federation.inprocess import InProcess
from fedstill.methods._discriminators import Discriminators
from fedstill.methods._input_generators import InputGenerator
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods._server import Server
from fedstill.methods.fediod import FedIOD
from fedstill.models import PatchCritic, build
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.runs.simulation import group_nodes, should_stack
from fedstill.tasks.classification import Classification
from tests.support.small_world import changed

pytestmark = pytest.mark.usefixtures("steady_adam")

SHAPE, TASK = (1, 8, 8), Classification(3)
ALIKE = ("small-cnn:4",) * 4
RESNETS = ("resnet8:4",) * 3
MIXED = ("mlp:8", "small-cnn:4", "mlp:8", "resnet8:4", "small-cnn:4")
CONFIG = FedIOD(
    steps=4,
    batch=6,
    generator=InputGenerator(noise=6, width=4),
    critic=Discriminators(width=4, batch=32),
    student=ReplayTraining(memory=20, steps=2, batch=8),
    ensemble="log_probs",
)


def nodes_of(specs: tuple[str, ...], audit: AuditLog | None = None) -> list[Node]:
    nodes = []
    for index, spec in enumerate(specs):
        generator = torch.Generator().manual_seed(index)
        size = 7 + 3 * index
        inputs = torch.randn(size, *SHAPE, generator=generator)
        targets = torch.randint(min(index + 1, 3), (size,), generator=generator)
        gate = Gate(f"n{index}", PolicyConfig(), audit or AuditLog())
        model = build(spec, SHAPE, 3, 0, index).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)  # so that the nodes disagree
        nodes.append(Node(f"n{index}", TensorData(inputs, targets), model, gate, 0))
    return nodes


def distilled(specs: tuple[str, ...], config: FedIOD, engine: str, steps: int = 3) -> dict[str, Any]:
    """Run some steps of FedIOD; return everything that an engine could change."""
    compute, audit = Compute(EngineConfig(batching=engine)), AuditLog()  # type: ignore[arg-type]
    nodes = nodes_of(specs, audit)
    side = config.node_side(NodeSetting(TASK, LocalConfig(), Compute()))
    for node in nodes:
        side.prepare(node)
    groups = group_nodes(nodes, should_stack(compute, nodes))
    federation = InProcess(nodes, groups, side, compute)
    student = build("mlp:8", SHAPE, 3, 0, "student")
    arguments = (federation, student, TASK, SHAPE, (0.5,), (0.5,), compute, 0, LocalConfig())
    server = Server(config, *arguments)
    losses = [list(server.step().values()) for _ in range(steps)]
    probe = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(9))
    return {
        "groups": [len(group) for group in groups],
        "losses": torch.tensor(losses),
        "student": [p.detach() for p in student.parameters()],
        "critics": [node.modules["critic"](probe).detach() for node in nodes],
        "audit": audit.traffic_totals(),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(one["losses"], other["losses"], rtol=1e-3, atol=1e-5)
    for part in ("student", "critics"):
        for mine, expected in zip(one[part], other[part], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-2, atol=1e-4)
    assert one["audit"] == other["audit"]


# --- equal metrics -------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "options",
    [
        {"importance": "counts", "critic": {"loss": "eq2"}, "ensemble": "logits"},
        {
            "importance": "fakeness",
            "critic": {"loss": "bce"},
            "ensemble": "probs",
            "gan_weights": "expertise",
        },
        {
            "importance": "realness",
            "critic": {"loss": "eq2"},
            "ensemble": "consensus",
            "gan_weights": "expertise",
        },
        {
            "importance": "realness",
            "critic": {"loss": "bce"},
            "gan_weights": "average",
            "student_inputs": "fresh",
        },
        {"importance": "odds", "ensemble": "probs", "student_inputs": "fresh"},
    ],
)
@pytest.mark.parametrize("specs", [ALIKE, MIXED, RESNETS], ids=["alike", "mixed", "resnets"])
def test_stacked_and_one_by_one_reach_equal_metrics(specs: Any, options: dict[str, Any]) -> None:
    config = changed(CONFIG, **options)
    stacked, alone = (distilled(specs, config, engine) for engine in ("stacked", "one-by-one"))
    assert max(stacked["groups"]) > 1
    assert set(alone["groups"]) == {1}
    same(stacked, alone)


def test_metrics_depend_on_compared_option() -> None:
    """Otherwise the equality above would be meaningless."""
    metrics = [
        distilled(ALIKE, changed(CONFIG, importance=how), "stacked")["losses"]
        for how in ("counts", "fakeness", "realness", "odds")
    ]
    for one, other in itertools.combinations(metrics, 2):
        assert (one - other).abs().max() > 1e-4


# --- selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "device", "network", "count", "stacked"),
    [
        ("auto", "cpu", "small-cnn:4", 7, False),
        ("auto", "cpu", "mlp:8", 7, True),
        ("auto", "cpu", "mlp:8", 6, False),
        ("auto", "cuda", "small-cnn:4", 2, True),
        ("stacked", "cpu", "small-cnn:4", 2, True),
        ("one-by-one", "cpu", "mlp:8", 7, False),
        ("one-by-one", "cuda", "small-cnn:4", 2, False),
    ],
)
def test_should_stack_equal_architectures(
    engine: Any, device: str, network: str, count: int, stacked: bool
) -> None:
    compute: Any = SimpleNamespace(
        config=EngineConfig(batching=engine), device=torch.device(device), workers=Workers(2)
    )
    assert should_stack(compute, nodes_of((network,) * count)) == stacked


@pytest.mark.parametrize(
    ("network", "alone", "graphs", "stacked"),
    [
        ("small-cnn:4", False, True, True),
        ("resnet8:96", False, True, False),  # 2.7 million parameters fill a GPU
        ("small-cnn:4", True, True, False),  # captured steps of one node after another are faster
        ("small-cnn:4", True, False, True),
    ],
)
def test_should_not_stack_large_networks_or_captured_training_on_gpu(
    network: str, alone: bool, graphs: bool, stacked: bool
) -> None:
    compute = Compute(EngineConfig(cuda_graphs=graphs))
    compute.device = torch.device("cuda")
    assert should_stack(compute, nodes_of((network,) * 2), local_training=alone) == stacked


def test_should_not_stack_nodes_with_convolutional_critics() -> None:
    compute, nodes = Compute(EngineConfig(batching="auto")), nodes_of(("mlp:8",) * 7)
    compute.workers = Workers(2)
    assert should_stack(compute, nodes)
    nodes[1].add_module("critic", PatchCritic(1, 4), lambda critic: torch.optim.Adam(critic.parameters()))
    assert not should_stack(compute, nodes)


def test_group_nodes_by_architecture() -> None:
    groups = [[node.name for node in group] for group in group_nodes(nodes_of(MIXED), True)]
    assert groups == [["n0", "n2"], ["n1", "n4"], ["n3"]]
