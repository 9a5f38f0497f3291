"""Membership of a run's private records: told by its central model, and by the answers that a node gave.

The outsider has the central model, or asks the ensemble through the nodes' gates. Some methods have neither:
then the average of the nodes' models is attacked, or all of them, of which the one speaks that is surest of
the record's label. Nobody in the run is given these; it is what they would tell if they were used. The
curious server has questions and answers, and distils a copy of the node's model from them.

Members are the records that the nodes learned from; of nodes of which the server heard nothing but how much
they hold, nothing can have come to a student. Others are test data, which no model saw; where one node is
attacked they have its classes in its own shares, lest the class itself tell who is a member. A part of the
test data is kept aside as RMIA's population.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from fedstill import models
from fedstill.attacks import membership, proxy
from fedstill.attacks.heard import Heard, Replay
from fedstill.attacks.membership import Seen
from fedstill.attacks.rates import Rates, rates, split
from fedstill.attacks.shadows import halves, together
from fedstill.attacks.tap import Overheard
from fedstill.core.choices import check_choices
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError, MethodRefused
from fedstill.core.seeds import derive, numpy_generator, torch_generator
from fedstill.data import dividing
from fedstill.node import training
from fedstill.node.node import Node
from fedstill.privacy.audit import CONFIDENCE
from fedstill.runs.simulation import Simulation

TITLES = {"loss": "loss", "lira": "LiRA", "lira-offline": "LiRA, offline", "rmia": "RMIA"}
OF = {
    "student": ("student", "the central model's outputs about any input"),
    "virtual": (
        "average of the nodes' models",
        "the outputs of the nodes' average about any input, which nobody in this run is given",
    ),
    "ensemble": ("ensemble", "what the ensemble answers about any input, through the nodes' gates"),
    "nodes": (
        "nodes' models",
        "the outputs of every node's own model about any input, which nobody in this run is given",
    ),
}
POPULATION = 4  # one of so many test records is RMIA's
MOST_POPULATION = 500
COPIES = replace(proxy.DISTIL, epochs=40)  # there is one copy for each shadow, too
TESTED = 100  # test records that a shadow federation is measured on; nobody looks at it


@dataclass(frozen=True)
class MembersConfig:
    """How membership is told."""

    shadows: int = 16
    """Models that the attacker trains itself, an even number from 4 up; 0: only attacks that need none."""
    trained: Literal["alone", "federations"] = "alone"
    """Each shadow by itself, as a node trains its model; or each by the whole run, with the run's method:
    stronger, and as many runs as shadows."""
    records: int = 2000
    """Members that are looked at, at most; and at most as many others. Shadows learn from half of them."""
    answers: int = 2000
    """Answers of a node that a copy of its model is distilled from, at most; 0: none."""

    def __post_init__(self) -> None:
        check_choices(self, "membership")
        if self.shadows % 2 or self.shadows < 0 or self.shadows == 2:
            raise ArgumentError("membership.shadows", self.shadows, "an even number from 4 up, or 0")
        for name, least in (("records", 10), ("answers", 0)):
            if getattr(self, name) < least:
                raise ArgumentError(f"membership.{name}", getattr(self, name), f"{least} or more")


@dataclass(frozen=True, eq=False)
class Candidates:
    """Records whose membership is asked for.

    Args:
        records: members and others.
        inside: which of them are members, ``(N,)`` bool.
        population: further records that no model learned from.
        learned: how many members there are in all.
    """

    records: TensorData
    inside: torch.Tensor
    population: TensorData
    learned: int

    @property
    def all(self) -> TensorData:
        """Records, and behind them the population."""
        return _together([self.records, self.population])


def section(
    again: Replay, experiment: Overheard, heard: Heard, config: MembersConfig, seed: int
) -> list[dict[str, Any]]:
    """Attack a run's central model, and the answers of the node that has most records.

    Args:
        again: what the run was made of.
        experiment: at its end.
        heard: what its server saw.
        config: how.
        seed: of shadows and draws.

    Raises:
        FedstillError: the task has other than one label an input, or there are too few records.
    """
    if experiment.task.kind != "class":
        reason = "membership is told from one label an input, and this task has none"
        raise MethodRefused(experiment.method.title, "every node", reason)
    found = [_central(again, experiment, heard, config, seed)]
    largest = max(experiment.nodes, key=lambda node: len(node.data))
    answered = heard.answers(largest.name)
    if answered is not None and config.answers and config.shadows:
        found.append(_answers(again, experiment, largest, answered, config, seed))
    return found


def outsider(experiment: Overheard, records: TensorData) -> torch.Tensor:
    """What the central model, or what stands for it, says about records: logits ``(N, classes)``."""
    inputs = records.inputs.to(experiment.compute.device)
    if experiment.method.central == "ensemble":
        experiment.reopen()
        server, parts = experiment.server, torch.split(inputs, training.at_once(inputs))
        asked = [server.ensemble(server.ask("predict", x=part)) for part in parts]
        return torch.cat([each for each in asked if each is not None]).float().cpu()
    told = experiment.answers(inputs)
    if told is not None:
        return told.float().cpu()
    each = torch.stack(
        [training.predict(node.model, inputs, experiment.compute) for node in experiment.nodes]
    )
    each = each.cpu()  # (K, N, classes)
    sure = torch.stack([membership.confidence(told, records.targets) for told in each])  # (K, N)
    return each[sure.argmax(0), torch.arange(len(records))]


def taught(experiment: Overheard, nodes: set[str]) -> list[Node]:
    """The nodes whose records may have come to what is attacked, given those that were heard to teach."""
    by_themselves = experiment.method.central in ("nodes", "ensemble")
    return [node for node in experiment.nodes if by_themselves or node.name in nodes]


def _central(
    again: Replay, experiment: Overheard, heard: Heard, config: MembersConfig, seed: int
) -> dict[str, Any]:
    teaching = taught(experiment, heard.taught)
    if not teaching:
        reason = "no node's records came to the central model"
        raise MethodRefused(experiment.method.title, "every node", reason)
    asked = _candidates(_together([node.data for node in teaching]), again.data.test, config, seed)
    inside = halves(len(asked.records), config.shadows, seed)
    told = [outsider(experiment, asked.all)]
    if config.trained == "federations":
        for at, row in enumerate(inside):
            outputs, inside[at] = _federation(again, asked, row, derive(seed, "federation", at))
            told.append(outputs)
    elif config.shadows:
        networks = together(
            _made(again, again.config.student.model),
            asked.records,
            inside,
            experiment.task,
            again.config.nodes.local,
            seed,
            compute=_fast(experiment),
        )
        told += [_outputs(network, asked.all, experiment.compute) for network in networks]
    of, sees = OF[experiment.method.central]
    return _told(of, sees, asked, torch.stack(told), inside, config)


def _federation(
    again: Replay, asked: Candidates, row: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A run with the same method, on other records and with other draws.

    Returns:
        What it says about the candidates ``(N + Z, classes)``, and which of them it learned from ``(N,)``: of
        those that it was to learn from, ``row``, without those of nodes that were not drawn.
    """
    rows = row.nonzero().flatten()
    part, run = asked.records.subset(rows), again.config
    generator = numpy_generator(seed, "split")
    try:
        indices = dividing.split(part.targets, len(again.data.classes), run.split, generator)
    except FedstillError as error:
        if isinstance(error, ArgumentError) and error.name == "split.column":
            told = "alone, where data are split by a column"
            raise ArgumentError("membership.trained", "federations", told) from error
        allowed = f"more, or membership.trained = alone ({error})"
        raise ArgumentError("membership.records", len(asked.records), allowed) from error
    test = again.data.test.subset(torch.arange(min(TESTED, len(again.data.test))))
    shadow = replace(
        again,
        config=replace(run, seed=seed),
        data=replace(again.data, test=test),
        parts=[part.subset(own) for own in indices],
    ).experiment()
    heard = Heard(0)
    shadow.listen(lambda release: heard.take(release, shadow.public))
    names = {node.name for node in taught(shadow, heard.taught)}
    learned = torch.zeros_like(row)
    for node, own in zip(shadow.nodes, indices, strict=True):
        if node.name in names:
            learned[rows[own]] = True
    return outsider(shadow, asked.all), learned


