"""Optimizers that compute as torch's without loading its compiler."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.optimizers import SGD, Adam

KINDS = [
    (Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    (Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.999)}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "fused": True}),
    (SGD, torch.optim.SGD, {"lr": 0.1}),
]


def take_steps(network: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    for _ in range(count):
        loss = network(torch.randn(8, 3, generator=draw)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(("own", "torchs", "options"), KINDS)
def test_steps_and_states_equal_those_of_torch(own: Any, torchs: Any, options: dict[str, Any]) -> None:
    networks = [nn.Linear(3, 2)]
    networks.append(copy.deepcopy(networks[0]))
    for network, kind in zip(networks, (own, torchs), strict=True):
        first = kind(network.parameters(), **options)
        take_steps(network, first, 3)
        resumed = kind(network.parameters(), **options)
        resumed.load_state_dict(first.state_dict())
        take_steps(network, resumed, 4)
    assert torch.equal(networks[0].weight, networks[1].weight)
    assert torch.is_grad_enabled()
    assert isinstance(own(networks[0].parameters(), lr=0.1), torchs)


RUN = """
import sys, torch, fedstill
data = fedstill.datasets.digits(nodes=2)
net = lambda: fedstill.models.SmallCNN(data.shape, 10, 8)
outcome = fedstill.distil(
    models=[net(), net()], student=net(), method=fedstill.FedIOD(steps=1),
    local=fedstill.LocalConfig(epochs=1, optimizer=sys.argv[1]), **data.arguments(),
)
assert outcome.history
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_run_does_not_load_the_compiler(optimizer: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, optimizer], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
