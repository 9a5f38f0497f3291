"""FedSD2C: the core-set, its perturbation, the distillation at a node, and the student's training."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.methods._public_data import StudentTraining
from fedstill.methods.fedsd2c import FedSD2C, mix_amplitudes
from fedstill.models.extractor_head import EXTRACTOR
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import NoPrivacy
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.simulation import Simulation
from tests.support import digits_world, small_world
from tests.support.errors import raises_invalid, raises_refused
from tests.support.privacy import make_mechanism
from tests.support.small_world import CLASSES, SHAPE, World, disagreeing, made, make_nodes

CONFIG = FedSD2C(ipc=2, image_steps=3, tau=2.0, student=StudentTraining(epochs=2, batch=100))
COUNTS = torch.tensor([[4, 0, 2], [3, 5, 1]])  # records of each class: with ipc = 2, classes 0; 0 and 1


def data(index: int) -> TensorData:
    y = torch.arange(CLASSES).repeat_interleave(COUNTS[index])
    return TensorData(torch.randn(len(y), *SHAPE, generator=torch.Generator().manual_seed(index)), y)


def world(config: Any = CONFIG, policy: PolicyConfig = small_world.OPEN) -> World:
    models = [disagreeing(made("small-cnn:2", index, parted=True)) for index in range(2)]
    nodes = make_nodes(models, policy=policy, data=data)
    student = made("small-cnn:2", "student", parted=True)
    return small_world.world(config, nodes, student, local=LocalConfig())


def response(one: World) -> dict[str, torch.Tensor]:
    return dict(one.server.query("distil_core_set").tensors)


def features(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h: torch.Tensor = model.get_submodule(EXTRACTOR).eval()(x)
    return h


def test_amplitudes_are_mixed_and_phases_kept() -> None:
    """With two pixels a and b the spectrum is a + b and a - b, both real."""
    x, other = torch.tensor([[[[3.0, 1.0]]]]), torch.tensor([[[[1.0, 5.0]]]])  # 4, 2 and 6, -4
    mixed = mix_amplitudes(x, other, 0.25)  # 4.5, 2.5
    torch.testing.assert_close(mixed, torch.tensor([[[[3.5, 1.0]]]]))
    torch.testing.assert_close(mix_amplitudes(x, other, 0.0), x)
    torch.testing.assert_close(mix_amplitudes(x, other, 1.0), torch.tensor([[[[5.0, 1.0]]]]))  # 6, 4


def test_core_set_has_the_most_certain_images_of_a_class() -> None:
    cross_entropy = torch.tensor([0.1, 0.9, 0.3, 0.2, 0.8, 0.4])
    of_class = torch.tensor([False, True, True, True, True, True])
    core, others = CONFIG.select(cross_entropy, of_class)
    assert core.tolist() == [3, 2]
    assert others.tolist() == [1, 4]
    core, others = CONFIG.select(cross_entropy, torch.tensor([True, False, True, True, False, False]))
    assert core.tolist() == [0, 3]
    assert others.tolist() == [2, 2]  # one other image, used twice


def test_only_classes_of_more_images_than_released_have_distillates() -> None:
    one = world()
    released = response(one)
    assert released["present"].tolist() == [[1, 0, 0], [1, 1, 0]]
    rows = released["present"].repeat_interleave(2, 1).bool()
    assert released["distillates"].shape == (2, 6, *SHAPE)
    assert (released["distillates"][~rows] == 0).all()
    assert (released["soft_labels"][~rows] == 0).all()
    for k, node in enumerate(one.nodes):
        z = released["distillates"][k][rows[k]]
        torch.testing.assert_close(released["soft_labels"][k][rows[k]], node.model.eval()(z))


def test_images_without_perturbation_and_steps_are_the_core_set() -> None:
    """This is what a policy has to refuse."""
    one = world(replace(CONFIG, lam=0.0, image_steps=0))
    images = response(one)["distillates"][0, :2]
    own = data(0).inputs[:4]
    assert all(any(torch.allclose(image, x, atol=1e-5) for x in own) for image in images)


def test_a_step_moves_pixels_by_the_learning_rate_within_bounds() -> None:
    """Features are the pixels here, whose gradients have the sign of (mean z - mean x); Adam's first step is
    the sign.
    """
    z = torch.tensor([[[[1.0, 2.0, 0.0]]], [[[3.0, 0.1, 0.0]]]])  # means 2, 1.05, 0
    x = torch.tensor([[[[9.0, 0.0, 0.5]]], [[[5.0, 0.0, 0.5]]]])  # means 7, 0, 0.5
    one_step = replace(CONFIG, image_steps=1, image_lr=0.25)
    moved = one_step.optimize(nn.Flatten(), z, x, (torch.tensor(0.0), torch.tensor(3.0)))
    torch.testing.assert_close(moved, torch.tensor([[[[1.25, 1.75, 0.25]]], [[[3.0, 0.0, 0.25]]]]))


def test_steps_bring_the_mean_features_closer() -> None:
    h = disagreeing(made("small-cnn:2", 0, parted=True))
    x = data(1).inputs
    start, core = x[:2], x[3:5]
    bounds = (torch.tensor(-9.0), torch.tensor(9.0))
    distances = []
    for steps in (0, 200):
        config = replace(CONFIG, image_steps=steps, image_lr=0.02)
        z = config.optimize(h.get_submodule(EXTRACTOR).eval(), start, core, bounds)
        distances.append((features(h, z).mean(0) - features(h, core).mean(0)).norm().item())
    assert distances[1] < 0.5 * distances[0]


def test_student_equals_plain_implementation() -> None:
    one = world()
    S = copy.deepcopy(one.server.student).train()
    released = response(world())
    rows = released["present"].repeat_interleave(2, 1).bool()
    x, z = released["distillates"][rows], released["soft_labels"][rows]
    adam = torch.optim.Adam(S.parameters(), CONFIG.student.lr)
    for _ in range(2):
        log_p, log_q = (z / 2).log_softmax(1), (S(x) / 2).log_softmax(1)
        loss = 4 * (log_p.exp() * (log_p - log_q)).sum(1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        assert one.server.step()["student"] == pytest.approx(loss.item(), rel=1e-4)


def test_outputs_only_policy_refuses_distillates() -> None:
    with raises_refused("outputs_only: distillates"):
        world(policy=PolicyConfig())


@pytest.mark.parametrize("mechanism", ["dp-sgd", "pate", "noisy-outputs"])
def test_mechanisms_refuse_distillates(mechanism: str) -> None:
    """They are made from records, so that neither noisy training nor noise on outputs protects them."""
    private = make_mechanism(mechanism)
    with raises_refused(f"privacy: mechanism {mechanism} cannot protect it", query="distil_core_set"):
        Simulation(digits_world.setting("fedsd2c", {}, privacies=[private] * 3))


def test_budget_refuses_distillates() -> None:
    with raises_refused("privacy: a budget is set", query="distil_core_set"):
        Simulation(digits_world.setting("fedsd2c", {}, privacies=[NoPrivacy(epsilon=1e6)] * 3))


def test_run_without_any_distillates_is_refused() -> None:
    with raises_invalid("method.ipc", 9):
        world(replace(CONFIG, ipc=9)).server.step()