def _answers(
    again: Replay,
    experiment: Simulation,
    node: Node,
    answered: tuple[torch.Tensor, torch.Tensor],
    config: MembersConfig,
    seed: int,
) -> dict[str, Any]:
    """Through a copy of one node's model, distilled from what it answered; shadows are copied likewise."""
    place = [each.name for each in experiment.nodes].index(node.name)
    names, task, compute = again.config.nodes.models, experiment.task, _fast(experiment)
    own, make = derive(seed, node.name), _made(again, names[place % len(names)])
    asked = _candidates(_together([node.data]), again.data.test, config, seed, alike=True)
    inside = halves(len(asked.records), config.shadows, own)
    shadows = together(make, asked.records, inside, task, again.config.nodes.local, own, compute=compute)
    inputs, answers = (part[-config.answers :] for part in answered)
    proxies, _ = proxy.through(
        make,
        inputs,
        answers,
        shadows,
        asked.records,
        inside,
        task,
        derive(own, "proxies"),
        local=COPIES,
        compute=compute,
    )
    told = torch.stack([_outputs(network, asked.all, compute) for network in proxies])
    sees = f"{len(answers)} questions to it and its answers, from which a copy of its model is distilled"
    sees += "; copies of shadows learn from plain answers, whatever the gate does to those of the node"
    alone = replace(config, trained="alone")
    return _told(f"answers of {node.name}", sees, asked, told, inside, alone)


