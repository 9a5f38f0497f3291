"""Shadow models: who learns from what, and that all at once is the same as one by one."""

from __future__ import annotations

import pytest
import torch
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
    inside = halves(100, 4, 0)
    assert not torch.equal(inside[0], inside[2])
    assert not torch.equal(inside, halves(100, 4, 1))


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


def test_a_model_without_a_record_is_refused() -> None:
    pool, inside = records(), halves(20, 2, 0)
    with pytest.raises(ArgumentError, match="a model without a record"):
        together(make, pool, inside & inside[:1], TASK, LOCAL, 0)


def _gate(name: str) -> Gate:
    return Gate(name, PolicyConfig(), AuditLog())
