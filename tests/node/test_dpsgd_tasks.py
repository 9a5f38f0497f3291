"""DP-SGD on every task: each example's gradient is that of the example alone, so that clipping bounds it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.models import build, module_check
from fedstill.node import dp_training, local_training
from fedstill.node.node import Node
from fedstill.privacy import noise
from fedstill.privacy.dpsgd import DPParameters, clipped_sum_and_loss
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks import TASKS, Task

N, SIDE, LENGTH, WORDS = 5, 16, 6, 11


@dataclass(frozen=True)
class Case:
    """A task and a network for it."""

    task: str
    model: str
    classes: int
    targets: tuple[int, ...]  # shape of one target
    lowest: int = 0
    channels: int = 1


CASES = (
    Case("classification", "small-cnn:4", 3, ()),
    Case("text", "transformer:8", 3, ()),
    Case("text", "bag:8", 3, ()),
    Case("tabular", "residual-mlp:8", 3, ()),
    Case("regression", "mlp:8", 1, (1,)),
    Case("survival", "mlp:8", 3, (2,)),
    Case("multi-label", "small-cnn:4", 3, (3,), lowest=-1),
    Case("segmentation", "unet:4", 3, (SIDE, SIDE)),
    Case("instances", "unet:4", 3, (SIDE, SIDE), channels=3),
    Case("reconstruction", "unet:4", 1, (1, SIDE, SIDE)),
)


def made(case: Case) -> tuple[Task, nn.Module, TensorData]:
    draw = torch.Generator().manual_seed(0)
    task = TASKS[case.task]().make(case.classes)
    shape = (case.channels, SIDE, SIDE) if task.form == "images" else (LENGTH,)
    inputs = torch.randn(N, *shape, generator=draw)
    if task.form == "texts":
        inputs = torch.randint(1, WORDS, (N, LENGTH), generator=draw)
        inputs[1::2, LENGTH // 2 :] = 0  # every second text has half the length
    targets = torch.randn(N, *case.targets, generator=draw).tanh()
    if task.kind == "time":
        time, event = torch.rand(2, N, generator=draw)
        targets = torch.stack([(1 + 2 * time), event.round()], 1)
    elif task.kind not in ("image", "number"):
        high = 2 if task.kind == "labels" else case.classes
        targets = torch.randint(case.lowest, high, (N, *case.targets), generator=draw)
    model = build(case.model, shape, case.classes, 0, vocabulary=WORDS if task.form == "texts" else 0)
    return task, model, TensorData(inputs, targets)


def alone(task: Task, model: nn.Module, data: TensorData, row: int, smoothing: float) -> torch.Tensor:
    """Return one example's gradient, computed as a batch of one: ``(P,)``."""
    one = data.subset(torch.tensor([row]))
    outputs = model(one.inputs).float()
    loss = task.loss(outputs.unsqueeze(0), one.targets.unsqueeze(0), smoothing).sum()
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.task} {case.model}")
def test_per_example_gradients_match_loop(case: Case) -> None:
    task, model, data = made(case)
    model.train()
    each = torch.stack([alone(task, model, data, row, 0.1) for row in range(N)])  # (N, P)
    lengths = each.norm(dim=1)
    assert (lengths > 0).all()
    clip = lengths.median().item()  # clips some, but not all
    expected = (each * (clip / lengths).clamp(max=1).unsqueeze(1)).sum(0)
    losses = dp_training._example_losses(task, LocalConfig(smoothing=0.1))
    trained = dict(model.named_parameters())
    total, _ = clipped_sum_and_loss(model, trained, losses, data.inputs, data.targets, clip)
    torch.testing.assert_close(total.float(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.task} {case.model}")
def test_batch_loss_is_mean_of_example_losses(case: Case) -> None:
    task, model, data = made(case)
    with torch.no_grad():
        outputs = model.eval()(data.inputs).float()
    together = task.loss(outputs.unsqueeze(0), data.targets.unsqueeze(0))
    losses = task.loss(outputs.unsqueeze(1), data.targets.unsqueeze(1))
    assert losses.shape == (N,)
    torch.testing.assert_close(together[0], losses.mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.task} {case.model}")
def test_private_training_is_reproducible(case: Case) -> None:
    def learned() -> torch.Tensor:
        task, model, data = made(case)
        module_check.reject_dp_incompatible(model, "the model", data.inputs[:2])
        gate: Any = SimpleNamespace(budgets=None)
        node = Node("n", data, model, gate, 0)
        node.dp_sgd_parameters = {"model": DPParameters(0.5, 1.0, partial(noise.seeded_sampler, 0))}
        config = LocalConfig(epochs=1, min_steps=2, batch=3, optimizer="sgd", lr=0.1)
        local_training.attach_optimizers([node], config)
        local_training.train([node], task, config, Compute())
        return torch.cat([own.detach().flatten() for own in model.parameters()])

    first = torch.cat([own.detach().flatten() for own in made(case)[1].parameters()])
    after = learned()
    assert after.isfinite().all()
    assert not torch.equal(after, first)
    assert torch.equal(after, learned())
