"""Audits of real nodes: correct mechanisms stay below their claims, and faults are detected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fedstill.attacks import mechanism_audits
from fedstill.attacks.mechanism_audits import (
    DELTA,
    AuditFinding,
    Distinguisher,
    audit_one_run,
    audit_one_run_linear,
    contradictory_records,
    run_audit,
)
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
from fedstill.privacy.release_rules import BoundedNoisyRows, NoisyCounts, SanitizedGradients
from fedstill.runs import spec

MakeDistinguisher = Callable[..., Distinguisher]
Fault = Callable[[pytest.MonkeyPatch], None]

# Distinguisher, minimum share of the claimed epsilon that it must show, and number of runs.
RELEASES: dict[str, tuple[MakeDistinguisher, float, int]] = {
    "counts": (mechanism_audits.distinguish_counts, 0.25, 300),
    "votes": (mechanism_audits.distinguish_votes, 0.2, 500),
    "label": (partial(mechanism_audits.distinguish_votes, release="label"), 0.2, 500),
    "laplace": (mechanism_audits.distinguish_outputs, 0.2, 600),
    "gaussian": (partial(mechanism_audits.distinguish_outputs, "gaussian", noise=0.2), 0.2, 300),
    "gradients": (mechanism_audits.distinguish_gradients, 0.2, 300),
    "teachers' gradients": (partial(mechanism_audits.distinguish_gradients, mechanism="pate"), 0.2, 200),
}


HIGH_CONFIDENCE = 0.99  # avoids false alarms with other versions of torch


# --- correct mechanisms ------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RELEASES)
def test_lower_bound_of_releases_stays_below_claim(name: str) -> None:
    make, minimum, runs = RELEASES[name]
    finding = run_audit(make(), runs, confidence=HIGH_CONFIDENCE)
    assert not finding.refuted
    assert 0 < finding.epsilon_lower_bound < finding.claimed_epsilon
    assert finding.same_noise_lower_bound is not None
    assert (
        minimum * finding.claimed_epsilon < finding.same_noise_lower_bound < 1.02 * finding.claimed_epsilon
    ), "the attack is strong"


@pytest.mark.slow
def test_lower_bound_of_dp_training_stays_below_claim() -> None:
    finding = run_audit(
        mechanism_audits.distinguish_by_training_steps(noise=0.6, step_count=2, records=4),
        200,
        confidence=HIGH_CONFIDENCE,
    )
    assert not finding.refuted
    assert 0 < finding.epsilon_lower_bound < finding.claimed_epsilon


@pytest.mark.slow
def test_lower_bound_of_critic_stays_below_claim() -> None:
    finding = run_audit(mechanism_audits.distinguish_by_critic_steps(), 60, confidence=HIGH_CONFIDENCE)
    assert not finding.refuted
    assert finding.epsilon_lower_bound < finding.claimed_epsilon


def test_one_run_lower_bound_stays_below_claim() -> None:
    finding = audit_one_run(confidence=HIGH_CONFIDENCE)
    assert not finding.refuted
    assert 0 < finding.epsilon_lower_bound < finding.claimed_epsilon


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("many", [False, True])
def test_one_run_linear_lower_bound_stays_below_claim(many: bool, precision: Precision) -> None:
    finding = audit_one_run_linear(confidence=HIGH_CONFIDENCE, many_records=many, precision=precision)
    assert 0 < finding.epsilon_lower_bound < finding.claimed_epsilon
    assert finding.claimed_epsilon == compute_epsilon({Event("gaussian", 4.0): 20}, DELTA)


@pytest.mark.parametrize(
    ("many", "preset"), [(False, "digits-fedkd-private"), (True, "fashion-fedkd-private")]
)
def test_audit_uses_training_of_private_presets(
    many: bool, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited: dict[str, Any] = {}

    def record_options(*_: float, **options: Any) -> AuditFinding:
        audited.update(options)
        return AuditFinding("dp-sgd", "", 1.0, 0.0, None, False, 1, 0.0)

    monkeypatch.setattr(mechanism_audits, "audit_one_run", record_options)
    audit_one_run_linear(many_records=many)
    run = spec.load(preset)
    assert isinstance(run.nodes.privacy, DPSGD)
    assert (audited["model"], audited["clip"]) == (run.nodes.models[0], run.nodes.privacy.training.clip)
    whole = {"batch": run.nodes.local.batch, "augment": run.nodes.local.augment}  # all records in one batch
    assert replace(audited["local"], **whole) == run.nodes.local


# --- claimed costs ------------------------------------------------------------------------------


def test_claimed_costs_by_hand() -> None:
    assert mechanism_audits.distinguish_counts(scale=2.0).claimed_cost == {Event("laplace", 2.0): 2}
    assert mechanism_audits.distinguish_votes(noise=2.0).claimed_cost == {
        Event("gaussian", 2 / math.sqrt(2)): 2
    }
    assert mechanism_audits.distinguish_outputs("laplace", noise=0.4, bound=0.1).claimed_cost == {
        Event("laplace", 1.0): 2
    }
    assert mechanism_audits.distinguish_outputs("gaussian", noise=0.4, bound=0.1).claimed_cost == {
        Event("gaussian", 2.0): 2
    }
    for mechanism in ("pate", "noisy-outputs"):
        claimed = mechanism_audits.distinguish_gradients(2.0, mechanism).claimed_cost
        assert claimed[Event("gaussian", 1.0)] == 2
        assert compute_epsilon(claimed, 1e-5) == pytest.approx(
            compute_epsilon({Event("gaussian", 1.0): 2}, 1e-5), rel=1e-6
        )
    assert mechanism_audits.distinguish_by_training_steps(
        0.8, step_count=4, records=8, batch=2
    ).claimed_cost == {Event("gaussian", 0.8, rate=0.25): 4}


@pytest.mark.parametrize("m", [1, 4])
def test_neighboring_datasets_differ_for_one_teacher(m: int) -> None:
    data, record = contradictory_records(0, m)
    both = TensorData(torch.cat([data.inputs, record.inputs]), torch.cat([data.targets, record.targets]))
    parts = partition_records(both, m)
    (home,) = [part.tolist() for part in parts if 0 in part]
    assert home == [0, len(data)], "the teacher has no other records"


# --- faults -------------------------------------------------------------------------------


def scaled_noise(factor: float) -> Callable[..., torch.Tensor]:
    """Return ``add_noise`` with its scale multiplied by a factor."""

    def noisy(values: torch.Tensor, noise: torch.Tensor, scale: float) -> torch.Tensor:
        return add_noise(values, noise, scale * factor)

    return noisy


def noise_times(factor: float) -> Fault:
    def broken(patch: pytest.MonkeyPatch) -> None:
        for module in (release_rules, pate, dp_training):
            patch.setattr(module, "add_noise", scaled_noise(factor))

    return broken


def repeated_noise(patch: pytest.MonkeyPatch) -> None:
    """Use the same noise for all responses of a run."""
    draws: Callable[..., NoiseSampler] = PrivacyMechanism.noise_sampler
    runs = iter(range(10**9))
    used: dict[tuple[int, int], str] = {}

    def again(self: PrivacyMechanism, *names: str | int) -> NoiseSampler:
        kind, number = names[0], names[1]
        if kind == "gate":  # two queries per run, and their gradients
            names = ("gate", used.setdefault((id(self), (int(number) - 1) // 2), str(next(runs))))
        elif "noise" in names:
            names = ("steps",)
        return draws(self, *names)

    patch.setattr(PrivacyMechanism, "noise_sampler", again)


def no_bound(patch: pytest.MonkeyPatch) -> None:
    for rule in (BoundedNoisyRows, SanitizedGradients, NoisyCounts):
        patch.setattr(rule, "bound", lambda self, tensor: to_finite(tensor))


def no_clip_at_teachers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pate, "clip_rows", lambda rows, clip: rows)


def shared_records(patch: pytest.MonkeyPatch) -> None:
    """Train every teacher on all records."""

    def all_of(data: TensorData, m: int) -> Sequence[torch.Tensor]:
        return [torch.arange(len(data))] * m

    patch.setattr(pate, "partition_records", all_of)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "broken", "runs"),
    [
        ("counts", noise_times(0.25), 150),
        ("votes", noise_times(0.5), 500),
        ("votes", repeated_noise, 60),
        ("votes", shared_records, 60),
        ("label", noise_times(0.25), 200),
        ("laplace", noise_times(0.25), 200),
        ("laplace", no_bound, 250),
        ("gaussian", noise_times(0.5), 200),
        ("gaussian", no_bound, 60),
        ("gradients", noise_times(0.5), 200),
        ("gradients", repeated_noise, 60),
        ("gradients", no_bound, 60),
        ("teachers' gradients", noise_times(0.5), 200),
        ("teachers' gradients", no_clip_at_teachers, 60),
    ],
)
def test_detects_broken_releases(
    name: str, broken: Fault, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = RELEASES[name][0]
    claimed = attack().claimed_cost
    broken(monkeypatch)
    broken_attack = attack()
    assert broken_attack.claimed_cost == claimed, "the fault is not charged"
    assert is_detected(run_audit(broken_attack, runs))


def fixed_order(patch: pytest.MonkeyPatch) -> None:
    """Take batches in a fixed order instead of sampling them."""
    batches: Callable[..., Any] = mechanism_audits._step_projections
    step = 0

    def sample(data: TensorData, rate: float, draws: NoiseSampler) -> TensorData:
        nonlocal step
        size, step = round(rate * len(data)), step + 1
        return data.subset(torch.arange((step - 1) * size, step * size))

    def projections(*args: Any) -> torch.Tensor:
        nonlocal step
        step = 0
        return batches(*args)

    patch.setattr(dp_training, "poisson_sample", sample)
    patch.setattr(mechanism_audits, "_step_projections", projections)


def no_clip(patch: pytest.MonkeyPatch) -> None:
    clipped_sum_and_loss: Callable[..., Any] = dp_training.clipped_sum_and_loss

    def unclipped(*args: Any) -> Any:
        *network_and_data, _, rows, isolate_rounding = args
        return clipped_sum_and_loss(*network_and_data, 1e12, rows, isolate_rounding)

    patch.setattr(dp_training, "clipped_sum_and_loss", unclipped)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("noise", "records", "broken", "runs"),
    [
        (2.0, 2, noise_times(0.25), 90),
        (2.0, 4, repeated_noise, 60),
        (2.0, 4, no_clip, 60),
        (0.5, 16, fixed_order, 120),
    ],
)
def test_detects_broken_dp_training(
    noise: float, records: int, broken: Fault, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    attack = mechanism_audits.distinguish_by_training_steps(noise, step_count=2, records=records, batch=2)
    assert attack.claimed_cost == {Event("gaussian", noise, rate=2 / records): 2}
    assert is_detected(run_audit(attack, runs))


@pytest.mark.slow
@pytest.mark.parametrize("broken", [noise_times(0.0), no_clip])
def test_detects_broken_critic(broken: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    attack = mechanism_audits.distinguish_by_critic_steps(noise=2.0)
    assert attack.claimed_cost[Event("gaussian", 2.0, rate=0.5)] == 2
    assert is_detected(run_audit(attack, 120))


def test_detects_missing_noise_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    noise_times(0.0)(monkeypatch)
    finding = audit_one_run(noise=8.0, canaries=200, epochs=20, guessed_share=0.15)
    assert finding.claimed_epsilon < 5
    assert finding.refuted


@pytest.mark.parametrize("many", [False, True])
def test_detects_missing_noise_in_large_steps(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_times(0.0)(monkeypatch)
    finding = audit_one_run_linear(many_records=many, noise=16.0)
    assert finding.claimed_epsilon < 1.5
    assert finding.refuted


def is_detected(finding: AuditFinding) -> bool:
    return (
        finding.refuted
        and finding.same_noise_lower_bound is not None
        and finding.same_noise_lower_bound > finding.claimed_epsilon
    )
