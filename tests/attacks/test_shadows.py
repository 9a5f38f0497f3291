"""Shadow models: who learns from what, and that all at once is the same as one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedstill.attacks.shadows import halves, together
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import derive, torch_generator
from fedstill.models import build
from fedstill.node import training
from fedstill.node.audit import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks.classification import Classification

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
    inside = halves(n, 2 * pairs, seed)
    assert inside.shape == (2 * pairs, n)
    assert inside.sum(0).tolist() == [pairs] * n
    assert inside.sum(1).tolist() == [n // 2, n - n // 2] * pairs
    assert torch.equal(inside, halves(n, 2 * pairs, seed))


def test_halves_are_drawn_anew_for_each_pair_and_seed() -> None:
    inside = halves(100, 32, 0)
    assert all(not torch.equal(one, other) for one, other in pairwise(inside[::2]))
    assert not torch.equal(inside, halves(100, 32, 1))
    # Two records are together in about half of the models, and not in the same half throughout.
    together_ = (inside[:, :1] == inside[:, 1:]).float().mean(0)
    assert 0.4 < float(together_.mean()) < 0.6
    assert float(together_.max()) < 1


# --- training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stacked", "one-by-one"])
def test_all_at_once_is_the_local_training_of_a_node(name: str) -> None:
    pool, inside = records(), halves(20, 4, 0)
    models = together(make, pool, inside, TASK, LOCAL, 3, compute=engine(name))
    for number, (model, row) in enumerate(zip(models, inside, strict=True)):
        node_name, compute = f"shadow-{number}", Compute()
        network = make(derive(3, "shadow", number))
        node = Node(node_name, pool.subset(row.nonzero().flatten()), network, _gate(node_name), 3)
        training.prepare([node], LOCAL)
        training.train([node], TASK, LOCAL, compute)
        for mine, theirs in zip(model.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_learns_from_its_own_records_and_from_no_other() -> None:
    pool, inside = records(), halves(20, 2, 0)
    changed = pool.inputs.clone()
    changed[inside[1]] += 1.0
    one = together(make, pool, inside, TASK, LOCAL, 0, compute=engine("stacked"))
    two = together(make, TensorData(changed, pool.targets), inside, TASK, LOCAL, 0, compute=engine("stacked"))
    assert all(map(torch.equal, one[0].parameters(), two[0].parameters()))
    assert not any(map(torch.equal, one[1].parameters(), two[1].parameters()))


def test_models_may_have_pools_of_their_own() -> None:
    pool, everything = records(), torch.ones(2, 20, dtype=torch.bool)
    other = TensorData(pool.inputs, (pool.targets + 1) % 3)
    long = LocalConfig(epochs=200, batch=20, lr=1e-2, smoothing=0.0)
    models = together(make, [pool, other], everything, TASK, long, 0, compute=engine("stacked"))
    for model, data in zip(models, (pool, other), strict=True):
        assert torch.equal(training.predict(model, pool.inputs, Compute()).argmax(1), data.targets)


def test_a_step_of_ones_own() -> None:
    """The work that is given is what is done: here, every output is drawn to class 2."""
    pool, inside = records(), halves(20, 2, 0)

    def work(group, step, x, y):  # type: ignore[no-untyped-def]
        losses = F.cross_entropy(group.bench("model")(x).flatten(0, 1), torch.full((y.numel(),), 2))
        group.step("model", losses.expand(len(x)))
        return losses.expand(len(x))

    local = LocalConfig(epochs=100, batch=10, lr=1e-2)
    for model in together(make, pool, inside, TASK, local, 0, compute=engine("stacked"), work=work):
        assert training.predict(model, pool.inputs, Compute()).argmax(1).eq(2).all()


def test_masks_of_another_form_are_refused() -> None:
    pool, inside = records(), halves(20, 2, 0)
    for mask in (inside[:, 1:], inside.float(), inside[0]):
        with pytest.raises(ArgumentError, match="inside"):
            together(make, [pool] * len(mask), mask, TASK, LOCAL, 0)
    with pytest.raises(ArgumentError, match="a model without a record"):
        together(make, pool, inside & inside[:1], TASK, LOCAL, 0)


def _gate(name: str) -> Gate:
    return Gate(name, PolicyConfig(), AuditLog())
