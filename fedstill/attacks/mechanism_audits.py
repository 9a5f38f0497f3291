"""Audits of all privacy mechanisms: attacks, and their lower bounds of epsilon compared with the claimed
ones.

Single releases are attacked in :mod:`fedstill.attacks.neighboring_datasets`. Here records are planted in
the data of DP-SGD training, and detected in its result. The number of records sets the sampling rate and
counts as known, so a record that is left out is replaced by a blank one: NaN, whose gradient counts as
zero.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from fedstill.attacks import neighboring_datasets
from fedstill.attacks.membership_inference import concatenate
from fedstill.attacks.neighboring_datasets import (
    LOCAL,
    NEGLIGIBLE_NOISE,
    SHAPE,
    AuditedNode,
    Distinguisher,
    load_digits,
)
from fedstill.core.compute import Precision
from fedstill.core.dataset import TensorData
from fedstill.core.seeds import derive, torch_generator
from fedstill.models.module_utils import deep_copy
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import DPTrainingConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.epsilon_lower_bounds import (
    CONFIDENCE,
    fisher_discriminant,
    lower_bound_from_runs,
    one_run_lower_bound,
)
from fedstill.privacy.events import Event
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.protocol.local_config import LocalConfig

DELTA = 1e-5
LEARNING_RATE = 1e-6  # so low that every gradient of the record stays clipped
Audit = Callable[[int], "AuditFinding"]


@dataclass(frozen=True)
class AuditFinding:
    """Result of an audit.

    Args:
        mechanism: registered name.
        target: audited release.
        claimed_epsilon: epsilon by the audit log, an upper bound.
        epsilon_lower_bound: lower bound of epsilon, for any noise.
        same_noise_lower_bound: lower bound for noise of the claimed kind; None if not computed.
        refuted: the claim is too small, at some delta.
        runs: number of runs of the mechanism.
        seconds: duration.
    """

    mechanism: str
    target: str
    claimed_epsilon: float
    epsilon_lower_bound: float
    same_noise_lower_bound: float | None
    refuted: bool
    runs: int
    seconds: float


def run_audit(distinguisher: Distinguisher, runs: int, confidence: float = CONFIDENCE) -> AuditFinding:
    """Run a distinguisher ``runs`` times without the record, and as often with it.

    Raises:
        ArgumentError: fewer than 6 runs.
    """
    start = time.perf_counter()
    observations = [
        torch.stack([distinguisher.observe(is_present, run) for run in range(runs)])
        for is_present in (False, True)
    ]
    evidence = lower_bound_from_runs(*fisher_discriminant(*observations), DELTA, confidence)
    return AuditFinding(
        mechanism=distinguisher.mechanism,
        target=distinguisher.target,
        claimed_epsilon=compute_epsilon(distinguisher.claimed_cost, DELTA),
        epsilon_lower_bound=evidence.epsilon(DELTA),
        same_noise_lower_bound=evidence.epsilon_assuming_noise_kind(distinguisher.claimed_cost, DELTA),
        refuted=evidence.refutes(distinguisher.claimed_cost),
        runs=2 * runs,
        seconds=time.perf_counter() - start,
    )


def audit_one_run(
    seed: int = 0,
    confidence: float = CONFIDENCE,
    *,
    noise: float = 1.0,
    canaries: int = 400,
    records: int = 100,
    epochs: float = 10,
    batch: int = 125,
    guessed_share: float = 0.25,
    clip: float = 1.0,
    model: str = "mlp:64",
    local: LocalConfig | None = None,
    precision: Precision = "float32",
) -> AuditFinding:
    """Train once with many planted records, each of them present or not by an independent coin.

    The records are noise images with random labels. The node then predicts them; those with the smallest
    losses are guessed to be present, those with the largest to be absent.

    Args:
        seed: of data, coins and noise.
        confidence: of the lower bound.
        noise: noise multiplier.
        canaries: number of planted records.
        records: number of other records.
        epochs: of the training.
        batch: expected batch size.
        guessed_share: share of the planted records guessed as present, and as absent.
        clip: of DP-SGD.
        model: of the node.
        local: training options, instead of ``epochs`` and ``batch``.
        precision: of the training.
    """
    start = time.perf_counter()
    generator = torch_generator(seed, "audit", "canaries")
    planted = TensorData(
        torch.rand(canaries, *SHAPE, generator=generator).round() * 2 - 1,
        torch.randint(10, (canaries,), generator=generator),
    )
    is_present = torch.rand(canaries, generator=generator) < 0.5
    present_records = TensorData(
        torch.where(is_present.view(-1, 1, 1, 1), planted.inputs, math.nan), planted.targets
    )
    audited = AuditedNode(
        concatenate([load_digits(seed, 10).subset(torch.arange(records)), present_records]),
        DPSGD(training=DPTrainingConfig(noise=noise, clip=clip)),
        local or LocalConfig(epochs=epochs, batch=batch, lr=1e-2, lr_end=1e-3, smoothing=0),
        secret=derive(seed, "audit", "one run"),
        model=model,
        classes=10,
        rows=canaries,
        precision=precision,
    )
    audited.learn()
    logits = audited.query("predict_logits", x=planted.inputs)["logits"]  # (m, 10)
    losses = F.cross_entropy(logits, planted.targets, reduction="none")
    order, guesses_per_side = losses.argsort(), max(1, int(guessed_share * canaries))
    correct = int(is_present[order[:guesses_per_side]].sum() + (~is_present[order[-guesses_per_side:]]).sum())
    claimed_epsilon = compute_epsilon(audited.spent(), DELTA)
    lower_bound = one_run_lower_bound(canaries, 2 * guesses_per_side, correct, DELTA, confidence)
    target = f"{canaries} planted records, {model}"
    seconds = time.perf_counter() - start
    return AuditFinding(
        "dp-sgd", target, claimed_epsilon, lower_bound, None, lower_bound > claimed_epsilon, 1, seconds
    )


def audit_one_run_linear(
    seed: int = 0,
    confidence: float = CONFIDENCE,
    *,
    many_records: bool = False,
    precision: Precision = "float32",
    noise: float = 4.0,
) -> AuditFinding:
    """Apply :func:`audit_one_run` to the training of the private presets: a linear model on fixed features,
    with a few steps over all records. It has more weights than planted records, so that it can memorize
    all of them.

    Args:
        seed: of data, coins and noise.
        confidence: of the lower bound.
        many_records: use the options of nodes with many records (four times as many steps, momentum, larger
            gradients), and twice the noise, which costs the same.
        precision: of the training.
        noise: noise multiplier.
    """
    step_count, momentum, clip = (80, 0.9, 0.5) if many_records else (20, 0.0, 0.25)
    local = LocalConfig(
        optimizer="sgd",
        momentum=momentum,
        epochs=1,
        min_steps=step_count,
        batch=4096,
        lr=64,
        lr_end=64,
        smoothing=0,
    )
    finding = audit_one_run(
        seed,
        confidence,
        model="random-conv:64",
        local=local,
        noise=2 * noise if many_records else noise,
        guessed_share=0.1,
        clip=clip,
        precision=precision,
    )
    suffix = ", bf16" if precision == "bfloat16" else ""
    return replace(finding, target=f"400 planted, {step_count} large steps{suffix}")


def distinguish_by_training_steps(
    noise: float = 0.8, step_count: int = 4, records: int = 8, batch: int = 2, seed: int = 0
) -> Distinguisher:
    """Distinguish by all steps of a private training: the change of the network in each of them.

    The record is one very bright pixel that is dark in all digits, so that its clipped gradient has a
    direction of its own. The observations are each step along that direction, the spread of the steps, and
    the likelihood ratio of all of them with and without the record, under the claimed noise.
    """
    privacy = DPSGD(training=DPTrainingConfig(noise=noise))
    local = replace(LOCAL, min_steps=step_count, batch=batch, lr=LEARNING_RATE, lr_end=LEARNING_RATE)
    others = load_digits(seed).subset(torch.arange(records - 1))
    inputs = torch.zeros(1, *SHAPE)
    inputs[0, 0, 0, 0] = 1000.0
    record = TensorData(inputs, torch.tensor([1]))
    nodes = [
        AuditedNode(concatenate([first_record, others]), privacy, local, secret=seed)
        for first_record in (blank_record(record), record)
    ]
    untrained = copy.deepcopy(nodes[0].node.model.state_dict())

    def observe(is_present: bool, run: int) -> torch.Tensor:
        node = nodes[is_present]
        node.node.model.load_state_dict(untrained)
        node.node.query_context_hash = f"run {run}"  # each run has different noise
        return _run_features(_step_projections(node, record, step_count, batch), noise, batch / records)

    observe(True, 0)
    nodes[True].query("predict_logits", x=inputs)
    return Distinguisher("dp-sgd", f"each of {step_count} steps of training", nodes[True].spent(), observe)


def distinguish_by_critic_steps(noise: float = 0.8, queries: int = 2, seed: int = 0) -> Distinguisher:
    """Distinguish by the steps of a critic on half of two records, one step for each query.

    The observation is each step's noisy sum along the record's own gradient, as Adam stores it.
    """
    privacy = NoisyOutputs(
        critic=DPTrainingConfig(noise=noise, clip=1e-3),  # all gradients are longer
        outputs=OutputsConfig(distribution="gaussian", noise=NEGLIGIBLE_NOISE, bound=1.0),
    )
    pair = load_digits(seed).subset(torch.arange(2))
    record, other = pair.subset(torch.tensor([0])), pair.subset(torch.tensor([1]))
    nodes = [
        AuditedNode(
            concatenate([first_record, other]), privacy, LocalConfig(epochs=1), secret=seed, critics=True
        )
        for first_record in (blank_record(record), record)
    ]
    module = nodes[0].node.modules["critic"]
    untrained, x = copy.deepcopy(module.state_dict()), torch.zeros(1, *SHAPE)
    direction = _unit_gradient(module, lambda D: F.softplus(D(record.inputs)).mean())

    def step(node: AuditedNode) -> torch.Tensor:
        critic, optimizer = node.node.modules["critic"], node.node.optimizers["critic"]
        critic.load_state_dict(untrained)
        optimizer.state.clear()
        node.query("predict_logits", x=x)
        moments = [optimizer.state[parameter]["exp_avg"].flatten() for parameter in critic.parameters()]
        gradient = torch.cat(moments) / (1 - optimizer.defaults["betas"][0])
        projection: torch.Tensor = gradient @ direction / privacy.critic.clip
        return projection

    def observe(is_present: bool, run: int) -> torch.Tensor:
        return torch.stack([step(nodes[is_present]) for _ in range(queries)])

    observe(False, 0)
    return Distinguisher("critic", f"each of {queries} steps of a critic", nodes[0].spent(), observe)


def blank_record(record: TensorData) -> TensorData:
    """Return a record that counts as one but teaches nothing."""
    return TensorData(torch.full_like(record.inputs, math.nan), record.targets)


def _step_projections(audited: AuditedNode, record: TensorData, step_count: int, batch: int) -> torch.Tensor:
    """Noisy sum of clipped gradients of each step, projected on the record's own gradient: ``(steps,)``."""
    model, projections = audited.node.model, []
    for step in range(step_count):
        weights = parameters_to_vector(model.parameters()).detach()
        direction = _unit_gradient(model, lambda D: F.cross_entropy(D(record.inputs), record.targets))
        audited.learn(step, 1)
        projections.append(
            (weights - parameters_to_vector(model.parameters()).detach()) @ direction * batch / LEARNING_RATE
        )
    return torch.stack(projections)


