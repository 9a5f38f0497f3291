"""Two worlds that differ in one record: real nodes behind real gates, at the worst that their data can be.

A guarantee is about all data that a node could hold, so the attacker chooses them: few digits, and one record
that turns a small network round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.seeds import numpy_generator
from fedstill.data.loaders import load
from fedstill.data.vision import Digits
from fedstill.federation.inprocess import partition
from fedstill.methods.audited import Audited
from fedstill.models import build
from fedstill.node import training
from fedstill.node.audit import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.node.protect import protect
from fedstill.node.requests import RequestHandler
from fedstill.privacy.config import PrivacyConfig
from fedstill.privacy.events import Price, from_text
from fedstill.privacy.teachers import shards
from fedstill.protocol.method import side_of
from fedstill.protocol.questions import NodeSetting
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks.classification import Classification

NAME, RUN = "audited", "audit"
SHAPE = (1, 8, 8)
CLASSES = 2  # of digits, 0 and 1: the fewer, the further a record moves an answer as a whole

Tensors = Mapping[str, torch.Tensor]


@dataclass
class World:
    """One node with some records, trained and ready to be asked.

    Args:
        privacy: what its owner says; without a budget, so that it never refuses.
        secret: keys its noise.
        model: its network; "linear" is one layer that starts at zero.
        rows: inputs of a question.
        critics: whether the node has a critic, that takes a step for each answer.
    """

    data: TensorData
    privacy: PrivacyConfig
    local: LocalConfig
    secret: int = 0
    model: str = "linear"
    classes: int = CLASSES
    rows: int = 1
    critics: bool = False
    node: Node = field(init=False)
    handler: RequestHandler = field(init=False)
    asked: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.task, self.compute = Classification(self.classes), Compute()
        self.audit = AuditLog()
        gate = Gate(NAME, PolicyConfig(outputs_only=False), self.audit, RUN)
        own = self.model == "linear"
        network = linear(self.classes) if own else build(self.model, SHAPE, self.classes, 0)
        self.node = Node(NAME, self.data, network, gate, 0)
        method = Audited(batch=self.rows, gan=float(self.critics))
        setting = NodeSetting(self.task, self.local, self.compute)
        side = side_of(method, setting)
        protect(self.node, self.privacy, side, method, setting, secret=self.secret)
        side.prepare([self.node])
        training.prepare(self.node.learners, self.local)
        self.handler = RequestHandler(Group([self.node]), side, self.compute)

    def learn(self, start: int = 0, steps: int | None = None) -> None:
        """Local training, or some steps of it."""
        for group in partition(self.node.learners, True):
            training.train(group, self.task, self.local, self.compute, start=start, steps=steps)

    def ask(self, question: str, **tensors: torch.Tensor) -> Tensors:
        """What leaves in answer to a question, under a new number."""
        self.asked += 1
        (told,) = self.handler.answer(question, self.asked, tensors, bool(tensors))
        return told

    def pull_back(self, pull: torch.Tensor) -> Tensors:
        """What leaves when a gradient of the last answer's logits is pulled back."""
        return self.handler.pull_back(self.asked, {NAME: {"logits": pull}})[NAME]

    def spent(self) -> Price:
        """What its audit log says that all of this has cost."""
        return from_text(self.audit.spent(NAME, RUN).run)


def linear(classes: int) -> nn.Module:
    """One layer that starts at zero, so that it follows its records and nothing else."""
    layer = nn.Linear(SHAPE[0] * SHAPE[1] * SHAPE[2], classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(nn.Flatten(), layer)


def digits(seed: int, classes: int = CLASSES) -> TensorData:
    """The digits of the first classes, in an order that follows from the seed."""
    data = load(Digits()).train
    own = (data.targets < classes).nonzero().flatten()
    order = numpy_generator(seed, "audit", "digits").permutation(len(own))
    return data.subset(own[torch.from_numpy(order)])


def contradicted(seed: int, teachers: int = 1) -> tuple[TensorData, TensorData]:
    """A digit, and a record that contradicts it: the same image, three times as strong, with another label.

    Of several teachers the same one learns from both, and the others abstain.
    """
    first = digits(seed).subset(torch.tensor([0]))
    strengths = 3 + torch.arange(20 * teachers).view(-1, 1, 1, 1) / 100
    louder = strengths * first.inputs
    candidates = TensorData(louder, ((first.targets + 1) % CLASSES).expand(len(louder)))
    (home,) = _homes(first, teachers)
    return first, candidates.subset(torch.tensor([_homes(candidates, teachers).index(home)]))


def _homes(data: TensorData, teachers: int) -> list[int]:
    whose = torch.empty(len(data), dtype=torch.int64)
    for teacher, part in enumerate(shards(data, teachers)):
        whose[part] = teacher
    return whose.tolist()
