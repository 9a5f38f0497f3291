"""Records whose membership is asked for: members, as many others, and records that no model learned from.

What an outsider sees of a run: outputs of its central model, or of what stands for it.

Some methods have no central model: then the average of the nodes' models is attacked, or all of them, of
which the one speaks that is surest of the record's label. Nobody in the run is given these; it is what they
would tell if they were used.

Membership of a run's private records: told by its central model, and by the answers that a node gave.

The outsider has the central model, or what stands for it (:mod:`fedstill.attacks.membership_inference`). The curious
server has queries and answers, and distils a copy of the node's model from them.

Members are the records that the nodes learned from; of nodes of which the server heard nothing but how much
they hold, nothing can have come to a student. Others are test data, which no model saw; where one node is
attacked they have its classes in its own shares, lest the class itself tell who is a member. A part of the
test data is kept aside as RMIA's population.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import nn

from fedstill import models
from fedstill.attacks.attack import Attack, AttackResult, Target
from fedstill.attacks.leakage import LeakageColumn, LeakageMetric, percent_fields
from fedstill.attacks.membership_scores import (
    ModelFactory,
    RecordLogits,
    attack_metrics,
    lira_attack,
    lira_offline_attack,
    logit_confidence,
    loss_attack,
    rmia_attack,
    shadow_halves,
    train_proxies,
    train_shadows,
)
from fedstill.attacks.transcript import ObservedSimulation, ReplayedRun, ServerTranscript
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError, MethodRefused
from fedstill.core.options import NonNegativeInt
from fedstill.core.seeds import derive, numpy_generator, torch_generator
from fedstill.data import splits
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.privacy.epsilon_lower_bounds import CONFIDENCE
from fedstill.protocol.payload_kinds import INPUTS
from fedstill.protocol.secure_aggregation import SUM
from fedstill.runs.simulation import Simulation

POPULATION_SHARE = 4  # one of so many test records is RMIA's
MAX_POPULATION = 500


@dataclass(frozen=True, eq=False)
class Candidates:
    """Records whose membership is asked for: members, ``inside`` ``(N,)`` bool, and others.

    Args:
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
        return concatenate([self.records, self.population])


