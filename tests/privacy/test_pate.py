"""PATE's teachers: votes, clipped gradients, parts of the data, and what one record can change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.federation.inprocess import group_nodes
from fedstill.models import build
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.protection import make_teachers
from fedstill.privacy.pate import TeacherEnsemble, _ClippedGradient, partition_records
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("steady_adam")

TASK, COMPUTE, SHAPE = Classification(3), Compute(), (1, 8, 8)
CONFIG = LocalConfig(epochs=3, batch=8, lr=0.01)


class Fixed(nn.Module):
    """Logits that depend on the mean of the input by a slope, and else are as given."""

    def __init__(self, logits: Sequence[float], slope: float = 0.0) -> None:
        super().__init__()
        self.logits, self.slope = torch.tensor(logits), slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pull = torch.tensor([1.0] + [0.0] * (len(self.logits) - 1))
        return self.logits + self.slope * x.flatten(1).mean(1, keepdim=True) * pull


def data(n: int = 60, seed: int = 0, groups: torch.Tensor | None = None) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, (n,), generator=generator)
    inputs = torch.randn(n, *SHAPE, generator=generator) + targets.view(-1, 1, 1, 1)
    return TensorData(inputs, targets, groups)


def made(m: int = 4, records: TensorData | None = None, name: str = "n", spec: str = "mlp:8") -> Node:
    teachers = [build(spec, SHAPE, 3, 0, "teacher") for _ in range(m)]
    gate: Any = None  # nothing is released here
    network = COMPUTE.to_device(TeacherEnsemble(teachers, sharpness=10.0, clip=1.0))
    return Node(name, records or data(), network, gate, 0)


def taught(node: Node, stacked: bool = True) -> Node:
    """The node, its teachers trained by the usual loop."""
    teachers = make_teachers(node, partition_records(node.data, len(node.model)))  # type: ignore[arg-type]
    local_training.make_optimizers(teachers, CONFIG)
    for group in group_nodes(teachers, stacked):
        local_training.train(group, TASK, CONFIG, COMPUTE)
    return node


# --- votes ----------------------------------------------------------------------------------------


def test_votes_by_hand() -> None:
    teachers = TeacherEnsemble(
        [Fixed([9.0, 1.0, 0.0]), Fixed([0.1, 0.2, 0.0]), Fixed([0.0, 5.0, 1.0])], sharpness=6.0
    )
    x = torch.zeros(2, *SHAPE)
    expected = torch.tensor([[2.0, 4.0, 0.0]]).expand(2, 3)
    with torch.no_grad():
        torch.testing.assert_close(teachers(x), expected)
    torch.testing.assert_close(teachers(x.requires_grad_()).detach(), expected, rtol=0, atol=0)


def test_teachers_without_records_abstain() -> None:
    teachers = TeacherEnsemble([Fixed([9.0, 0.0]), Fixed([0.0, 9.0]), Fixed([0.0, 9.0])], sharpness=3.0)
    teachers.abstain([torch.tensor([0]), torch.tensor([], dtype=torch.int64), torch.tensor([1])])
    torch.testing.assert_close(teachers(torch.zeros(1, *SHAPE)), torch.tensor([[1.0, 1.0]]))
    again = TeacherEnsemble([Fixed([9.0, 0.0]) for _ in range(3)])
    again.load_state_dict(teachers.state_dict())
    assert again.voting.tolist() == [1, 0, 1], "and a run that goes on knows it"


@pytest.mark.parametrize(
    "bad", [[math.nan] * 3, [0.0, math.inf, 0.0], [9.0, -math.inf, 0.0], [math.nan, 1, 0]]
)
def test_a_teacher_whose_logits_are_not_finite_abstains_and_spoils_no_others_vote(bad: list[float]) -> None:
    sound = [Fixed([9.0, 1.0, 0.0]), Fixed([0.0, 5.0, 1.0], 2.0), Fixed([1.0, 2.0, 0.0], 3.0)]
    teachers, upstream = TeacherEnsemble([*sound, Fixed(bad, 1.0)], 8.0, 10.0), torch.randn(2, 3)
    x = torch.zeros(2, *SHAPE, requires_grad=True)
    told = teachers(x)
    with torch.no_grad():
        assert torch.equal(teachers(x), told), "with gradients or without"
    assert told.tolist() == [[2.0, 4.0, 0.0]] * 2
    soft = 8.0 * torch.stack([network(x).softmax(1) for network in sound]).sum(0) / 4
    expected = torch.autograd.grad(soft, x, upstream)[0]
    torch.testing.assert_close(torch.autograd.grad(told, x, upstream)[0], expected)
    assert expected.abs().max() > 0


def test_a_teacher_abstains_for_those_inputs_alone_that_overflow_it() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with torch.no_grad():
        network[1].weight.fill_(10.0)
    x = torch.ones(2, *SHAPE)
    x[1] = 3e38  # finite, as a server may ask
    x.requires_grad_()
    told = TeacherEnsemble([network], 1.0)(x)
    assert told.sum(1).tolist() == [1.0, 0.0]
    (gradient,) = torch.autograd.grad(told, x, torch.full((2, 3), 1e38))
    assert gradient.isfinite().all()
    assert gradient.flatten(1).norm(dim=1).max() <= 1.0


def test_a_teachers_gradient_that_is_no_number_spoils_no_others() -> None:
    class Steep(Fixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward((x * 0).sqrt())  # finite logits; a gradient of 0 times infinity

    x, upstream = torch.zeros(2, *SHAPE, requires_grad=True), torch.tensor([[1.0, 0.0]]).expand(2, 2)
    sound = Fixed([0.0, 0.0], 1.0)
    found = torch.autograd.grad(TeacherEnsemble([sound, Steep([0.0, 0.0], 1.0)], 1.0)(x), x, upstream)[0]
    torch.testing.assert_close(found, torch.autograd.grad(sound(x).softmax(1) / 2, x, upstream)[0])


def test_the_gradient_is_that_of_the_mean_softmax_where_no_clip_binds() -> None:
    networks = [build("mlp:8", SHAPE, 3, 0, k) for k in range(3)]
    x = torch.randn(4, *SHAPE, requires_grad=True)
    upstream = 1e-3 * torch.randn(4, 3)
    mine = torch.autograd.grad(TeacherEnsemble(networks, 7.0, clip=1e3)(x), x, upstream)[0]
    soft = 7.0 * torch.stack([network(x).softmax(1) for network in networks]).mean(0)
    torch.testing.assert_close(mine, torch.autograd.grad(soft, x, upstream)[0])
    assert mine.abs().max() > 0


def test_each_teachers_gradient_is_clipped_by_itself_before_the_mean() -> None:
    networks = [Fixed([0.0, 0.0], slope) for slope in (1000.0, 0.5, -2.0)]
    x = torch.zeros(2, *SHAPE, requires_grad=True)
    upstream = torch.tensor([[1.0, 0.0], [0.01, 0.0]])
    clip, sharpness = 0.05, 4.0
    found = torch.autograd.grad(TeacherEnsemble(networks, sharpness, clip)(x), x, upstream)[0]
    expected = torch.zeros(2)
    for network in networks:  # d softmax_0 / dx = slope / 4 in each of 64 pixels' share of the mean
        length = sharpness * upstream[:, 0] * network.slope / 4 / math.sqrt(64)
        expected += length.clamp(-clip, clip) / 3
    torch.testing.assert_close(found.flatten(1).sum(1) / math.sqrt(64), expected, rtol=1e-4, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    scale=st.sampled_from([0.0, 1e-20, 1.0, 1e6, 1e30, math.inf, math.nan]),
    clip=st.floats(1e-3, 1e3),
    half=st.booleans(),
    seed=st.integers(0, 99),
)
def test_no_row_exceeds_the_clip(scale: float, clip: float, half: bool, seed: int) -> None:
    rows = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    rows[2:] *= scale
    x = torch.zeros(5, 1, 4, 4, dtype=torch.half if half else torch.float, requires_grad=True)
    (kept,) = torch.autograd.grad(_ClippedGradient.apply(x, clip), x, rows.to(x.dtype))  # type: ignore[no-untyped-call]
    assert kept.isfinite().all()
    lengths = kept.double().flatten(1).norm(dim=1)
    assert (lengths <= clip * (1 + (1e-2 if half else 0))).all()
    short = rows.flatten(1).norm(dim=1) < 0.9 * clip
    torch.testing.assert_close(
        kept[short].float(), rows[short], rtol=1e-2 if half else 1e-6, atol=1e-3 if half else 0
    )


# --- parts of the data ----------------------------------------------------------------------------


def test_parts_are_all_records_once() -> None:
    parts = partition_records(data(500), 7)
    assert torch.cat(parts).sort().values.tolist() == list(range(500))
    assert all(len(part) for part in parts)
    expected = 500 / 7
    assert sum((len(part) - expected) ** 2 / expected for part in parts) < 22, "as even as chance: chi2(6)"


@settings(max_examples=25, deadline=None)
@given(row=st.integers(0, 39), m=st.integers(1, 9))
def test_one_record_less_moves_no_other(row: int, m: int) -> None:
    records = data(40)
    whole, less = partition_records(records, m), [r for r in range(40) if r != row]
    parts = partition_records(records.subset(torch.tensor(less)), m)
    assert [[less[r] for r in part] for part in parts] == [
        [r for r in part.tolist() if r != row] for part in whole
    ]


def test_neither_order_nor_layout_matters_but_content_and_label_do() -> None:
    records = data(40)
    whole = partition_records(records, 5)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = partition_records(records.subset(order), 5)
    assert [sorted(order[part].tolist()) for part in shuffled] == [part.tolist() for part in whole]
    laid = TensorData(records.inputs.to(memory_format=torch.channels_last), records.targets)
    assert [part.tolist() for part in partition_records(laid, 5)] == [part.tolist() for part in whole]
    other = TensorData(records.inputs, (records.targets + 1) % 3)
    assert [part.tolist() for part in partition_records(other, 5)] != [part.tolist() for part in whole]


def test_a_group_stays_together_and_follows_its_own_number_alone() -> None:
    groups = torch.arange(60) // 5
    parts = partition_records(data(60, groups=groups), 4)
    owners = [set(groups[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == 12, "no group is in two parts"
    assert sum(map(bool, owners)) > 1
    rest = data(60, groups=groups).subset((groups != 3).nonzero().flatten())
    assert rest.groups is not None
    assert [set(rest.groups[part].tolist()) for part in partition_records(rest, 4)] == [
        own - {3} for own in owners
    ]


# --- teachers as nodes ----------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [True, False])
def test_teachers_learn_from_their_own_parts_inside_the_nodes_model(stacked: bool) -> None:
    node = made()
    before = {name: value.clone() for name, value in node.model.state_dict().items()}
    parts = partition_records(node.data, 4)
    teachers = make_teachers(node, parts)
    assert [teacher.name for teacher in teachers] == [f"n/teacher-{k}" for k in range(4)]
    for teacher, part in zip(teachers, parts, strict=True):
        assert torch.equal(teacher.data.inputs, node.data.inputs[part])
    local_training.make_optimizers(teachers, CONFIG)
    for group in group_nodes(teachers, stacked):
        assert len(group) == (4 if stacked else 1)
        local_training.train(group, TASK, CONFIG, COMPUTE)
    after = node.model.state_dict()
    assert list(after) == list(before)
    changed = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"0", "1", "2", "3"}
    for teacher, part in zip(teachers, parts, strict=True):  # each as if it were alone in the world
        alone = Node(
            teacher.name, node.data.subset(part), build("mlp:8", SHAPE, 3, 0, "teacher"), teacher.gate, 0
        )
        local_training.make_optimizers([alone], CONFIG)
        local_training.train([alone], TASK, CONFIG, COMPUTE)
        for name, value in alone.model.state_dict().items():
            torch.testing.assert_close(teacher.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert teachers[0].optimizers is not node.optimizers
    assert not node.optimizers


def test_a_teacher_without_records_is_left_out_and_abstains() -> None:
    node = made(m=8, records=data(4))
    parts = partition_records(node.data, 8)
    empty = [k for k, part in enumerate(parts) if not len(part)]
    teachers = make_teachers(node, parts)
    assert empty
    assert len(teachers) == 8 - len(empty)
    taught(node)
    with torch.no_grad():
        votes = node.model(node.data.inputs) * 8 / 10
    torch.testing.assert_close(votes.sum(1), torch.full((4,), 8.0 - len(empty)))


def test_frozen_parameters_of_a_teacher_stay() -> None:
    networks = [build("mlp:8", SHAPE, 3, 0, "teacher") for _ in range(2)]
    for network in networks:
        network[1].requires_grad_(False)
    gate: Any = None
    node = Node("n", data(), COMPUTE.to_device(TeacherEnsemble(networks)), gate, 0)
    NodeGroup([node]).module("model").train(False)  # which takes all gradients away
    first = [network[1].weight.clone() for network in networks]
    last = [network[3].weight.clone() for network in networks]
    taught(node)
    assert all(
        torch.equal(network[1].weight, weight) for network, weight in zip(networks, first, strict=True)
    )
    assert not any(
        torch.equal(network[3].weight, weight) for network, weight in zip(networks, last, strict=True)
    )
