"""FedIOD compared with a deliberately simple Algorithm 1, and its options."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.core.seeds import torch_generator
from fedstill.federation.responses import Responses
from fedstill.methods._discriminators import Discriminators
from fedstill.methods._input_generators import InputGenerator
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods.fediod import FedIOD
from fedstill.models.module_utils import to_vector
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.privacy import noise
from fedstill.privacy.dpsgd import DPParameters
from fedstill.protocol.local_config import LocalConfig
from tests.support import small_world
from tests.support.errors import raises_invalid
from tests.support.small_world import CLASSES, SEED, SHAPE, World, changed, disagreeing, few, made, make_nodes

pytestmark = pytest.mark.usefixtures("steady_adam")

SPECS = ("small-cnn:4", "resnet8:4", "mlp:8")
SMALL = FedIOD(
    steps=4,
    batch=5,
    ensemble="log_probs",
    generator=InputGenerator(noise=6, width=4),
    critic=Discriminators(width=4, batch=32),
    student=ReplayTraining(steps=2, batch=100, memory=12),  # one batch has all of the memory
)
PAPER = changed(
    SMALL,
    critic={"loss": "eq2"},
    gan_weights="size",
    importance="fakeness",
    ensemble="logits",
    tau=math.inf,
    gan=1.0,
    conf=1.0,
    unique=1.0,
    mimic=1.0,
    balance=0.0,
    student_inputs="fresh",
    student={"steps": 1},
)


def world(
    config: FedIOD,
    *,
    specs: tuple[str, ...] = SPECS,
    policies: Mapping[int, PolicyConfig] | None = None,
    student: str = "resnet8:4",
) -> World:
    models = [disagreeing(made(spec, index)) for index, spec in enumerate(specs)]
    nodes = make_nodes(models, classes=few)
    for index, node in enumerate(nodes):
        node.gate.ledger.policy = (policies or {}).get(index, PolicyConfig())
    first = made(student, "student")
    first[0].requires_grad_(student != "small-cnn:4")  # type: ignore[index]
    return small_world.world(config, nodes, first, local=LocalConfig())


# --- Algorithm 1, simply -------------------------------------------------------------------------


def entropy(q: torch.Tensor) -> torch.Tensor:
    return -sum(q[..., c] * q[..., c].log() for c in range(CLASSES))


class Plain:
    """Algorithm 1 written simply: loops, plain autograd, no federation."""

    def __init__(self, start: World, config: FedIOD) -> None:
        self.config = config
        self.data = [node.data for node in start.nodes]
        self.nodes = start.nodes  # only to sample x'_k with the node's own generators
        self.T = [copy.deepcopy(node.model).requires_grad_(False) for node in start.nodes]
        rated = config.importance in ("fakeness", "realness", "odds")
        critical = config.gan > 0 or rated  # otherwise there are no critics
        self.D = [copy.deepcopy(node.modules["critic"]).train() for node in start.nodes if critical]
        self.G, self.S = copy.deepcopy(start.server.state.generator.G), copy.deepcopy(start.server.student)
        adam = {"betas": (0.5, 0.999)}
        self.g_opt = torch.optim.Adam(self.G.parameters(), **adam)
        self.d_opt = [torch.optim.Adam(D.parameters(), config.critic.lr, **adam) for D in self.D]
        self.s_opt = torch.optim.Adam(self.S.parameters())
        self.sizes = [len(data) for data in self.data]
        self.pi = [size / sum(self.sizes) for size in self.sizes]
        self.t, self.number = 0, 1  # query 0 was for the label counts
        self.replay: list[tuple[torch.Tensor, torch.Tensor]] = []

    def rate(self, first: float, last: float) -> float:
        return last + (first - last) * 0.5 * (1 + math.cos(math.pi * self.t / (self.config.steps - 1)))

    def weights(self, d: list[torch.Tensor], reals: list[torch.Tensor]) -> torch.Tensor:
        """Return the weights of Eq. 8, or FedGO's, (K, B, classes)."""
        how, batch = self.config.importance, self.config.batch
        out = torch.zeros(len(self.data), batch, CLASSES)
        for b in range(batch):
            for c in range(CLASSES):
                hat = []
                for k, data in enumerate(self.data):
                    one = float(len(data) if how in ("size", "odds") else (data.targets == c).sum())
                    if how in ("fakeness", "realness"):
                        here, real_score = d[k][b].sigmoid().mean(), reals[k].sigmoid().mean()
                        if how == "realness":
                            here, real_score = 1 - here, 1 - real_score
                        one *= (here / real_score).item()
                    if how == "odds":
                        real = (-d[k][b].double()).sigmoid()  # probability of real, for each patch
                        one *= (real / (1 - real)).log().mean().exp().item()
                    hat.append(one)
                for k, one in enumerate(hat):
                    out[k, b, c] = one / sum(hat) if sum(hat) else 1 / len(hat)
        return out

    def ensembled(self, z: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return Eq. 9, (B, classes)."""
        if self.config.ensemble == "logits":
            return sum(weights[k] * z[k] for k in range(len(z)))
        if self.config.ensemble == "log_probs":
            return sum(weights[k] * z[k].log_softmax(1) for k in range(len(z)))
        return sum(weights[k] * z[k].softmax(1) for k in range(len(z))).log()

    def mimic(self, student: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return Eq. 6 and 10."""
        tau = self.config.tau
        if tau == math.inf:
            student, target = (z - z.mean(1, keepdim=True) for z in (student, target))
            return 0.5 * F.mse_loss(student, target)
        log_s, log_t = (student / tau).log_softmax(1), (target / tau).log_softmax(1)
        return tau**2 * F.kl_div(log_s, log_t, reduction="batchmean", log_target=True)

    def responses(self, x: torch.Tensor, reals: list[torch.Tensor]) -> Any:
        z = [T(x) for T in self.T]
        d = [D(x) for D in self.D]
        with torch.no_grad():
            weights = self.weights(d, [D(real) for D, real in zip(self.D, reals, strict=False)])
        return z, d, weights, self.ensembled(z, weights)

    def draw(self) -> list[torch.Tensor]:
        size = self.config.batch
        reals = [node.sample_batch(size, "critic", self.number).inputs for node in self.nodes]
        self.number += 1
        return reals

    def step(self) -> dict[str, float]:
        config, K = self.config, len(self.T)
        for group in self.g_opt.param_groups:
            group["lr"] = self.rate(config.generator.lr, config.generator.lr_end)
        for group in self.s_opt.param_groups:
            group["lr"] = self.rate(config.student.lr, config.student.lr_end)

        w = torch.randn(config.batch, config.generator.noise, generator=torch_generator(SEED, "w", self.t))
        x = self.G(w)
        some = config.critic.batch or config.batch
        own = [
            node.sample_batch(min(some, config.batch), "critic", self.number).inputs for node in self.nodes
        ]
        reals = self.draw()
        for D, optimizer, real in zip(self.D, self.d_opt, own, strict=False):
            real_loss, fake_loss = D(real), D(x.detach()[:some])
            if config.critic.loss == "eq2":
                loss = real_loss.sigmoid().mean() + (1 - fake_loss.sigmoid()).mean()
            else:  # real is class 0, generated is class 1
                loss = F.binary_cross_entropy_with_logits(real_loss, torch.zeros_like(real_loss))
                loss = loss + F.binary_cross_entropy_with_logits(fake_loss, torch.ones_like(fake_loss))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        z, d, weights, z_bar = self.responses(x, reals)
        L_gan = torch.zeros(())
        shown = z_bar.detach().softmax(1)
        for b in range(config.batch):
            knows = torch.stack([(weights[k, b] * shown[b]).sum() for k in range(K)])
            for k in range(len(self.D)):
                share = {"size": self.pi[k], "average": 1 / K, "expertise": (knows / knows.sum())[k]}
                fake = d[k][b].sigmoid()
                doubt = fake.sum() if config.critic.loss == "eq2" else -(1 - fake).log().sum()
                L_gan = L_gan + share[config.gan_weights] * doubt / config.batch
        q = [one.softmax(1) for one in z]
        L_conf = sum(self.pi[k] * entropy(q[k]).mean() for k in range(K))
        L_unique = L_conf - entropy(sum(self.pi[k] * q[k] for k in range(K))).mean()
        L_balance = -entropy(z_bar.softmax(1).mean(0))
        L_mimic = self.mimic(self.S.eval()(x), z_bar)
        loss = config.gan * L_gan + config.conf * L_conf + config.unique * L_unique
        loss = loss - config.mimic * L_mimic + config.balance * L_balance
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()

        self.replay += zip(x.detach(), z_bar.detach(), strict=True)
        self.replay = self.replay[-config.student.memory :]
        self.S.train()
        for step in range(config.student.steps):
            if config.student_inputs == "fresh":
                draw = torch_generator(SEED, "fresh w", self.t, step)
                with torch.no_grad():
                    x = self.G(torch.randn(config.batch, config.generator.noise, generator=draw))
                    target = self.responses(x, self.draw())[-1]
            else:
                x, target = (torch.stack(part) for part in zip(*self.replay, strict=True))
            L_S = self.mimic(self.S(x), target)
            self.s_opt.zero_grad()
            L_S.backward()
            self.s_opt.step()
        self.t += 1
        names = {"gan": L_gan, "conf": L_conf, "unique": L_unique, "mimic": L_mimic, "balance": L_balance}
        return {name: loss.item() for name, loss in names.items()} | {"student": L_S.item()}


# Biases that the following batch norm cancels: their gradients are rounding noise.
CANCELED = {"linear.bias", "body.2.bias", "body.6.bias"}
CANCELED |= {f"body.{layer}.running_mean" for layer in (0, 3, 7)}
CANCELED_IN_CRITIC = {"2.bias"}


def same(one: nn.Module, other: nn.Module, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    for name, value in other.state_dict().items():
        if name not in but:
            torch.testing.assert_close(one.state_dict()[name], value, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SMALL, id="replayed"),
        pytest.param(PAPER, id="paper"),
        pytest.param(changed(PAPER, critic={"loss": "bce"}, student_inputs="replayed"), id="fakeness, bce"),
        pytest.param(replace(SMALL, importance="realness", ensemble="probs", tau=4.0), id="realness"),
        pytest.param(replace(SMALL, importance="odds", ensemble="probs"), id="odds"),
        pytest.param(replace(SMALL, importance="size", gan_weights="average"), id="sizes, average"),
        pytest.param(replace(SMALL, gan_weights="expertise"), id="expertise"),
        pytest.param(changed(SMALL, critic={"batch": 2}), id="critics learn on two of five"),
        pytest.param(changed(SMALL, critic={"batch": 0}), id="critics learn on all"),
        pytest.param(replace(SMALL, gan=0.0, conf=0.0, unique=5.0, mimic=3.0, balance=0.0), id="adversaries"),
        pytest.param(replace(SMALL, unique=-5.0), id="agreement"),
    ],
)
def test_step_equals_algorithm_1(config: FedIOD) -> None:
    one = world(config)
    plain = Plain(world(config), config)
    for _ in range(2):
        losses, expected = one.server.step(), plain.step()
        assert losses == pytest.approx(expected, rel=1e-3, abs=1e-5)
    same(one.server.student, plain.S)
    same(one.server.state.generator.G, plain.G, CANCELED)
    assert len(plain.D) == sum("critic" in node.modules for node in one.nodes) == (3 if config.gan else 0)
    for node, critic in zip(one.nodes, plain.D, strict=False):
        same(node.modules["critic"], critic, CANCELED_IN_CRITIC)


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("importance", "samples"), [("counts", 0), ("realness", 1)])
def test_private_critic_samples_real_inputs_only_for_ratings(
    importance: Any, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world(replace(SMALL, importance=importance))
    times, sample = [0], Node.sample_batch

    def counted(*args: Any) -> TensorData:
        times[0] += 1
        return sample(*args)

    monkeypatch.setattr(Node, "sample_batch", counted)
    node, x = one.nodes[0], torch.zeros(5, *SHAPE)
    node.dp_sgd_parameters = {"critic": DPParameters(1.0, 1.0, partial(noise.seeded_sampler, 0))}
    one.side.prepare(node)
    before = to_vector(node.modules["critic"])
    one.side.queries["predict_logits"].function(NodeView(NodeGroup([node]), one.side.setting), x=x)
    assert times[0] == samples
    assert not torch.equal(to_vector(node.modules["critic"]), before)


def test_frozen_student_parameters_stay_frozen() -> None:
    server = world(SMALL, specs=("mlp:8", "mlp:8"), student="small-cnn:4").server  # its first layer is frozen
    student, before = server.student, copy.deepcopy(server.student.state_dict())
    for _ in range(2):
        server.step()
    assert torch.equal(student.state_dict()["0.weight"], before["0.weight"])
    assert not torch.equal(student.state_dict()["4.weight"], before["4.weight"])
    wanted = [parameter.requires_grad for parameter in student.parameters()]
    assert wanted == [False, False] + [True] * (len(wanted) - 2)


@pytest.mark.parametrize("importance", ["fakeness", "realness"])
def test_mean_critic_outputs_on_real_data_get_no_gradient(
    importance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These outputs do not depend on x, and the importance weights are constants in G's loss."""
    one, sent = world(replace(SMALL, importance=importance)), []
    collect = one.server.federation.collect_gradients

    def recorded(number: int, query: str, output_gradients: Any, encoding: Any = None) -> Any:
        sent.extend(set(each) for each in output_gradients.values())
        return collect(number, query, output_gradients, encoding)

    monkeypatch.setattr(one.server.federation, "collect_gradients", recorded)
    one.server.step()
    assert sent == [{"logits", "critic"}] * len(one.nodes)


# --- evaluation, samples -------------------------------------------------------------------------


@pytest.mark.parametrize("importance", ["counts", "realness", "odds"])
def test_preview_responses_train_and_release_nothing(importance: Any) -> None:
    one = world(replace(SMALL, importance=importance))
    one.server.step()
    before, audit = copy.deepcopy([node.state_dict() for node in one.nodes]), one.audit.traffic_totals()
    x = torch.randn(7, *SHAPE, generator=torch.Generator().manual_seed(0))
    response = one.preview(x)
    for row, node in enumerate(one.nodes):
        torch.testing.assert_close(response["logits"][row], node.model(x))
        if importance != "counts":  # otherwise the weights do not need the critic
            torch.testing.assert_close(response["critic"][row], node.modules["critic"](x))
        for role, values in before[row]["modules"].items():
            for name, value in values.items():
                assert torch.equal(node.modules[role].state_dict()[name], value)
    assert one.audit.traffic_totals() == audit
    expected = {"counts": set(), "realness": {"critic", "critic_real"}, "odds": {"critic"}}
    assert set(response) == {"logits"} | expected[importance]
    together = one.server.ensemble_responses(Responses(-1, one.server.federation.nodes, response))
    assert together.shape == (7, CLASSES)


def test_preview_samples_are_repeatable_and_change_nothing() -> None:
    server = world(SMALL).server
    G = server.state.generator.G
    state = copy.deepcopy(G.state_dict())
    first, again = server.preview_samples(4), server.preview_samples(4)
    assert torch.equal(first, again)
    assert G.training
    assert all(torch.equal(state[name], value) for name, value in G.state_dict().items())
    assert -2 <= first.min() < first.max() <= 2  # (0 - 0.5) / 0.25 to (1 - 0.5) / 0.25
    server.step()
    assert not torch.equal(server.preview_samples(4), first)


def test_rejects_odds_with_eq2_critics() -> None:
    with raises_invalid("method.critic.loss", "eq2", "bce"):
        FedIOD(importance="odds", critic=Discriminators(loss="eq2"))


def test_rejects_generator_without_loss() -> None:
    with raises_invalid("method.mimic", 0.0, "above 0"):
        FedIOD(backpropagate=False, mimic=0.0)
    assert FedIOD(mimic=0.0).backpropagate, "critics and gradients of nodes train the generator"
