"""PATE: votes, clipped gradients, partitions of the data, thresholds, and sensitivity to one record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.models import build
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.protection import make_teachers
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import seeded_sampler
from fedstill.privacy.pate import NoisyVotes, PateConfig, TeacherEnsemble, _ClippedGradient, partition_records
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.simulation import group_nodes
from fedstill.tasks.classification import Classification
from tests.support.privacy import single_event

pytestmark = pytest.mark.usefixtures("steady_adam")

TASK, COMPUTE, SHAPE = Classification(3), Compute(), (1, 8, 8)
CONFIG = LocalConfig(epochs=3, batch=8, lr=0.01)


class Fixed(nn.Module):
    """Return fixed logits, of which the first also depends linearly on the mean of the input."""

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


def make_node(m: int = 4, records: TensorData | None = None, name: str = "n", spec: str = "mlp:8") -> Node:
    teachers = [build(spec, SHAPE, 3, 0, "teacher") for _ in range(m)]
    gate: Any = None  # not used: these tests release nothing
    network = COMPUTE.to_device(TeacherEnsemble(teachers, sharpness=10.0, clip=1.0))
    return Node(name, records or data(), network, gate, 0)


def train_teachers(node: Node, stacked: bool = True) -> Node:
    """Train the teachers of the node with the usual loop."""
    teachers = make_teachers(node, partition_records(node.data, len(node.model)))  # type: ignore[arg-type]
    local_training.attach_optimizers(teachers, CONFIG)
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
    teachers.set_abstaining_teachers(
        [torch.tensor([0]), torch.tensor([], dtype=torch.int64), torch.tensor([1])]
    )
    torch.testing.assert_close(teachers(torch.zeros(1, *SHAPE)), torch.tensor([[1.0, 1.0]]))
    again = TeacherEnsemble([Fixed([9.0, 0.0]) for _ in range(3)])
    again.load_state_dict(teachers.state_dict())
    assert again.voting.tolist() == [1, 0, 1], "loaded from the state"


@pytest.mark.parametrize(
    "bad", [[math.nan] * 3, [0.0, math.inf, 0.0], [9.0, -math.inf, 0.0], [math.nan, 1, 0]]
)
def test_teacher_with_non_finite_logits_abstains(bad: list[float]) -> None:
    sound = [Fixed([9.0, 1.0, 0.0]), Fixed([0.0, 5.0, 1.0], 2.0), Fixed([1.0, 2.0, 0.0], 3.0)]
    teachers, upstream = TeacherEnsemble([*sound, Fixed(bad, 1.0)], 8.0, 10.0), torch.randn(2, 3)
    x = torch.zeros(2, *SHAPE, requires_grad=True)
    votes_ = teachers(x)
    with torch.no_grad():
        assert torch.equal(teachers(x), votes_), "equal with and without gradients"
    assert votes_.tolist() == [[2.0, 4.0, 0.0]] * 2
    soft = 8.0 * torch.stack([network(x).softmax(1) for network in sound]).sum(0) / 4
    expected = torch.autograd.grad(soft, x, upstream)[0]
    torch.testing.assert_close(torch.autograd.grad(votes_, x, upstream)[0], expected)
    assert expected.abs().max() > 0


def test_teacher_abstains_only_for_overflowing_inputs() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with torch.no_grad():
        network[1].weight.fill_(10.0)
    x = torch.ones(2, *SHAPE)
    x[1] = 3e38  # finite, so accepted from a server
    x.requires_grad_()
    votes_ = TeacherEnsemble([network], 1.0)(x)
    assert votes_.sum(1).tolist() == [1.0, 0.0]
    (gradient,) = torch.autograd.grad(votes_, x, torch.full((2, 3), 1e38))
    assert gradient.isfinite().all()
    assert gradient.flatten(1).norm(dim=1).max() <= 1.0


def test_nan_gradient_of_one_teacher_does_not_spread() -> None:
    class Steep(Fixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward((x * 0).sqrt())  # finite logits with gradient 0 * infinity

    x, upstream = torch.zeros(2, *SHAPE, requires_grad=True), torch.tensor([[1.0, 0.0]]).expand(2, 2)
    sound = Fixed([0.0, 0.0], 1.0)
    gradient = torch.autograd.grad(TeacherEnsemble([sound, Steep([0.0, 0.0], 1.0)], 1.0)(x), x, upstream)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(sound(x).softmax(1) / 2, x, upstream)[0])


def test_unclipped_gradient_is_that_of_mean_softmax() -> None:
    networks = [build("mlp:8", SHAPE, 3, 0, k) for k in range(3)]
    x = torch.randn(4, *SHAPE, requires_grad=True)
    upstream = 1e-3 * torch.randn(4, 3)
    mine = torch.autograd.grad(TeacherEnsemble(networks, 7.0, clip=1e3)(x), x, upstream)[0]
    soft = 7.0 * torch.stack([network(x).softmax(1) for network in networks]).mean(0)
    torch.testing.assert_close(mine, torch.autograd.grad(soft, x, upstream)[0])
    assert mine.abs().max() > 0


def test_teacher_gradients_are_clipped_before_the_mean() -> None:
    networks = [Fixed([0.0, 0.0], slope) for slope in (1000.0, 0.5, -2.0)]
    x = torch.zeros(2, *SHAPE, requires_grad=True)
    upstream = torch.tensor([[1.0, 0.0], [0.01, 0.0]])
    clip, sharpness = 0.05, 4.0
    gradient = torch.autograd.grad(TeacherEnsemble(networks, sharpness, clip)(x), x, upstream)[0]
    expected = torch.zeros(2)
    for network in networks:  # d softmax_0 / dx = slope / 4, divided by the 64 pixels of the mean
        length = sharpness * upstream[:, 0] * network.slope / 4 / math.sqrt(64)
        expected += length.clamp(-clip, clip) / 3
    torch.testing.assert_close(gradient.flatten(1).sum(1) / math.sqrt(64), expected, rtol=1e-4, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    scale=st.sampled_from([0.0, 1e-20, 1.0, 1e6, 1e30, math.inf, math.nan]),
    clip=st.floats(1e-3, 1e3),
    half=st.booleans(),
    seed=st.integers(0, 99),
)
def test_clipped_gradient_rows_stay_within_clip(scale: float, clip: float, half: bool, seed: int) -> None:
    rows = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    rows[2:] *= scale
    x = torch.zeros(5, 1, 4, 4, dtype=torch.half if half else torch.float, requires_grad=True)
    (clipped,) = torch.autograd.grad(_ClippedGradient.apply(x, clip), x, rows.to(x.dtype))  # type: ignore[no-untyped-call]
    assert clipped.isfinite().all()
    lengths = clipped.double().flatten(1).norm(dim=1)
    assert (lengths <= clip * (1 + (1e-2 if half else 0))).all()
    short = rows.flatten(1).norm(dim=1) < 0.9 * clip
    torch.testing.assert_close(
        clipped[short].float(), rows[short], rtol=1e-2 if half else 1e-6, atol=1e-3 if half else 0
    )


# --- partitions of the data -----------------------------------------------------------------------


def test_partition_covers_all_records_once() -> None:
    parts = partition_records(data(500), 7)
    assert torch.cat(parts).sort().values.tolist() == list(range(500))
    assert all(len(part) for part in parts)
    expected = 500 / 7
    assert sum((len(part) - expected) ** 2 / expected for part in parts) < 22, (
        "sizes are as even as random ones: chi2(6)"
    )


@settings(max_examples=25, deadline=None)
@given(row=st.integers(0, 39), m=st.integers(1, 9))
def test_removing_a_record_keeps_all_other_assignments(row: int, m: int) -> None:
    records = data(40)
    whole, less = partition_records(records, m), [r for r in range(40) if r != row]
    parts = partition_records(records.subset(torch.tensor(less)), m)
    assert [[less[r] for r in part] for part in parts] == [
        [r for r in part.tolist() if r != row] for part in whole
    ]


def test_partition_depends_on_content_and_label_only() -> None:
    records = data(40)
    whole = partition_records(records, 5)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = partition_records(records.subset(order), 5)
    assert [sorted(order[part].tolist()) for part in shuffled] == [part.tolist() for part in whole]
    laid = TensorData(records.inputs.to(memory_format=torch.channels_last), records.targets)
    assert [part.tolist() for part in partition_records(laid, 5)] == [part.tolist() for part in whole]
    other = TensorData(records.inputs, (records.targets + 1) % 3)
    assert [part.tolist() for part in partition_records(other, 5)] != [part.tolist() for part in whole]


def test_groups_stay_together() -> None:
    groups = torch.arange(60) // 5
    parts = partition_records(data(60, groups=groups), 4)
    owners = [set(groups[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == 12, "groups are not divided"
    assert sum(map(bool, owners)) > 1
    rest = data(60, groups=groups).subset((groups != 3).nonzero().flatten())
    assert rest.groups is not None
    assert [set(rest.groups[part].tolist()) for part in partition_records(rest, 4)] == [
        own - {3} for own in owners
    ]


# --- teachers as nodes ----------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [True, False])
def test_teachers_train_on_their_shards_inside_the_model(stacked: bool) -> None:
    node = make_node()
    before = {name: value.clone() for name, value in node.model.state_dict().items()}
    parts = partition_records(node.data, 4)
    teachers = make_teachers(node, parts)
    assert [teacher.name for teacher in teachers] == [f"n/teacher-{k}" for k in range(4)]
    for teacher, part in zip(teachers, parts, strict=True):
        assert torch.equal(teacher.data.inputs, node.data.inputs[part])
    local_training.attach_optimizers(teachers, CONFIG)
    for group in group_nodes(teachers, stacked):
        assert len(group) == (4 if stacked else 1)
        local_training.train(group, TASK, CONFIG, COMPUTE)
    after = node.model.state_dict()
    assert list(after) == list(before)
    changed = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"0", "1", "2", "3"}
    for teacher, part in zip(teachers, parts, strict=True):  # each as if trained separately
        alone = Node(
            teacher.name, node.data.subset(part), build("mlp:8", SHAPE, 3, 0, "teacher"), teacher.gate, 0
        )
        local_training.attach_optimizers([alone], CONFIG)
        local_training.train([alone], TASK, CONFIG, COMPUTE)
        for name, value in alone.model.state_dict().items():
            torch.testing.assert_close(teacher.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert teachers[0].optimizers is not node.optimizers
    assert not node.optimizers


def test_teacher_without_records_is_not_trained() -> None:
    node = make_node(m=8, records=data(4))
    parts = partition_records(node.data, 8)
    empty = [k for k, part in enumerate(parts) if not len(part)]
    teachers = make_teachers(node, parts)
    assert empty
    assert len(teachers) == 8 - len(empty)
    train_teachers(node)
    with torch.no_grad():
        votes = node.model(node.data.inputs) * 8 / 10
    torch.testing.assert_close(votes.sum(1), torch.full((4,), 8.0 - len(empty)))


def test_frozen_teacher_parameters_stay_fixed() -> None:
    networks = [build("mlp:8", SHAPE, 3, 0, "teacher") for _ in range(2)]
    for network in networks:
        network[1].requires_grad_(False)
    gate: Any = None
    node = Node("n", data(), COMPUTE.to_device(TeacherEnsemble(networks)), gate, 0)
    NodeGroup([node]).module("model").train(False)  # removes all gradients
    first = [network[1].weight.clone() for network in networks]
    last = [network[3].weight.clone() for network in networks]
    train_teachers(node)
    assert all(
        torch.equal(network[1].weight, weight) for network, weight in zip(networks, first, strict=True)
    )
    assert not any(
        torch.equal(network[3].weight, weight) for network, weight in zip(networks, last, strict=True)
    )


def test_votes_are_encoded_as_logits() -> None:
    """4 teachers and sharpness 8: a vote is a logit of 2. Intermediate values are rounded to whole votes."""
    x = torch.tensor([[8.0, 0.0, 0.0], [2.0, 2.0, 4.0], [2.4, 1.7, 3.6], [-5.0, 99.0, 0.0]])
    exact = [[8, 0, 0], [2, 2, 4], [2, 2, 4], [0, 8, 0]]
    rule = NoisyVotes(PateConfig(teachers=4, sharpness=8.0), 0.0)
    assert rule.noise(rule.bound(x), seeded_sampler(0)).tolist() == exact
    for m in (1, 3, 7, 10, 100, 250):  # shares in float32 for any number of teachers
        votes = torch.arange(m + 1.0)
        read = NoisyVotes(PateConfig(teachers=m), 1.0).bound((10 * (votes / m)).unsqueeze(1))
        assert torch.allclose(read.flatten() * m / 10, votes, rtol=1e-6)


def test_label_release_has_expected_probability() -> None:
    """The label with more noisy votes wins: P(a + N > b + N') = Phi((a - b) / (sigma sqrt 2))."""
    rule = NoisyVotes(PateConfig(teachers=10, release="label", sharpness=6.0), 3.0)
    x = torch.tensor([[6.0 * 0.6, 6.0 * 0.4]]).repeat(20_000, 1)
    out = rule.noise(rule.bound(x), seeded_sampler(0, "label"))
    assert ((out == 6.0).sum(1) == 1).all()
    assert ((out == 0.0).sum(1) == 1).all()
    expected = stats.norm.cdf(2 / (3 * math.sqrt(2)))
    assert (out[:, 0] == 6.0).double().mean().item() == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize("release", ["votes", "label"])
def test_rows_below_threshold_are_zeros_and_cost_no_votes(release) -> None:
    rule = NoisyVotes(PateConfig(teachers=100, release=release, threshold=70.0, threshold_noise=10.0), 5.0)
    x = torch.tensor([[8.0, 2.0, 0.0]]).repeat(5_000, 1)  # 80 votes; the threshold 70 is one sigma below
    out = rule.noise(rule.bound(x), seeded_sampler(0, "threshold"))
    answered = (out != 0).any(1)
    assert answered.double().mean().item() == pytest.approx(stats.norm.cdf(1), abs=0.02)
    passed = int(answered.sum())
    assert rule.actual_cost(out.shape, out) == {
        Event("gaussian", 10 / math.sqrt(5_000)): 1,
        Event("gaussian", 5 / math.sqrt(2 * passed)): 1,
    }
    nothing = torch.zeros(2, 3)
    assert rule.actual_cost((2, 3), nothing) == {Event("gaussian", 10 / math.sqrt(2)): 1}
    # Without a threshold, a row of zeros is a regular response.
    everywhere = NoisyVotes(PateConfig(teachers=100, release=release), 5.0)
    assert everywhere.actual_cost((2, 3), nothing) == everywhere.cost((2, 3))


def test_threshold_noise_is_independent_of_vote_noise() -> None:
    """The noise of released rows has the same distribution as that of all rows."""
    rule = NoisyVotes(PateConfig(teachers=10, threshold=5.0, threshold_noise=5.0), 5.0)
    x = torch.tensor([[5.0, 5.0]]).repeat(20_000, 1)
    out = rule.noise(rule.bound(x), seeded_sampler(0, "own noise"))
    added = (out[(out != 0).any(1)] - 5).flatten().numpy()
    assert len(added) == pytest.approx(20_000, rel=0.05)  # half of the rows, two values per row
    assert stats.kstest(added, stats.norm(scale=5).cdf).pvalue > 0.01


def test_released_rows_are_never_all_zeros() -> None:
    class Zeros:
        """Return noise of zero."""

        def normal(self, shape):
            return torch.zeros(tuple(shape), dtype=torch.float64)

    rule = NoisyVotes(PateConfig(teachers=10, threshold=0.0), 5.0)
    out = rule.noise(torch.zeros(3, 2), Zeros())  # type: ignore[arg-type]
    assert (out != 0).all()
    assert (out.abs() < 1e-4).all()


@given(st.integers(1, 60), st.integers(0, 2**31))
def test_actual_cost_never_exceeds_cost(B: int, seed: int) -> None:
    rule = NoisyVotes(PateConfig(teachers=10, threshold=5.0, threshold_noise=3.0), 5.0)
    out = rule.noise(rule.bound(torch.rand(B, 4) * 10), seeded_sampler(seed))
    cost, actual_cost = rule.cost((B, 4)), rule.actual_cost((B, 4), out)
    assert cost is not None
    assert actual_cost is not None
    square = [sum(times / event.noise**2 for event, times in p.items()) for p in (cost, actual_cost)]
    assert square[1] <= square[0] * (1 + 1e-12)
    assert (square[1] < square[0] * (1 - 1e-9)) == bool((out == 0).all(1).any())


@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(2, 12), st.integers(1, 60))
def test_votes_stay_within_sensitivity(seed: int, B: int, C: int, m: int) -> None:
    """One record may change the vote of one teacher on each input."""
    rng = np.random.default_rng(seed)
    votes = rng.integers(C, size=(m, B))
    changed = votes.copy()
    changed[rng.integers(m)] = rng.integers(C, size=B)
    rule = NoisyVotes(PateConfig(teachers=m, threshold=2.0, threshold_noise=3.0, sharpness=7.0), 4.0)
    (most, _), (all_, _) = sorted(
        (single_event(PrivacyCost({event: 1})) for event in rule.cost((B, C)) or {}),
        key=lambda item: item[0].noise != 3.0 / math.sqrt(B),
    )
    logits = [7.0 * torch.from_numpy(np.eye(C)[v].mean(0)).float() for v in (votes, changed)]
    counts = [rule.bound(z).double() * m / 7 for z in logits]
    exact = [torch.from_numpy(np.eye(C)[v].sum(0)) for v in (votes, changed)]
    for got, want in zip(counts, exact, strict=True):
        assert torch.allclose(got, want, rtol=1e-5)
    slack = 1 + 1e-5  # logits are float32
    assert all_.noise * (counts[0] - counts[1]).norm() <= 4.0 * slack
    assert most.noise * (counts[0].amax(1) - counts[1].amax(1)).norm() <= 3.0 * slack
