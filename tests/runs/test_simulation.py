"""A simulation's own computations: central models, shares of the test set, evaluation steps, refusals."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.compute import EngineConfig, Workers
from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.core.errors import ArgumentError, FedstillError, MethodRefused, ModelError, QueryRefused
from fedstill.data.public import PublicData
from fedstill.methods._discriminators import Discriminators
from fedstill.methods._input_generators import InputGenerator
from fedstill.methods._public_data import StudentTraining
from fedstill.methods.ensemble import NodeEnsemble
from fedstill.methods.fedad import FedAD
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fediod import FedIOD
from fedstill.methods.fediod_maps import FedIODMaps
from fedstill.methods.fedkd import FedKD
from fedstill.methods.fedmd import FedMD
from fedstill.methods.fedper import FedPer
from fedstill.methods.fl_mrcm import FLMRCM
from fedstill.methods.standalone import Standalone
from fedstill.models import build
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import DPTrainingConfig, NoPrivacy, PrivacyConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.build import Setting, describe_cases
from fedstill.runs.simulation import Simulation
from fedstill.tasks.multi_label import MultiLabel
from tests.support.bright_rows import SHAPE, SIZES, blobs, setting
from tests.support.runs import node_models


def accuracy(model: nn.Module, data: TensorData) -> float:
    with torch.no_grad():
        outputs: torch.Tensor = model.eval()(data.inputs)
    return 100 * float((outputs.argmax(1) == data.targets).double().mean())


def test_evaluates_nodes_on_known_labels() -> None:
    """In all metrics of the nodes' own models: standalone, local, shares, labels, and each evaluation."""

    def findings(count: int, seed: int, unknown: int | None = None) -> TensorData:
        data = blobs(count, seed)
        targets = torch.nn.functional.one_hot(data.targets, 3)
        if unknown is not None:
            targets[:, unknown] = -1
        return TensorData(data.inputs, targets)

    one = setting(
        Standalone(),
        task=MultiLabel(3),
        parts=[findings(30, node, unknown=node) for node in range(3)],
        local=LocalConfig(epochs=20, batch=10, lr=0.05),
    )
    one = replace(one, test=findings(40, 9))
    experiment = Simulation(one)
    results = experiment.run()
    truth = one.test.targets
    means = []
    for node, model in enumerate(node_models(one)):
        with torch.no_grad():
            aucs = MultiLabel(3).metric_per_class(model.eval()(one.test.inputs), truth)
        assert aucs is not None
        result = results["labels"]["nodes"][experiment.nodes[node].name]
        assert result == [None if label == node else pytest.approx(aucs[label]) for label in range(3)]
        means.append(sum(auc for label, auc in enumerate(aucs) if label != node) / 2)
    for whose in ("standalone", "local"):
        assert results[whose]["auc"]["per_node"] == pytest.approx(means)
    assert results["auc"] == pytest.approx(sum(means) / 3)
    assert experiment.evaluate()["auc"] == pytest.approx(results["auc"])
    for node, share in enumerate(results["local"]["share"]["per_node"]):
        rows = experiment.evaluation.rows_of_test_share(node, 3)
        with torch.no_grad():
            aucs = MultiLabel(3).metric_per_class(node_models(one)[node](one.test.inputs[rows]), truth[rows])
        assert aucs is not None
        assert share == pytest.approx(sum(auc for label, auc in enumerate(aucs) if label != node) / 2)


def test_evaluates_nodes_on_labels_of_public_data() -> None:
    inputs = blobs(30, 7)
    parts = []
    for node in range(3):
        targets = torch.nn.functional.one_hot(blobs(30, node).targets, 3)
        targets[:, node] = -1
        parts.append(TensorData(blobs(30, node).inputs, targets))
    public = PublicData("public", inputs.inputs, torch.nn.functional.one_hot(inputs.targets, 3))
    test = TensorData(blobs(40, 9).inputs, torch.nn.functional.one_hot(blobs(40, 9).targets, 3))
    for labeled in (True, False):
        method = FedKD(student=StudentTraining(epochs=1, batch=10), levels=0, labeled=labeled)
        one = setting(method, task=MultiLabel(3), parts=parts, public=public)
        result = Simulation(replace(one, test=test)).run()["labels"]["nodes"].values()
        assert [aucs.count(None) for aucs in result] == [0 if labeled else 1] * 3


