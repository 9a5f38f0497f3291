"""Shadow models: who learns from what, and that all at once is the same as one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedstill.attacks.membership_scores import (
    RecordLogits,
    attack_metrics,
    lira_attack,
    rmia_attack,
    shadow_halves,
    train_proxies,
    train_shadows,
)
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import derive, torch_generator
from fedstill.core.workers import Workers
from fedstill.data import Digits, load
from fedstill.models import build
from fedstill.node import local_training
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.local_training import predict
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks.classification import Classification
from tests.attacks.runs import look

TASK, LOCAL = Classification(3), LocalConfig(epochs=6, batch=5, smoothing=0.0)


def records(n: int = 20) -> TensorData:
    generator = torch_generator(0, "records")
    return TensorData(
        torch.randn(n, 1, 4, 4, generator=generator), torch.randint(3, (n,), generator=generator)
    )


def make(seed: int) -> nn.Module:
    return build("mlp:8", (1, 4, 4), 3, seed)


def engine(name: str) -> Compute:
    return Compute(EngineConfig(name="stacked" if name == "stacked" else "one-by-one"))


# --- halves -----------------------------------------------------------------------------------------


@given(st.integers(2, 50), st.integers(0, 6), st.integers(0, 2**32))
def test_each_record_is_in_half_of_the_models(n: int, pairs: int, seed: int) -> None:
    inside = shadow_halves(n, 2 * pairs, seed)
    assert inside.shape == (2 * pairs, n)
    assert inside.sum(0).tolist() == [pairs] * n
    assert inside.sum(1).tolist() == [n // 2, n - n // 2] * pairs
    assert torch.equal(inside, shadow_halves(n, 2 * pairs, seed))


def test_halves_are_drawn_anew_for_each_pair_and_seed() -> None:
    inside = shadow_halves(100, 4, 0)
    assert not torch.equal(inside[0], inside[2])
    assert not torch.equal(inside, shadow_halves(100, 4, 1))


# --- training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stacked", "one-by-one"])
def test_all_at_once_is_the_local_training_of_a_node(name: str) -> None:
    pool, inside = records(), shadow_halves(20, 4, 0)
    models = train_shadows(make, pool, inside, TASK, LOCAL, 3, compute=engine(name))
    for number, (model, row) in enumerate(zip(models, inside, strict=True)):
        node_name, compute = f"shadow-{number}", Compute()
        network = make(derive(3, "shadow", number))
        node = Node(node_name, pool.subset(row.nonzero().flatten()), network, _gate(node_name), 3)
        local_training.make_optimizers([node], LOCAL)
        local_training.train([node], TASK, LOCAL, compute)
        for mine, theirs in zip(model.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_models_that_draw_may_follow_others_that_do_not() -> None:
    """As those of a node with dropout follow those of the student, in one attack."""

    def dropping(seed: int) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), make(seed))

    pool, inside = records(), shadow_halves(20, 4, 0)
    expected = train_shadows(dropping, pool, inside, TASK, LOCAL, 3, compute=engine("one-by-one"))
    compute = engine("one-by-one")
    compute.workers = Workers(2)
    train_shadows(make, pool, inside, TASK, LOCAL, 3, compute=compute)
    found = train_shadows(dropping, pool, inside, TASK, LOCAL, 3, compute=compute)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_a_model_learns_from_its_own_records_and_from_no_other() -> None:
    pool, inside = records(), shadow_halves(20, 2, 0)
    changed = pool.inputs.clone()
    changed[inside[1]] += 1.0
    one = train_shadows(make, pool, inside, TASK, LOCAL, 0, compute=engine("stacked"))
    two = train_shadows(
        make, TensorData(changed, pool.targets), inside, TASK, LOCAL, 0, compute=engine("stacked")
    )
    assert all(map(torch.equal, one[0].parameters(), two[0].parameters()))
    assert not any(map(torch.equal, one[1].parameters(), two[1].parameters()))


def test_a_model_without_a_record_is_refused() -> None:
    pool, inside = records(), shadow_halves(20, 2, 0)
    with pytest.raises(ArgumentError, match="a model without a record"):
        train_shadows(make, pool, inside & inside[:1], TASK, LOCAL, 0)


def _gate(name: str) -> Gate:
    return Gate(name, PolicyConfig(), AuditLog())


TEN = Classification(10)
COMPUTE = Compute(EngineConfig(name="stacked"))
N, SHADOWS = 100, 8
DISTIL = LocalConfig(epochs=60, batch=100, lr=3e-3, smoothing=0.0)


def network(seed: int) -> nn.Module:
    return build("mlp:64", (1, 8, 8), 10, seed)


class World:
    """A node that overfitted 100 digits of 200, a server with shadows, and 500 digits that nobody owns."""

    def __init__(self) -> None:
        data = load(Digits())
        order = torch.randperm(len(data.train), generator=torch_generator(0, "proxies"))
        self.pool = data.train.subset(order[: 2 * N])
        self.public = data.train.subset(order[2 * N : 2 * N + 500])
        self.inside, self.theirs = shadow_halves(2 * N, 2, 1)[0], shadow_halves(2 * N, SHADOWS, 2)
        local = LocalConfig(epochs=300, batch=N, lr=3e-3, smoothing=0.0)
        masks = torch.cat([self.inside[None], self.theirs])
        self.node, *self.shadows = train_shadows(network, self.pool, masks, TEN, local, 0, compute=COMPUTE)

    def says(self, inputs: torch.Tensor) -> torch.Tensor:
        return predict(self.node, inputs, COMPUTE)

    def proxied(self, responses: torch.Tensor) -> tuple[list[nn.Module], RecordLogits]:
        inputs = self.public.inputs
        copies = train_proxies(
            network, inputs, responses, self.shadows, TEN, 5, local=DISTIL, compute=COMPUTE
        )
        return copies, look(copies[0], copies[1:], self.pool, self.theirs, COMPUTE)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_a_proxy_says_what_was_said_up_to_what_softmax_does_not_see(world: World) -> None:
    inputs = world.public.inputs[:100]
    responses = torch.stack([world.says(inputs), predict(world.shadows[0], inputs, COMPUTE)])
    local = LocalConfig(epochs=400, batch=100, lr=3e-3, smoothing=0.0)
    copies = train_proxies(
        network, inputs, responses[0] + 3.0, world.shadows[:1], TEN, 0, local=local, compute=COMPUTE
    )
    told = torch.stack([predict(proxy, inputs, COMPUTE) for proxy in copies])
    told, responses = (values - values.mean(2, keepdim=True) for values in (told, responses))
    errors = (told - responses).square().mean((1, 2)) / responses.var((1, 2))
    swapped = (told - responses.flip(0)).square().mean((1, 2)) / responses.var((1, 2))
    assert errors.max() < 0.02
    assert swapped.min() > 2 * errors.max(), "each copies its own"


def test_a_proxy_gives_its_nodes_records_away(world: World) -> None:
    copies, seen = world.proxied(world.says(world.public.inputs))
    found = attack_metrics(lira_attack(seen), world.inside)
    assert len(copies) == 1 + SHADOWS
    assert found["auc"]["value"] > 0.7
    # RMIA's population is one that was not asked about: to those the proxies were fitted.
    others = look(copies[0], copies[1:], load(Digits()).test)
    assert attack_metrics(rmia_attack(seen, others), world.inside)["auc"]["value"] > 0.7
    direct = look(world.node, world.shadows, world.pool, world.theirs)
    assert found["auc"]["value"] < attack_metrics(lira_attack(direct), world.inside)["auc"]["value"]


def test_less_is_told_by_answers_to_other_queries(world: World) -> None:
    _, seen = world.proxied(world.says(world.public.inputs).roll(1, 0))
    assert attack_metrics(lira_attack(seen), world.inside)["auc"]["value"] < 0.65


def test_answers_of_another_number_than_queries_are_refused(world: World) -> None:
    with pytest.raises(ArgumentError, match="answers"):
        train_proxies(network, world.public.inputs, torch.zeros(3, 10), [], TEN, 0)
