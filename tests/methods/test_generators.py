"""What FedMD-CG, FedCG and FedGEN share: messages, engines, going on after a stop, crossed distillation."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, QuestionRefused
from fedstill.core.state import load_state, save_state
from fedstill.federation import InProcess
from fedstill.methods._generators import imagined
from fedstill.methods._uploads import Uploads, crossed, ensembled, kl
from fedstill.methods.fedcg import FedCG
from fedstill.methods.fedgen import FedGEN
from fedstill.methods.fedmd_cg import FedMDCG
from fedstill.methods.server import Server, ServerSetting
from fedstill.models import build
from fedstill.models.features import FeatureGenerator, condition
from fedstill.models.split import Split, split
from fedstill.models.vector import to_vector, weighted_mean
from fedstill.node.audit import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.method import Method
from fedstill.protocol.questions import NodeSetting
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("steady_adam")

SHAPE, CLASSES, SEED = (1, 8, 8), 3, 4
LOCAL = LocalConfig(epochs=2, batch=4)
SMALL: dict[str, Any] = {
    "rounds": 3,
    "noise": 4,
    "generator_width": 6,
    "server_steps": 3,
    "server_batch": 8,
    "server_lr": 0.001,
}
METHODS = [
    pytest.param(FedMDCG(**SMALL), id="fedmd-cg"),
    pytest.param(FedCG(**SMALL), id="fedcg"),
    pytest.param(FedGEN(**SMALL), id="fedgen"),
    pytest.param(FedGEN(**SMALL, shares="model"), id="fedgen, whole models"),
]


@dataclass
class World:
    nodes: list[Node]
    server: Server
    audit: AuditLog


def world(
    method: Method,
    *,
    stacked: bool = True,
    count: int = 3,
    policy: PolicyConfig | None = None,
    local: LocalConfig = LOCAL,
) -> World:
    audit, nodes = AuditLog(), []
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        size = 9 + 5 * index
        inputs = torch.randn(size, *SHAPE, generator=generator)
        targets = torch.randint(min(index + 1, CLASSES), (size,), generator=generator)  # few classes each
        gate = Gate(f"n{index}", policy or PolicyConfig(outputs_only=False), audit)
        model = split(build("small-cnn:4", SHAPE, CLASSES, 0, index), "model")
        nodes.append(Node(f"n{index}", TensorData(inputs, targets), model, gate, SEED))
    task = Classification(CLASSES)
    side = method.node_side(NodeSetting(task, local, Compute()))
    side.prepare(nodes)
    groups = [nodes] if stacked else [[node] for node in nodes]
    federation = InProcess(nodes, groups, side, Compute())
    student = split(build("small-cnn:4", SHAPE, CLASSES, 0, "student"), "student")
    setting = ServerSetting(federation, student, task, SHAPE, (0.5,), (0.5,), Compute(), SEED, local)
    return World(nodes, Server(method, setting), audit)


def states(world: World) -> list[torch.Tensor]:
    """Everything that has been learned."""
    nodes = [to_vector(module) for node in world.nodes for module in node.modules.values()]
    return [to_vector(world.server.student), to_vector(world.server.state.G), *nodes]


def behaviour(world: World) -> list[torch.Tensor]:
    """What all networks give for some inputs."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(5, *SHAPE, generator=generator)
    c, f = (torch.randn(5, size, generator=generator) for size in (4 + CLASSES, 32 + CLASSES))
    inputs = {"model": x, "generator": c, "critic": f}
    networks = [("model", world.server.student), ("generator", world.server.state.G)]
    networks += [pair for node in world.nodes for pair in node.modules.items()]
    with torch.no_grad():
        return [module.eval()(inputs[role]) for role, module in networks]


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_extractor_is_in_no_message(method: Any) -> None:
    here = world(method)
    asked: list[tuple[str, dict[str, int]]] = []
    answer = here.server.federation.ask

    def listen(question: str, **given: Any) -> Any:
        answers = answer(question, **given)
        asked.append((question, {name: out[0].numel() for name, out in answers.tensors.items()}))
        return answers

    here.server.federation.ask = listen  # type: ignore[method-assign]
    for _ in range(method.rounds):
        here.server.step()
    model = here.nodes[0].model
    assert isinstance(model, Split)
    head, generator = to_vector(model.head).numel(), to_vector(here.server.state.G).numel()
    whole = to_vector(model).numel()
    if isinstance(method, FedGEN):
        each = {"parameters": whole if method.shares == "model" else head}
        kinds = {"parameters" if method.shares == "model" else "head parameters": each["parameters"]}
    else:
        each = {"generator": generator, "head": head}
        kinds = {"generator parameters": generator, "head parameters": head}
    assert asked == [("begin", {}), ("count_labels", {"counts": CLASSES, "sizes": 1})] + [("train", each)] * 3
    up = here.audit.summary()["by_kind"]
    expected = {kind: 4 * size * 3 * method.rounds for kind, size in kinds.items()}  # bytes, nodes, rounds
    assert {kind: told["up"] for kind, told in up.items() if told["up"]} == {
        **expected,
        "label counts": 4 * 3 * (CLASSES + 1),
    }


