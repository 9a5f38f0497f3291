"""The same seed gives the same figures on every engine, and ``auto`` chooses by measuring."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.federation import inprocess
from fedstill.federation.inprocess import InProcess, choose, partition
from fedstill.methods._server import Server
from fedstill.methods.fediod import FedIOD
from fedstill.models import build
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import Group
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.questions import NodeSetting
from fedstill.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("steady_adam")

SHAPE, TASK = (1, 8, 8), Classification(3)
ALIKE = ("small-cnn:4",) * 4
RESNETS = ("resnet8:4",) * 3
MIXED = ("mlp:8", "small-cnn:4", "mlp:8", "resnet8:4", "small-cnn:4")
CONFIG = FedIOD(
    steps=4,
    batch=6,
    noise=6,
    generator_width=4,
    critic_width=4,
    memory=20,
    student_steps=2,
    student_batch=8,
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
    """Some steps of FedIOD; all that an engine could change."""
    compute, audit = Compute(EngineConfig(name=engine)), AuditLog()  # type: ignore[arg-type]
    nodes = nodes_of(specs, audit)
    side = config.node_side(NodeSetting(TASK, LocalConfig(), Compute()))
    side.prepare(nodes)
    groups, _ = choose(nodes, compute, side.rehearse)
    federation = InProcess(nodes, groups, side, compute)
    student = build("mlp:8", SHAPE, 3, 0, "student")
    place = (federation, student, TASK, SHAPE, (0.5,), (0.5,), compute, 0, LocalConfig())
    server = Server(config, *place)
    losses = [list(server.step().values()) for _ in range(steps)]
    probe = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(9))
    return {
        "groups": [len(group) for group in groups],
        "losses": torch.tensor(losses),
        "student": [p.detach() for p in student.parameters()],
        "critics": [node.modules["critic"](probe).detach() for node in nodes],
        "audit": audit.summary(),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(one["losses"], other["losses"], rtol=1e-3, atol=1e-5)
    for part in ("student", "critics"):
        for mine, expected in zip(one[part], other[part], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-2, atol=1e-4)
    assert one["audit"] == other["audit"]


# --- equal figures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"importance": "counts", "gan_form": "eq2", "ensemble": "logits"},
        {"importance": "fakeness", "gan_form": "bce", "ensemble": "probs", "gan_weights": "expertise"},
        {"importance": "realness", "gan_form": "eq2", "ensemble": "consensus", "gan_weights": "expertise"},
        {"importance": "realness", "gan_form": "bce", "gan_weights": "average", "student_inputs": "fresh"},
    ],
)
@pytest.mark.parametrize("specs", [ALIKE, MIXED, RESNETS], ids=["alike", "mixed", "resnets"])
def test_stacked_and_one_by_one_give_equal_figures(specs: Any, options: dict[str, Any]) -> None:
    config = FedIOD(**{**vars(CONFIG), **options})
    stacked, alone = (distilled(specs, config, engine) for engine in ("stacked", "one-by-one"))
    assert max(stacked["groups"]) > 1
    assert set(alone["groups"]) == {1}
    same(stacked, alone)


def test_the_figures_do_depend_on_the_option_that_is_compared() -> None:
    """Or else equality above would say nothing."""
    figures = [
        distilled(ALIKE, FedIOD(**{**vars(CONFIG), "importance": how}), "stacked")["losses"]
        for how in ("counts", "fakeness", "realness")
    ]
    for one, other in itertools.combinations(figures, 2):
        assert (one - other).abs().max() > 1e-4


# --- choosing ------------------------------------------------------------------------------------


class Clock:
    """A clock that only a trial moves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(inprocess, "time", clock)
    return clock


def sizes(groups: list[list[Node]]) -> list[list[str]]:
    return [[node.name for node in group] for group in groups]


AUTO = Compute(EngineConfig(name="auto"))


@pytest.mark.parametrize(
    ("stacked_cost", "expected"),
    # A near tie goes to one by one.
    [(3.0, [["n0", "n1", "n2"]]), (4.4, [["n0"], ["n1"], ["n2"]]), (100.0, [["n0"], ["n1"], ["n2"]])],
)
def test_auto_takes_what_measures_faster(
    clock: Clock, stacked_cost: float, expected: list[list[str]]
) -> None:
    def trial(group: Group) -> None:  # one by one: 4.5 in all
        clock.now += stacked_cost if len(group) > 1 else 1.5

    groups, ratios = choose(nodes_of(RESNETS), AUTO, trial)
    assert sizes(groups) == expected
    assert ratios == {"n0": pytest.approx(stacked_cost / 4.5, abs=1e-3)}


def test_each_kind_is_measured_for_itself(clock: Clock) -> None:
    def trial(group: Group) -> None:
        slow_when_stacked = isinstance(group.nodes[0].model[0], nn.Conv2d)  # type: ignore[index]
        clock.now += 10.0 if slow_when_stacked and len(group) > 1 else 1.0

    groups, ratios = choose(nodes_of(MIXED), AUTO, trial)
    assert sizes(groups) == [["n0", "n2"], ["n1"], ["n4"], ["n3"]]
    assert ratios == {"n0": 0.5, "n1": 5.0}


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
def test_a_named_engine_is_taken_without_measuring(engine: Any) -> None:
    def trial(group: Group) -> None:
        raise AssertionError("nothing to measure")

    nodes = nodes_of(MIXED)
    groups, ratios = choose(nodes, Compute(EngineConfig(name=engine)), trial)
    assert sizes(groups) == sizes(partition(nodes, engine == "stacked"))
    assert ratios == {}


def test_a_rehearsal_leaves_the_nodes_untouched() -> None:
    audit = AuditLog()
    nodes = nodes_of(MIXED, audit)
    side = CONFIG.node_side(NodeSetting(TASK, LocalConfig(), Compute()))
    side.prepare(nodes)
    nodes[0].model.train()
    parameters = [p for node in nodes for module in node.modules.values() for p in module.parameters()]
    states = copy.deepcopy([node.state() for node in nodes])
    modes = [m.training for node in nodes for module in node.modules.values() for m in module.modules()]
    wanted, rng = [p.requires_grad for p in parameters], torch.get_rng_state()
    calls = []

    def trial(group: Group) -> None:
        calls.append(len(group))
        side.rehearse(group)

    choose(nodes, AUTO, trial)
    assert set(calls) == {1, 2}
    after = [p for node in nodes for module in node.modules.values() for p in module.parameters()]
    assert all(p is q for p, q in zip(parameters, after, strict=True))
    assert [p.requires_grad for p in after] == wanted
    assert all(p.grad is None for p in after)
    now = [m.training for node in nodes for module in node.modules.values() for m in module.modules()]
    assert now == modes
    for node, old in zip(nodes, states, strict=True):
        for role, values in old["modules"].items():
            for name, value in values.items():
                assert torch.equal(node.modules[role].state_dict()[name], value)
        assert not node.optimisers["critic"].state
    assert torch.equal(torch.get_rng_state(), rng)
    assert audit.summary() == AuditLog().summary()
