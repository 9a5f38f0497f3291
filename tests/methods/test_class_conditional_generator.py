"""DENSE and Co-Boosting, with queried and with uploaded models, compared with plain implementations."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.seeds import torch_generator
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.responses import Responses
from fedstill.methods._input_generators import LabelGenerator
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods.co_boosting import CoBoosting
from fedstill.methods.dense import DENSE
from fedstill.models.interface import Interface
from fedstill.models.norm_layers import outputs_and_batch_norm_loss
from fedstill.models.predictors import Predictor
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks.classification import Classification
from tests.support import small_world
from tests.support.errors import raises_invalid, raises_refused
from tests.support.small_world import (
    CLASSES,
    SEED,
    SHAPE,
    World,
    change_responses,
    disagreeing,
    few,
    made,
    make_nodes,
    same,
)

pytestmark = pytest.mark.usefixtures("steady_adam")

TINY: dict[str, Any] = {
    "steps": 3,
    "batch": 4,
    "generator": LabelGenerator(noise=6, width=4),
    "student": ReplayTraining(steps=1, batch=100),  # one batch has all of the memory
    "tau": 2.0,
}
DENSER = DENSE(**TINY, generator_steps=2, adversary=0.5, bn=0.3)
BOOSTING = CoBoosting(**TINY, adversary=0.5, hardness=2.0, mu=0.05, epsilon=0.1)
NORMED = replace(BOOSTING, bn=0.3)
SPECS = ("resnet8:4", "resnet8:4", "mlp:8")
TO = Interface(Classification(3), tuple("abc"), SHAPE)  # input and output of a model that is no module


def world(config: Any, specs: tuple[str, ...] = SPECS, policy: PolicyConfig = small_world.OPEN) -> World:
    models = [disagreeing(made(spec, index)) for index, spec in enumerate(specs)]
    for model in models:
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):  # statistics as after training
                draw = torch.Generator().manual_seed(len(layer.running_mean))
                layer.running_mean.normal_(generator=draw)
                layer.running_var.uniform_(0.5, 2.0, generator=draw)
    nodes = make_nodes(models, classes=few, policy=policy)
    kinds = small_world.kinds_of(nodes)
    return small_world.world(
        config, nodes, made("resnet8:4", "student"), local=LocalConfig(), architectures=kinds
    )


class Plain:
    """One step as described in the papers: loops, plain autograd, no federation."""

    def __init__(self, config: Any) -> None:
        start = world(config)
        self.config, self.f = config, [node.model.eval().requires_grad_(False) for node in start.nodes]
        self.G, self.S = copy.deepcopy(start.server.state.generator.G), copy.deepcopy(start.server.student)
        self.g_adam = torch.optim.Adam(self.G.parameters(), config.generator.lr, betas=(0.5, 0.999))
        self.s_adam = torch.optim.Adam(self.S.parameters(), config.student.lr)

    def kl(self, z: torch.Tensor, z_S: torch.Tensor) -> torch.Tensor:
        """Return the divergence for each input."""
        log_p, log_q = (z / 2.0).log_softmax(1), (z_S / 2.0).log_softmax(1)
        return 4.0 * (log_p.exp() * (log_p - log_q)).sum(1)

    def bn(self, x: torch.Tensor) -> torch.Tensor:
        """Return L_BN, the mean over nodes; the last node has no batch norm."""
        loss = torch.zeros(())
        for model in self.f:
            h, total = [], torch.zeros(())
            layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
            hooks = [
                layer.register_forward_pre_hook(lambda _, given, h=h: h.append(given[0])) for layer in layers
            ]
            model(x)
            for layer, features, hook in zip(layers, h, hooks, strict=True):
                hook.remove()
                mean, var = torch.zeros(features.shape[1]), torch.zeros(features.shape[1])
                for c in range(features.shape[1]):
                    mean[c] = features[:, c].mean()
                    var[c] = (features[:, c] - features[:, c].mean()).square().mean()
                total = total + (mean - layer.running_mean).square().sum().sqrt()
                total = total + (var - layer.running_var).square().sum().sqrt()
            loss = loss + total / len(self.f)
        return loss

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch_generator(SEED, "w", 0)
        w, y = torch.randn(4, 6, generator=draw), torch.randint(CLASSES, (4,), generator=draw)
        return torch.cat([w, F.one_hot(y, CLASSES).float()], 1), y

    def descend(self, loss: torch.Tensor) -> None:
        self.g_adam.zero_grad()
        loss.backward()
        self.g_adam.step()

    def study(self, x: torch.Tensor, z: torch.Tensor) -> float:
        self.S.train()
        loss = self.kl(z.detach(), self.S(x.detach())).mean()
        self.s_adam.zero_grad()
        loss.backward()
        self.s_adam.step()
        return loss.item()

    def dense(self) -> dict[str, float]:
        w_y, y = self.batch()
        for _ in range(2):
            x = self.G(w_y)
            z = (self.f[0](x) + self.f[1](x) + self.f[2](x)) / 3
            z_S = self.S.eval()(x)
            L_CE = sum(-z[b].log_softmax(0)[y[b]] for b in range(4)) / 4
            divergence = self.kl(z, z_S)
            L_div = -sum(divergence[b] for b in range(4) if z[b].argmax() != z_S[b].argmax()) / 4
            L_BN = self.bn(x)
            self.descend(L_CE + 0.5 * L_div + 0.3 * L_BN)
        losses = {"recognized": L_CE.item(), "sought": L_div.item(), "statistics": L_BN.item()}
        return {**losses, "student": self.study(x, z)}

    def boosting(self) -> dict[str, float]:
        w_y, y = self.batch()
        w, x = torch.full((3,), 1 / 3, requires_grad=True), self.G(w_y)

        def A(inputs: torch.Tensor) -> torch.Tensor:
            return sum(w[k] * self.f[k](inputs) for k in range(3))

        z, z_S = A(x), self.S.eval()(x)
        ce = torch.stack([-z[b].log_softmax(0)[y[b]] for b in range(4)])
        hard = torch.stack([1 - z[b].softmax(0)[y[b]] for b in range(4)]).detach()
        L_H, L_A = (hard**2 * ce).mean(), -self.kl(z, z_S).mean()
        losses = {"recognized": L_H.item(), "sought": L_A.item()}
        L_G = L_H + 0.5 * L_A
        if self.config.bn:
            L_BN = self.bn(x)
            losses["statistics"], L_G = L_BN.item(), L_G + 0.3 * L_BN
        self.descend(L_G)
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(A(x), y), w)
        self.w = w = (w - 0.05 * gradient.sign()).clamp(0, 1).detach()
        v = 2 * torch.rand(4, CLASSES, generator=torch_generator(SEED, "v", 0)) - 1
        (gradient,) = torch.autograd.grad((v * (A(x) / 2.0).softmax(1)).sum(), x)
        x = x.detach() + 0.1 / 0.25 * gradient.sign()  # 0.1 of a pixel's range, normalized by 0.25
        return {**losses, "student": self.study(x, A(x))}


@pytest.mark.parametrize(
    ("config", "step"), [(DENSER, Plain.dense), (BOOSTING, Plain.boosting), (NORMED, Plain.boosting)]
)
@pytest.mark.parametrize("models", ["queried", "uploaded"])
def test_step_equals_plain_implementation(config: Any, step: Any, models: Any) -> None:
    """Holds for queried and for uploaded models."""
    one, plain = world(replace(config, models=models)), Plain(config)
    losses, expected = one.server.step(), step(plain)
    assert losses == pytest.approx(expected, rel=2e-3, abs=1e-5)
    same(one.server.student, plain.S, rtol=1e-3, atol=2e-4)
    for mine, theirs in zip(one.server.state.generator.G.parameters(), plain.G.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-4)
    if isinstance(config, CoBoosting):
        torch.testing.assert_close(one.server.state.w, plain.w)


@pytest.mark.parametrize("config", [DENSER, BOOSTING])
def test_releases_of_queried_and_uploaded_models(config: Any) -> None:
    """Queried models release responses and gradients in each step; uploaded ones are released once."""
    queried, uploaded = (world(replace(config, models=models)) for models in ("queried", "uploaded"))
    for one in (queried, uploaded):
        for _ in range(3):
            one.server.step()
    released = [
        {kind for entry in one.audit.entries() for kind in entry["up"]} for one in (queried, uploaded)
    ]
    further = {"batch norm distance"} if config is DENSER else set()
    assert released == [{"logits", "gradients", *further}, {"parameters"}]
    # Queries: two steps of G; in Co-Boosting one step, one batch and its perturbed form.
    steps = 3 * (2 if config is DENSER else 3)
    assert queried.side.queries["predict_logits"].times == steps
    numbers = [len({entry["number"] for entry in one.audit.entries()}) for one in (queried, uploaded)]
    assert numbers == [steps, 1]


def test_outputs_only_policy_prevents_model_upload() -> None:
    for config in (DENSER, BOOSTING):
        with raises_refused("outputs_only: parameters"):
            world(replace(config, models="uploaded"), policy=PolicyConfig())
        world(config, policy=PolicyConfig())


def test_model_without_parameters_is_not_uploaded() -> None:
    nodes = make_nodes([Predictor(lambda images: images[:, 0, 0, :3], TO)])
    setting = {"local": LocalConfig(), "architectures": small_world.kinds_of(nodes)}
    with raises_invalid("method.models", "uploaded", "queried"):
        small_world.world(DENSE(models="uploaded"), nodes, made("mlp:8", "student"), **setting)


def test_weights_favor_nodes_that_recognize_the_inputs() -> None:
    """The weight of a correct node increases, that of a wrong one decreases, both within 0..1."""
    one = world(replace(BOOSTING, mu=0.6), specs=("mlp:8",) * 2)
    y = torch.tensor([0, 1, 2, 1])
    right = 4.0 * F.one_hot(y, CLASSES).float()
    responses = Responses(-1, ("n0", "n1"), {"logits": torch.stack([right, -right])})
    BOOSTING.update_node_weights(one.server, one.server.state, responses, y, 0)
    torch.testing.assert_close(one.server.state.w, torch.tensor([0.55, 0.45]))
    for t in range(60):
        BOOSTING.update_node_weights(one.server, one.server.state, responses, y, t)
    torch.testing.assert_close(one.server.state.w, torch.tensor([1.0, 0.0]))


def test_batch_norm_loss_moves_inputs_to_the_statistics() -> None:
    norm = nn.BatchNorm2d(2).eval()
    norm.running_mean[:] = torch.tensor([1.0, -2.0])
    x = torch.randn(64, 2, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    adam = torch.optim.Adam([x], 0.05)
    for _ in range(200):
        adam.zero_grad()
        outputs_and_batch_norm_loss(norm, x)[1].backward()
        adam.step()
    torch.testing.assert_close(x.mean((0, 2, 3)), norm.running_mean, atol=0.05, rtol=0)
    assert outputs_and_batch_norm_loss(nn.Linear(2, 2), torch.ones(1, 2))[1] == 0


@pytest.mark.parametrize("models", ["queried", "uploaded"])
def test_returning_node_without_counts_has_no_weight(models: Any) -> None:
    config = replace(DENSER, weights="counts", models=models)
    here = world(config)
    here.federation.link = LinkConfig(quorum=0.3)

    def respond(query: str, nodes: Any, sent: Any, response: Any) -> Any:
        if query == "count_labels":
            here.federation.exclude(
                "n1", query, "no answer", may_rejoin=True, since_query=response.args[1].number
            )
        return {name: value for name, value in response().items() if name not in here.federation.excluded}

    change_responses(here, respond)
    losses = [here.server.step()]
    here.federation.excluded.pop("n1", None)  # n1 returns
    losses.append(here.server.step())
    alone = world(config)  # a federation without n1
    alone.federation.link = LinkConfig(quorum=0.3)
    alone.federation.exclude("n1", "count_labels", "gone", may_rejoin=False)
    assert losses == [alone.server.step(), alone.server.step()]