# --- virtual global models -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
def test_virtual_model_is_weighted_mean_of_nodes(engine: Any) -> None:
    """FedMD-CG, section 3.1; batch norm's statistics are averaged, too."""
    one = setting(FedPer(rounds=2), "resnet8:4", engine=EngineConfig(batching=engine))
    results = Simulation(one).run()
    models = [model.state_dict() for model in node_models(one)]
    assert not torch.equal(models[0]["8.weight"], models[1]["8.weight"])
    average = copy.deepcopy(node_models(one)[0])
    for name, value in average.state_dict().items():
        mean = sum(size / 60 * state[name].double() for size, state in zip(SIZES, models, strict=True))
        value.copy_(mean if value.is_floating_point() else mean.round())
    assert results["accuracy"] == pytest.approx(accuracy(average, one.test))
    assert results["student"] is None  # no party has this model
    head = dict(one.student.named_parameters())["8.weight"]
    assert all(not torch.equal(head, state["8.weight"]) for state in models)


def test_virtual_model_is_not_returned() -> None:
    """Evaluating after each round must give the same models as evaluating at the end only."""
    often, seldom = (setting(FedPer(rounds=3), every=every) for every in (1, 0))
    for one in (often, seldom):
        Simulation(one).run()
    for mine, other in zip(
        (*node_models(often), often.student), (*node_models(seldom), seldom.student), strict=True
    ):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in mine.state_dict().items())


def test_without_global_model_metric_is_mean_of_nodes() -> None:
    one = setting(Standalone())
    before = copy.deepcopy(one.student.state_dict())
    results = Simulation(one).run()
    each = [accuracy(model, one.test) for model in node_models(one)]
    assert results["accuracy"] == pytest.approx(sum(each) / 3)
    assert results["local"]["accuracy"]["per_node"] == pytest.approx(each)
    assert results["student"] is None
    assert all(torch.equal(value, before[name]) for name, value in one.student.state_dict().items())


def test_student_is_global_model() -> None:
    one = setting(FedAvg(rounds=2))
    results = Simulation(one).run()
    assert (
        results["accuracy"]
        == results["student"]["accuracy"]
        == pytest.approx(accuracy(one.student, one.test))
    )


# --- local accuracy --------------------------------------------------------------------------------


@pytest.mark.parametrize(("test", "nodes"), [(40, 3), (16, 7), (7, 7)])
def test_test_shares_are_disjoint_and_even(test: int, nodes: int) -> None:
    one = setting(Standalone(), test=test, nodes=nodes)
    number = torch.arange(test).view(-1, 1, 1, 1)
    one.test.inputs[:, :, 0, :1] = number[:, :, 0] / 1000  # makes each example identifiable
    experiment = Simulation(one)
    shares = [
        one.test.subset(experiment.evaluation.rows_of_test_share(index, nodes)) for index in range(nodes)
    ]
    values = sorted(round(x * 1000) for share in shares for x in share.inputs[:, 0, 0, 0].tolist())
    assert values == list(range(test))
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1
    for share in shares:
        rows = [round(x * 1000) for x in share.inputs[:, 0, 0, 0].tolist()]
        assert torch.equal(share.targets, one.test.targets[rows])


def test_test_shares_depend_on_seed() -> None:
    def shares(seed: int) -> list[torch.Tensor]:
        experiment = Simulation(setting(Standalone(), seed=seed))
        return [
            experiment.test.inputs[experiment.evaluation.rows_of_test_share(index, 3)] for index in range(3)
        ]

    first, again, other = shares(0), shares(0), shares(1)
    assert all(torch.equal(mine, same) for mine, same in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    test = setting(Standalone()).test.inputs
    assert not torch.equal(first[0], test[: len(first[0])])  # not the first examples in order


def test_every_node_has_test_share() -> None:
    experiment = Simulation(setting(Standalone(), test=2, nodes=3))
    assert [len(experiment.evaluation.rows_of_test_share(index, 3)) for index in range(3)] == [1, 1, 1]


def test_local_accuracy_uses_test_shares() -> None:
    one = setting(Standalone(), test=41)
    experiment = Simulation(one)
    results = experiment.run()
    shares = [one.test.subset(experiment.evaluation.rows_of_test_share(index, 3)) for index in range(3)]
    each = [accuracy(model, share) for model, share in zip(node_models(one), shares, strict=True)]
    assert results["local"]["share"]["per_node"] == pytest.approx(each)
    assert results["local"]["share"]["mean"] == pytest.approx(sum(each) / 3)
    assert experiment.evaluate()["local_accuracy"] == pytest.approx(sum(each) / 3)


# --- evaluation steps ------------------------------------------------------------------------------


def looks(method: Any, every: int | None) -> list[int]:
    """Return the rounds after which a run was evaluated."""
    experiment = Simulation(setting(method, every=every))
    experiment.run()
    lines = [line for line in experiment.records.metrics if line["phase"] == "distillation"]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["step"] for line in lines if "accuracy" in line]


