"""Audits of all privacy mechanisms: attacks, and their lower bounds of epsilon compared with the claimed
ones.

A guarantee covers all possible data, so the attacker chooses the worst: few digits, and one record that
reverses a small network. There are two kinds of attacks:

- On single releases, with neighboring data sets: two real nodes behind real gates differ in one record. Both
  get the same queries. Each run sends two queries, and the record moves the second response in the opposite
  direction. Every charged release thus carries information, and repeated noise is detected. Request handler,
  gate, rules, noise and audit log are those of any run.
- On the training of DP-SGD: records are planted in the data, and detected in its result. The number of
  records sets the sampling rate and counts as known, so a record that is left out is replaced by a blank
  one: NaN, whose gradient counts as zero.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from fedstill.attacks.membership_inference import concatenate
from fedstill.core.compute import Compute, EngineConfig, Precision
from fedstill.core.dataset import TensorData
from fedstill.core.seeds import derive, numpy_generator, torch_generator
from fedstill.data.builtin import Digits
from fedstill.data.loading import load
from fedstill.methods.audit_method import AuditMethod
from fedstill.models import build
from fedstill.models.module_utils import deep_copy
from fedstill.node import local_training
from fedstill.node.architectures import group_by_architecture
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.plain_releases import PlainReleases
from fedstill.node.policy import PolicyConfig
from fedstill.node.protection import protect
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.request_handler import RequestHandler
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import DPTrainingConfig, GradientsConfig, PrivacyConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.epsilon_lower_bounds import (
    CONFIDENCE,
    fisher_discriminant,
    lower_bound_from_runs,
    one_run_lower_bound,
)
from fedstill.privacy.events import Event, PrivacyCost, cost_from_dict
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.privacy.pate import PATE, PateConfig, partition_records
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.wire_format import Tensors
from fedstill.tasks.classification import Classification

DELTA = 1e-5
LEARNING_RATE = 1e-6  # so low that every gradient of the record stays clipped
SHAPE = (1, 8, 8)
CLASSES = 2  # digits 0 and 1: with fewer classes, a record moves a whole response further
TEACHERS = 4
STEEP_GRADIENT = 1e4  # output gradient for which every input gradient is clipped
NEGLIGIBLE_NOISE = 1e6  # noise of releases that are not attacked: they cost almost nothing
LOCAL = LocalConfig(
    epochs=0, min_steps=30, batch=8, optimizer="sgd", lr=1e-3, lr_end=1e-3, momentum=0, smoothing=0
)
Audit = Callable[[int], "AuditFinding"]
Observe = Callable[[bool, int], torch.Tensor]


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


@dataclass(frozen=True)
class Distinguisher:
    """Attack by an adversary who knows all records but one.

    Args:
        mechanism: registered name.
        target: attacked release, in words.
        claimed_cost: cost of a run by the node's audit log.
        observe: maps the presence of the record and the number of the run to an observation ``(d,)``.
    """

    mechanism: str
    target: str
    claimed_cost: PrivacyCost
    observe: Observe


def distinguish_counts(scale: float = 1.0, seed: int = 0) -> Distinguisher:
    """Attack label counts, queried twice: the record adds one to its class."""
    privacy = PATE(counts_noise=scale, pate=PateConfig(teachers=1, noise=1.0))

    def observe(node: AuditedNode, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([node.query("count_labels")["counts"] for _ in range(2)])

    data, record = contradictory_records(seed)
    counts_without = torch.bincount(data.targets, minlength=CLASSES).repeat(2).float()
    counts_with = counts_without + torch.bincount(record.targets, minlength=CLASSES).repeat(2)
    return _make_distinguisher(
        "counts", "noisy label counts", privacy, observe, seed, (counts_without, counts_with)
    )


def distinguish_votes(noise: float = 2.0, release: str = "votes", seed: int = 0) -> Distinguisher:
    """Attack noisy votes: the record changes one teacher's vote on the queried inputs."""
    pate = PateConfig(teachers=TEACHERS, noise=noise, release="label" if release == "label" else "votes")
    privacy = PATE(pate=pate)
    target = "noisy votes" if release == "votes" else "the class of most votes"
    return _make_distinguisher("pate", target, privacy, _query_logits, seed)


