"""FedDF: averages by hand, distillation from all received models, and architectures kept apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, QuestionRefused
from fedstill.core.seeds import torch_generator
from fedstill.core.state import load_state, save_state
from fedstill.data.public import Public
from fedstill.federation import InProcess, partition
from fedstill.methods.feddf import FedDF
from fedstill.methods.server import Server, ServerSetting
from fedstill.models import build
from fedstill.models.vector import load_vector, to_vector
from fedstill.node import training
from fedstill.node.audit import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.group import signature
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.questions import NodeSetting
from fedstill.protocol.schedule import LocalConfig, Span
from fedstill.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("steady_adam")

SHAPE, CLASSES, SEED, N = (1, 8, 8), 3, 4, 23
TASK, LOCAL = Classification(CLASSES), LocalConfig(epochs=2, batch=4, lr=1e-2, augment="none")
ALIKE = ("mlp:8",) * 4
MIXED = ("mlp:8", "lenet5:6", "mlp:8", "mlp:4", "lenet5:6")
RESNETS = ("resnet8:4",) * 3
CONFIG = FedDF(rounds=3, steps=4, batch=5, lr=1e-2, lr_end=1e-3)
COUNTS = replace(CONFIG, weights="counts", ensemble="consensus")


@dataclass
class World:
    nodes: list[Node]
    public: Public
    federation: InProcess
    server: Server
    audit: AuditLog


def world(
    config: FedDF,
    *,
    specs: Sequence[str] = ALIKE,
    student: str = "mlp:8",
    stacked: bool = True,
    policy: PolicyConfig | None = None,
) -> World:
    audit, nodes, compute = AuditLog(), [], Compute()
    public = Public("made", torch.randn(N, *SHAPE, generator=torch.Generator().manual_seed(99)))
    for index, spec in enumerate(specs):
        generator = torch.Generator().manual_seed(index)
        size = 6 + 5 * index
        inputs = torch.randn(size, *SHAPE, generator=generator)
        targets = torch.randint(CLASSES, (size,), generator=generator)
        gate = Gate(f"n{index}", policy or PolicyConfig(outputs_only=False), audit)
        model = build(spec, SHAPE, CLASSES, 0, index)
        nodes.append(Node(f"n{index}", TensorData(inputs, targets), model, gate, SEED))
    kinds: dict[Any, list[Node]] = {}
    for node in nodes:
        kinds.setdefault(signature(node.model), []).append(node)
    by_kind = tuple(
        (tuple(node.name for node in alike), copy.deepcopy(alike[0].model)) for alike in kinds.values()
    )
    side = config.node_side(NodeSetting(TASK, LOCAL, compute, public))
    side.prepare(nodes)
    federation = InProcess(nodes, partition(nodes, stacked), side, compute)
    setting = ServerSetting(
        federation,
        build(student, SHAPE, CLASSES, 0, "student"),
        TASK,
        SHAPE,
        (0.5,),
        (0.5,),
        compute,
        SEED,
        LOCAL,
        public,
        by_kind,
    )
    return World(nodes, public, federation, Server(config, setting), audit)


def students(made: World) -> list[nn.Module]:
    return list(made.server.state.students.values())


def firsts(made: World) -> dict[str, nn.Module]:
    """By node, the student of its architecture as it is now."""
    kinds = zip(made.server.kinds, map(copy.deepcopy, students(made)), strict=True)
    return {name: student for (names, _), student in kinds for name in names}


def run(made: World, turns: int | None = None) -> World:
    for _ in range(made.server.total if turns is None else turns):
        made.server.step()
    return made


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, msg=name, **tolerance)


def trained(node: Node, model: nn.Module, t: int, rounds: int) -> nn.Module:
    """What a node makes of a model in round t, without a federation."""
    alone = Node(node.name, node.data, copy.deepcopy(model), node.gate, node.seed)
    training.prepare([alone], LOCAL)
    training.train([alone], TASK, LOCAL, Compute(), span=Span(t, t + 1, rounds))
    return alone.model


# --- averaging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [ALIKE, RESNETS], ids=["mlp", "batch norm"])
def test_without_distillation_it_is_fedavgs_weighted_mean(specs: tuple[str, ...]) -> None:
    made = world(replace(CONFIG, steps=0), specs=specs, student=specs[0])
    start = copy.deepcopy(made.server.student)
    run(made, 1)
    states = [trained(node, start, 0, 3).state_dict() for node in made.nodes]
    sizes = [len(node.data) for node in made.nodes]
    for name, value in made.server.student.state_dict().items():
        mean = sum(size / sum(sizes) * state[name] for size, state in zip(sizes, states, strict=True))
        if not value.is_floating_point():  # batch norm's count of batches
            mean = mean.round().to(value.dtype)
        torch.testing.assert_close(value, mean, rtol=1e-3, atol=1e-4, msg=name)


def test_a_round_is_the_average_taught_by_the_mean_of_all_logits() -> None:
    made = world(CONFIG)
    start, x = copy.deepcopy(made.server.student), made.public.inputs
    run(made, 1)

    models = [trained(node, start, 0, 3) for node in made.nodes]
    sizes = torch.tensor([float(len(node.data)) for node in made.nodes])
    student = copy.deepcopy(start)
    load_vector(student, (sizes / sizes.sum()) @ torch.stack([to_vector(model) for model in models]))
    optimiser = torch.optim.Adam(student.parameters())
    with torch.no_grad():
        p = torch.stack([model.eval()(x) for model in models]).mean(0).softmax(1)
    d = torch.randint(N, (4, 5), generator=torch_generator(SEED, "d", 0))
    for step, rows in enumerate(d):
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 + (1e-2 - 1e-3) * 0.5 * (1 + math.cos(math.pi * step / 3))
        q = student(x[rows]).softmax(1)
        loss = (p[rows] * (p[rows] / q).log()).sum(1).mean()  # KL(teachers || student)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    same(made.server.student, student, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("specs", [ALIKE, MIXED], ids=["alike", "mixed"])
def test_teachers_weighed_by_their_label_counts(specs: tuple[str, ...]) -> None:
    """sum_k omega_k^c z_k^c, omega_k^c = N_k^c / sum N_k^c, whichever order the architectures come in."""
    made = world(replace(CONFIG, weights="counts", steps=0), specs=specs)
    start = firsts(made)
    run(made, 1)
    counts = torch.stack([TASK.counts(node.data) for node in made.nodes])
    assert made.server.state.counts == {f"n{k}": row.tolist() for k, row in enumerate(counts)}
    told = made.audit.summary()
    assert "tell_size" not in told["questions_by_name"]
    assert told["by_kind"]["label counts"]["up"] == len(specs) * (CLASSES + 1) * 4
    models = {node.name: trained(node, start[node.name], 0, 3).eval() for node in made.nodes}
    received = {names[0]: {name: to_vector(models[name]) for name in names} for names, _ in made.server.kinds}
    x = made.public.inputs
    with torch.no_grad():
        z = torch.stack([models[node.name](x) for node in made.nodes])
        expected = (counts[:, None] / counts.sum(0) * z).sum(0)
        taught = made.server.method.taught(made.server, made.server.state, received, x)
        torch.testing.assert_close(taught, expected, rtol=1e-4, atol=1e-5)


def test_each_public_input_goes_once_through_each_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = world(replace(CONFIG, steps=50)), []

    def counted(model: nn.Module, inputs: torch.Tensor, compute: Compute) -> torch.Tensor:
        seen.append(len(inputs))
        return training.predict(model, inputs, compute)

    monkeypatch.setattr("fedstill.methods.feddf.predict", counted)
    run(made, 1)
    assert seen == [N] * 4


def test_batch_norm_keeps_the_averaged_statistics() -> None:
    means = []
    for steps in (0, 4):
        made = run(world(replace(CONFIG, steps=steps), specs=RESNETS, student=RESNETS[0]), 1)
        buffers = dict(made.server.student.named_buffers())
        means.append(torch.cat([value.flatten().float() for value in buffers.values()]))
    assert torch.equal(*means)


def test_only_who_is_drawn_takes_part() -> None:
    config = replace(CONFIG, participation=0.5)
    made = run(world(config))
    asked = [
        [f"n{k}" for k in range(4) if f"n{k}" in config.drawn(made.federation.nodes, SEED, t)]
        for t in range(3)
    ]
    assert all(len(names) == 2 for names in asked)
    per_node = made.audit.summary()["by_node"]
    size = len(to_vector(made.server.student)) * 4
    for node in made.nodes:
        rounds = sum(node.name in names for names in asked)
        assert per_node[node.name]["up"] == rounds * size + 4  # and its data's size


# --- several architectures -----------------------------------------------------------------------


def test_each_architecture_has_its_own_average_and_none_is_mixed() -> None:
    made = world(replace(CONFIG, steps=0), specs=MIXED, student="mlp:8")
    start = firsts(made)
    run(made, 1)
    kinds = [names for names, _ in made.server.kinds]
    assert kinds == [("n0", "n2"), ("n1", "n4"), ("n3",)]
    assert made.server.state.students["n0"] is made.server.student
    for student, names in zip(students(made), kinds, strict=True):
        members = [node for node in made.nodes if node.name in names]
        sizes = torch.tensor([float(len(node.data)) for node in members])
        vectors = torch.stack([to_vector(trained(node, start[node.name], 0, 3)) for node in members])
        mean = (sizes / sizes.sum()) @ vectors
        torch.testing.assert_close(to_vector(student), mean, rtol=1e-3, atol=1e-4)


def test_all_models_teach_every_student() -> None:
    made = world(replace(CONFIG, rounds=1, steps=100, batch=N, lr=1e-2), specs=MIXED)
    start = firsts(made)
    run(made)
    x = made.public.inputs
    with torch.no_grad():
        each = [trained(node, start[node.name], 0, 1).eval()(x) for node in made.nodes]
        z = torch.stack(each).mean(0)
        for student in students(made):
            gap = TASK.distance(student(x), z, 1.0).mean()
            own = torch.stack([TASK.distance(one, z, 1.0).mean() for one in each]).min()
            assert gap < 0.5 * own


def test_an_architecture_of_which_no_node_was_drawn_is_taught_all_the_same() -> None:
    made = world(replace(CONFIG, participation=0.2), specs=MIXED)
    before = [to_vector(student) for student in students(made)]
    run(made, 1)
    assert all(not torch.equal(to_vector(s), b) for s, b in zip(students(made), before, strict=True))


def test_a_student_of_no_nodes_architecture_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ArgumentError, match=r"student.model is 'MLP': allowed is .* that of n0, that of n1"):
        world(CONFIG, specs=MIXED, student="mlp:16")


# --- policy, engines, stops ----------------------------------------------------------------------


def test_outputs_only_refuses_it() -> None:
    with pytest.raises(QuestionRefused, match="outputs_only: no parameters"):
        world(CONFIG, policy=PolicyConfig())


@pytest.mark.parametrize("specs", [ALIKE, MIXED], ids=["alike", "mixed"])
def test_stacked_and_one_by_one_give_equal_figures(specs: tuple[str, ...]) -> None:
    config = replace(COUNTS, participation=0.8)
    stacked, alone = (run(world(config, specs=specs, stacked=stacked)) for stacked in (True, False))
    for one, other in zip(students(stacked), students(alone), strict=True):
        same(one, other, rtol=1e-2, atol=1e-4)
    assert stacked.audit.summary() == alone.audit.summary()


@pytest.mark.parametrize("specs", [ALIKE, MIXED], ids=["alike", "mixed"])
def test_a_run_goes_on_to_the_same_students(tmp_path: Path, specs: tuple[str, ...]) -> None:
    straight, half = run(world(COUNTS, specs=specs)), run(world(COUNTS, specs=specs), 1)
    save_state(tmp_path / "state.st", half.server.kept())
    rest = world(COUNTS, specs=specs)
    rest.server.take_up(load_state(tmp_path / "state.st"))
    run(rest, 2)
    for one, other in zip(students(rest), students(straight), strict=True):
        same(one, other)


@pytest.mark.parametrize(
    ("option", "value"),
    [("steps", -1), ("batch", 0), ("tau", 0.0), ("lr", -1.0), ("rounds", 0), ("weights", "x")],
)
def test_an_option_that_is_not_allowed_is_named(option: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"method.{option} is "):
        FedDF(**{option: value})
