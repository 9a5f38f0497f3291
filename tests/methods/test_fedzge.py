"""FedZGE compared with a plain step, and its gradient estimate with the true gradient."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.compute import Compute, EngineConfig, Precision
from fedstill.core.seeds import torch_generator
from fedstill.methods._discriminators import Discriminators
from fedstill.methods._input_generators import InputGenerator, LabelGenerator
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods._zeroth_order import directions, linearize
from fedstill.methods.fediod import FedIOD
from fedstill.methods.fedzge import FedZGE
from fedstill.models.interface import Interface
from fedstill.models.predictors import Predictor
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks.classification import Classification
from tests.support import small_world
from tests.support.errors import raises_invalid
from tests.support.small_world import CLASSES, SEED, SHAPE, World, disagreeing, made, make_nodes, same

pytestmark = pytest.mark.usefixtures("steady_adam")

SMALL = FedZGE(
    steps=3,
    batch=4,
    directions=2,
    epsilon=0.01,
    generator=LabelGenerator(noise=6, width=4),
    student=ReplayTraining(steps=1, batch=100),  # one batch has all of the memory
    tau=1.0,
    adversary=0.5,
    diversity=2.0,
    balance=3.0,
)
IOD = FedIOD(
    steps=3,
    batch=4,
    gan=0.0,
    generator=InputGenerator(noise=6, width=4),
    student=ReplayTraining(memory=12),
)
TO = Interface(Classification(3), tuple("abc"), SHAPE)  # input and output of a model that is no module


def world(config: Any, *models: nn.Module, precision: Precision = "float32") -> World:
    nodes = make_nodes(models or [disagreeing(made(f"mlp:{8 + k}", k)) for k in range(3)])
    compute = Compute(EngineConfig(precision=precision))
    return small_world.world(config, nodes, made("mlp:8", "student"), local=LocalConfig(), compute=compute)


def generator_gradients(one: World) -> torch.Tensor:
    """Return the estimated gradients that train G in the next step."""
    one.server.step()
    return torch.cat([parameter.grad.flatten() for parameter in one.server.state.generator.G.parameters()])


# --- the estimate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [1, 4, 16, 64])
def test_squared_error_of_estimate_is_d_minus_1_over_q(q: int) -> None:
    """The responses are linear in x, so finite differences are exact."""
    d, classes, inputs = 6, 3, 4000
    draw = torch.Generator().manual_seed(q)
    A, g = torch.randn(d, classes, generator=draw), torch.randn(1, inputs, classes, generator=draw)
    x = torch.randn(inputs, d, generator=draw).double().requires_grad_()
    u = directions(q, x, draw).double()
    assert torch.allclose(u.norm(dim=2), torch.ones(q, inputs).double(), atol=1e-6)
    points = torch.cat([x.detach(), (x.detach() + 0.1 * u).flatten(0, 1)])
    z = linearize((points @ A.double()).unsqueeze(0), x, u, 0.1)
    torch.testing.assert_close(z[0], x @ A.double(), msg="the value is that of the response")
    (estimate,) = torch.autograd.grad((g * z).sum(), x)
    true = g[0].double() @ A.T.double()
    error = (estimate - true).square().sum(1) / true.square().sum(1)
    assert error.mean().item() == pytest.approx((d - 1) / q, rel=0.1)


def test_differences_approximate_gradients_of_nodes() -> None:
    """Many directions give an accurate estimate; without directions there is none."""
    config = replace(IOD, conf=5.0)
    variants = ({}, {"backpropagate": False, "directions": 3000, "epsilon": 0.01}, {"backpropagate": False})
    through, around, mimicking = (
        generator_gradients(world(replace(config, **variant))) for variant in variants
    )  # type: ignore[arg-type]
    assert F.cosine_similarity(around, through, dim=0) > 0.98
    assert around.norm().item() == pytest.approx(through.norm().item(), rel=0.1)
    assert F.cosine_similarity(mimicking, through, dim=0) < 0.5


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(IOD, backpropagate=False, directions=2),
    ],
    ids=["fedzge", "fediod"],
)
def test_differences_are_exact_for_nodes_with_bfloat16(config: Any) -> None:
    assert torch.equal(
        generator_gradients(world(config, precision="bfloat16")), generator_gradients(world(config))
    )


@pytest.mark.parametrize("importance", ["realness", "odds"])
def test_other_tensors_are_not_linearized(importance: Any) -> None:
    """Finite differences use the critics' scores of each input, but not their mean score of real inputs."""
    config = replace(IOD, gan=1.0, critic=Discriminators(width=4, batch=32), importance=importance)
    one = world(replace(config, backpropagate=False, directions=2, ensemble="probs"))
    one.server.step()
    assert one.side.queries["predict_logits"].rows == 12
    assert {kind for entry in one.audit.entries() for kind in entry["up"]} == {
        "label counts",
        "logits",
        "critic",
    }


