"""FedDF: averages by hand, distillation from all received models, and separate architectures."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.errors import NodeFault
from fedstill.core.seeds import torch_generator
from fedstill.federation.link_config import LinkConfig
from fedstill.methods import feddf
from fedstill.methods.feddf import FedDF
from fedstill.models.inference import predict
from fedstill.models.module_utils import load_vector, to_vector
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.protocol.local_config import LocalConfig, Span
from tests.support import small_world
from tests.support.errors import raises_invalid
from tests.support.small_world import (
    CLASSES,
    SEED,
    TASK,
    World,
    change_responses,
    kinds_of,
    made,
    make_nodes,
    public_data,
    resumed,
    run,
    same,
)

pytestmark = pytest.mark.usefixtures("steady_adam")

N = 23
LOCAL = LocalConfig(epochs=2, batch=4, lr=1e-2, augment="none")
ALIKE = ("mlp:8",) * 4
MIXED = ("mlp:8", "lenet5:6", "mlp:8", "mlp:4", "lenet5:6")
RESNETS = ("resnet8:4",) * 3
CONFIG = FedDF(rounds=3, steps=4, batch=5, lr=1e-2, lr_end=1e-3)
COUNTS = replace(CONFIG, weights="counts", ensemble="consensus")


def world(
    config: FedDF, *, specs: Sequence[str] = ALIKE, student: str = "mlp:8", stacked: bool = True
) -> World:
    nodes = make_nodes([made(spec, index) for index, spec in enumerate(specs)])
    kinds = copy.deepcopy(kinds_of(nodes))
    first = made(student, "student")
    given: dict[str, Any] = {
        "local": LOCAL,
        "stacked": stacked,
        "public": public_data(N),
        "architectures": kinds,
    }
    return small_world.world(config, nodes, first, **given)


def students(here: World) -> list[nn.Module]:
    return list(here.server.state.students.values())


def firsts(here: World) -> dict[str, nn.Module]:
    """Return, by node, a copy of the student of its architecture."""
    kinds = zip(here.server.architectures, map(copy.deepcopy, students(here)), strict=True)
    return {name: student for (names, _), student in kinds for name in names}


def trained(node: Node, model: nn.Module, t: int, rounds: int) -> nn.Module:
    """Return the parameters after a node's local training in round t, without a federation."""
    alone = Node(node.name, node.data, copy.deepcopy(model), node.gate, node.seed)
    local_training.attach_optimizers([alone], LOCAL)
    local_training.train([alone], TASK, LOCAL, Compute(), span=Span(t, t + 1, rounds))
    return alone.model


# --- averaging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [ALIKE, RESNETS], ids=["mlp", "batch norm"])
def test_without_distillation_feddf_equals_fedavg(specs: tuple[str, ...]) -> None:
    here = world(replace(CONFIG, steps=0), specs=specs, student=specs[0])
    start = copy.deepcopy(here.server.student)
    run(here, 1)
    states = [trained(node, start, 0, 3).state_dict() for node in here.nodes]
    sizes = [len(node.data) for node in here.nodes]
    for name, value in here.server.student.state_dict().items():
        mean = sum(size / sum(sizes) * state[name] for size, state in zip(sizes, states, strict=True))
        if not value.is_floating_point():  # the batch counter of batch norm
            mean = mean.round().to(value.dtype)
        torch.testing.assert_close(value, mean, rtol=1e-3, atol=1e-4, msg=name)


def test_round_distills_mean_logits_into_the_average() -> None:
    here = world(CONFIG)
    start, x = copy.deepcopy(here.server.student), here.public.inputs
    run(here, 1)

    models = [trained(node, start, 0, 3) for node in here.nodes]
    sizes = torch.tensor([float(len(node.data)) for node in here.nodes])
    student = copy.deepcopy(start)
    load_vector(student, (sizes / sizes.sum()) @ torch.stack([to_vector(model) for model in models]))
    optimizer = torch.optim.Adam(student.parameters())
    with torch.no_grad():
        p = torch.stack([model.eval()(x) for model in models]).mean(0).softmax(1)
    d = torch.randint(N, (4, 5), generator=torch_generator(SEED, "d", 0))
    for step, rows in enumerate(d):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 + (1e-2 - 1e-3) * 0.5 * (1 + math.cos(math.pi * step / 3))
        q = student(x[rows]).softmax(1)
        loss = (p[rows] * (p[rows] / q).log()).sum(1).mean()  # KL(teachers || student)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    same(here.server.student, student, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("specs", [ALIKE, MIXED], ids=["alike", "mixed"])
