"""Co-Dream compared with a plain implementation of a batch of dreams."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedstill.core.seeds import torch_generator
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods.co_dream import CoDream
from fedstill.models.norm_layers import outputs_and_batch_norm_loss
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from tests.support import small_world
from tests.support.small_world import SEED, SHAPE, World, disagreeing, made, make_nodes, same

pytestmark = pytest.mark.usefixtures("steady_adam")

SMALL = CoDream(
    steps=2,
    batch=4,
    dream_steps=3,
    dream_lr=0.3,
    bn=0.2,
    adversary=0.7,
    student=ReplayTraining(steps=1, batch=100),  # one batch has all of the memory
)
SPECS = ("resnet8:4", "mlp:8", "resnet8:4")


def world(config: Any = SMALL, policy: PolicyConfig | None = None) -> World:
    models = [disagreeing(made(spec, index)) for index, spec in enumerate(SPECS)]
    nodes = make_nodes(models, policy=policy or PolicyConfig())
    return small_world.world(config, nodes, made("mlp:8", "student"), local=LocalConfig())


def entropy(p: torch.Tensor) -> torch.Tensor:
    return -(p * p.log()).sum(-1)


def test_batch_of_dreams_equals_plain_implementation() -> None:
    """Gradients of each node's loss, their mean, Adam steps with pixels clamped to 0..1; then soft labels."""
    one, start = world(), world()
    losses = one.server.step()
    f = [copy.deepcopy(node.model).eval().requires_grad_(False) for node in start.nodes]
    S = copy.deepcopy(start.server.student)
    x = torch.randn(4, *SHAPE, generator=torch_generator(SEED, "dreams", 0)).requires_grad_()
    adam = torch.optim.Adam([x], 0.3)
    for _ in range(3):
        gradients, terms = [], []
        for f_k in f:
            z, R_bn = outputs_and_batch_norm_loss(f_k, x)
            p, q = z.softmax(1), S(x).softmax(1)
            JS = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
            each = torch.stack([entropy(p).mean(), -JS.mean(), R_bn])
            gradients.append(torch.autograd.grad(each @ torch.tensor([1.0, 0.7, 0.2]), x)[0])
            terms.append(each.detach())
        x.grad = sum(gradients) / 3
        adam.step()
        with torch.no_grad():
            x.clamp_(-2, 2)  # (0 - 0.5) / 0.25 to (1 - 0.5) / 0.25
    assert x.abs().max() == 2, "some values are clipped to the pixel range"
    means = (sum(terms) / 3).tolist()
    y = sum(f_k(x) for f_k in f) / 3
    L_S = F.kl_div(S(x.detach()).log_softmax(1), y.detach().softmax(1), reduction="batchmean")
    s_adam = torch.optim.Adam(S.parameters(), SMALL.student.lr)
    L_S.backward()
    s_adam.step()
    expected = dict(zip(("entropy", "adversary", "statistics", "student"), (*means, L_S.item()), strict=True))
    assert losses == pytest.approx(expected, rel=1e-3, abs=1e-5)
    same(one.server.student, S, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(one.server.preview_samples(9), x.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("bn", "more"), [(0.2, {"batch norm distance"}), (0.0, set())])
def test_releases_are_responses_and_gradients(bn: float, more: set[str]) -> None:
    """With batch norm statistics, also one number for each batch."""
    one = world(replace(SMALL, bn=bn))
    one.server.step()
    up = [entry["up"] for entry in one.audit.entries()]
    assert {kind for each in up for kind in each} == {"logits", "gradients", *more}
    assert all(each.get("batch norm distance", 4) == 4 for each in up)
    assert one.federation.number == 4, "three steps and the label query"
