"""Membership inference on a run's private records, through its student and through the responses of a node.

The outsider queries the student, or its substitute: methods without a student are attacked through the
average of the nodes' models, or through all of them, of which the one most confident in the record's label
is used. Nobody in the run has these models; the result shows what they would reveal. The curious server has
queries and responses, and distills a copy of the node's model from them, and, for co-op LiRA, of the other
nodes' models.

Members are the records that the nodes learned from. Nodes from which the server received nothing but counts
cannot have influenced a student. Other records are test data. For an attack on one node they have the class
shares of its records, so that the class alone does not reveal membership. A part of the test data is RMIA's
population.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import nn

from fedstill.attacks.attack import (
    Attack,
    AttackResult,
    ComparisonColumn,
    LeakageMetric,
    Target,
    percent_fields,
)
from fedstill.attacks.membership_scores import (
    MIN_OTHER_NODES,
    RecordLogits,
    attack_metrics,
    coop_lira_attack,
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
from fedstill.core.errors import ArgumentError, FedstillError, MethodRefused, format_option
from fedstill.core.options import NonNegativeInt
from fedstill.core.seeds import derive, numpy_generator, torch_generator
from fedstill.data import partitioners
from fedstill.models.inference import inference_batch_size, predict
from fedstill.node.node import Node
from fedstill.privacy.epsilon_lower_bounds import CONFIDENCE
from fedstill.protocol.payload_kinds import INPUTS
from fedstill.protocol.secure_aggregation import SUM
from fedstill.runs.simulation import Simulation

POPULATION_SHARE = 4  # one in so many test records is in RMIA's population
MAX_POPULATION = 500
SHADOW_TEST_RECORDS = 100  # for the evaluation of shadow federations, which is not used
MAX_OTHER_NODES = 64  # whose models are copied for co-op LiRA; from as many, each record has its own variance
REPORTED_RATE = 0.01  # false positive rate in comparisons
AUC, RESPONSES_AUC, TPR = "membership_auc", "responses_auc", "tpr_at_1_percent"
COOP = "coop-lira"
TITLES = {
    "loss": "loss",
    "lira": "LiRA",
    "lira-offline": "LiRA, offline",
    "rmia": "RMIA",
    COOP: "co-op LiRA",
}
TARGET_TEXTS = {
    "student": ("student", "the student's outputs for any input"),
    "virtual": (
        "average of the nodes' models",
        "the outputs of the nodes' average for any input, a model that this run does not share",
    ),
    "ensemble": ("ensemble", "the ensemble's responses to any input, through the nodes' gates"),
    "nodes": (
        "nodes' models",
        "the outputs of every node's model for any input, models that this run does not share",
    ),
}
HYPOTHETICAL_TARGETS = ("average of the nodes' models", "nodes' models")
SHADOW_TEXTS = {
    "federations": "each a repetition of the whole run on other samples of the records",
    "alone": "each trained alone as a node trains its model",
}


@dataclass(frozen=True)
class MembershipInference(Attack):
    """Membership inference by loss, LiRA, RMIA, and by co-op LiRA from responses of three nodes or more."""

    title: ClassVar[str] = "Membership inference: detection of training records"
    columns: ClassVar[tuple[ComparisonColumn, ...]] = (
        ComparisonColumn(
            name=AUC,
            head="membership AUC",
            title="Membership AUC %",
            description="Membership AUC: how often an attack on the student, or its substitute, ranks a "
            "training record above another one, in percent; 50 is guessing.",
            guess=50.0,
            axis="AUC of the strongest membership attack",
        ),
        ComparisonColumn(
            name=TPR,
            head="TPR at 1%",
            title="TPR % at 1%",
            description="TPR at 1%: the percentage of members found at 1% false positives; 1 is guessing.",
        ),
        ComparisonColumn(
            name=RESPONSES_AUC,
            head="responses' AUC",
            title="Responses\u2019 AUC %",
            description="Responses' AUC: the same through the responses of one node, or through the sum of "
            "all nodes' responses if the server sees sums only.",
            guess=50.0,
        ),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "AUC: how often, of a member and another record, the attack picks the member; 50% is guessing. "
        "Members found with few false alarms are individual harm; guessing finds equal shares of members and "
        "others. In brackets: intervals over records, for the one attacked model, which hold for all "
        "attacks on it together at 95%. The best of several attacks is slightly above guessing by chance.",
    )

    shadows: int = 16
    """Number of shadow models that the attacker trains, an even number from 4 up; 0: attacks without shadow
    models only.
    """
    trained: Literal["alone", "federations"] = "alone"
    """alone: each shadow as a node trains its model. federations: each by the whole run with its method,
    which is stronger and needs as many runs as shadows.
    """
    records: Annotated[int, Ge(10)] = 2000
    """Largest number of members that are tested, and of others. Shadows learn from half of them."""
    responses: NonNegativeInt = 2000
    """Largest number of a node's responses from which a copy of its model is distilled; 0: no such attack."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shadows % 2 or self.shadows < 0 or self.shadows == 2:
            raise ArgumentError("membership.shadows", self.shadows, "an even number from 4 up, or 0")

    @property
    def transcript_rows(self) -> int:
        return self.responses

    def run(self, target: Target) -> AttackResult:
        """Attack a run's student, and the responses of the node with the most records."""
        if target.experiment.task.kind != "class":
            reason = "membership inference needs one label per input, and this task has none"
            raise MethodRefused(target.experiment.method.title, "", reason)
        targets = [_attack_student(target, self)]
        largest = max(target.nodes, key=lambda node: len(node.data))
        source = SUM if target.experiment.side.sums else largest.name
        responses = target.transcript.responses(source)
        if responses is None or not self.responses:
            reason = "no node released responses to inputs that were sent with a query"
            if not self.responses:
                reason = "membership.responses is 0"
            return AttackResult({"targets": targets}, skipped=[("membership through responses", reason)])
        targets.append(_attack_responses(target, largest, responses, self, source))
        if targets[-1]["other_nodes"]:
            return AttackResult({"targets": targets})
        reason = f"fewer than {MIN_OTHER_NODES} other nodes released as many responses as {largest.name}"
        if source == SUM:
            reason = "the server sees the sum of all nodes' responses"
        return AttackResult({"targets": targets}, skipped=[(TITLES[COOP], reason)])

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
        first, *_ = part["targets"]
        for target in part["targets"]:
            for attack in target["attacks"]:
                yield from _metric_rows(attack, target["target"], AUC if target is first else RESPONSES_AUC)

    def sentence(self, part: Mapping[str, Any]) -> str:
        parts = []
        for target in part["targets"]:
            best = next(attack for attack in target["attacks"] if attack["name"] == target["best"])
            auc = best["auc"]
            qualifier = (
                " (not significantly different from chance)" if auc["low"] <= 0.5 <= auc["high"] else ""
            )
            qualifier = ", with reversed scores" if auc["high"] < 0.5 else qualifier
            hypothetical = ", which is not shared," if target["target"] in HYPOTHETICAL_TARGETS else ""
            parts.append(
                f"{100 * _oriented_auc(auc):.0f} times in 100 by the {target['target']}"
                f"{hypothetical}{qualifier}"
            )
        return (
            f"Given a training record and another one, the best attack picked the former "
            f"{' and '.join(parts)}; chance is 50."
        )

    def describe_strength(self, part: Mapping[str, Any]) -> str:
        target = part["targets"][0]
        titles = ", ".join(attack["title"].replace(", ", " ") for attack in target["attacks"])
        trained = {"alone": "trained alone", "federations": "each of a federation"}[target["trained"]]
        has_coop = any(attack["name"] == COOP for each in part["targets"] for attack in each["attacks"])
        without_shadows = f" and {TITLES[COOP]}" if has_coop else ""
        return f"membership by {titles} ({target['shadows']} shadow models, {trained}){without_shadows}"

    def explanations(self, part: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        return [(target["target"], _describe_target(target)) for target in part["targets"]]


def _attack_student(target: Target, attack: MembershipInference) -> dict[str, Any]:
    """Attack the student or its substitute."""
    replayed, experiment, seed = target.replay, target.experiment, target.seed
    contributors = contributing_nodes(experiment, target.transcript.contributors)
    if not contributors:
        reason = "no node's records came to the central model"
        raise MethodRefused(experiment.method.title, "", reason)
    candidates = choose_candidates(
        concatenate([private_records(experiment, node) for node in contributors]),
        replayed.data.test,
        attack.records,
        seed,
    )
    inside = shadow_halves(len(candidates.records), attack.shadows, seed)
    logits = [target_logits(experiment, candidates.records_and_population)]
    if attack.trained == "federations":
        for index, row in enumerate(inside):
            outputs, inside[index] = shadow_federation(
                replayed, candidates, row, derive(seed, "federation", index)
            )
            logits.append(outputs)
    elif attack.shadows:
        make, local = replayed.model_factory(replayed.config.student.model), replayed.config.nodes.local
        compute = experiment.compute
        networks = train_shadows(
            make, candidates.records, inside, experiment.task, local, seed, compute=compute
        )
        logits += [
            _predict(network, candidates.records_and_population, experiment.compute) for network in networks
        ]
    name, view = TARGET_TEXTS[experiment.method.evaluated_model]
    scores = score_candidates(candidates, torch.stack(logits), inside)
    return _attack_record(name, view, candidates, scores, attack)


def _attack_responses(
    target: Target,
    node: Node,
    pairs: tuple[torch.Tensor, torch.Tensor],
    attack: MembershipInference,
    source: str,
) -> dict[str, Any]:
    """Attack a copy of one node's model, distilled from its responses; copies of the shadows and of the other
    nodes' models are distilled likewise.

    Under secure aggregation (``source`` is the sum), the copy is of the sum of all nodes.
    """
    replayed, task, compute = target.replay, target.experiment.task, target.experiment.compute
    node_index = [other_node.name for other_node in target.nodes].index(node.name)
    names, local = replayed.config.nodes.models, replayed.config.nodes.local
    node_seed, make = derive(target.seed, node.name), replayed.model_factory(names[node_index % len(names)])
    candidates = choose_candidates(
        concatenate([private_records(target.experiment, node)]),
        replayed.data.test,
        attack.records,
        target.seed,
        match_classes=True,
    )
    inside = shadow_halves(len(candidates.records), attack.shadows, node_seed)
    shadows = train_shadows(make, candidates.records, inside, task, local, node_seed, compute=compute)
    inputs, responses = (part[-attack.responses :] for part in pairs)
    others = _responses_of_others(target, node, len(responses))
    seed = derive(node_seed, "proxies")
    proxies = train_proxies(make, inputs, responses, shadows, task, seed, others=others, compute=compute)
    logits = torch.stack(
        [_predict(network, candidates.records_and_population, compute) for network in proxies]
    )
    count, models = len(candidates.records), 1 + len(shadows)
    scores = score_candidates(candidates, logits[:models], inside)
    if others:
        records = logits[:, :count]
        scores[COOP] = coop_lira_attack(records[0], records[models:], candidates.records.targets)
    if source == SUM:
        name = f"sum of the nodes' responses, for records of {node.name}"
        view = (
            f"{len(responses)} queries and the sums of all nodes' responses, from which a copy of one model"
        )
        view += " is distilled as if it were this node's"
    else:
        name = f"responses of {node.name}"
        view = (
            f"{len(responses)} queries to it and its responses, from which a copy of its model is distilled"
        )
    if attack.shadows:
        view += "; copies of shadows learn from plain responses, whatever the gate does to those of the node"
    if others:
        view += f"; {TITLES[COOP]} compares it with copies of {len(others)} other nodes' models"
    record = _attack_record(name, view, candidates, scores, replace(attack, trained="alone"))
    return {**record, "other_nodes": len(others)}


def _responses_of_others(target: Target, node: Node, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the last inputs and responses ``(count, ...)`` of other nodes that released so many finite ones.

    These are the first :data:`MAX_OTHER_NODES` nodes; none if co-op LiRA has too few.
    """
    pairs = [target.transcript.responses(other.name) for other in target.nodes if other is not node]
    others = [
        (inputs[-count:], logits[-count:])
        for inputs, logits in (pair for pair in pairs if pair is not None)
        if len(logits) >= count and bool(logits[-count:].isfinite().all())
    ]
    return others[:MAX_OTHER_NODES] if len(others) >= MIN_OTHER_NODES else []


def _attack_record(
    name: str,
    view: str,
    candidates: Candidates,
    scores: Mapping[str, torch.Tensor],
    attack: MembershipInference,
) -> dict[str, Any]:
    """Return the record of all attacks on a target, from the scores ``(N,)`` of each."""
    # All intervals hold together, as the strongest attack is reported first.
    confidence = 1 - (1 - CONFIDENCE) / len(scores)
    metrics = {name: attack_metrics(score, candidates.inside, confidence) for name, score in scores.items()}
    return {
        "target": name,
        "view": view,
        "member_count": candidates.member_count,
        "members": int(candidates.inside.sum()),
        "others": int((~candidates.inside).sum()),
        "shadows": attack.shadows,
        "trained": attack.trained,
        "attacks": [{"name": name, "title": TITLES[name], **values} for name, values in metrics.items()],
        "best": strongest_attack_name(metrics),
    }


def score_candidates(
    candidates: Candidates, logits: torch.Tensor, inside: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return each attack's scores of the candidates ``(N,)``, higher for likelier members.

    Args:
        candidates: records and population.
        logits: of the target and of M shadows for candidates and population, ``(1 + M, N + Z, classes)``.
            Without shadows only the attack by loss is possible.
        inside: which shadow learned from which candidate, ``(M, N)`` bool.
    """
    n, labels = len(candidates.records), candidates.records_and_population.targets
    record_logits = RecordLogits(logits[0, :n], logits[1:, :n], inside, labels[:n])
    scores = {"loss": loss_attack(record_logits)}
    if len(inside):
        never_inside = torch.zeros(len(inside), len(candidates.population), dtype=torch.bool)
        population = RecordLogits(logits[0, n:], logits[1:, n:], never_inside, labels[n:])
        scores |= {
            "lira": lira_attack(record_logits),
            "lira-offline": lira_offline_attack(record_logits),
            "rmia": rmia_attack(record_logits, population),
        }
    return scores


def strongest_attack_name(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the attack with the highest AUC."""
    return max(records, key=lambda name: _oriented_auc(records[name]["auc"]))


def _oriented_auc(auc: Mapping[str, float]) -> float:
    """AUC of an attack, with reversed scores if they are significantly wrong."""
    return 1 - auc["value"] if auc["high"] < 0.5 else auc["value"]


# --- candidates ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidates:
    """Records whose membership is tested: members, ``inside`` ``(N,)`` bool, and others.

    Args:
        records: members and others.
        inside: True for members.
        population: further records from which no model learned.
        member_count: total number of members.
    """

    records: TensorData
    inside: torch.Tensor
    population: TensorData
    member_count: int

    @property
    def records_and_population(self) -> TensorData:
        """Records followed by the population."""
        return concatenate([self.records, self.population])


def choose_candidates(
    members: TensorData, test: TensorData, max_records: int, seed: int, *, match_classes: bool = False
) -> Candidates:
    """Sample at most ``max_records`` members and as many other records.

    Args:
        members: all records that the target learned from.
        test: records that it did not learn from.
        max_records: of each.
        seed: of the sampling.
        match_classes: give the others the class shares of the members.

    Raises:
        ArgumentError: fewer than two records of a kind.
    """
    order = torch.randperm(len(test), generator=torch_generator(seed, "membership", "test"))
    population_size = min(len(test) // POPULATION_SHARE, MAX_POPULATION)
    population, remaining = test.subset(order[:population_size]), test.subset(order[population_size:])
    member_count = len(members)
    member_order = torch.randperm(len(members), generator=torch_generator(seed, "membership", "members"))
    members = members.subset(member_order[:max_records].sort().values)
    first_rows = torch.arange(min(len(remaining), max_records))
    others = remaining.subset(
        _match_class_shares(remaining.targets, members.targets, max_records) if match_classes else first_rows
    )
    if min(len(members), len(others), len(population)) < 2:
        sizes = f"{len(members)} members, {len(others)} others, a population of {len(population)}"
        raise ArgumentError("records", sizes, "two or more of each")
    inside = torch.arange(len(members) + len(others)) < len(members)
    return Candidates(concatenate([members, others]), inside, population, member_count)


def _match_class_shares(targets: torch.Tensor, reference: torch.Tensor, max_rows: int) -> torch.Tensor:
    """Return as many rows of ``targets`` (N,) as possible whose class shares are those of ``reference``.

    At most ``max_rows``, up to rounding in each class.

    >>> _match_class_shares(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), 10).tolist()
    [0, 3, 4]
    """
    classes = int(max(targets.max(), reference.max())) + 1
    available, wanted = (
        torch.bincount(labels, minlength=classes).double() for labels in (targets, reference)
    )
    share = wanted / wanted.sum()
    usable = (share > 0) & (available > 0)
    total = min(float((available[usable] / share[usable]).min()), max_rows)  # limited by the scarcest class
    counts = torch.clamp((share * total).ceil(), max=available).long()
    rows = [torch.nonzero(targets == label).flatten()[: int(counts[label])] for label in range(classes)]
    return torch.cat(rows).sort().values


def private_records(experiment: Simulation, node: Node) -> TensorData:
    """Return a node's own records, without labeled public data that a method adds."""
    names = [other_node.name for other_node in experiment.nodes]
    return experiment.setting.nodes[names.index(node.name)].data


def concatenate(parts: Sequence[TensorData]) -> TensorData:
    return TensorData.concat([part.to("cpu") for part in parts])


# --- outputs of targets and shadow models ----------------------------------------------------------


def target_logits(experiment: ObservedSimulation, records: TensorData) -> torch.Tensor:
    """Return the logits of the student, or its substitute, for records: ``(N, classes)``."""
    inputs = records.inputs.to(experiment.compute.device)
    if experiment.method.evaluated_model == "ensemble":
        experiment.allow_queries_after_end()
        server, parts = experiment.server, torch.split(inputs, inference_batch_size(inputs))
        query, name = _find_scores_query(experiment)
        queried = (server.query(query, **{name: part}) for part in parts)  # type: ignore[arg-type]
        responses = [server.ensemble_responses(tensors) for tensors in queried]
        return torch.cat([node_logits for node_logits in responses if node_logits is not None]).float().cpu()
    student_logits = experiment.responses(inputs)
    if student_logits is not None:
        return student_logits.float().cpu()
    node_logits = torch.stack([predict(node.model, inputs, experiment.compute) for node in experiment.nodes])
    node_logits = node_logits.cpu()  # (K, N, classes)
    confidences = torch.stack(
        [logit_confidence(student_logits, records.targets) for student_logits in node_logits]
    )  # (K, N)
    return node_logits[confidences.argmax(0), torch.arange(len(records))]


def _find_scores_query(experiment: ObservedSimulation) -> tuple[str, str]:
    """Return the name of the query for scores of any inputs, and of its input tensor."""
    return next(
        (query.name, name)
        for query in experiment.side.queries.values()
        for name, kind in query.sends.items()
        if kind == INPUTS and any(released.category == "scores" for released in query.releases.values())
    )


def contributing_nodes(experiment: ObservedSimulation, names: set[str]) -> list[Node]:
    """Return the nodes whose records may have influenced the target, given the names of those that released
    something.
    """
    uses_node_models = experiment.method.evaluated_model in ("nodes", "ensemble")
    includes_all = uses_node_models or SUM in names
    return [node for node in experiment.nodes if includes_all or node.name in names]


def shadow_federation(
    replayed: ReplayedRun, candidates: Candidates, row: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the same method on other records and with other random numbers.

    Returns:
        Logits for the candidates ``(N + Z, classes)``, and the mask of those that it learned from ``(N,)``:
            the records of ``row``, without those of nodes that did not participate.
    """
    rows = row.nonzero().flatten()
    part, run = candidates.records.subset(rows), replayed.config
    generator = numpy_generator(seed, "split")
    try:
        indices = partitioners.split(part.targets, len(replayed.data.classes), run.split, generator)
    except FedstillError as error:
        if isinstance(error, ArgumentError) and error.name == "split.column":
            expected = "alone, where data are split by a column"
            raise ArgumentError("membership.trained", "federations", expected) from error
        expected_records = f"more, or {format_option('membership.trained', 'alone')} ({error})"
        raise ArgumentError("membership.records", len(candidates.records), expected_records) from error
    test = replayed.data.test.subset(torch.arange(min(SHADOW_TEST_RECORDS, len(replayed.data.test))))
    shadow = replace(
        replayed,
        config=replace(run, seed=seed),
        data=replace(replayed.data, test=test),
        parts=[part.subset(rows_of_node) for rows_of_node in indices],
    ).experiment()
    transcript = ServerTranscript(0)
    shadow.run_with_listener(lambda release: transcript.record_release(release, shadow.public))
    names = {node.name for node in contributing_nodes(shadow, transcript.contributors)}
    is_member = torch.zeros_like(row)
    for node, rows_of_node in zip(shadow.nodes, indices, strict=True):
        if node.name in names:
            is_member[rows[rows_of_node]] = True
    return target_logits(shadow, candidates.records_and_population), is_member


def _predict(network: nn.Module, records: TensorData, compute: Compute) -> torch.Tensor:
    return predict(network, records.inputs.to(compute.device), compute).cpu()


# --- report ----------------------------------------------------------------------------------------


def _metric_rows(attack: Mapping[str, Any], target_name: str, column: str) -> Iterator[LeakageMetric]:
    auc, target = attack["auc"], {"attack": attack["title"], "target": target_name}
    yield LeakageMetric(
        **target,
        **percent_fields(**auc),
        metric="AUC",
        baseline="50%",
        note="not significantly different from guessing" if auc["low"] <= 0.5 <= auc["high"] else "",
        column=column,
    )
    for point in attack["at"]:
        rate = f"{100 * point['rate']:g}%"
        yield LeakageMetric(
            **target,
            **percent_fields(**point["true_positives"]),
            metric=f"members found at {rate} false alarms",
            baseline=rate,
            note=f"{point['found']:,} of {point['members']:,}; "
            f"false alarms: {point['accused']:,} of {point['others']:,}",
            column=TPR if column == AUC and math.isclose(point["rate"], REPORTED_RATE) else "",
            detail=not point["allowed"],  # few others allow no low rate
        )


def _describe_target(target: Mapping[str, Any]) -> str:
    """Describe the adversary's view of one target, and the tested records."""
    members, others, shadows = (target[key] for key in ("members", "others", "shadows"))
    shadow_text = f", with {shadows} shadow models, {SHADOW_TEXTS[target['trained']]}" if shadows else ""
    rates = sorted({point["rate"] for attack in target["attacks"] for point in attack["at"]}, reverse=True)
    # Rates that are too low for the number of records.
    limits = [
        f" {100 * rate:g}% false alarms need at least {math.ceil(1 / rate):,} others: that column counts "
        "members found without any false alarm."
        for rate in rates
        if 1e-9 < rate < 1 and others * rate < 1 - 1e-9
    ]
    return (
        f"The adversary sees {target['view']}. It was tested on {members:,} members and "
        f"{others:,} others{shadow_text}.{''.join(limits)}"
    )