@pytest.mark.parametrize(
    ("rounds", "every", "expected"),
    [
        (20, None, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        (3, None, [1, 2, 3]),
        (7, 3, [3, 6, 7]),
        (7, 0, [7]),
        (2, 100, [2]),
    ],
)
def test_evaluates_at_interval_and_end(rounds: int, every: int | None, expected: list[int]) -> None:
    assert looks(FedAvg(rounds=rounds), every) == expected


# --- refusals before training ----------------------------------------------------------------------


def untouched(one: Setting, error: type[Exception], message: str) -> str:
    """Check that the setting is rejected before any training; return the error's text."""
    networks = (*node_models(one), one.student)
    before = copy.deepcopy([network.state_dict() for network in networks])
    with pytest.raises(error, match=message) as caught:
        Simulation(one)
    for network, old in zip(networks, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in network.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rejects_public_data_of_other_shape() -> None:
    public = PublicData("elsewhere", torch.zeros(5, 1, 12, 8))
    message = re.escape(f"invalid shape of public data = (1, 12, 8) (expected {SHAPE}, as in the test data")
    untouched(setting(FedAvg(rounds=1), public=public), ArgumentError, message)


def test_result_names_public_data() -> None:
    public = PublicData("elsewhere", torch.zeros(5, *SHAPE), note="five images")
    results = Simulation(setting(FedAvg(rounds=1), public=public)).run()
    assert results["public"] == {"name": "elsewhere", "examples": 5, "note": "five images"}
    assert Simulation(setting(FedAvg(rounds=1))).run()["public"] is None


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        (FedIODMaps(steps=1), MethodRefused, "it generates images from label maps, and this task has none"),
        (
            FLMRCM(rounds=1, target="x"),
            ArgumentError,
            r"invalid method\.target = 'x' \(expected one of node-0",
        ),
        (FedAD(student=StudentTraining(epochs=1)), ModelError, "the student"),
    ],
)
def test_rejects_invalid_server_options_before_training(
    method: Any, error: type[Exception], message: str
) -> None:
    changes: dict[str, Any] = {}
    if isinstance(method, FedAD):
        changes = {"student": build("mlp:8", SHAPE, 3, 0), "public": PublicData("p", blobs(6, 1).inputs)}
    untouched(setting(method, "small-cnn:4", **changes), error, message)


@pytest.mark.parametrize("method", [FedIOD(steps=1), FedAvg(rounds=1)])
def test_trial_server_changes_nothing(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = Simulation.make_server
    monkeypatch.setattr(Simulation, "make_server", lambda *given: made.append(make(*given)) or made[-1])
    one, random = setting(method), torch.get_rng_state()
    before = copy.deepcopy(one.student.state_dict())
    experiment = Simulation(one)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in experiment.student.state_dict().items())
    assert all(parameter.requires_grad for parameter in experiment.student.parameters())
    assert [server.student is experiment.student for server in made] == [False]
    assert experiment.audit.traffic_totals()["queries"] == 0


def test_names_nodes_that_refuse_parameters() -> None:
    policies = [PolicyConfig(outputs_only=False), PolicyConfig(), PolicyConfig()]
    one = setting(FedAvg(rounds=1), policies=policies)
    message = untouched(one, QueryRefused, "'node-1', 'node-2' refuse query 'train' by rule outputs_only")
    assert "parameters may not leave" in message


class Between(nn.Module):
    """A module that computes something between its two parts, which the parts alone would omit."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.extractor(x).tanh())
        return out


class OwnForward(nn.Sequential):
    """A Sequential with a custom forward."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x + x.flip(3).relu())  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("network", [Between, OwnForward])
