"""Shadow models: trained as the target was, on random halves of a pool of records, by the attacker.

Shadows come in pairs that share the pool between them, so that each record is in half of them and all learn
from as many. This project's own local training trains them, all at once (:func:`together`); that whole
federations do is in :mod:`fedstill.attacks.outsider`.

Whoever holds the pairs of questions and answers that left a node, and cannot ask more, distils a *proxy* of
its model from them and attacks that (:func:`proxies`). Copying a model by its answers is the subject of
Tramer, Zhang, Juels, Reiter, Ristenpart, "Stealing Machine Learning Models via Prediction APIs", USENIX
Security 2016. What left the node is all that enters, and proxies of shadows are distilled from as many pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import derive, torch_generator
from fedstill.federation.inprocess import partition, stacks
from fedstill.node import local_training
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.local_training import Work
from fedstill.node.node import Node
from fedstill.node.node_group import Group, signature
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks import Task
from fedstill.tasks.formulas import distance

Make = Callable[[int], nn.Module]  # an untrained model, from a seed


def halves(records: int, models: int, seed: int) -> torch.Tensor:
    """Which model learns from which record: ``(models, records)`` bool, each record in half of the models.

    Models 2i and 2i + 1 share the records between them, by chance; of an odd number the second has one more.

    >>> inside = halves(6, 4, 0)
    >>> inside.sum(0).tolist(), inside.sum(1).tolist()
    ([2, 2, 2, 2, 2, 2], [3, 3, 3, 3])
    """
    inside = torch.zeros(models, records, dtype=torch.bool)
    for pair in range(models // 2):
        order = torch.randperm(records, generator=torch_generator(seed, "shadow halves", pair))
        inside[2 * pair, order[: records // 2]] = True
        inside[2 * pair + 1] = ~inside[2 * pair]
    return inside


def together(
    make: Make,
    pool: TensorData | Sequence[TensorData],
    inside: torch.Tensor,
    task: Task,
    local: LocalConfig,
    seed: int,
    *,
    compute: Compute | None = None,
    work: Work | None = None,
) -> list[nn.Module]:
    """All at once, by the local training of a node.

    Each model has first weights, batches and augmentation of its own, which follow from the seed.

    Args:
        make: an untrained model; all of one architecture.
        pool: the records; or one a model, of the same size, where models learn different targets of them.
        inside: which model learns from which of them, ``(M, N)`` bool.
        local: how the target was trained, as far as the attacker knows.
        work: what one step does; None is a step on the task's loss.

    Raises:
        ArgumentError: a model without a record.
    """
    if len(inside) and not bool(inside.any(1).all()):
        raise ArgumentError("inside", "a model without a record", "one record or more for each model")
    compute = compute or Compute()
    pools = [pool] * len(inside) if isinstance(pool, TensorData) else pool
    nodes = []
    for model, (data, row) in enumerate(zip(pools, inside, strict=True)):
        name = f"shadow-{model}"
        network = compute.place(make(derive(seed, "shadow", model)))
        own = data.subset(row.nonzero().flatten().to(data.inputs.device)).to(compute.device)
        nodes.append(Node(name, own, network, Gate(name, PolicyConfig(), AuditLog()), seed))
    local_training.prepare(nodes, local)
    groups = partition(nodes, stacks(compute, nodes))

    def learn(group: Sequence[Node]) -> None:
        local_training.train(group, task, local, compute, work=work)

    kinds = [("shadow", work is None, signature(group[0].model)) for group in groups]
    compute.workers.each(learn, groups, kinds)
    return [node.model for node in nodes]


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
    told = [answers, *(local_training.predict(shadow, asked, compute).cpu() for shadow in shadows)]
    pools = [TensorData(inputs, each.float()) for each in told]
    everything = torch.ones(len(told), len(inputs), dtype=torch.bool)

    def work(group: Group, step: int, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        outputs = group.bench("model")(x)  # (G, B, classes)
        apart = distance(outputs.flatten(0, 1), told.flatten(0, 1), math.inf)
        losses = apart.view(len(outputs), -1).mean(1)
        group.step("model", losses)
        return losses

    return together(make, pools, everything, task, local, seed, compute=compute, work=work)