def choose_candidates(
    members: TensorData, test: TensorData, most: int, seed: int, *, alike: bool = False
) -> Candidates:
    """Of each ``most`` at most: of all records that the target learned from, and of ``test``, which it did
    not; ``alike``: others have the members' classes, in their shares."""
    order = torch.randperm(len(test), generator=torch_generator(seed, "membership", "test"))
    apart = min(len(test) // POPULATION_SHARE, MAX_POPULATION)
    population, rest = test.subset(order[:apart]), test.subset(order[apart:])
    learned = len(members)
    drawn = torch.randperm(len(members), generator=torch_generator(seed, "membership", "members"))
    members = members.subset(drawn[:most].sort().values)
    first = torch.arange(min(len(rest), most))
    others = rest.subset(_match_class_shares(rest.targets, members.targets, most) if alike else first)
    if min(len(members), len(others), len(population)) < 2:
        sizes = f"{len(members)} members, {len(others)} others, a population of {len(population)}"
        raise ArgumentError("records", sizes, "two of each, to tell who was a member")
    inside = torch.arange(len(members) + len(others)) < len(members)
    return Candidates(concatenate([members, others]), inside, population, learned)


def _match_class_shares(targets: torch.Tensor, like: torch.Tensor, most: int) -> torch.Tensor:
    """Rows of ``targets`` (N,), as many as can be, whose classes have the shares that they have in ``like``.

    At most ``most``, but for rounding up in each class.

    >>> _match_class_shares(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), 10).tolist()
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


def concatenate(parts: Sequence[TensorData]) -> TensorData:
    return TensorData.joined([part.to("cpu") for part in parts])


TARGET_TEXTS = {
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
SHADOW_TEST_RECORDS = 100  # test records that a shadow federation is measured on; nobody looks at it


def target_logits(experiment: ObservedSimulation, records: TensorData) -> torch.Tensor:
    """What the central model, or what stands for it, says about records: logits ``(N, classes)``."""
    inputs = records.inputs.to(experiment.compute.device)
    if experiment.method.central == "ensemble":
        experiment.reopen()
        server, parts = experiment.server, torch.split(inputs, local_training.at_once(inputs))
        query, name = _find_scores_query(experiment)
        asked = [server.ensemble(server.query(query, **{name: part})) for part in parts]  # type: ignore[arg-type]
        return torch.cat([each for each in asked if each is not None]).float().cpu()
    told = experiment.responses(inputs)
    if told is not None:
        return told.float().cpu()
    each = torch.stack(
        [local_training.predict(node.model, inputs, experiment.compute) for node in experiment.nodes]
    )
    each = each.cpu()  # (K, N, classes)
    sure = torch.stack([logit_confidence(told, records.targets) for told in each])  # (K, N)
    return each[sure.argmax(0), torch.arange(len(records))]


def _find_scores_query(experiment: ObservedSimulation) -> tuple[str, str]:
    """The query that is answered with scores of any inputs, and what its inputs are called."""
    return next(
        (query.name, name)
        for query in experiment.side.queries.values()
        for name, kind in query.sends.items()
        if kind == INPUTS and any(released.of == "scores" for released in query.releases.values())
    )


def contributing_nodes(experiment: ObservedSimulation, nodes: set[str]) -> list[Node]:
    """The nodes whose records may have come to what is attacked, given those that were heard to teach."""
    by_themselves = experiment.method.central in ("nodes", "ensemble")
    all_of_them = by_themselves or SUM in nodes
    return [node for node in experiment.nodes if all_of_them or node.name in nodes]


def shadow_federation(
    again: ReplayedRun, asked: Candidates, row: torch.Tensor, seed: int
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
        indices = splits.split(part.targets, len(again.data.classes), run.split, generator)
    except FedstillError as error:
        if isinstance(error, ArgumentError) and error.name == "split.column":
            told = "alone, where data are split by a column"
            raise ArgumentError("membership.trained", "federations", told) from error
        allowed = f"more, or membership.trained = alone ({error})"
        raise ArgumentError("membership.records", len(asked.records), allowed) from error
    test = again.data.test.subset(torch.arange(min(SHADOW_TEST_RECORDS, len(again.data.test))))
    shadow = replace(
        again,
        config=replace(run, seed=seed),
        data=replace(again.data, test=test),
        parts=[part.subset(own) for own in indices],
    ).experiment()
    heard = ServerTranscript(0)
    shadow.listen(lambda release: heard.take(release, shadow.public))
    names = {node.name for node in contributing_nodes(shadow, heard.taught)}
    learned = torch.zeros_like(row)
    for node, own in zip(shadow.nodes, indices, strict=True):
        if node.name in names:
            learned[rows[own]] = True
    return target_logits(shadow, asked.all), learned


TITLES = {"loss": "loss", "lira": "LiRA", "lira-offline": "LiRA, offline", "rmia": "RMIA"}
HYPOTHETICAL_TARGETS = ("average of the nodes' models", "nodes' models")
SHADOW_TEXTS = {
    "federations": "each the whole run again, over other draws of the records",
    "alone": "each trained alone as a node trains its model",
}
REPORTED_RATE = 0.01  # of false positives, at which comparisons tell true positives
AUC, RESPONSES_AUC, TPR = "membership_auc", "answers_auc", "tpr_at_1_percent"


@dataclass(frozen=True)
class MembershipInference(Attack):
    """How membership is told."""

    title: ClassVar[str] = "Who was among the training records: membership inference"
    columns: ClassVar[tuple[LeakageColumn, ...]] = (
        LeakageColumn(
            name=AUC,
            head="membership AUC",
            title="Membership AUC %",
            says="Membership AUC: how often an attack on the central model, or on what stands for it, "
            "ranks a record that was trained on above one that was not, in percent; 50 is guessing.",
            guess=50.0,
            axis="AUC of the strongest membership attack",
        ),
        LeakageColumn(
            name=TPR,
            head="TPR at 1%",
            title="TPR % at 1%",
            says="TPR at 1%: the percentage of members that it finds where it accuses 1% of the others; 1 is "
            "guessing.",
        ),
        LeakageColumn(
            name=RESPONSES_AUC,
            head="answers' AUC",
            title="Answers\u2019 AUC %",
            says="Answers' AUC: the same through what one node answered, as the server sees it, or through "
            "the sum of all nodes' answers, where it sees no more.",
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
    responses: NonNegativeInt = 2000
    """Answers of a node that a copy of its model is distilled from, at most; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shadows % 2 or self.shadows < 0 or self.shadows == 2:
            raise ArgumentError("membership.shadows", self.shadows, "an even number from 4 up, or 0")

    @property
    def rows_heard(self) -> int:
        return self.responses

    def run(self, target: Target) -> AttackResult:
        """Attack a run's central model, and the answers of the node that has most records."""
        if target.experiment.task.kind != "class":
            reason = "membership is told from one label an input, and this task has none"
            raise MethodRefused(target.experiment.method.title, "every node", reason)
        found = [_attack_student(target, self)]
        largest = max(target.nodes, key=lambda node: len(node.data))
        told = SUM if target.experiment.side.sums else largest.name
        answered = target.heard.responses(told)
        if answered is not None and self.responses and self.shadows:
            found.append(_attack_responses(target, largest, answered, self, told))
            return AttackResult({"targets": found})
        reason = "no answers left the nodes about inputs that go down with a query"
        if not self.responses or not self.shadows:
            reason = "membership.answers or membership.shadows is 0"
        return AttackResult({"targets": found}, skipped=[("membership through answers", reason)])

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
        central, *_ = part["targets"]
        for target in part["targets"]:
            for each in target["attacks"]:
                yield from _metric_rows(each, target["of"], AUC if target is central else RESPONSES_AUC)

    def sentence(self, part: Mapping[str, Any]) -> str:
        parts = []
        for target in part["targets"]:
            best = next(each for each in target["attacks"] if each["name"] == target["best"])
            auc = best["auc"]
            hint = " (not told from chance)" if auc["low"] <= 0.5 <= auc["high"] else ""
            hint = ", its scores turned round" if auc["high"] < 0.5 else hint
            nobody = ", which nobody was given," if target["of"] in HYPOTHETICAL_TARGETS else ""
            parts.append(f"{100 * _oriented_auc(auc):.0f} times in 100 by the {target['of']}{nobody}{hint}")
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
        return [(target["of"], _describe_target(target)) for target in part["targets"]]


def strongest_attack(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The attack that is right most often."""
    return max(found, key=lambda name: _oriented_auc(found[name]["auc"]))


def _oriented_auc(auc: Mapping[str, float]) -> float:
    """How often an attack is right, its scores turned round where they are wrong for sure."""
    return 1 - auc["value"] if auc["high"] < 0.5 else auc["value"]


def _metric_rows(attack: Mapping[str, Any], of: str, column: str) -> Iterator[LeakageMetric]:
    auc, who = attack["auc"], {"attack": attack["title"], "who": of}
    yield LeakageMetric(
        **who,
        **percent_fields(**auc),
        metric="AUC",
        without="50%",
        says="not told from guessing" if auc["low"] <= 0.5 <= auc["high"] else "",
        column=column,
    )
    for at in attack["at"]:
        rate = f"{100 * at['rate']:g}%"
        yield LeakageMetric(
            **who,
            **percent_fields(**at["true_positives"]),
            metric=f"members found at {rate} false alarms",
            without=rate,
            says=f"{at['found']:,} of {at['members']:,}; false alarms: {at['accused']:,} of {at['others']:,}",
            column=TPR if column == AUC and math.isclose(at["rate"], REPORTED_RATE) else "",
            detail=not at["allowed"],  # of few others no low rate can be told
        )


def _describe_target(target: Mapping[str, Any]) -> str:
    """What the adversary of one target sees, and on what it was tried."""
    members, others, shadows = (target[key] for key in ("members", "others", "shadows"))
    models = f", with {shadows} shadow models, {SHADOW_TEXTS[target['trained']]}" if shadows else ""
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


def private_records(experiment: Simulation, node: Node) -> TensorData:
    """What a node holds itself: where methods train on labeled public data, these stand beside it."""
    names = [each.name for each in experiment.nodes]
    return experiment.setting.parts[names.index(node.name)]


def _attack_student(target: Target, how: MembershipInference) -> dict[str, Any]:
    """The central model, or what stands for it."""
    again, experiment, seed = target.replay, target.experiment, target.seed
    teaching = contributing_nodes(experiment, target.heard.taught)
    if not teaching:
        reason = "no node's records came to the central model"
        raise MethodRefused(experiment.method.title, "every node", reason)
    asked = choose_candidates(
        concatenate([private_records(experiment, node) for node in teaching]),
        again.data.test,
        how.records,
        seed,
    )
    inside = shadow_halves(len(asked.records), how.shadows, seed)
    told = [target_logits(experiment, asked.all)]
    if how.trained == "federations":
        for at, row in enumerate(inside):
            outputs, inside[at] = shadow_federation(again, asked, row, derive(seed, "federation", at))
            told.append(outputs)
    elif how.shadows:
        make, local = _model_factory(again, again.config.student.model), again.config.nodes.local
        compute = experiment.compute
        networks = train_shadows(make, asked.records, inside, experiment.task, local, seed, compute=compute)
        told += [_predict(network, asked.all, experiment.compute) for network in networks]
    of, sees = TARGET_TEXTS[experiment.method.central]
    return _attack_record(of, sees, asked, torch.stack(told), inside, how)


def _attack_responses(
    target: Target,
    node: Node,
    answered: tuple[torch.Tensor, torch.Tensor],
    how: MembershipInference,
    told: str,
) -> dict[str, Any]:
    """Through a copy of one node's model, distilled from what it answered; shadows are copied likewise.

    Where the server sees sums only (``told``), the copy is of what all nodes say together.
    """
    again, task, compute = target.replay, target.experiment.task, target.experiment.compute
    place = [each.name for each in target.nodes].index(node.name)
    names, local = again.config.nodes.models, again.config.nodes.local
    own, make = derive(target.seed, node.name), _model_factory(again, names[place % len(names)])
    asked = choose_candidates(
        concatenate([private_records(target.experiment, node)]),
        again.data.test,
        how.records,
        target.seed,
        alike=True,
    )
    inside = shadow_halves(len(asked.records), how.shadows, own)
    shadows = train_shadows(make, asked.records, inside, task, local, own, compute=compute)
    inputs, responses = (part[-how.responses :] for part in answered)
    copies = train_proxies(make, inputs, responses, shadows, task, derive(own, "proxies"), compute=compute)
    said = torch.stack([_predict(network, asked.all, compute) for network in copies])
    if told == SUM:
        of = f"sum of the nodes' answers, for records of {node.name}"
        sees = f"{len(responses)} queries and the sums of all nodes' answers, from which a copy of one model"
        sees += " is distilled as if it were this node's"
    else:
        of = f"answers of {node.name}"
        sees = f"{len(responses)} queries to it and its answers, from which a copy of its model is distilled"
    sees += "; copies of shadows learn from plain answers, whatever the gate does to those of the node"
    return _attack_record(of, sees, asked, said, inside, replace(how, trained="alone"))


def _attack_record(
    of: str, sees: str, asked: Candidates, told: torch.Tensor, inside: torch.Tensor, how: MembershipInference
) -> dict[str, Any]:
    """All attacks on what target and shadows say ``(1 + M, N + Z, classes)``, as the file has them."""
    scored = score_candidates(asked, told, inside)
    # All intervals hold together, since the attack that got most is told first.
    sure = 1 - (1 - CONFIDENCE) / len(scored)
    found = {name: attack_metrics(score, asked.inside, sure) for name, score in scored.items()}
    return {
        "of": of,
        "sees": sees,
        "learned": asked.learned,
        "members": int(asked.inside.sum()),
        "others": int((~asked.inside).sum()),
        "shadows": how.shadows,
        "trained": how.trained,
        "attacks": [{"name": name, "title": TITLES[name], **each} for name, each in found.items()],
        "best": strongest_attack(found),
    }


def score_candidates(asked: Candidates, told: torch.Tensor, inside: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each attack's score of each candidate ``(N,)``, higher for likelier members.

    Args:
        told: logits of the target and of M shadows about candidates and population, ``(1 + M, N + Z,
            classes)``. Without shadows there is the attack by loss alone.
        inside: which shadow learned from which candidate, ``(M, N)`` bool.
    """
    n, labels = len(asked.records), asked.all.targets
    seen = RecordLogits(told[0, :n], told[1:, :n], inside, labels[:n])
    found = {"loss": loss_attack(seen)}
    if len(inside):
        nobody = torch.zeros(len(inside), len(asked.population), dtype=torch.bool)
        population = RecordLogits(told[0, n:], told[1:, n:], nobody, labels[n:])
        found |= {
            "lira": lira_attack(seen),
            "lira-offline": lira_offline_attack(seen),
            "rmia": rmia_attack(seen, population),
        }
    return found


def _model_factory(again: ReplayedRun, spec: str) -> ModelFactory:
    """Untrained networks of a name, one a seed."""
    data, classes = again.data, len(again.data.classes)
    return lambda seed: models.build(spec, again.shape, classes, seed, "shadow", vocabulary=data.vocabulary)


def _predict(network: nn.Module, records: TensorData, compute: Compute) -> torch.Tensor:
    return local_training.predict(network, records.inputs.to(compute.device), compute).cpu()