# --- a step ---------------------------------------------------------------------------------------


def test_step_equals_plain_implementation() -> None:
    one, plain = world(SMALL), world(SMALL)
    G, S = copy.deepcopy(plain.server.state.generator.G), copy.deepcopy(plain.server.student)
    adam = torch.optim.Adam(G.parameters(), SMALL.generator.lr, betas=(0.5, 0.999))
    losses = one.server.step()

    draw = torch_generator(SEED, "w", 0)
    w, y = torch.randn(4, 6, generator=draw), torch.randint(CLASSES, (4,), generator=draw)
    x = G(torch.cat([w, F.one_hot(y, CLASSES).float()], 1))
    u = directions(2, x, torch_generator(SEED, "directions", 0))
    counts = torch.stack([node.data.targets.bincount(minlength=CLASSES) for node in plain.nodes]).float()
    omega = counts / counts.sum(0)  # (K, C)
    f = [copy.deepcopy(node.model).requires_grad_(False) for node in plain.nodes]

    def ensemble(inputs: torch.Tensor) -> torch.Tensor:
        return sum(omega[k] * f[k](inputs) for k in range(3))

    def L(inputs: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
        distances = torch.zeros(())
        for i in range(4):
            for j in range(4):
                distances = (
                    distances + (inputs[i] - inputs[j]).square().mean() * (w[i] - w[j]).square().mean() / 16
                )
        p, kl = z.softmax(1).mean(0), torch.zeros(())
        for b in range(4):
            log_z, log_S = z[b].log_softmax(0), S(inputs)[b].log_softmax(0)
            kl = kl + (log_z.exp() * (log_z - log_S)).sum() / 4
        fidelity = -sum(z[b].log_softmax(0)[y[b]] for b in range(4)) / 4
        return {
            "fidelity": fidelity,
            "adversary": -kl,
            "diversity": torch.exp(-distances),
            "balance": (p * p.log()).sum(),
        }

    def L_G(terms: dict[str, torch.Tensor]) -> torch.Tensor:
        return terms["fidelity"] + 0.5 * terms["adversary"] + 2 * terms["diversity"] + 3 * terms["balance"]

    leaf, z = x.detach().requires_grad_(), ensemble(x.detach()).requires_grad_()
    terms = L(leaf, z)
    assert {name: losses[name] for name in terms} == pytest.approx(
        {name: term.item() for name, term in terms.items()}, rel=1e-4
    )
    L_G(terms).backward()
    for b in range(4):
        for j in range(2):
            shifted = ensemble((x[b] + 0.01 * u[j, b]).detach().unsqueeze(0))[0]
            derivative = (z.grad[b] * (shifted - z[b])).sum() / 0.01  # of the loss, along u_j
            leaf.grad[b] += 64 / 2 * derivative.detach() * u[j, b]
    x.backward(leaf.grad)
    adam.step()
    for mine, theirs in zip(one.server.state.generator.G.parameters(), G.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-4)
    s_adam = torch.optim.Adam(S.parameters(), SMALL.student.lr)
    log_S = S(x.detach()).log_softmax(1)
    loss = F.kl_div(log_S, z.detach().log_softmax(1), reduction="batchmean", log_target=True)
    assert losses["student"] == pytest.approx(loss.item(), rel=1e-4)
    s_adam.zero_grad()
    loss.backward()
    s_adam.step()
    same(one.server.student, S, rtol=1e-3, atol=1e-5)


# --- nodes ----------------------------------------------------------------------------------------


def test_nodes_without_gradients_give_equal_steps() -> None:
    """The same network gives the same results as a module and as an opaque function."""
    models = [disagreeing(made("mlp:8", index)) for index in range(2)]
    behind = [
        Predictor(
            lambda images, model=model: model(torch.from_numpy(images)).detach().numpy(),
            Interface(Classification(3), tuple("abc"), SHAPE),
        )
        for model in models
    ]
    one, other = world(SMALL, *models), world(SMALL, *behind)
    for _ in range(3):
        assert one.server.step() == pytest.approx(other.server.step(), abs=1e-5)
    assert {kind for entry in other.audit.entries() for kind in entry["up"]} == {"label counts", "logits"}


# --- refusals -------------------------------------------------------------------------------------


def test_rejects_directions_with_gradients_and_small_memory() -> None:
    with raises_invalid("method.directions", 2, "0", "backpropagate"):
        FedIOD(directions=2)
    assert FedIOD(backpropagate=False, mimic=0.0, directions=2).directions, (
        "finite differences train the generator"
    )
    with raises_invalid("method.student.memory", 3, "at least method.batch (4"):
        replace(SMALL, student=ReplayTraining(memory=3))