def distinguish_outputs(
    distribution: str = "laplace", noise: float = 0.4, bound: float = 0.1, seed: int = 0
) -> Distinguisher:
    """Attack noisy outputs of a network that the record reverses."""
    config = OutputsConfig(
        distribution="gaussian" if distribution == "gaussian" else "laplace", noise=noise, bound=bound
    )
    privacy = NoisyOutputs(outputs=config)
    ends = torch.tensor(-bound), torch.tensor(bound)
    return _make_distinguisher(
        "noisy-outputs", f"bounded outputs, {distribution} noise", privacy, _query_logits, seed, ends
    )


def distinguish_gradients(
    noise: float = 2.0, mechanism: str = "noisy-outputs", seed: int = 0
) -> Distinguisher:
    """Attack sanitized gradients: the record reverses the gradient of a network, or of one of several
    teachers.
    """
    if mechanism == "pate":
        teachers, gradients = (
            PateConfig(teachers=TEACHERS, noise=NEGLIGIBLE_NOISE),
            GradientsConfig(noise=noise / TEACHERS),
        )
        target = f"mean of {TEACHERS} teachers' gradients"
        return _make_distinguisher(
            mechanism, target, PATE(pate=teachers, gradients=gradients), _query_gradients, seed
        )
    outputs = OutputsConfig(distribution="gaussian", noise=NEGLIGIBLE_NOISE, bound=1.0)
    privacy = NoisyOutputs(outputs=outputs, gradients=GradientsConfig(noise=noise))
    return _make_distinguisher(mechanism, "sanitized gradients", privacy, _query_gradients, seed)


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


@dataclass
class AuditedNode:
    """One trained node with some records, ready for queries.

    Args:
        data: its records.
        privacy: mechanism of its owner, without a budget, so that it refuses nothing.
        local: training options.
        secret: key of its noise.
        model: of the node; "linear" is one layer that is initialized with zeros.
        classes: number of classes.
        rows: inputs of a query.
        critics: the node has a critic, which takes a step for each response.
        precision: of training and predictions.
    """

    data: TensorData
    privacy: PrivacyConfig
    local: LocalConfig
    secret: int = 0
    model: str = "linear"
    classes: int = CLASSES
    rows: int = 1
    critics: bool = False
    precision: Precision = "float32"
    node: Node = field(init=False)
    handler: RequestHandler = field(init=False)
    releases: PlainReleases = field(default_factory=PlainReleases, init=False)
    query_number: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.task = Classification(self.classes)
        self.compute = Compute(EngineConfig(precision=self.precision))
        self.audit = AuditLog()
        gate = Gate(NODE_NAME, PolicyConfig(outputs_only=False), self.audit, RUN_NAME)
        is_linear = self.model == "linear"
        network = zero_linear(self.classes) if is_linear else build(self.model, SHAPE, self.classes, 0)
        self.node = Node(NODE_NAME, self.data, network, gate, 0)
        method = AuditMethod(batch=self.rows, critics=self.critics)
        setting = NodeSetting(self.task, self.local, self.compute)
        side = method.node_side(setting)  # of this package, although the method is not registered
        protect(self.node, self.privacy, side, method, setting, secret=self.secret)
        side.prepare(self.node)
        local_training.attach_optimizers(self.node.self_or_teachers, self.local)
        self.handler = RequestHandler(NodeGroup([self.node]), side, self.compute)

    def learn(self, start: int = 0, steps: int | None = None) -> None:
        """Run the local training, or some steps of it."""
        for group in group_by_architecture(self.node.self_or_teachers):
            local_training.train(group, self.task, self.local, self.compute, start=start, steps=steps)

    def query(self, query: str, **tensors: torch.Tensor) -> Tensors:
        """Send a query with a new number, and return the released tensors."""
        self.query_number += 1
        received = ReceivedTensors.of_query(self.handler.side.queries[query], tensors)
        return self.releases.respond(self.handler, self.query_number, received, bool(tensors), None)

    def pull_back(self, output_gradient: torch.Tensor) -> Tensors:
        """Send a gradient of the last response's logits, and return the released input gradient."""
        query = self.handler.query_name(self.query_number)
        received = ReceivedTensors.of_gradients(query, {"logits": output_gradient})
        return self.releases.backward(self.handler, self.query_number, received, None)

    def spent(self) -> PrivacyCost:
        """Total cost by the node's audit log."""
        return cost_from_dict(self.audit.spending(NODE_NAME, RUN_NAME).run_events)


