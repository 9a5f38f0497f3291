"""An experiment's own arithmetic: central models, shares of the test set, when it looks, what it refuses."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.compute import EngineConfig
from fedstill.data.dataset import TensorData
from fedstill.data.public import Public
from fedstill.errors import ArgumentError, FedstillError, ModelError, QuestionRefused
from fedstill.experiment import Experiment
from fedstill.methods.ensemble import EnsembleConfig
from fedstill.methods.fedavg import FedAvgConfig
from fedstill.methods.fediod import FedIODConfig
from fedstill.methods.fedper import FedPerConfig
from fedstill.methods.standalone import StandaloneConfig
from fedstill.models import build
from fedstill.node.gate import PolicyConfig
from fedstill.node.training import LocalConfig
from fedstill.records import Records
from fedstill.setting import Setting
from fedstill.tasks import Classification

SHAPE, SIZES = (1, 8, 8), (10, 20, 30)


def blobs(count: int, seed: int) -> TensorData:
    """Images of one bright row, whose place tells which of three classes."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=draw)
    pixels = -0.8 + 0.1 * torch.rand(count, *SHAPE, generator=draw)
    pixels[torch.arange(count), 0, 2 * labels] = 0.8
    return TensorData(pixels, labels)


def setting(method: Any, spec: str = "mlp:8", *, test: int = 40, nodes: int = 3, **changes: Any) -> Setting:
    given: dict[str, Any] = {
        "task": Classification(3),
        "parts": [blobs(SIZES[index % 3], index) for index in range(nodes)],
        "models": [build(spec, SHAPE, 3, 0, index) for index in range(nodes)],
        "student": build(spec, SHAPE, 3, 0, "student"),
        "test": blobs(test, 9),
        "method": method,
        "policies": [PolicyConfig(outputs_only=False)] * nodes,
        "local": LocalConfig(epochs=2, batch=10),
        "engine": EngineConfig(name="one-by-one"),
        **changes,
    }
    return Setting(**given)


def accuracy(model: nn.Module, data: TensorData) -> float:
    with torch.no_grad():
        outputs: torch.Tensor = model.eval()(data.inputs)
    return 100 * float((outputs.argmax(1) == data.targets).double().mean())


# --- what stands for a central model ---------------------------------------------------------------


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
def test_the_virtual_central_model_is_the_nodes_mean_weighed_by_their_data(engine: Any) -> None:
    """FedMD-CG, section 3.1; batch norm's statistics are averaged too."""
    one = setting(FedPerConfig(rounds=2), "resnet8:4", engine=EngineConfig(name=engine))
    figures = Experiment(one).run()
    models = [model.state_dict() for model in one.models]
    assert not torch.equal(models[0]["8.weight"], models[1]["8.weight"])
    average = copy.deepcopy(one.models[0])
    for name, value in average.state_dict().items():
        mean = sum(size / 60 * state[name].double() for size, state in zip(SIZES, models, strict=True))
        value.copy_(mean if value.is_floating_point() else mean.round())
    assert figures["accuracy"] == pytest.approx(accuracy(average, one.test))
    assert figures["student"] is None  # nobody has it, and nobody gets it
    head = dict(one.student.named_parameters())["8.weight"]
    assert all(not torch.equal(head, state["8.weight"]) for state in models)


def test_the_virtual_model_is_made_to_be_looked_at_and_not_given_to_anyone() -> None:
    """Looking every round must give the figures of looking at the end only."""
    often, seldom = (setting(FedPerConfig(rounds=3), every=every) for every in (1, 0))
    for one in (often, seldom):
        Experiment(one).run()
    for mine, other in zip((*often.models, often.student), (*seldom.models, seldom.student), strict=True):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in mine.state_dict().items())


def test_without_a_central_model_the_figure_is_the_nodes_mean() -> None:
    one = setting(StandaloneConfig())
    before = copy.deepcopy(one.student.state_dict())
    figures = Experiment(one).run()
    each = [accuracy(model, one.test) for model in one.models]
    assert figures["accuracy"] == pytest.approx(sum(each) / 3)
    assert figures["local"]["accuracy"]["per_node"] == pytest.approx(each)
    assert figures["student"] is None
    assert all(torch.equal(value, before[name]) for name, value in one.student.state_dict().items())


