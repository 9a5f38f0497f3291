"""A setting made ready to run: every check that can be made beforehand has been made.

Everything is checked before anything is written.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.progress import Bars
from fedstill.core.records import Records
from fedstill.core.seeds import derive, seeded
from fedstill.federation import InProcess
from fedstill.methods.server import Server, ServerSetting
from fedstill.node import training
from fedstill.node.account import Account
from fedstill.node.fit import fitted
from fedstill.node.gate import Gate
from fedstill.node.group import signature
from fedstill.node.ledger import Ledger
from fedstill.node.node import Node
from fedstill.node.protect import check_priced, protect, unit_notes, wanted
from fedstill.privacy.config import NoPrivacy, PrivacyConfig
from fedstill.protocol.method import Method, method_name, side_of
from fedstill.protocol.questions import NodeSetting
from fedstill.runs.evaluation import Evaluation
from fedstill.runs.setting import Setting, check, check_architectures, normalisation, shape_of

LEDGER = "ledger.sqlite"  # in a run's folder: what its nodes' privacy has cost
RUN = "run"  # what a simulation is called in it


class Prepared:
    """Nodes, student and method of a setting, and what is known of the run so far.

    Raises:
        FedstillError: data, models, policies and method do not fit together.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.task = setting, setting.task
        method_name(setting.method)  # which refuses what is none
        self.method: Method = setting.method
        self.compute = Compute(setting.engine)
        self.ledger = Ledger()
        self.needs = self.method.needs()
        names, policies = check(setting)
        privacies = list(setting.privacies) or [NoPrivacy()] * len(names)
        parts = [part.to(self.compute.device) for part in setting.parts]
        self.nodes = [
            Node(
                name,
                part,
                self._network(model, f"model of {name}"),
                Gate(name, policy, self.ledger),
                setting.seed,
            )
            for name, part, model, policy in zip(names, parts, setting.models, policies, strict=True)
        ]
        self.student = self._network(setting.student, "student")
        self.test = setting.test.to(self.compute.device)
        learned = {node.name: node.data for node in self.nodes}
        self.evaluation = Evaluation(self.task, self.test, self.compute, setting.seed, learned)
        self.public = None if setting.public is None else setting.public.to(self.compute.device)
        check_architectures(setting, self.method.title, self.needs, self.nodes, self.student)
        self.kinds = self._kinds()
        features = None
        if setting.perceptual:
            from fedstill.models.vgg import load_vgg

            scale = [part.flatten().tolist() for part in normalisation(setting)]
            features = self.compute.place(load_vgg(Path(setting.perceptual), *scale))
        self.at_nodes = NodeSetting(self.task, setting.local, self.compute, self.public, features)
        self.side = side_of(self.method, self.at_nodes)
        self.account = Account(None, self.ledger_key, durable=False)
        self.notes = [*self.side.notes, *unit_notes([node.data for node in self.nodes], privacies)]
        for node, privacy in zip(self.nodes, privacies, strict=True):
            if wanted(privacy):
                self._protect(node, privacy)
        self.learners = [learner for node in self.nodes for learner in node.learners]
        self.side.prepare(self.nodes)
        for node in self.nodes:
            check_priced(node)
            for module in node.modules.values():
                self.compute.place(module)
        if self.side.first is not None:
            training.prepare(self.learners, setting.local)
        # Before anything is trained or written: would every node answer what the method asks, and do the
        # options go with task, student and public data? The server itself knows, so one is made and let go.
        with seeded(setting.seed, "trial server"):
            self.make_server([[node] for node in self.nodes], copy.deepcopy(self.student))

        self.records = Records(None)
        self.bars = Bars(False)
        self.seconds = {"local_training": 0.0, "centralised": 0.0, "distillation": 0.0}
        self._earlier = 0.0  # seconds of the run before it was stopped
        self._start = time.monotonic()
        self._phase: tuple[str, float] | None = None  # the phase at work, and when it began
        self.local_steps: dict[str, int] = {}  # done, by the name of a group's first node
        self.groups: dict[str, list[list[str]]] = {}  # chosen once, and kept over stops
        self.ratios: dict[str, dict[str, float]] = {}
        self.mark: Node | None = None
        self.server: Any = None
        self.known = self.nodes  # whose models can be measured: all, but for what was left out of a rehearsal

    def secret(self, name: str) -> int:
        """What keys the noise at a node: no secret in a simulation, whose seed is known."""
        return derive(self.setting.seed, name, "gate")

    @property
    def ledger_key(self) -> int:
        return derive(self.setting.seed, LEDGER)

    def _protect(self, node: Node, privacy: PrivacyConfig) -> None:
        protect(
            node,
            privacy,
            self.side,
            self.setting.method,
            self.at_nodes,
            account=self.account,
            run=RUN,
            secret=self.secret(node.name),
        )

    def make_server(self, groups: Sequence[Sequence[Node]], student: nn.Module | None = None) -> Server:
        """The method's program at the server, at its beginning; with another student, if one is given."""
        mean, std = normalisation(self.setting)
        at_server = ServerSetting(
            federation=self._federation(groups),
            student=self.student if student is None else student,
            task=self.task,
            shape=shape_of(self.setting),
            mean=tuple(mean.flatten().tolist()),
            std=tuple(std.flatten().tolist()),
            compute=self.compute,
            seed=self.setting.seed,
            local=self.setting.local,
            public=self.public,
            kinds=self.kinds,
        )
        return Server(self.method, at_server)

    @property
    def has_student(self) -> bool:
        """Whether the server ends with a whole model; an average made to evaluate never leaves this file."""
        return self.method.central == "student"

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Normalised inputs ``(n, C, H, W)`` as bytes."""
        mean, std = normalisation(self.setting)
        # Contiguous, as a file of safetensors needs it.
        return (images * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8).contiguous()

    def _network(self, model: nn.Module, whose: str) -> nn.Module:
        """A network on the device, in two parts if the method needs them."""
        parted = self.needs.split
        return fitted(
            model,
            self.compute,
            shape_of(self.setting),
            self.setting.seed,
            whose,
            parted=parted,
            vocabulary=self.setting.vocabulary,
        )

    def _kinds(self) -> tuple[tuple[tuple[str, ...], nn.Module], ...]:
        """The nodes' names by architecture, with a network of each in its first state."""
        kinds: dict[tuple[Any, ...], list[Node]] = {}
        for node in self.nodes:
            kinds.setdefault(signature(node.model), []).append(node)
        return tuple(
            (tuple(node.name for node in alike), copy.deepcopy(alike[0].model)) for alike in kinds.values()
        )

    def _federation(self, groups: Sequence[Sequence[Node]]) -> InProcess:
        return InProcess(self.nodes, groups, self.side, self.compute, self.setting.link)

    def elapsed(self) -> float:
        """Seconds of the run so far, those before a stop included."""
        return self._earlier + time.monotonic() - self._start