def test_rejects_unsplittable_network(
    network: type[nn.Module],
) -> None:
    """Otherwise another function would be trained than the one that the owner gets back."""
    models = [network() for _ in range(3)]
    one = setting(FedPer(rounds=1), models=models, student=network())
    untouched(one, ModelError, "student cannot be split")
    # this method does not split networks
    Simulation(setting(Standalone(), models=[network() for _ in range(3)]))


@pytest.mark.parametrize(
    "method",
    [
        Standalone(),
        NodeEnsemble(),
        FedIOD(steps=1, generator=InputGenerator(width=4), critic=Discriminators(width=4), batch=4),
        FedAvg(rounds=1),
        FedPer(rounds=1),
    ],
)
def test_frozen_network_runs_or_is_refused(method: Any) -> None:
    """A frozen model only responds; a method that must train it is refused, with the node's name."""
    one = setting(method)
    node_models(one)[1].requires_grad_(False)
    before = copy.deepcopy(node_models(one)[1].state_dict())
    try:
        experiment = Simulation(one)
    except FedstillError as refused:
        message = str(refused)
    else:
        experiment.run()
        assert all(
            torch.equal(value, before[name]) for name, value in node_models(one)[1].state_dict().items()
        )
        return
    assert "node-1" in message


def test_frozen_network_uses_no_random_numbers() -> None:
    """Nodes of one architecture with dropout get the same query; evaluation uses no random numbers."""

    def learned(count: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        student, public = build("mlp:8", SHAPE, 3, 0), blobs(30, 5)
        networks = [nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3)) for _ in range(3)]
        networks[0].requires_grad_(False)
        method = FedMD(initial_rounds=1, rounds=2, student=StudentTraining(epochs=1, batch=32, lr_end=1e-4))
        given = {"models": networks, "student": student, "public": PublicData("made", public.inputs)}
        experiment = Simulation(setting(method, **given))
        experiment.compute.workers = Workers(count)
        experiment.run()
        return [value for network in networks for value in network.state_dict().values()]

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(learned(2), learned(1), strict=True))


class FunctionalDropout(nn.Module):
    """A network with random numbers that no layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.dropout(x.flatten(1), 0.5, self.training))


def test_random_networks_repeat_if_watched_and_are_refused_otherwise() -> None:
    def learned(workers: Workers) -> list[torch.Tensor]:
        torch.manual_seed(0)
        networks = [FunctionalDropout() for _ in range(3)]
        experiment = Simulation(setting(FedAvg(rounds=1), models=networks, student=FunctionalDropout()))
        experiment.compute.workers = workers
        experiment.run()
        return [value for network in networks for value in network.state_dict().values()]

    with pytest.raises(FedstillError, match=r"global generator .* engine.watch_random"):
        learned(Workers(2))
    watched, alone = learned(Workers(2, watch_random=True)), learned(Workers(1))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(watched, alone, strict=True))


# --- owners of examples ----------------------------------------------------------------------------


def test_notes_privacy_unit() -> None:
    def notes(privacy: PrivacyConfig) -> str:
        one = setting(FedAvg(rounds=1), privacies=[privacy] * 3)
        nodes = [
            replace(node, data=replace(node.data, groups=torch.arange(len(node.data)) // 5))
            for node in one.nodes
        ]
        experiment = Simulation(replace(one, nodes=nodes))
        return str(experiment.run()["notes"])

    noise = DPTrainingConfig(noise=4.0)
    assert "privacy.group_size = 5" in notes(DPSGD(training=noise))
    assert notes(DPSGD(training=noise, group_size=5)) == "[]"
    assert notes(NoPrivacy()) == "[]"


def test_result_counts_test_cases() -> None:
    part = blobs(4, 0)
    case_ids, corners = torch.tensor([2, 2, 5, 5]), torch.zeros(4, 2, dtype=torch.int64)
    cases = CaseIndex(case_ids, tuple("abcdef"), ("",) * 6)
    assert describe_cases(part) == {}
    assert describe_cases(replace(part, cases=cases)) == {"test_cases": 2, "case": "patient"}
    assert describe_cases(replace(part, cases=replace(cases, corners=corners)))["case"] == "picture"
    assert describe_cases(replace(part, cases=replace(cases, case_ids=torch.arange(4)))) == {}