@pytest.mark.parametrize("method", METHODS)
def test_a_node_that_gives_outputs_only_refuses_before_anything_is_asked(method: Any) -> None:
    with pytest.raises(QuestionRefused, match=r"outputs_only: no .*parameters"):
        world(method, policy=PolicyConfig())


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_that_is_just_enough_for_the_run(method: Any) -> None:
    limit = 2 + method.rounds
    here = world(method, policy=PolicyConfig(outputs_only=False, most_questions=limit))
    for _ in range(method.rounds):
        here.server.step()
    with pytest.raises(QuestionRefused, match="most_questions"):
        world(method, policy=PolicyConfig(outputs_only=False, most_questions=limit - 1))


# --- engines and stops ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_stacked_and_one_by_one_give_the_same(method: Any) -> None:
    together, apart = world(method), world(method, stacked=False)
    for _ in range(method.rounds):
        one, other = together.server.step(), apart.server.step()
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
    for one, other in zip(behaviour(together), behaviour(apart), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_stopped_goes_on_to_the_same(method: Any, tmp_path: Path) -> None:
    method = replace(method, participation=0.7)  # another two of three nodes in each round
    unbroken, before = world(method), world(method)
    losses = [unbroken.server.step() for _ in range(method.rounds)]
    before.server.step()
    state = {"server": before.server.kept(), "nodes": [node.state() for node in before.nodes]}
    save_state(tmp_path / "state", state)

    after = world(method)
    saved = load_state(tmp_path / "state")
    for node, own in zip(after.nodes, saved["nodes"], strict=True):
        node.load(own)
    after.server.take_up(saved["server"])
    assert [after.server.step() for _ in range(method.rounds - 1)] == losses[1:]
    for one, other in zip(states(unbroken), states(after), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", METHODS)
def test_a_rehearsal_trains_copies_only(method: Any) -> None:
    here = world(method)
    before = [to_vector(module) for node in here.nodes for module in node.modules.values()]
    side = method.node_side(NodeSetting(Classification(CLASSES), LOCAL, Compute()))
    side.rehearse(Group([node.rehearsing() for node in here.nodes]))
    for old, new in zip(before, [m for node in here.nodes for m in node.modules.values()], strict=True):
        assert torch.equal(old, to_vector(new))


@pytest.mark.parametrize("method", METHODS)
def test_who_takes_part_is_averaged_by_data_size(method: Any) -> None:
    method = replace(method, participation=0.7, server_steps=0)
    here = world(method)
    for _ in range(2):
        asked: list[Any] = []
        answer = here.server.federation.ask
        here.server.federation.ask = lambda question, **given: (  # type: ignore[method-assign]
            asked.append(answer(question, **given)) or asked[-1]  # noqa: B023
        )
        here.server.step()
        here.server.federation.ask = answer  # type: ignore[method-assign]
        update = asked[-1]
        assert len(update.nodes) == 2
        sizes = torch.tensor([{"n0": 9.0, "n1": 14.0, "n2": 19.0}[name] for name in update.nodes])
        name = "parameters" if isinstance(method, FedGEN) else "head"
        shared = here.server.student if getattr(method, "shares", "") == "model" else here.server.student.head
        mean = weighted_mean(update[name], sizes)
        assert torch.equal(to_vector(shared), mean)  # type: ignore[arg-type]


# --- at the server, against plain loops ------------------------------------------------------------


def networks(nodes: int) -> tuple[FeatureGenerator, nn.Linear, Uploads]:
    """Unlike generators and heads, with running statistics of their own."""
    torch.manual_seed(0)
    G, D = FeatureGenerator(4, CLASSES, 5, 6), nn.Linear(5, CLASSES)
    generators, heads = [], []
    for _ in range(nodes):
        mine, head = FeatureGenerator(4, CLASSES, 5, 6), nn.Linear(5, CLASSES)
        with torch.no_grad():
            head.weight.mul_(3)
            for _ in range(5):
                mine(torch.randn(16, 4 + CLASSES))  # moves the running statistics
        generators.append(to_vector(mine))
        heads.append(to_vector(head))
    return G.eval(), D, Uploads(G, D, torch.stack(generators), torch.stack(heads))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(CLASSES, (6,), generator=generator)
    return condition(torch.randn(6, 4, generator=generator), y, CLASSES), y


def plain_kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p || q) of two distributions, as numbers."""
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p.tolist(), q.tolist(), strict=True))


def test_kl_is_from_its_first_argument() -> None:
    p, q = torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.5])
    forward, backward = kl(p.log(), q.log()).item(), kl(q.log(), p.log()).item()
    assert forward == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-5)
    assert backward == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5), rel=1e-5)
    assert abs(forward - backward) > 0.1
    assert kl(p.log() + 7, p.log() - 3).item() == pytest.approx(
        0.0, abs=1e-6
    )  # of logits, not log-probabilities


def test_eq_10_to_12_against_a_loop_over_nodes_and_examples() -> None:
    G, D, uploads = networks(3)
    c, y = batch()
    counts = [[5.0, 0.0, 2.0], [1.0, 4.0, 0.0], [2.0, 4.0, 8.0]]
    expected = [0.0, 0.0, 0.0]
    with torch.no_grad():
        for b in range(len(y)):
            label, one = int(y[b]), c[b : b + 1]
            total = sum(node[label] for node in counts)
            for i in range(3):
                G_i, D_i = uploads.generators.modules[i], uploads.heads.modules[i]
                tau = counts[i][label] / total
                rho_i = D_i(G_i(one))[0].softmax(0)
                students = (D(G(one)), D(G_i(one)), D_i(G(one)))  # rho_g, rho_ig, rho_gi
                for which, student in enumerate(students):
                    expected[which] += tau * plain_kl(student[0].softmax(0), rho_i) / len(y)
    tau_all = torch.tensor(counts) / torch.tensor(counts).sum(0)
    losses = crossed(uploads, G, D, c, tau_all[:, y])
    assert losses.tolist() == pytest.approx(expected, rel=1e-4)


def test_fedcgs_distillation_against_a_loop() -> None:
    G, D, uploads = networks(3)
    c, y = batch()
    pi = [0.2, 0.3, 0.5]
    expected = 0.0
    with torch.no_grad():
        for b in range(len(y)):
            one = c[b : b + 1]
            teacher = torch.zeros(CLASSES)
            for i in range(3):
                teacher += pi[i] * uploads.heads.modules[i](uploads.generators.modules[i](one))[0].softmax(0)
            expected += plain_kl(teacher, D(G(one))[0].softmax(0)) / len(y)
    assert ensembled(uploads, G, D, c, torch.tensor(pi)).item() == pytest.approx(expected, rel=1e-4)


def test_only_the_global_networks_learn_and_each_where_the_paper_says() -> None:
    G, D, uploads = networks(2)
    c, y = batch()
    tau = torch.full((2, len(y)), 0.5)

    def learned(which: int) -> tuple[bool, bool]:
        G.zero_grad()
        D.zero_grad()
        crossed(uploads, G, D, c, tau)[which].backward()  # type: ignore[no-untyped-call]
        moved = [
            any(w.grad is not None and bool(w.grad.abs().sum() > 1e-6) for w in net.parameters())
            for net in (G, D)
        ]
        return moved[0], moved[1]

    assert [learned(which) for which in range(3)] == [(True, True), (False, True), (True, False)]
    for bench in (uploads.generators, uploads.heads):
        assert all(w.grad is None and not w.requires_grad for m in bench.modules for w in m.parameters())


@pytest.mark.parametrize("aggregation", ["kdc", "kd"])
def test_with_one_node_the_average_is_all_there_is_to_distil(aggregation: str) -> None:
    # One step at the server: its loss is that of the averages, before they are moved.
    config = FedMDCG(**{**SMALL, "server_steps": 1}, aggregation=aggregation)  # type: ignore[arg-type]
    here = world(config, count=1)
    for _ in range(2):
        losses = here.server.step()
        assert len(losses) > 1
        assert all(abs(value) < 1e-6 for name, value in losses.items() if name != "consistency")
    ave = world(replace(config, aggregation="ave"), count=1)
    ave.server.step()
    assert torch.equal(to_vector(ave.server.state.G), to_vector(ave.nodes[0].modules["generator"]))


def test_averages_are_weighed_by_data_and_hold_the_running_statistics() -> None:
    here = world(FedMDCG(**SMALL, aggregation="ave"))
    here.server.step()
    generators = [node.modules["generator"] for node in here.nodes]
    sizes = torch.tensor([9.0, 14.0, 19.0])
    for name, tensor in here.server.state.G.state_dict().items():
        own = torch.stack([G.state_dict()[name].float() for G in generators])
        expected = torch.tensordot(sizes / sizes.sum(), own, 1)
        assert torch.allclose(tensor.float(), expected, atol=0.51 if "tracked" in name else 1e-6), name
    moved = generators[0].state_dict()["1.running_mean"]
    assert moved.abs().sum() > 0


def test_consistency_is_the_cross_entropy_of_local_heads_on_local_generators() -> None:
    here = world(FedMDCG(**SMALL, aggregation="ave"))
    found = here.server.step()["consistency"]
    counts = torch.stack([Classification(CLASSES).counts(node.data) for node in here.nodes])
    z, y = imagined(Compute(), counts, 512, 4, SEED, "consistency")
    expected = 0.0
    for node, own in zip(here.nodes, counts, strict=True):
        model = node.model
        assert isinstance(model, Split)
        with torch.no_grad():
            logits = model.head(node.modules["generator"](condition(z, y, CLASSES)))
        each = nn.functional.cross_entropy(logits, y, reduction="none")
        expected += float((own[y] / counts.sum(0)[y] * each).mean())
    assert found == pytest.approx(expected, rel=1e-4)


def test_labels_that_nobody_has_are_not_imagined() -> None:
    counts = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    z, y = imagined(Compute(), counts, 4000, 2, 0, "try")
    share = torch.bincount(y, minlength=3) / len(y)
    assert share.tolist() == pytest.approx([0.75, 0.0, 0.25], abs=0.03)
    assert z.mean().abs() < 0.05
    assert z.std().item() == pytest.approx(1.0, abs=0.05)


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise", 0),
        ("generator_width", 0),
        ("server_steps", -1),
        ("server_batch", 1),
        ("server_lr", math.inf),
        ("rounds", 0),
        ("participation", 0.0),
    ],
)
@pytest.mark.parametrize("config", [FedMDCG, FedCG, FedGEN])
def test_options_out_of_range(config: Any, name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"method.{name} is "):
        config(**{name: value})


def test_batches_of_one_cannot_be_normalised() -> None:
    with pytest.raises(ArgumentError, match=r"nodes\.local\.batch is 1"):
        world(FedMDCG(**SMALL), local=replace(LOCAL, batch=1))


def test_the_server_keeps_no_reference_to_what_was_uploaded() -> None:
    G, D, _ = networks(2)
    before = copy.deepcopy(G.state_dict())
    uploads = Uploads(G, D, *(torch.zeros(2, to_vector(net).numel()) for net in (G, D)))
    assert all(torch.equal(value, before[name]) for name, value in G.state_dict().items())
    assert not uploads.judged(torch.randn(2, 3, 5)).any()