def test_the_student_is_the_central_model_where_there_is_one() -> None:
    one = setting(FedAvgConfig(rounds=2))
    figures = Experiment(one).run()
    assert (
        figures["accuracy"]
        == figures["student"]["accuracy"]
        == pytest.approx(accuracy(one.student, one.test))
    )


# --- local accuracy --------------------------------------------------------------------------------


@pytest.mark.parametrize(("test", "nodes"), [(40, 3), (9, 3), (10, 6), (16, 7), (7, 7)])
def test_every_test_example_is_in_exactly_one_nodes_even_share(test: int, nodes: int) -> None:
    one = setting(StandaloneConfig(), test=test, nodes=nodes)
    number = torch.arange(test).view(-1, 1, 1, 1)
    one.test.inputs[:, :, 0, :1] = number[:, :, 0] / 1000  # each can be told
    experiment = Experiment(one)
    shares = [experiment._share(index) for index in range(nodes)]
    found = sorted(round(x * 1000) for share in shares for x in share.inputs[:, 0, 0, 0].tolist())
    assert found == list(range(test))
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1
    for share in shares:
        rows = [round(x * 1000) for x in share.inputs[:, 0, 0, 0].tolist()]
        assert torch.equal(share.targets, one.test.targets[rows])


def test_shares_are_random_and_the_seeds_own() -> None:
    def shares(seed: int) -> list[torch.Tensor]:
        experiment = Experiment(setting(StandaloneConfig(), seed=seed))
        return [experiment._share(index).inputs for index in range(3)]

    first, again, other = shares(0), shares(0), shares(1)
    assert all(torch.equal(mine, same) for mine, same in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    test = setting(StandaloneConfig()).test.inputs
    assert not torch.equal(first[0], test[: len(first[0])])  # not simply in order


def test_fewer_test_examples_than_nodes_leave_nobody_without_a_share() -> None:
    experiment = Experiment(setting(StandaloneConfig(), test=2, nodes=3))
    assert [len(experiment._share(index)) for index in range(3)] == [1, 1, 1]


def test_local_accuracy_is_each_nodes_model_on_its_own_share() -> None:
    one = setting(StandaloneConfig(), test=41)
    experiment = Experiment(one)
    figures = experiment.run()
    each = [accuracy(model, experiment._share(index)) for index, model in enumerate(one.models)]
    assert figures["local"]["share"]["per_node"] == pytest.approx(each)
    assert figures["local"]["share"]["mean"] == pytest.approx(sum(each) / 3)
    assert experiment._look()["local_accuracy"] == pytest.approx(sum(each) / 3)


# --- when it looks ---------------------------------------------------------------------------------


def looks(method: Any, every: int | None) -> list[int]:
    """The turns after which a run was evaluated."""
    experiment = Experiment(setting(method, every=every))
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
def test_a_run_looks_every_so_many_turns_and_at_the_end(
    rounds: int, every: int | None, expected: list[int]
) -> None:
    assert looks(FedAvgConfig(rounds=rounds), every) == expected


@pytest.mark.parametrize("rounds", [10, 15, 19, 25, 29])
def test_by_itself_it_looks_about_ten_times(rounds: int) -> None:
    found = looks(FedAvgConfig(rounds=rounds), None)
    assert 9 <= len(found) <= 20
    assert found[-1] == rounds


# --- what is refused before anything is trained ----------------------------------------------------


def untouched(one: Setting, error: type[Exception], said: str) -> str:
    """Refused, with nothing trained and nothing recorded; gives what was said."""
    networks = (*one.models, one.student)
    before = copy.deepcopy([network.state_dict() for network in networks])
    with pytest.raises(error, match=said) as caught:
        Experiment(one)
    for network, old in zip(networks, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in network.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 12, 8), (1, 8, 4)])
