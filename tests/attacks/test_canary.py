"""Audits of real nodes: what is sound stays below its claim, and what is broken is caught."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fedstill.attacks import mechanism_audits, neighboring_datasets
from fedstill.attacks.mechanism_audits import (
    DELTA,
    AuditFinding,
    audit_one_run,
    audit_one_run_linear,
    run_audit,
)
from fedstill.attacks.neighboring_datasets import Distinguisher, contradictory_records
from fedstill.core.compute import Precision
from fedstill.core.dataset import TensorData
from fedstill.node import dp_training
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy import pate, release_rules
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.clipping import to_finite
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.events import Event
from fedstill.privacy.noise import NoiseSampler, add_noise
from fedstill.privacy.pate import partition_records
from fedstill.privacy.release_rules import NoisyCounts, NoisyRows, SanitizedGradients
from fedstill.runs import config

Make = Callable[..., Distinguisher]
Break = Callable[[pytest.MonkeyPatch], None]

# Each with the part of what is claimed that so many runs show at least.
RELEASES: dict[str, tuple[Make, float, int]] = {
    "counts": (neighboring_datasets.distinguish_counts, 0.25, 300),
    "votes": (neighboring_datasets.distinguish_votes, 0.2, 500),
    "label": (partial(neighboring_datasets.distinguish_votes, release="label"), 0.2, 500),
    "laplace": (neighboring_datasets.distinguish_outputs, 0.2, 600),
    "gaussian": (partial(neighboring_datasets.distinguish_outputs, "gaussian", noise=0.2), 0.2, 300),
    "gradients": (neighboring_datasets.distinguish_gradients, 0.2, 300),
    "teachers' gradients": (partial(neighboring_datasets.distinguish_gradients, mechanism="pate"), 0.2, 200),
}


SURE = 0.99  # that no other version of torch or of a config finds a fault by chance


# --- what is sound --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELEASES)
def test_lower_bound_of_releases_stays_below_claim(name: str) -> None:
    make, minimum, runs = RELEASES[name]
    found = run_audit(make(), runs, confidence=SURE)
    assert not found.refuted
    assert 0 < found.epsilon_lower_bound < found.claimed_epsilon
    assert found.same_noise_lower_bound is not None
    assert minimum * found.claimed_epsilon < found.same_noise_lower_bound < 1.02 * found.claimed_epsilon, (
        "the attack is no weak one"
    )


def test_lower_bound_of_dp_training_stays_below_claim() -> None:
    found = run_audit(
        mechanism_audits.distinguish_training_steps(noise=0.6, step_count=2, records=4), 200, confidence=SURE
    )
    assert not found.refuted
    assert 0 < found.epsilon_lower_bound < found.claimed_epsilon


def test_lower_bound_of_critic_stays_below_claim() -> None:
    found = run_audit(mechanism_audits.distinguish_critic_steps(), 60, confidence=SURE)
    assert not found.refuted
    assert found.epsilon_lower_bound < found.claimed_epsilon


def test_one_run_lower_bound_stays_below_claim() -> None:
    found = audit_one_run(confidence=SURE)
    assert not found.refuted
    assert 0 < found.epsilon_lower_bound < found.claimed_epsilon


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("many", [False, True])
def test_one_run_linear_lower_bound_stays_below_claim(many: bool, precision: Precision) -> None:
    found = audit_one_run_linear(confidence=SURE, many_records=many, precision=precision)
    assert 0 < found.epsilon_lower_bound < found.claimed_epsilon
    assert found.claimed_epsilon == compute_epsilon({Event("gaussian", 4.0): 20}, DELTA)


@pytest.mark.parametrize(
    ("many", "preset"), [(False, "digits-fedkd-private"), (True, "fashion-fedkd-private")]
)
def test_audit_uses_training_of_private_presets(
    many: bool, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited: dict[str, Any] = {}

    def caught(*_: float, **options: Any) -> AuditFinding:
        audited.update(options)
        return AuditFinding("dp-sgd", "", 1.0, 0.0, None, False, 1, 0.0)

    monkeypatch.setattr(mechanism_audits, "audit_one_run", caught)
    audit_one_run_linear(many_records=many)
    run = config.load(preset)
    assert isinstance(run.nodes.privacy, DPSGD)
    assert (audited["model"], audited["clip"]) == (run.nodes.models[0], run.nodes.privacy.training.clip)
    whole = {"batch": run.nodes.local.batch, "augment": run.nodes.local.augment}  # all records at once
    assert replace(audited["local"], **whole) == run.nodes.local


# --- what is claimed ------------------------------------------------------------------------------


def test_claimed_costs_by_hand() -> None:
    assert neighboring_datasets.distinguish_counts(scale=2.0).claimed_cost == {Event("laplace", 2.0): 2}
    assert neighboring_datasets.distinguish_votes(noise=2.0).claimed_cost == {
        Event("gaussian", 2 / math.sqrt(2)): 2
    }
    assert neighboring_datasets.distinguish_outputs("laplace", noise=0.4, bound=0.1).claimed_cost == {
        Event("laplace", 1.0): 2
    }
    assert neighboring_datasets.distinguish_outputs("gaussian", noise=0.4, bound=0.1).claimed_cost == {
        Event("gaussian", 2.0): 2
    }
    for mechanism in ("pate", "noisy-outputs"):
        claimed = neighboring_datasets.distinguish_gradients(2.0, mechanism).claimed_cost
        assert claimed[Event("gaussian", 1.0)] == 2
        assert compute_epsilon(claimed, 1e-5) == pytest.approx(
            compute_epsilon({Event("gaussian", 1.0): 2}, 1e-5), rel=1e-6
        )
    assert mechanism_audits.distinguish_training_steps(
        0.8, step_count=4, records=8, batch=2
    ).claimed_cost == {Event("gaussian", 0.8, rate=0.25): 4}


@pytest.mark.parametrize("m", [1, 4])
def test_neighboring_datasets_differ_for_one_teacher(m: int) -> None:
    data, record = contradictory_records(0, m)
    both = TensorData(torch.cat([data.inputs, record.inputs]), torch.cat([data.targets, record.targets]))
    parts = partition_records(both, m)
    (home,) = [part.tolist() for part in parts if 0 in part]
    assert home == [0, len(data)], "alone with the record that it contradicts"


# --- what is broken -------------------------------------------------------------------------------


def louder(by: float) -> Callable[..., torch.Tensor]:
    """Less noise than is drawn for."""

    def noisy(values: torch.Tensor, noise: torch.Tensor, scale: float) -> torch.Tensor:
        return add_noise(values, noise, scale * by)

    return noisy


def noise_times(by: float) -> Break:
    def broken(patch: pytest.MonkeyPatch) -> None:
        for module in (release_rules, pate, dp_training):
            patch.setattr(module, "add_noise", louder(by))

    return broken


def noise_again(patch: pytest.MonkeyPatch) -> None:
    """The same noise for all that a node answers."""
    draws: Callable[..., NoiseSampler] = PrivacyMechanism.noise_sampler
    runs = iter(range(10**9))
    used: dict[tuple[int, int], str] = {}

    def again(self: PrivacyMechanism, *names: str | int) -> NoiseSampler:
        kind, number = names[0], names[1]
        if kind == "gate":  # two queries a run, and their gradients
            names = ("gate", used.setdefault((id(self), (int(number) - 1) // 2), str(next(runs))))
        elif "noise" in names:
            names = ("steps",)
        return draws(self, *names)

    patch.setattr(PrivacyMechanism, "noise_sampler", again)


def no_bound(patch: pytest.MonkeyPatch) -> None:
    for rule in (NoisyRows, SanitizedGradients, NoisyCounts):
        patch.setattr(rule, "bound", lambda self, tensor: to_finite(tensor))


def no_clip_at_teachers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pate, "clip_rows", lambda rows, clip: rows)


def teachers_that_share(patch: pytest.MonkeyPatch) -> None:
    """Every teacher learns from every record."""

    def all_of(data: TensorData, m: int) -> Sequence[torch.Tensor]:
        return [torch.arange(len(data))] * m

    patch.setattr(pate, "partition_records", all_of)


@pytest.mark.parametrize(
    ("name", "broken", "runs"),
    [
        ("counts", noise_times(0.25), 150),
        ("votes", noise_times(0.5), 500),
        ("votes", noise_again, 60),
        ("votes", teachers_that_share, 60),
        ("label", noise_times(0.25), 200),
        ("laplace", noise_times(0.25), 200),
        ("laplace", no_bound, 250),
        ("gaussian", noise_times(0.5), 200),
        ("gaussian", no_bound, 60),
        ("gradients", noise_times(0.5), 200),
        ("gradients", noise_again, 60),
        ("gradients", no_bound, 60),
        ("teachers' gradients", noise_times(0.5), 200),
        ("teachers' gradients", no_clip_at_teachers, 60),
    ],
)
def test_detects_broken_releases(
    name: str, broken: Break, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = RELEASES[name][0]
    claimed = attack().claimed_cost
    broken(monkeypatch)
    of_broken = attack()
    assert of_broken.claimed_cost == claimed, "it is charged as if it were sound"
    assert caught(run_audit(of_broken, runs))


def fixed_order(patch: pytest.MonkeyPatch) -> None:
    """Batches one after another from the first record on, charged as if each were drawn by itself."""
    batches: Callable[..., Any] = mechanism_audits._step_projections
    turn = 0

    def sample(data: TensorData, rate: float, draws: NoiseSampler) -> TensorData:
        nonlocal turn
        size, turn = round(rate * len(data)), turn + 1
        return data.subset(torch.arange((turn - 1) * size, turn * size))

    def sensitivity(*args: Any) -> torch.Tensor:
        nonlocal turn
        turn = 0
        return batches(*args)

    patch.setattr(dp_training, "poisson_sample", sample)
    patch.setattr(mechanism_audits, "_step_projections", sensitivity)


def no_clip(patch: pytest.MonkeyPatch) -> None:
    clipped_sum: Callable[..., Any] = dp_training.clipped_sum

    def unclipped(*args: Any) -> Any:
        *network_and_data, _, rows = args
        return clipped_sum(*network_and_data, 1e12, rows)

    patch.setattr(dp_training, "clipped_sum", unclipped)


@pytest.mark.parametrize(
    ("noise", "records", "broken", "runs"),
    [
        (2.0, 2, noise_times(0.25), 90),
        (2.0, 4, noise_again, 60),
        (2.0, 4, no_clip, 60),
        (0.5, 16, fixed_order, 120),
    ],
)
def test_detects_broken_dp_training(
    noise: float, records: int, broken: Break, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    attack = mechanism_audits.distinguish_training_steps(noise, step_count=2, records=records, batch=2)
    assert attack.claimed_cost == {Event("gaussian", noise, rate=2 / records): 2}
    assert caught(run_audit(attack, runs))


@pytest.mark.parametrize("broken", [noise_times(0.0), no_clip])
def test_detects_broken_critic(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    attack = mechanism_audits.distinguish_critic_steps(noise=2.0)
    assert attack.claimed_cost[Event("gaussian", 2.0, rate=0.5)] == 2
    assert caught(run_audit(attack, 120))


def test_detects_missing_noise_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    noise_times(0.0)(monkeypatch)
    found = audit_one_run(noise=8.0, canaries=200, epochs=20, guessed_share=0.15)
    assert found.claimed_epsilon < 5
    assert found.refuted


@pytest.mark.parametrize("many", [False, True])
def test_detects_missing_noise_in_large_steps(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_times(0.0)(monkeypatch)
    found = audit_one_run_linear(many_records=many, noise=16.0)
    assert found.claimed_epsilon < 1.5
    assert found.refuted


def caught(found: AuditFinding) -> bool:
    return (
        found.refuted
        and found.same_noise_lower_bound is not None
        and found.same_noise_lower_bound > found.claimed_epsilon
    )
