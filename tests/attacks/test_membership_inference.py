"""Membership inference on runs: overfitted models reveal members, untrained ones do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import nn

from fedstill.attacks import membership_inference
from fedstill.attacks.attack import Target
from fedstill.attacks.gradient_inversion import GradientInversion
from fedstill.attacks.label_counts import LabelCounts
from fedstill.attacks.membership_inference import (
    MembershipInference,
    choose_candidates,
    concatenate,
    shadow_federation,
    strongest_attack_name,
    target_logits,
)
from fedstill.attacks.transcript import ObservedSimulation, ReplayedRun, ServerTranscript
from fedstill.core.errors import MethodRefused
from fedstill.models.inference import predict
from fedstill.protocol.secure_aggregation import SUM
from fedstill.runs.simulation import Simulation
from fedstill.tasks.reconstruction import ReconstructionConfig
from tests.support.errors import raises_invalid
from tests.support.runs import FEDAVG, SGD, replay

FEW = MembershipInference(shadows=8)
HARD = {**SGD, "optimizer": "adam", "lr": 5e-3, "lr_end": 2e-3, "epochs": 50.0}  # overfits 200 digits
LOCAL = {"models": ["mlp:64"], "local": HARD, "policy": {"outputs_only": False}}
HEART: dict[str, Any] = {"nodes": LOCAL, "student": {"model": "mlp:64"}, "split": {"nodes": 2, "alpha": 5.0}}


def replay_to_end(again: ReplayedRun, most: int = 0) -> tuple[ObservedSimulation, ServerTranscript]:
    experiment, transcript = again.experiment(), ServerTranscript(most)
    experiment.run_with_listener(lambda release: transcript.record_release(release, experiment.public))
    return experiment, transcript


def run_attack(
    again: ReplayedRun, experiment: ObservedSimulation, transcript: ServerTranscript, how: MembershipInference
) -> list[dict[str, Any]]:
    record: list[dict[str, Any]] = how.run(Target(again, experiment, transcript)).part["targets"]
    return record


def auc(record: dict[str, Any], name: str) -> float:
    return float(next(each for each in record["attacks"] if each["name"] == name)["auc"]["value"])


def test_detects_members_of_overfitted_model() -> None:
    again = replay({"name": "standalone"}, **HEART)
    experiment, transcript = replay_to_end(again)
    (record,) = run_attack(again, experiment, transcript, FEW)
    assert (record["target"], record["members"], record["shadows"], record["trained"]) == (
        "nodes' models",
        200,
        8,
        "alone",
    )
    assert record["others"] == 359 - 89
    assert auc(record, "lira") > auc(record, "loss") + 0.02
    assert auc(record, "rmia") > auc(record, "loss") + 0.02
    best = next(each for each in record["attacks"] if each["name"] == record["best"])
    assert best["auc"]["low"] > 0.5
    # four attacks: each interval at 98.75 %, for a joint confidence of 95 %
    among = best["at"][0]["true_positives"]
    exact = binomtest(best["at"][0]["found"], 200).proportion_ci(0.9875, "exact")
    assert (among["low"], among["high"]) == pytest.approx((exact.low, exact.high))
    assert best["at"][0]["rate"] == 0.01


def test_untrained_model_reveals_no_membership() -> None:
    lazy = {**SGD, "lr": 1e-9, "lr_end": 1e-9, "epochs": 1.0}
    again = replay(FEDAVG, **{**HEART, "nodes": {**LOCAL, "local": lazy}})
    experiment, transcript = replay_to_end(again)
    (record,) = run_attack(again, experiment, transcript, FEW)
    for each in record["attacks"]:
        assert each["auc"]["low"] < 0.5 < each["auc"]["high"], each["name"]


def test_shadow_federations_repeat_the_method() -> None:
    again = replay(FEDAVG, **HEART)
    experiment, transcript = replay_to_end(again)
    (record,) = run_attack(again, experiment, transcript, replace(FEW, trained="federations", shadows=4))
    assert (record["target"], record["trained"]) == ("student", "federations")
    assert auc(record, "lira") > 0.55
    alone = run_attack(again, experiment, transcript, replace(FEW, shadows=4))[0]
    assert auc(alone, "loss") == auc(record, "loss")  # this attack uses no shadows
    assert auc(alone, "lira") != auc(record, "lira")


def test_shadow_federation_trains_on_its_half(monkeypatch: pytest.MonkeyPatch) -> None:
    again = replay(FEDAVG)
    candidates_ = choose_candidates(concatenate(again.parts), again.data.test, FEW.records, 0)
    row = torch.zeros(len(candidates_.records), dtype=torch.bool)
    row[::2] = True
    parts: list[torch.Tensor] = []
    run = Simulation.run
    monkeypatch.setattr(
        Simulation, "run", lambda self: parts.extend(node.data.inputs for node in self.nodes) or run(self)
    )
    record, learned_from = shadow_federation(again, candidates_, row, 7)
    assert torch.equal(learned_from, row)
    assert record.shape == (len(candidates_.records_and_population), 10)
    learned = torch.cat(parts).flatten(1)
    assert sorted(map(tuple, learned.tolist())) == sorted(
        map(tuple, candidates_.records.inputs[row].flatten(1).tolist())
    )


@pytest.mark.slow
def test_attacks_responses_of_largest_node_through_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    public = {"name": "held-out", "share": 0.5}
    plain = {"name": "fedkd", "student": {"epochs": 1}, "levels": 0, "gamma": float("inf")}
    shape = {**HEART, "nodes": {**LOCAL, "policy": {}}, "data": {"name": "digits", "train_limit": 400}}
    again = replay(plain, outputs_only=True, public=public, **shape)
    experiment, transcript = replay_to_end(again, 500)
    # The rest depends on responses only, and shadows are the same for each call.
    monkeypatch.setattr(membership_inference, "_attack_student", lambda target, how: {})
    shadows = membership_inference.train_shadows
    trained: list[list[nn.Module]] = []

    def once(*given: Any, **named: Any) -> list[nn.Module]:
        trained.extend([] if trained else [shadows(*given, **named)])
        return trained[0]

    monkeypatch.setattr(membership_inference, "train_shadows", once)
    _, responses = run_attack(again, experiment, transcript, FEW)
    largest = max(experiment.nodes, key=lambda node: len(node.data))
    assert responses["target"] == f"responses of {largest.name}"
    assert responses["view"].startswith("200 queries to it")
    assert responses["member_count"] == responses["members"] == len(largest.data)
    record = transcript._logits_by_node[largest.name]
    for number, logits in record.items():
        record[number] = logits[torch.randperm(len(logits), generator=torch.Generator().manual_seed(0))]
    shuffled = run_attack(again, experiment, transcript, FEW)[1]
    for attack in ("loss", "rmia"):
        assert auc(responses, attack) > 0.53
        assert auc(responses, attack) > auc(shuffled, attack) + 0.02
    none = run_attack(again, experiment, transcript, replace(FEW, responses=0))
    assert len(none) == 1


def test_coop_lira_uses_copies_of_the_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    method = {"name": "fedkd", "student": {"epochs": 1}, "levels": 0, "gamma": float("inf")}
    nodes, split = {"models": ["mlp:32"], "local": HARD}, {"nodes": 4, "alpha": 100.0}
    again = replay(method, outputs_only=True, public={"name": "held-out"}, nodes=nodes, split=split)
    experiment, transcript = replay_to_end(again, 500)
    no_shadows = replace(FEW, shadows=0)

    def attack() -> tuple[dict[str, Any], list[str]]:
        result = no_shadows.run(Target(again, experiment, transcript))
        has_coop = no_shadows.describe_strength(result.part).endswith(" and co-op LiRA")
        assert has_coop == bool(result.part["targets"][1]["other_nodes"])
        return result.part["targets"][1], [name for name, _ in result.skipped]

    all_nodes, skipped = attack()
    assert [each["name"] for each in all_nodes["attacks"]] == ["loss", "coop-lira"]
    assert (all_nodes["other_nodes"], skipped) == (3, [])
    assert all_nodes["view"].endswith("co-op LiRA compares it with copies of 3 other nodes' models")
    with monkeypatch.context() as limited:
        limited.setattr(membership_inference, "MAX_OTHER_NODES", 2)
        assert attack()[0]["other_nodes"] == 2
    largest = max(experiment.nodes, key=lambda node: len(node.data)).name
    first, second, _ = (node.name for node in experiment.nodes if node.name != largest)
    (number,) = transcript._logits_by_node[first]
    transcript._logits_by_node[first][number] *= float("nan")
    three_nodes, skipped = attack()
    assert (three_nodes["other_nodes"], skipped) == (2, [])
    assert auc(three_nodes, "loss") == auc(all_nodes, "loss")
    assert auc(three_nodes, "coop-lira") != auc(all_nodes, "coop-lira")
    del transcript._logits_by_node[second]
    two_nodes, skipped = attack()
    assert [each["name"] for each in two_nodes["attacks"]] == ["loss"]
    assert (two_nodes["other_nodes"], skipped) == (0, ["co-op LiRA"])


def test_members_come_from_contributing_nodes() -> None:
    again = replay({**FEDAVG, "rounds": 1, "participation": 0.34})
    experiment, transcript = replay_to_end(again)
    (contributor,) = transcript.contributors
    (record,) = run_attack(again, experiment, transcript, FEW)
    size = next(len(node.data) for node in experiment.nodes if node.name == contributor)
    assert record["member_count"] == record["members"] == size < 200
    candidates_ = choose_candidates(concatenate(again.parts), again.data.test, FEW.records, 0)
    row = torch.ones(len(candidates_.records), dtype=torch.bool)
    learned = shadow_federation(again, candidates_, row, 7)[1]
    assert 0 < int(learned.sum()) < len(row) / 2


def test_public_data_are_no_members() -> None:
    again = replay({"name": "fedkd", "student": {"epochs": 1}, "labeled": True}, public={"name": "held-out"})
    experiment, transcript = replay_to_end(again)
    held = sum(len(part) for part in again.parts)
    assert sum(len(node.data) for node in experiment.nodes) > held, (
        "public data are added to the data of nodes"
    )
    (central, *responses) = run_attack(again, experiment, transcript, replace(FEW, records=1000))
    assert central["members"] == held
    assert all(each["members"] <= held for each in responses)


def test_rejects_student_of_public_data() -> None:
    again = replay({"name": "public-only"}, public={"name": "held-out"})
    experiment, transcript = replay_to_end(again)
    with pytest.raises(MethodRefused, match="central model"):
        run_attack(again, experiment, transcript, FEW)


def test_ensemble_responds_through_gates() -> None:
    outputs = {"distribution": "gaussian", "noise": 100.0, "bound": 1.0}
    privacy = {"mechanism": "noisy-outputs", "outputs": outputs, "counts_noise": 1.0}
    nodes = {"models": ["mlp:32"], "local": SGD, "policy": {"outputs_only": True}}
    spread = []
    for more in ({}, {"privacy": privacy}):
        again = replay({"name": "ensemble"}, nodes={**nodes, **more})
        experiment, _ = replay_to_end(again)
        spread.append(float(target_logits(experiment, again.data.test.subset(torch.arange(50))).std()))
    assert spread[1] > 10 * spread[0]


def test_most_confident_node_model_is_used() -> None:
    again = replay({"name": "standalone"})
    experiment, _ = replay_to_end(again)
    records = again.data.test.subset(torch.arange(20))
    record = target_logits(experiment, records)
    each = torch.stack([node.model(records.inputs) for node in experiment.nodes]).detach()
    sure = each.softmax(2)[:, torch.arange(20), records.targets]  # (K, 20)
    assert torch.allclose(record.softmax(1)[torch.arange(20), records.targets], sure.max(0).values, atol=1e-6)


@pytest.mark.parametrize("records", [2000, 20])
def test_others_match_class_shares_of_members(records: int) -> None:
    again = replay(FEDAVG, split={"nodes": 3, "alpha": 0.3})
    own = again.parts[0]
    candidates_ = choose_candidates(own, again.data.test, records, 0, match_classes=True)
    assert int((~candidates_.inside).sum()) < records + 10
    parts = (
        candidates_.records.targets[candidates_.inside],
        candidates_.records.targets[~candidates_.inside],
    )
    shares = [torch.bincount(labels, minlength=10).double() for labels in parts]
    distance = (shares[0] / shares[0].sum() - shares[1] / shares[1].sum()).abs().sum() / 2
    assert distance < 0.1
    assert not any(
        (own.inputs == x).flatten(1).all(1).any() for x in candidates_.records.inputs[~candidates_.inside]
    )


def test_rejects_inapplicable_runs_in_one_line() -> None:
    for bad in (
        {"shadows": 3},
        {"shadows": -4},
        {"shadows": 2},
        {"records": 3},
        {"responses": -1},
        {"trained": "both"},
    ):
        ((name, value),) = bad.items()
        with raises_invalid(f"membership.{name}", value):
            MembershipInference(**bad)  # type: ignore[arg-type]
    again = replay(FEDAVG)
    experiment, transcript = replay_to_end(again)
    experiment.task = ReconstructionConfig().make(1)
    with pytest.raises(MethodRefused, match="one label"):
        run_attack(again, experiment, transcript, FEW)


def test_secure_aggregation_hides_single_responses() -> None:
    method = {"name": "fedkd", "student": {"epochs": 2}, "levels": 0, "gamma": float("inf")}
    again = replay(
        method,
        public={"name": "held-out"},
        link={"secure_aggregation": True},
        split={"nodes": 3, "alpha": 5.0},
    )
    experiment, transcript = replay_to_end(again, most=100)

    inputs, responses = transcript.responses(SUM) or pytest.fail("the transcript contains no sums")
    alone = torch.stack([predict(node.model, inputs, experiment.compute) for node in experiment.nodes])
    counts = torch.stack([experiment.task.counts(node.data) for node in experiment.nodes]).unsqueeze(1)
    mean = (counts * alone).sum(0) / counts.sum(0)
    torch.testing.assert_close(responses, mean, rtol=1e-3, atol=1e-3)
    assert [transcript.responses(node.name) for node in experiment.nodes] == [None] * 3
    central, record = run_attack(again, experiment, transcript, replace(FEW, shadows=4))
    assert central["members"] == sum(len(node.data) for node in experiment.nodes)
    assert record["target"].startswith("sum of the nodes' responses, for records of node-")
    for attack in (LabelCounts(), GradientInversion()):
        assert "sum" in (attack.refusal(experiment.side) or "")


@pytest.mark.parametrize(
    ("auc", "expected"),
    [
        ((0.62, 0.58, 0.66), "picked the former 62 times in 100 by the student; chance"),
        (
            (0.52, 0.48, 0.56),
            "52 times in 100 by the student (not significantly different from chance); chance",
        ),
        ((0.20, 0.17, 0.23), "80 times in 100 by the student, with reversed scores; chance"),
    ],
)
def test_reversed_scores_count_as_correct(auc: tuple[float, float, float], expected: str) -> None:
    intervals = {"loss": auc, "lira": (0.51, 0.47, 0.55)}
    attacks = {
        name: {"name": name, "auc": dict(zip(("value", "low", "high"), each, strict=True))}
        for name, each in intervals.items()
    }
    best = strongest_attack_name(attacks)
    assert best == "loss"
    part = {"targets": [{"target": "student", "best": best, "attacks": list(attacks.values())}]}
    assert expected in MembershipInference().sentence(part)
