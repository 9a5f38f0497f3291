"""Membership of a run's private records: told by its central model, and by the answers that a node gave.

The outsider has the central model, or what stands for it (:mod:`fedstill.attacks.outsider`). The curious
server has questions and answers, and distils a copy of the node's model from them.

Members are the records that the nodes learned from; of nodes of which the server heard nothing but how much
they hold, nothing can have come to a student. Others are test data, which no model saw; where one node is
attacked they have its classes in its own shares, lest the class itself tell who is a member. A part of the
test data is kept aside as RMIA's population.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import nn

from fedstill import models
from fedstill.attacks import membership_scores, proxy
from fedstill.attacks.attack import Attack, Found, Target
from fedstill.attacks.candidates import Candidates, candidates, merged
from fedstill.attacks.heard import Heard, Replay
from fedstill.attacks.membership_scores import Seen
from fedstill.attacks.outsider import OF, federation, outsider, taught
from fedstill.attacks.rates import Rates, rates, split
from fedstill.attacks.rows import Column, Row, with_interval
from fedstill.attacks.shadows import halves, together
from fedstill.attacks.tap import Overheard
from fedstill.core.checked import NonNegativeInt
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, MethodRefused
from fedstill.core.seeds import derive
from fedstill.node import training
from fedstill.node.node import Node
from fedstill.privacy.audit import CONFIDENCE
from fedstill.runs.simulation import Simulation

TITLES = {"loss": "loss", "lira": "LiRA", "lira-offline": "LiRA, offline", "rmia": "RMIA"}
COPIES = replace(proxy.DISTIL, epochs=40)  # there is one copy for each shadow, too


GIVEN_TO_NOBODY = ("average of the nodes' models", "nodes' models")
SHADOWS = {
    "federations": "each the whole run again, over other draws of the records",
    "alone": "each trained alone as a node trains its model",
}
RATE = 0.01  # of false positives, at which comparisons tell true positives
AUC, ANSWERED, FOUND = "membership_auc", "answers_auc", "tpr_at_1_percent"


@dataclass(frozen=True)
class MembershipInference(Attack):
    """How membership is told."""

    title: ClassVar[str] = "Who was among the training records: membership inference"
    columns: ClassVar[tuple[Column, ...]] = (
        Column(
            name=AUC,
            head="membership AUC",
            title="Membership AUC %",
            says="Membership AUC: how often an attack on the central model, or on what stands for it, "
            "ranks a record that was trained on above one that was not, in percent; 50 is guessing.",
            guess=50.0,
            axis="AUC of the strongest membership attack",
        ),
        Column(
            name=FOUND,
            head="TPR at 1%",
            title="TPR % at 1%",
            says="TPR at 1%: the percentage of members that it finds where it accuses 1% of the others; 1 is "
            "guessing.",
        ),
        Column(
            name=ANSWERED,
            head="answers' AUC",
            title="Answers\u2019 AUC %",
            says="Answers' AUC: the same through what one node answered, as the server sees it.",
            guess=50.0,
        ),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "AUC: how often, of a member and another record, the attack picks the member; 50% is guessing. "
        "What harms single people is what is found where false alarms are rare; who guesses finds as large "
        "a share of members as of others. In brackets: intervals over records, for the one model that was "
        "attacked; all attacks on it together lie in theirs at 95%. The best of several attacks is a "
        "little above guessing by chance.",
    )

    shadows: int = 16
    """Models that the attacker trains itself, an even number from 4 up; 0: only attacks that need none."""
    trained: Literal["alone", "federations"] = "alone"
    """Each shadow by itself, as a node trains its model; or each by the whole run, with the run's method:
    stronger, and as many runs as shadows."""
    records: Annotated[int, Ge(10)] = 2000
    """Members that are looked at, at most; and at most as many others. Shadows learn from half of them."""
    answers: NonNegativeInt = 2000
    """Answers of a node that a copy of its model is distilled from, at most; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shadows % 2 or self.shadows < 0 or self.shadows == 2:
            raise ArgumentError("membership.shadows", self.shadows, "an even number from 4 up, or 0")

    @property
    def rows_heard(self) -> int:
        return self.answers

    def run(self, target: Target) -> Found:
        found = section(target.replay, target.experiment, target.heard, self, target.seed)
        if len(found) > 1:
            return Found({"targets": found})
        reason = "no answers to questions left the nodes"
        if not self.answers or not self.shadows:
            reason = "membership.answers or membership.shadows is 0"
        return Found({"targets": found}, skipped=[("membership through answers", reason)])

    def rows(self, part: Mapping[str, Any]) -> Iterator[Row]:
        central, *_ = part["targets"]
        for target in part["targets"]:
            for each in target["attacks"]:
                yield from _figures(each, target["of"], AUC if target is central else ANSWERED)

    def sentence(self, part: Mapping[str, Any]) -> str:
        parts = []
        for target in part["targets"]:
            best = next(each for each in target["attacks"] if each["name"] == target["best"])
            hint = " (not told from chance)" if best["auc"]["low"] <= 0.5 else ""
            nobody = ", which nobody was given," if target["of"] in GIVEN_TO_NOBODY else ""
            parts.append(f"{100 * best['auc']['value']:.0f} times in 100 by the {target['of']}{nobody}{hint}")
        return (
            f"Shown a record that was learned from and one that was not, the best attack picked the former "
            f"{' and '.join(parts)}; chance is 50."
        )

    def strength(self, part: Mapping[str, Any]) -> str:
        central = part["targets"][0]
        titles = ", ".join(each["title"].replace(", ", " ") for each in central["attacks"])
        trained = {"alone": "trained alone", "federations": "each of a federation"}[central["trained"]]
        return f"membership by {titles} ({central['shadows']} shadow models, {trained})"

    def about(self, part: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        return [(target["of"], _tried(target)) for target in part["targets"]]


def _figures(attack: Mapping[str, Any], of: str, column: str) -> Iterator[Row]:
    """What one attack got of one target."""
    auc = attack["auc"]
    value, low, high = (auc[key] for key in ("value", "low", "high"))
    yield Row(
        attack=attack["title"],
        who=of,
        figure="AUC",
        value=100 * value,
        interval=(100 * low, 100 * high),
        text=with_interval(value, low, high),
        without="50%",
        says="not told from guessing" if low <= 0.5 <= high else "",
        column=column,
    )
    for at in attack["at"]:
        rate, found = f"{100 * at['rate']:g}%", at["true_positives"]
        value, low, high = (found[key] for key in ("value", "low", "high"))
        yield Row(
            attack=attack["title"],
            who=of,
            figure=f"members found at {rate} false alarms",
            value=100 * value,
            interval=(100 * low, 100 * high),
            text=with_interval(value, low, high),
            without=rate,
            says=f"{at['found']:,} of {at['members']:,}; false alarms: {at['accused']:,} of {at['others']:,}",
            column=FOUND if column == AUC and math.isclose(at["rate"], RATE) else "",
            detail=not at["allowed"],  # of few others no low rate can be told
        )


def _tried(target: Mapping[str, Any]) -> str:
    """What the adversary of one target sees, and on what it was tried."""
    members, others, shadows = (target[key] for key in ("members", "others", "shadows"))
    models = f", with {shadows} shadow models, {SHADOWS[target['trained']]}" if shadows else ""
    rates = sorted({at["rate"] for each in target["attacks"] for at in each["at"]}, reverse=True)
    # What no number of these records can tell, whatever the attack.
    few = [
        f" {100 * rate:g}% false alarms cannot be told from fewer than {math.ceil(1 / rate):,} others: that "
        "column counts members found without any false alarm."
        for rate in rates
        if 1e-9 < rate < 1 and others * rate < 1 - 1e-9
    ]
    return (
        f"The adversary sees {target['sees']}. It was tried on {members:,} members (trained on) and "
        f"{others:,} others (not){models}.{''.join(few)}"
    )


def section(
    again: Replay, experiment: Overheard, heard: Heard, config: MembershipInference, seed: int
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


def _central(
    again: Replay, experiment: Overheard, heard: Heard, config: MembershipInference, seed: int
) -> dict[str, Any]:
    teaching = taught(experiment, heard.taught)
    if not teaching:
        reason = "no node's records came to the central model"
        raise MethodRefused(experiment.method.title, "every node", reason)
    asked = candidates(merged([node.data for node in teaching]), again.data.test, config.records, seed)
    inside = halves(len(asked.records), config.shadows, seed)
    told = [outsider(experiment, asked.all)]
    if config.trained == "federations":
        for at, row in enumerate(inside):
            outputs, inside[at] = federation(again, asked, row, derive(seed, "federation", at))
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


def _answers(
    again: Replay,
    experiment: Simulation,
    node: Node,
    answered: tuple[torch.Tensor, torch.Tensor],
    config: MembershipInference,
    seed: int,
) -> dict[str, Any]:
    """Through a copy of one node's model, distilled from what it answered; shadows are copied likewise."""
    place = [each.name for each in experiment.nodes].index(node.name)
    names, task, compute = again.config.nodes.models, experiment.task, _fast(experiment)
    own, make = derive(seed, node.name), _made(again, names[place % len(names)])
    asked = candidates(merged([node.data]), again.data.test, config.records, seed, alike=True)
    inside = halves(len(asked.records), config.shadows, own)
    shadows = together(make, asked.records, inside, task, again.config.nodes.local, own, compute=compute)
    inputs, answers = (part[-config.answers :] for part in answered)
    copied = derive(own, "proxies")
    proxies = proxy.through(make, inputs, answers, shadows, task, copied, local=COPIES, compute=compute)
    told = torch.stack([_outputs(network, asked.all, compute) for network in proxies])
    sees = f"{len(answers)} questions to it and its answers, from which a copy of its model is distilled"
    sees += "; copies of shadows learn from plain answers, whatever the gate does to those of the node"
    alone = replace(config, trained="alone")
    return _told(f"answers of {node.name}", sees, asked, told, inside, alone)


def _told(
    of: str,
    sees: str,
    asked: Candidates,
    told: torch.Tensor,
    inside: torch.Tensor,
    config: MembershipInference,
) -> dict[str, Any]:
    """All attacks on what target and shadows say ``(1 + M, N + Z, classes)``, as the file has them."""
    n, labels = len(asked.records), asked.all.targets
    seen = Seen(told[0, :n], told[1:, :n], inside, labels[:n])
    nobody = torch.zeros(len(inside), len(asked.population), dtype=torch.bool)
    population = Seen(told[0, n:], told[1:, n:], nobody, labels[n:])
    scores: dict[str, Callable[[], torch.Tensor]] = {"loss": lambda: membership_scores.loss(seen)}
    if config.shadows:
        scores |= {
            "lira": lambda: membership_scores.lira(seen),
            "lira-offline": lambda: membership_scores.lira_offline(seen),
            "rmia": lambda: membership_scores.rmia(seen, population),
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
    return {"name": name, "title": TITLES[name], **asdict(found)}


def _made(again: Replay, spec: str) -> Callable[[int], nn.Module]:
    """Untrained networks of a name, one a seed."""
    shape, classes = tuple(again.data.test.inputs.shape[1:]), len(again.data.classes)
    return lambda seed: models.build(spec, shape, classes, seed, "shadow", vocabulary=again.data.vocabulary)


def _fast(experiment: Simulation) -> Compute:
    """Shadows in one stack: not what is fastest just now, as figures would hang on it."""
    return Compute(replace(experiment.compute.config, name="stacked"))


def _outputs(network: nn.Module, records: TensorData, compute: Compute) -> torch.Tensor:
    return training.predict(network, records.inputs.to(compute.device), compute).cpu()