def zero_linear(classes: int) -> nn.Module:
    """Return one layer initialized with zeros, so that it depends on its records alone."""
    layer = nn.Linear(SHAPE[0] * SHAPE[1] * SHAPE[2], classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(nn.Flatten(), layer)


def load_digits(seed: int, classes: int = CLASSES) -> TensorData:
    """Return the digits of the first classes, in an order given by the seed."""
    data = load(Digits()).train
    rows = (data.targets < classes).nonzero().flatten()
    order = numpy_generator(seed, "audit", "digits").permutation(len(rows))
    return data.subset(rows[torch.from_numpy(order)])


def contradictory_records(seed: int, teachers: int = 1) -> tuple[TensorData, TensorData]:
    """Return a digit, and a record that contradicts it: the same image, three times as strong, with another
    label.

    With several teachers, one of them learns from both, and the others abstain.
    """
    digit = load_digits(seed).subset(torch.tensor([0]))
    strengths = 3 + torch.arange(20 * teachers).view(-1, 1, 1, 1) / 100
    scaled = strengths * digit.inputs
    candidates = TensorData(scaled, ((digit.targets + 1) % CLASSES).expand(len(scaled)))
    (teacher,) = _teacher_indices(digit, teachers)
    return digit, candidates.subset(torch.tensor([_teacher_indices(candidates, teachers).index(teacher)]))


def blank_record(record: TensorData) -> TensorData:
    """Return a record that counts as one but teaches nothing."""
    return TensorData(torch.full_like(record.inputs, math.nan), record.targets)


def _teacher_indices(data: TensorData, teachers: int) -> list[int]:
    teacher_of = torch.empty(len(data), dtype=torch.int64)
    for teacher, rows in enumerate(partition_records(data, teachers)):
        teacher_of[rows] = teacher
    return teacher_of.tolist()


def _query_logits(node: AuditedNode, x: torch.Tensor) -> torch.Tensor:
    """Responses to the first digit and to its negative, for which a network of one layer has the opposite
    output.
    """
    return torch.cat([node.query("predict_logits", x=inputs)["logits"].flatten() for inputs in (x, -x)])


def _query_gradients(node: AuditedNode, x: torch.Tensor) -> torch.Tensor:
    """Input gradients along the first digit, for an output gradient and its negative."""
    direction, output_gradient = (x / x.norm()).flatten(), torch.tensor([[STEEP_GRADIENT, -STEEP_GRADIENT]])
    projections = []
    for gradient in (output_gradient, -output_gradient):
        node.query("predict_logits", x=x)
        projections.append(node.pull_back(gradient)["d/dx"].flatten() @ direction)
    return torch.stack(projections)


def _make_distinguisher(
    mechanism: str,
    target: str,
    privacy: PrivacyConfig,
    observe_node: Callable[[AuditedNode, torch.Tensor], torch.Tensor],
    seed: int,
    ends: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Distinguisher:
    """Query two nodes. If the exact outputs of both are given, also clamp the observations to them, as
    Laplace noise has its information between them.
    """
    teachers = privacy.pate.teachers if isinstance(privacy, PATE) else 1
    data, record = contradictory_records(seed, teachers)
    x = data.inputs[:1].view(1, *SHAPE)
    nodes = [
        AuditedNode(records, privacy, LOCAL, secret=seed) for records in (data, concatenate([data, record]))
    ]
    for node in nodes:
        node.learn()

    def observe(is_present: bool, run: int) -> torch.Tensor:
        observed = observe_node(nodes[is_present], x)
        return observed if ends is None else torch.cat([observed, observed.clamp(*ends)])

    observe(False, 0)
    return Distinguisher(mechanism, target, nodes[0].spent(), observe)


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


"""Audits by mechanism; each takes the seed of data and noise."""


NODE_NAME, RUN_NAME = "audited", "audit"


def _make_repeated_audit(
    make_distinguisher: Callable[..., Distinguisher], runs: int, **options: str
) -> Audit:
    return lambda seed: run_audit(make_distinguisher(seed=seed, **options), runs)


AUDITS: Mapping[str, tuple[Audit, ...]] = {
    "counts": (_make_repeated_audit(distinguish_counts, 2000),),
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
        _make_repeated_audit(distinguish_votes, 2000),
        _make_repeated_audit(distinguish_votes, 2000, release="label"),
        _make_repeated_audit(distinguish_gradients, 2000, mechanism="pate"),
    ),
    "noisy-outputs": (
        _make_repeated_audit(distinguish_outputs, 2000),
        _make_repeated_audit(distinguish_outputs, 2000, distribution="gaussian"),
        _make_repeated_audit(distinguish_gradients, 2000),
    ),
}