def test_public_data_of_another_shape_are_refused(shape: tuple[int, int, int]) -> None:
    public = Public("elsewhere", torch.zeros(5, *shape))
    said = re.escape(f"shape of public data is {shape}: allowed is {SHAPE}, as in the test data")
    untouched(setting(FedAvgConfig(rounds=1), public=public), ArgumentError, said)


def test_public_data_of_the_right_shape_are_named_in_the_figures() -> None:
    public = Public("elsewhere", torch.zeros(5, *SHAPE), note="five images")
    figures = Experiment(setting(FedAvgConfig(rounds=1), public=public)).run()
    assert figures["public"] == {"name": "elsewhere", "examples": 5, "note": "five images"}
    assert Experiment(setting(FedAvgConfig(rounds=1))).run()["public"] is None


def test_the_first_node_that_will_not_share_parameters_is_named() -> None:
    policies = [PolicyConfig(outputs_only=False), PolicyConfig(), PolicyConfig()]
    one = setting(FedAvgConfig(rounds=1), policies=policies)
    said = untouched(one, QuestionRefused, "'node-1' refuses question 'train' by rule outputs_only")
    assert "no parameters" in said


class Between(nn.Module):
    """Computes something between its two modules, which the parts alone would leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.extractor(x).tanh())
        return out


class OwnForward(nn.Sequential):
    """A Sequential whose forward is its user's own."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x + x.flip(3).relu())  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("network", [Between, OwnForward])
def test_a_network_that_is_not_head_after_extractor_is_refused_where_it_must_be_split(
    network: type[nn.Module],
) -> None:
    """Or else another function would be trained than the one that its owner gets back and uses."""
    models = [network() for _ in range(3)]
    one = setting(FedPerConfig(rounds=1), models=models, student=network())
    untouched(one, ModelError, "model of node-0")
    Experiment(setting(StandaloneConfig(), models=[network() for _ in range(3)]))  # here it need not be


@pytest.mark.parametrize(
    "method",
    [
        StandaloneConfig(),
        EnsembleConfig(),
        FedIODConfig(steps=1, generator_width=4, critic_width=4, batch=4),
        FedAvgConfig(rounds=1),
        FedPerConfig(rounds=1),
    ],
)
def test_a_node_with_a_frozen_network_is_served_or_refused_in_one_line(method: Any) -> None:
    """Who brings a finished model only answers; a method that must train it may say no, naming the node."""
    one = setting(method)
    one.models[1].requires_grad_(False)
    before = copy.deepcopy(one.models[1].state_dict())
    try:
        experiment = Experiment(one)
    except FedstillError as refused:
        said = str(refused)
    else:
        experiment.run()
        assert all(torch.equal(value, before[name]) for name, value in one.models[1].state_dict().items())
        return
    assert "node-1" in said


# --- stops -----------------------------------------------------------------------------------------


def test_what_was_chosen_and_measured_is_kept_over_a_stop(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on in the groups in which it began, whatever would measure faster now."""
    auto: dict[str, Any] = {"engine": EngineConfig(name="auto")}
    first = Experiment(setting(FedAvgConfig(rounds=3), **auto))
    monkeypatch.setattr(Records, "due", lambda self: True)
    real, turns = first.method.server, 0

    def stopping(config: Any, at_server: Any) -> Any:
        server = real(config, at_server)
        step = server.step

        def one() -> Any:
            nonlocal turns
            turns += 1
            if turns == 2:
                raise KeyboardInterrupt
            return step()

        server.step = one  # type: ignore[method-assign]
        return server

    first.method = replace(first.method, server=stopping)
    with pytest.raises(KeyboardInterrupt):
        first.run(tmp_path)
    second = Experiment(setting(FedAvgConfig(rounds=3), **auto))

    def measuring(*args: Any) -> Any:
        raise AssertionError("chosen already")

    monkeypatch.setattr("fedstill.experiment.choose", measuring)
    figures = second.run(tmp_path)
    assert second.groups == first.groups
    assert figures["engine"]["stacked_over_one_by_one"] == first.ratios
