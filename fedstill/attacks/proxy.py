"""Membership from a node's answers alone: through a copy of its model, distilled from questions and answers.

Whoever holds the pairs that left the node, and cannot ask more, distils a *proxy* of its model from them and
attacks that. Copying a model by its answers is the subject of Tramer, Zhang, Juels, Reiter, Ristenpart,
"Stealing Machine Learning Models via Prediction APIs", USENIX Security 2016. What left the node is all that
enters, and proxies of shadows are distilled from as many pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from fedstill.attacks.shadows import Make, together
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.node import training
from fedstill.node.group import Group
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks import Task
from fedstill.tasks.functional import distance

DISTIL = LocalConfig(epochs=40, batch=64, smoothing=0.0)
"""How a proxy learns: longer than a node, as answers say more than labels do."""


def proxies(
    make: Make,
    inputs: torch.Tensor,
    answers: torch.Tensor,
    shadows: Sequence[nn.Module],
    task: Task,
    seed: int,
    *,
    local: LocalConfig = DISTIL,
    compute: Compute | None = None,
) -> list[nn.Module]:
    """One of the node, from what it answered, and then one of each shadow, which is asked the same.

    The loss is half the mean squared difference of logits without their mean, the limit of distillation at
    high temperature: it copies also what is said of unlikely classes.

    Args:
        make: an untrained proxy, of the node's architecture as far as that is known.
        inputs: what the node was asked about ``(Q, ...)``.
        answers: what it answered ``(Q, classes)``, as logits.
        shadows: the attacker's own models.

    Raises:
        ArgumentError: no questions, or answers of another number.
    """
    if len(answers) != len(inputs) or not len(inputs):
        raise ArgumentError("answers", tuple(answers.shape), f"({len(inputs)}, classes)")
    compute = compute or Compute()
    asked = inputs.to(compute.device)
    told = [answers, *(training.predict(shadow, asked, compute).cpu() for shadow in shadows)]
    pools = [TensorData(inputs, each.float()) for each in told]
    everything = torch.ones(len(told), len(inputs), dtype=torch.bool)

    def work(group: Group, step: int, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        outputs = group.bench("model")(x)  # (G, B, classes)
        apart = distance(outputs.flatten(0, 1), told.flatten(0, 1), math.inf)
        losses = apart.view(len(outputs), -1).mean(1)
        group.step("model", losses)
        return losses

    return together(make, pools, everything, task, local, seed, compute=compute, work=work)
