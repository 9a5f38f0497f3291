"""Methods under a mechanism: each release is charged as declared, and engines give equal metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.compute import EngineConfig
from fedstill.methods._server import Server
from fedstill.models.module_utils import to_vector
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import DPTrainingConfig, GradientsConfig, NoPrivacy, PrivacyConfig
from fedstill.privacy.events import Event, PrivacyCost, cost_from_dict, cost_to_dict, total_cost
from fedstill.privacy.noisy_outputs import OutputsConfig
from fedstill.privacy.pate import PateConfig
from fedstill.runs.build import Setting
from fedstill.runs.simulation import Simulation
from tests.support import digits_world
from tests.support.audit_logs import total_charged
from tests.support.digits_world import SIZES
from tests.support.errors import raises_invalid, raises_refused
from tests.support.privacy import make_mechanism

pytestmark = pytest.mark.usefixtures("steady_adam")

TINY = {"batch": 8, "z_max": 20.0, "levels": 100}
QUIET: dict[str, Any] = {
    "training": DPTrainingConfig(noise=0.5),
    "critic": DPTrainingConfig(noise=1.0),
    "pate": PateConfig(teachers=4, noise=2.0),
    "gradients": GradientsConfig(noise=0.5),
    "outputs": OutputsConfig(noise=0.5, bound=5.0),
}
MECHANISMS: tuple[Any, ...] = ("dp-sgd", "pate", "noisy-outputs")
ASKING = [
    (method, options, mechanism)
    for method, options in (
        ("fediod", {}),
        ("fediod", {"gan": 0.0, "through": False}),
        ("fediod", {"student_inputs": "fresh"}),
        ("fedkd", {}),
        ("fedzge", {}),
        ("dense", {"bn": 0.0}),
        ("ensemble", {}),
    )
    for mechanism in MECHANISMS
]
CASES = [
    *ASKING,
    ("fedavg", {}, "dp-sgd"),
    ("fedprox", {"mu": 1.0}, "dp-sgd"),
    ("fedgen", {}, "dp-sgd"),
    ("fedftg", {}, "dp-sgd"),
    ("dsfl", {}, "dp-sgd"),
    ("dsfl", {}, "noisy-outputs"),
]
ONCE = [
    (method, mechanism)
    for method, options, mechanism in CASES
    if not options and method in ("fediod", "fedkd", "fedavg")
]


def privately(mechanism: Any, **change: Any) -> PrivacyConfig:
    return make_mechanism(mechanism, **{**QUIET, **change})


def setting(
    method: str, options: dict[str, Any], privacies: Sequence[PrivacyConfig], engine: Any = "one-by-one"
) -> Setting:
    given = {"privacies": privacies, "engine": EngineConfig(batching=engine)}
    return digits_world.setting(method, {**TINY, **options}, **given)


def ran(given: Setting, out: Path | None = None) -> tuple[Simulation, dict[str, Any]]:
    experiment = Simulation(given)
    return experiment, experiment.run(out)


def schedule(experiment: Simulation, index: int) -> PrivacyCost | None:
    budgets = experiment.nodes[index].gate.budgets
    assert budgets is not None
    return total_cost(budgets.mechanism.run_costs())


# --- privacy cost -------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(("method", "options", "mechanism"), CASES)
def test_cost_of_run_equals_declared_cost(
    method: str, options: dict[str, Any], mechanism: str, tmp_path: Path
) -> None:
    experiment, metrics = ran(setting(method, options, [privately(mechanism)] * 3), tmp_path)
    audit = AuditLog(tmp_path / FILE, read_only=True)
    for index, node in enumerate(experiment.nodes):
        declared = schedule(experiment, index)
        assert declared, "the run has a cost"
        record = metrics["privacy"]["nodes"][index]
        if method != "ensemble":  # not known beforehand to send queries
            assert total_charged(experiment.audit, node.name) == (cost_to_dict(declared), 0)
        spent = audit.spending(node.name, "run")
        assert spent.run_events == total_charged(experiment.audit, node.name)[0], "also in the audit log"
        assert spent.run_no_guarantee == 0
        cost = compute_epsilon(cost_from_dict(spent.run_events), 1e-5)
        assert record["epsilon"] == pytest.approx(cost)
        assert cost > 0
        assert (record["mechanism"], record["guarantee"], record["left"]) == (mechanism, True, None)
    audit.close()
    assert metrics["privacy"]["guarantee"]
    assert f"mechanism {mechanism}" in metrics["privacy"]["text"]


def test_fediod_under_dp_sgd_by_hand() -> None:
    experiment, _ = ran(setting("fediod", {}, [privately("dp-sgd")] * 3))
    for node, size, steps in zip(experiment.nodes, SIZES, (5, 3, 5), strict=True):
        model = Event("gaussian", 0.5, rate=16 / size)  # 2 epochs in batches of 16
        critic = Event("gaussian", 1.0, rate=8 / size)  # one step for each of 3 queries
        cost = PrivacyCost({model: steps, critic: 3, Event("laplace", 10.0): 1})
        assert total_charged(experiment.audit, node.name) == (cost_to_dict(cost), 0)


def test_critic_steps_of_queries_with_differences_cost_no_more() -> None:
    """A query has three times as many inputs, and a critic step three times as many records."""
    options = {"backpropagate": False, "directions": 2}
    experiment, _ = ran(setting("fediod", options, [privately("dp-sgd")] * 3))
    assert experiment.side.queries["predict_logits"].rows == 3 * 8
    for node, size in zip(experiment.nodes, SIZES, strict=True):
        cost = cost_from_dict(total_charged(experiment.audit, node.name)[0])
        assert cost[Event("gaussian", 1.0, rate=8 / size)] == 3


def test_fediod_under_pate_by_hand() -> None:
    experiment, _ = ran(setting("fediod", {"gan": 0.0}, [privately("pate")] * 3))
    cost = cost_from_dict(total_charged(experiment.audit, "node-1")[0])
    counts, (votes, *more) = Event("laplace", 10.0), sorted(set(cost) - {Event("laplace", 10.0)}, key=str)
    assert (cost[counts], cost[votes]) == (1, 3)
    noises = sorted(event.noise for event in (votes, *more))
    # 8 rows: 0.5 x 4 / (2 sqrt(8)) for gradients, and 2 / sqrt(2 x 8) for votes
    assert noises == pytest.approx([2 / (2 * 8**0.5), 2 / 4])


def test_fedavg_charges_each_round() -> None:
    experiment, _ = ran(setting("fedavg", {"rounds": 2}, [privately("dp-sgd", counts_noise=2.0)] * 3))
    for node, size, steps in zip(experiment.nodes, SIZES, (5, 3, 5), strict=True):
        cost = PrivacyCost({Event("gaussian", 0.5, rate=16 / size): steps, Event("laplace", 2.0): 1})
        assert total_charged(experiment.audit, node.name) == (cost_to_dict(cost), 0)


def test_nodes_may_use_different_mechanisms() -> None:
    privacies = [privately("dp-sgd"), privately("pate"), NoPrivacy()]
    _, metrics = ran(setting("fediod", {}, privacies))
    record = metrics["privacy"]
    assert [node["mechanism"] for node in record["nodes"]] == ["dp-sgd", "pate", "none"]
    assert [node["guarantee"] for node in record["nodes"]] == [True, True, False]
    assert record["nodes"][2]["epsilon"] is None
    assert (record["guarantee"], record["text"]) == (None, "no guarantee for node-2")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("method", "mechanism"), ONCE)
def test_run_spends_nearly_its_epsilon(method: str, mechanism: str) -> None:
    free = make_mechanism(
        mechanism,
        epsilon=20.0,
        pate=PateConfig(teachers=4),
        outputs=OutputsConfig(bound=5.0),
    )
    _, metrics = ran(setting(method, {}, [free] * 3))
    for node in metrics["privacy"]["nodes"]:
        assert 0.9 * 20 < node["epsilon"] <= 20
        assert node["left"] == pytest.approx(20 - node["epsilon"])


# --- engines, interrupted runs ------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("method", "mechanism"), ONCE)
def test_engines_give_equal_metrics(method: str, mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise depends on rounding, in which engines differ; here its name is independent of it."""
    draws: Any = PrivacyMechanism.noise_sampler

    def unstamped(self: PrivacyMechanism, *names: str | int) -> Any:
        return draws(self, *(name for name in names if len(str(name)) < 32))

    monkeypatch.setattr(PrivacyMechanism, "noise_sampler", unstamped)
    (one, alone), (other, stacked) = (
        ran(setting(method, {}, [privately(mechanism)] * 3, engine)) for engine in ("one-by-one", "stacked")
    )
    assert alone["privacy"] == stacked["privacy"]
    assert alone["bytes"] == stacked["bytes"]
    torch.testing.assert_close(to_vector(one.student), to_vector(other.student), rtol=1e-4, atol=1e-4)