def _told(
    of: str, sees: str, asked: Candidates, told: torch.Tensor, inside: torch.Tensor, config: MembersConfig
) -> dict[str, Any]:
    """All attacks on what target and shadows say ``(1 + M, N + Z, classes)``, as the file has them."""
    n, labels = len(asked.records), asked.all.targets
    seen = Seen(told[0, :n], told[1:, :n], inside, labels[:n])
    nobody = torch.zeros(len(inside), len(asked.population), dtype=torch.bool)
    population = Seen(told[0, n:], told[1:, n:], nobody, labels[n:])
    scores: dict[str, Callable[[], torch.Tensor]] = {"loss": lambda: membership.loss(seen)}
    if config.shadows:
        scores |= {
            "lira": lambda: membership.lira(seen),
            "lira-offline": lambda: membership.lira_offline(seen),
            "rmia": lambda: membership.rmia(seen, population),
        }
    # All intervals hold together, since the attack that got most is told first.
    sure = 1 - (1 - CONFIDENCE) / len(scores)
    found = {name: rates(*split(score(), asked.inside), confidence=sure) for name, score in scores.items()}
    return {
        "of": of,
        "sees": sees,
        "learned": asked.learned,
        "members": int(asked.inside.sum()),
        "others": int((~asked.inside).sum()),
        "shadows": config.shadows,
        "trained": config.trained,
        "attacks": [_attack(name, each) for name, each in found.items()],
        "best": max(found, key=lambda name: found[name].auc.value),
    }


def _attack(name: str, found: Rates) -> dict[str, Any]:
    told = asdict(found)
    return {
        "name": name,
        "title": TITLES[name],
        "auc": told["auc"],
        "at": list(told["at"]),
        "line": str(found),
    }


def _candidates(
    members: TensorData, test: TensorData, config: MembersConfig, seed: int, *, alike: bool = False
) -> Candidates:
    """Members, as many others at most, and a population.

    Args:
        members: all records that the target learned from.
        test: records that it did not.
        config: how many of each, at most.
        seed: of what is drawn.
        alike: others have the members' classes, in their shares.
    """
    order = torch.randperm(len(test), generator=torch_generator(seed, "membership", "test"))
    apart = min(len(test) // POPULATION, MOST_POPULATION)
    population, rest = test.subset(order[:apart]), test.subset(order[apart:])
    learned = len(members)
    drawn = torch.randperm(len(members), generator=torch_generator(seed, "membership", "members"))
    members = members.subset(drawn[: config.records].sort().values)
    first = torch.arange(min(len(rest), config.records))
    others = rest.subset(_alike(rest.targets, members.targets, config.records) if alike else first)
    if min(len(members), len(others), len(population)) < 2:
        sizes = f"{len(members)} members, {len(others)} others, a population of {len(population)}"
        raise ArgumentError("records", sizes, "two of each, to tell who was a member")
    inside = torch.arange(len(members) + len(others)) < len(members)
    return Candidates(_together([members, others]), inside, population, learned)


def _alike(targets: torch.Tensor, like: torch.Tensor, most: int) -> torch.Tensor:
    """Rows of ``targets`` (N,), as many as can be, whose classes have the shares that they have in ``like``.

    At most ``most``, but for rounding up in each class.

    >>> _alike(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), 10).tolist()
    [0, 3, 4]
    """
    classes = int(max(targets.max(), like.max())) + 1
    have, want = (torch.bincount(labels, minlength=classes).double() for labels in (targets, like))
    share = want / want.sum()
    known = (share > 0) & (have > 0)
    total = min(float((have[known] / share[known]).min()), most)  # limited by the scarcest class
    counts = torch.clamp((share * total).ceil(), max=have).long()
    rows = [torch.nonzero(targets == label).flatten()[: int(counts[label])] for label in range(classes)]
    return torch.cat(rows).sort().values


def _together(parts: Sequence[TensorData]) -> TensorData:
    return TensorData(
        torch.cat([part.inputs.cpu() for part in parts]), torch.cat([part.targets.cpu() for part in parts])
    )


def _made(again: Replay, spec: str) -> Callable[[int], nn.Module]:
    """Untrained networks of a name, one a seed."""
    shape, classes = tuple(again.data.test.inputs.shape[1:]), len(again.data.classes)
    return lambda seed: models.build(spec, shape, classes, seed, "shadow", vocabulary=again.data.vocabulary)


def _fast(experiment: Simulation) -> Compute:
    """Shadows in one stack: not what is fastest just now, as figures would hang on it."""
    return Compute(replace(experiment.compute.config, name="stacked"))


def _outputs(network: nn.Module, records: TensorData, compute: Compute) -> torch.Tensor:
    return training.predict(network, records.inputs.to(compute.device), compute).cpu()