def _unit_gradient(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
    network = deep_copy(model).requires_grad_(True)
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(network), list(network.parameters()))
    flat = torch.cat([part.flatten() for part in gradients])
    unit: torch.Tensor = flat / flat.norm().clamp(min=1e-30)
    return unit


def _run_features(projections: torch.Tensor, noise: float, rate: float) -> torch.Tensor:
    """The projections, their spread, and the log likelihood ratio with over without the record."""
    event = Event("gaussian", noise, rate)
    exponents = ((projections - 0.5) / event.noise**2).double().clamp(-300, 300)
    log_likelihood_ratio = torch.log1p(event.rate * torch.expm1(exponents)).sum()
    return torch.cat(
        [
            projections.double(),
            (projections.max() - projections.min()).view(1).double(),
            log_likelihood_ratio.view(1),
        ]
    )


def _make_repeated_audit(
    make_distinguisher: Callable[..., Distinguisher], runs: int, **options: str
) -> Audit:
    return lambda seed: run_audit(make_distinguisher(seed=seed, **options), runs)


AUDITS: Mapping[str, tuple[Audit, ...]] = {
    "counts": (_make_repeated_audit(neighboring_datasets.distinguish_counts, 2000),),
    "dp-sgd": (
        _make_repeated_audit(distinguish_by_training_steps, 1500),
        audit_one_run,
        audit_one_run_linear,
        partial(audit_one_run_linear, many_records=True),
        partial(audit_one_run_linear, precision="bfloat16"),
        partial(audit_one_run_linear, many_records=True, precision="bfloat16"),
    ),
    "critic": (_make_repeated_audit(distinguish_by_critic_steps, 800),),
    "pate": (
        _make_repeated_audit(neighboring_datasets.distinguish_votes, 2000),
        _make_repeated_audit(neighboring_datasets.distinguish_votes, 2000, release="label"),
        _make_repeated_audit(neighboring_datasets.distinguish_gradients, 2000, mechanism="pate"),
    ),
    "noisy-outputs": (
        _make_repeated_audit(neighboring_datasets.distinguish_outputs, 2000),
        _make_repeated_audit(neighboring_datasets.distinguish_outputs, 2000, distribution="gaussian"),
        _make_repeated_audit(neighboring_datasets.distinguish_gradients, 2000),
    ),
}
"""Audits by mechanism; each takes the seed of data and noise."""