class Stopped(Exception):
    """Raised to stop a run."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "mechanism"), [("fediod", "dp-sgd"), ("fediod", "pate"), ("fedavg", "dp-sgd")]
)
def test_resumed_run_is_charged_once(
    method: str, mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [privately(mechanism)] * 3
    whole, metrics = ran(setting(method, {}, given))
    broken = Simulation(setting(method, {}, given))
    step, allowed_steps = Server.step, iter(range(1))

    def stops(self: Any) -> Any:
        if next(allowed_steps, None) is None:
            raise Stopped
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "step", stops)
        with pytest.raises(Stopped):
            broken.run(tmp_path)
    back, again = ran(setting(method, {}, given), tmp_path)
    assert again["privacy"] == metrics["privacy"]
    assert torch.equal(to_vector(back.student), to_vector(whole.student))
    audit = AuditLog(tmp_path / FILE, read_only=True)
    for node in whole.nodes:
        assert audit.spending(node.name, "run").run_events == dict(total_charged(whole.audit, node.name)[0])
    audit.close()


# --- refusals -----------------------------------------------------------------------------------------


def test_pate_refuses_training_rounds_and_noisy_outputs_give_no_guarantee() -> None:
    with raises_refused("privacy", "trained once"):
        Simulation(setting("fedavg", {}, [privately("pate")] * 3))
    _, metrics = ran(setting("fedavg", {}, [privately("noisy-outputs")] * 3))
    assert metrics["privacy"]["text"] == "no guarantee"
    with raises_refused("privacy: a budget is set", "noisy-outputs", "parameters", query="count_samples"):
        Simulation(setting("fedavg", {}, [privately("noisy-outputs", epsilon=100.0)] * 3))


def test_mechanism_refuses_public_data_in_local_training() -> None:
    with raises_invalid("privacy.mechanism of node-0", "dp-sgd", "none", "public data"):
        Simulation(setting("fedkd", {"labeled": True, "levels": 0}, [privately("dp-sgd")] * 3))


def test_budget_refuses_critic_outputs_on_records() -> None:
    bare = setting("fediod", {"importance": "realness"}, [privately("pate", epsilon=1e6)] * 3)
    with raises_refused("privacy: a budget is set", "pate", "critic", query="count_labels"):
        Simulation(bare)


@pytest.mark.parametrize("mechanism", ["pate", "noisy-outputs"])
def test_budget_refuses_batch_norm_distance_without_noise(mechanism: str) -> None:
    bare = setting("dense", {}, [privately(mechanism, epsilon=1e6)] * 3)
    with raises_refused("privacy", "batch norm distance"):
        Simulation(bare)


def test_run_over_budget_is_refused_before_training() -> None:
    with raises_refused("privacy budget", "epsilon 0.5"):
        Simulation(setting("fediod", {}, [privately("dp-sgd", epsilon=0.5)] * 3))