def test_teachers_weighted_by_label_counts(specs: tuple[str, ...]) -> None:
    """sum_k omega_k^c z_k^c with omega_k^c = N_k^c / sum N_k^c, for any order of architectures."""
    here = world(replace(CONFIG, weights="counts", steps=0), specs=specs)
    start = firsts(here)
    run(here, 1)
    counts = torch.stack([TASK.counts(node.data) for node in here.nodes])
    assert torch.equal(here.server.state.histogram.counts, counts)
    summary = here.audit.traffic_totals()
    assert "count_samples" not in summary["queries_by_name"]
    assert summary["by_kind"]["label counts"]["up"] == len(specs) * (CLASSES + 1) * 4
    models = {node.name: trained(node, start[node.name], 0, 3).eval() for node in here.nodes}
    received = {
        names[0]: {name: to_vector(models[name]) for name in names} for names, _ in here.server.architectures
    }
    x = here.public.inputs
    with torch.no_grad():
        z = torch.stack([models[node.name](x) for node in here.nodes])
        expected = (counts[:, None] / counts.sum(0) * z).sum(0)
        taught = here.server.method.teacher_targets(here.server, here.server.state, received, x)
        torch.testing.assert_close(taught, expected, rtol=1e-4, atol=1e-5)


def test_each_teacher_predicts_each_public_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here, sizes = world(replace(CONFIG, steps=50)), []

    def counted(model: nn.Module, inputs: torch.Tensor, compute: Compute) -> torch.Tensor:
        sizes.append(len(inputs))
        return predict(model, inputs, compute)

    monkeypatch.setattr("fedstill.methods.feddf.predict", counted)
    run(here, 1)
    assert sizes == [N] * 4


def test_batch_norm_keeps_the_averaged_statistics() -> None:
    means = []
    for steps in (0, 4):
        here = run(world(replace(CONFIG, steps=steps), specs=RESNETS, student=RESNETS[0]), 1)
        buffers = dict(here.server.student.named_buffers())
        means.append(torch.cat([value.flatten().float() for value in buffers.values()]))
    assert torch.equal(*means)


# --- several architectures -----------------------------------------------------------------------


def test_architectures_are_averaged_separately() -> None:
    here = world(replace(CONFIG, steps=0), specs=MIXED, student="mlp:8")
    start = firsts(here)
    run(here, 1)
    kinds = [names for names, _ in here.server.architectures]
    assert kinds == [("n0", "n2"), ("n1", "n4"), ("n3",)]
    assert here.server.state.students["n0"] is here.server.student
    for student, names in zip(students(here), kinds, strict=True):
        members = [node for node in here.nodes if node.name in names]
        sizes = torch.tensor([float(len(node.data)) for node in members])
        vectors = torch.stack([to_vector(trained(node, start[node.name], 0, 3)) for node in members])
        mean = (sizes / sizes.sum()) @ vectors
        torch.testing.assert_close(to_vector(student), mean, rtol=1e-3, atol=1e-4)


def test_loss_belongs_to_global_student(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(CONFIG, specs=MIXED, student="lenet5:6")
    central = here.server.student
    monkeypatch.setattr(feddf, "distill", lambda student, *given: 1.0 if student is central else 2.0)
    assert here.server.step() == {"student": 1.0}
    assert world(replace(CONFIG, steps=0)).server.step() == {"student": 0.0}


def test_distills_architecture_without_participants() -> None:
    here = world(replace(CONFIG, participation=0.2), specs=MIXED)
    before = [to_vector(student) for student in students(here)]
    run(here, 1)
    assert all(not torch.equal(to_vector(s), b) for s, b in zip(students(here), before, strict=True))


def without(here: World, away: set[str]) -> None:
    """Make nodes fail during training."""
    here.federation.link = LinkConfig(quorum=0.2)

    def respond(query: str, nodes: Any, sent: Any, response: Any) -> Any:
        excluded = away & set(nodes) if query == "train" else set()
        for name in excluded:
            here.federation.exclude(
                name, query, "no answer", may_rejoin=True, since_query=response.args[1].number
            )
        return {name: value for name, value in response().items() if name not in excluded}

    change_responses(here, respond)


def test_distills_architecture_whose_nodes_are_excluded() -> None:
    here = world(CONFIG, specs=MIXED)
    without(here, {"n3"})  # the only mlp:4
    before = [to_vector(student) for student in students(here)]
    here.server.step()
    assert here.federation.present == ("n0", "n1", "n2", "n4")
    assert all(not torch.equal(to_vector(s), b) for s, b in zip(students(here), before, strict=True))


def test_run_stops_without_responses() -> None:
    here = world(replace(CONFIG, participation=0.2), specs=MIXED)
    without(here, {"n0", "n1", "n2", "n3", "n4"})
    with pytest.raises(NodeFault, match="excluded"):
        here.server.step()


def test_rejects_student_of_other_architecture() -> None:
    with raises_invalid("student.model", "MLP", "n0", "n1"):
        world(CONFIG, specs=MIXED, student="mlp:16")


# --- interrupted runs --------------------------------------------------------------


def test_resumed_run_reaches_equal_students(tmp_path: Path) -> None:
    straight = run(world(COUNTS, specs=MIXED))
    rest = run(resumed(lambda: world(COUNTS, specs=MIXED), 1, tmp_path), 2)
    for one, other in zip(students(rest), students(straight), strict=True):
        same(one, other)
