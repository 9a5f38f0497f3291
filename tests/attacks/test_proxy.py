"""Attacks that have a node's answers alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.attacks.membership_scores import Seen, lira, rmia
from fedstill.attacks.rates import rates
from fedstill.attacks.shadows import halves, proxies, together
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.data import Digits, load
from fedstill.models import build
from fedstill.node.training import predict
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks.classification import Classification
from tests.attacks.runs import look

TASK = Classification(10)
COMPUTE = Compute(EngineConfig(name="stacked"))
N, SHADOWS = 100, 8
DISTIL = LocalConfig(epochs=60, batch=100, lr=3e-3, smoothing=0.0)


def make(seed: int) -> nn.Module:
    return build("mlp:64", (1, 8, 8), 10, seed)


class World:
    """A node that overfitted 100 digits of 200, a server with shadows, and 500 digits that nobody owns."""

    def __init__(self) -> None:
        data = load(Digits())
        order = torch.randperm(len(data.train), generator=torch_generator(0, "proxies"))
        self.pool = data.train.subset(order[: 2 * N])
        self.public = data.train.subset(order[2 * N : 2 * N + 500])
        self.inside, self.theirs = halves(2 * N, 2, 1)[0], halves(2 * N, SHADOWS, 2)
        local = LocalConfig(epochs=300, batch=N, lr=3e-3, smoothing=0.0)
        masks = torch.cat([self.inside[None], self.theirs])
        self.node, *self.shadows = together(make, self.pool, masks, TASK, local, 0, compute=COMPUTE)

    def says(self, inputs: torch.Tensor) -> torch.Tensor:
        return predict(self.node, inputs, COMPUTE)

    def proxied(self, answers: torch.Tensor) -> tuple[list[nn.Module], Seen]:
        inputs = self.public.inputs
        copies = proxies(make, inputs, answers, self.shadows, TASK, 5, local=DISTIL, compute=COMPUTE)
        return copies, look(copies[0], copies[1:], self.pool, self.theirs, COMPUTE)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_a_proxy_says_what_was_said_up_to_what_softmax_does_not_see(world: World) -> None:
    inputs = world.public.inputs[:100]
    answers = torch.stack([world.says(inputs), predict(world.shadows[0], inputs, COMPUTE)])
    local = LocalConfig(epochs=400, batch=100, lr=3e-3, smoothing=0.0)
    copies = proxies(make, inputs, answers[0] + 3.0, world.shadows[:1], TASK, 0, local=local, compute=COMPUTE)
    told = torch.stack([predict(proxy, inputs, COMPUTE) for proxy in copies])
    told, answers = (values - values.mean(2, keepdim=True) for values in (told, answers))
    errors = (told - answers).square().mean((1, 2)) / answers.var((1, 2))
    swapped = (told - answers.flip(0)).square().mean((1, 2)) / answers.var((1, 2))
    assert errors.max() < 0.02
    assert swapped.min() > 2 * errors.max(), "each copies its own"


def test_a_proxy_gives_its_nodes_records_away(world: World) -> None:
    copies, seen = world.proxied(world.says(world.public.inputs))
    found = rates(lira(seen), world.inside)
    assert len(copies) == 1 + SHADOWS
    assert found["auc"]["value"] > 0.7
    # RMIA's population is one that was not asked about: to those the proxies were fitted.
    others = look(copies[0], copies[1:], load(Digits()).test)
    assert rates(rmia(seen, others), world.inside)["auc"]["value"] > 0.7
    direct = look(world.node, world.shadows, world.pool, world.theirs)
    assert found["auc"]["value"] < rates(lira(direct), world.inside)["auc"]["value"]


def test_less_is_told_by_answers_to_other_questions(world: World) -> None:
    _, seen = world.proxied(world.says(world.public.inputs).roll(1, 0))
    assert rates(lira(seen), world.inside)["auc"]["value"] < 0.65


def test_answers_of_another_number_than_questions_are_refused(world: World) -> None:
    with pytest.raises(ArgumentError, match="answers"):
        proxies(make, world.public.inputs, torch.zeros(3, 10), [], TASK, 0)
