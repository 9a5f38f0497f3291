"""Attacks on single releases with neighboring data sets: two real nodes behind real gates that differ in
one record.

A guarantee covers all possible data, so the attacker chooses the worst: few digits, and one record that
reverses a small network.

Both nodes get the same queries. Each run sends two queries, and the record moves the second response in the
opposite direction. Every charged release thus carries information, and repeated noise is detected. Request
handler, gate, rules, noise and audit log are those of any run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from fedstill.attacks.membership_inference import concatenate
from fedstill.core.compute import Compute, EngineConfig, Precision
from fedstill.core.dataset import TensorData
from fedstill.core.seeds import numpy_generator
from fedstill.data.builtin import Digits
from fedstill.data.loading import load
from fedstill.methods.audit_method import AuditMethod
from fedstill.models import build
from fedstill.node import local_training
from fedstill.node.architectures import group_by_architecture
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.policy import PolicyConfig
from fedstill.node.protection import protect
from fedstill.node.request_handler import RequestHandler
from fedstill.privacy.config import GradientsConfig, PrivacyConfig
from fedstill.privacy.events import PrivacyCost, cost_from_dict
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.privacy.pate import PATE, PateConfig, partition_records
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.wire_format import Tensors
from fedstill.tasks.classification import Classification

NODE_NAME, RUN_NAME = "audited", "audit"
SHAPE = (1, 8, 8)
CLASSES = 2  # digits 0 and 1: with fewer classes, a record moves a whole response further
TEACHERS = 4
STEEP_GRADIENT = 1e4  # output gradient for which every input gradient is clipped
NEGLIGIBLE_NOISE = 1e6  # noise of releases that are not attacked: they cost almost nothing
LOCAL = LocalConfig(
    epochs=0, min_steps=30, batch=8, optimizer="sgd", lr=1e-3, lr_end=1e-3, momentum=0, smoothing=0
)
Observe = Callable[[bool, int], torch.Tensor]


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
        (released,) = self.handler.respond(query, self.query_number, tensors, bool(tensors))
        return released

    def pull_back(self, output_gradient: torch.Tensor) -> Tensors:
        """Send a gradient of the last response's logits, and return the released input gradient."""
        return self.handler.backward(self.query_number, {NODE_NAME: {"logits": output_gradient}})[NODE_NAME]

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


def _teacher_indices(data: TensorData, teachers: int) -> list[int]:
    teacher_of = torch.empty(len(data), dtype=torch.int64)
    for teacher, rows in enumerate(partition_records(data, teachers)):
        teacher_of[rows] = teacher
    return teacher_of.tolist()


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
