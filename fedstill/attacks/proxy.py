"""Membership from a node's answers alone: by asking about the record itself, or through a copy of its model.

Two adversaries. The *curious server* puts the candidate among its questions and scores what it is told
(:func:`asked`). Whoever holds only the pairs of questions and answers that left the node, and cannot ask
more, distils a *proxy* of its model from them and attacks that (:func:`through`). Copying a model by its
answers is the subject of Tramer, Zhang, Juels, Reiter, Ristenpart, "Stealing Machine Learning Models via
Prediction APIs", USENIX Security 2016.

What left the node is all that enters, and proxies of shadows are distilled from as many pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from fedstill.attacks.membership_scores import Seen
from fedstill.attacks.shadows import Make, together
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.node import training
from fedstill.node.group import Group
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks import Task
from fedstill.tasks.functional import distance

DISTIL = LocalConfig(epochs=200, batch=64, smoothing=0.0)
"""How a proxy learns: longer than a node, as answers say more than labels do."""


def asked(
    answers: torch.Tensor,
    shadows: Sequence[nn.Module],
    records: TensorData,
    inside: torch.Tensor,
    *,
    compute: Compute | None = None,
) -> Seen:
    """What a curious server has that put the candidates among its questions.

    Args:
        answers: one node's answers about the candidates ``(N, classes)``, as logits.
        shadows: the server's own models.
        records: the candidates, with their labels.
        inside: which shadow learned from which of them, ``(M, N)`` bool.
        compute: device and precision; None is the default.

    Raises:
        ArgumentError: shapes that do not go together.
    """
    outputs = _answers(shadows, records.inputs, answers, compute or Compute())
    return Seen(answers, outputs, inside, records.targets.cpu())


def through(
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
    """Proxies: one of the node, from what it answered, and then one of each shadow, which is asked the same.

    Args:
        make: an untrained proxy, of the node's architecture as far as that is known.
        inputs: what the node was asked about ``(Q, ...)``.
        answers: what it answered ``(Q, classes)``, as logits.
        shadows: the attacker's own models.
        task, seed, local, compute: as of :func:`imitate`.

    Raises:
        ArgumentError: shapes that do not go together.
    """
    compute = compute or Compute()
    theirs = _answers(shadows, inputs, answers, compute)
    return imitate(make, inputs, torch.cat([answers[None], theirs]), task, seed, local, compute)


def imitate(
    make: Make,
    inputs: torch.Tensor,
    answers: torch.Tensor,
    task: Task,
    seed: int,
    local: LocalConfig = DISTIL,
    compute: Compute | None = None,
) -> list[nn.Module]:
    """A model for each of several sets of answers to the same questions, distilled from them.

    The loss is half the mean squared difference of logits without their mean, the limit of distillation at
    high temperature: it copies also what is said of unlikely classes.

    Args:
        make: an untrained model.
        inputs: the questions ``(Q, ...)``.
        answers: logits ``(G, Q, classes)``.
        task: of the models.
        seed: of everything.
        local: how they learn.
        compute: device and precision; None is the default.

    Raises:
        ArgumentError: answers of another form.
    """
    if answers.ndim != 3 or answers.shape[1] != len(inputs) or not len(inputs):
        raise ArgumentError("answers", tuple(answers.shape), f"(models, {len(inputs)}, classes)")
    pools = [TensorData(inputs, told.float()) for told in answers]
    everything = torch.ones(len(answers), len(inputs), dtype=torch.bool)

    def work(group: Group, step: int, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        outputs = group.bench("model")(x)  # (G, B, classes)
        apart = distance(outputs.flatten(0, 1), told.flatten(0, 1), math.inf)
        losses = apart.view(len(outputs), -1).mean(1)
        group.step("model", losses)
        return losses

    return together(make, pools, everything, task, local, seed, compute=compute, work=work)


def _answers(
    shadows: Sequence[nn.Module],
    inputs: torch.Tensor,
    answers: torch.Tensor,
    compute: Compute,
) -> torch.Tensor:
    """The shadows' answers, ``(M, ..)``."""
    told = [training.predict(shadow, inputs.to(compute.device), compute).cpu() for shadow in shadows]
    return torch.stack(told) if told else answers.new_empty(0, *answers.shape)
