"""Preparation of a simulation: nodes, student and method, with all checks before anything is written."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import derive, seeded
from fedstill.federation.inprocess import InProcess
from fedstill.federation.secure_aggregation import SecureAggregation
from fedstill.methods._server import Server
from fedstill.models.module_utils import deep_copy
from fedstill.node import local_training
from fedstill.node.gate import Gate
from fedstill.node.model_setup import require_trainable_batch_size
from fedstill.node.node import Node
from fedstill.node.node_group import architecture_key as kind_of
from fedstill.node.protection import (
    group_privacy_notes,
    needs_mechanism,
    protect,
    require_unchanged_data,
    run_uncharged_preparation,
)
from fedstill.privacy.config import NoPrivacy
from fedstill.protocol.method import build_node_side
from fedstill.protocol.queries import NodeSetting
from fedstill.runs.evaluation import Evaluation
from fedstill.runs.loop import Run
from fedstill.runs.setting import Setting, check_networks, check_nodes


class PreparedSimulation(Run, ABC):
    """Nodes, student and method of a setting, ready to begin.

    Args:
        setting: with data, models and policies of the nodes.

    Attributes:
        nodes: all of them.
        evaluated_nodes: those whose models can be measured: all, but for what was left out of a rehearsal.

    Raises:
        FedstillError: data, models, policies and method do not fit together.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        names, policies = check_nodes(setting)
        privacies = list(setting.privacies) or [NoPrivacy()] * len(names)
        self.nodes = [
            Node(
                name,
                part,
                self._prepare_network(model, f"model of {name}"),
                Gate(name, policy, self.audit),
                setting.seed,
            )
            for name, part, model, policy in zip(
                names,
                [part.to(self.compute.device) for part in setting.parts],
                setting.models,
                policies,
                strict=True,
            )
        ]
        for node in self.nodes:
            node.gate.output_shape = self.task.output_shape(self.shape)
        student = kind_of(self.student)
        check_networks(
            self.method.title,
            self.needs,
            {node.name: node.is_frozen for node in self.nodes},
            {node.name: kind_of(node.model) == student for node in self.nodes},
        )
        networks = {f"model of {node.name}": node.model for node in self.nodes}
        self.check_batch_size_for_batch_norm({"student": self.student, **networks})
        learning = networks if self.method.trains_models else {}
        central = (
            {} if setting.centralized_model is None else {"centralized model": setting.centralized_model}
        )
        for whose, model in {**learning, **central}.items():
            require_trainable_batch_size(model, setting.local, self.shape, self.task.form, f"the {whose}")
        self.kinds = self._nodes_by_architecture()
        self.at_nodes = NodeSetting(
            self.task,
            setting.local,
            self.compute,
            self.public,
            self._perceptual_features(),
            setting.schema,
            setting.link.secure_aggregation,
        )
        self.side = build_node_side(self.method, self.at_nodes)
        if any(query.sum_fault(setting.local.optimizer) for query in self.side.queries.values()):
            expected = (
                "sgd with link.secure_aggregation: a first step of Adam shows the sign of each gradient"
            )
            raise ArgumentError("local.optimizer", setting.local.optimizer, expected)
        self.notes += [*self.side.notes, *group_privacy_notes([node.data for node in self.nodes], privacies)]
        for node, privacy in zip(self.nodes, privacies, strict=True):
            if needs_mechanism(privacy):
                key = self.secret(node.name)
                protect(node, privacy, self.side, self.method, self.at_nodes, secret=key)
        self.learners = [learner for node in self.nodes for learner in node.self_or_teachers]
        run_uncharged_preparation(self.side, self.nodes)
        learned = {
            node.name: node.data for node in self.nodes
        }  # public data among it, where these have labels
        self.evaluation = Evaluation(self.task, self.test, self.compute, setting.seed, learned)
        for node in self.nodes:
            require_unchanged_data(node)
            for module in node.modules.values():
                self.compute.to_device(module)
        if self.side.initial_training is not None:
            local_training.attach_optimizers(self.learners, setting.local)
        # A trial server checks that every node allows the method's queries, and that options, task, student
        # and public data fit together.
        with seeded(setting.seed, "trial server"):
            self.make_server([[node] for node in self.nodes], deep_copy(self.student))
        self.local_steps: dict[str, int] = {}
        self.groups: dict[str, list[list[str]]] = {}
        self.centralized_node: Node | None = None
        self.evaluated_nodes = self.nodes

    def secret(self, name: str) -> int:
        """Return the key of a node's noise; it is no secret in a simulation, whose seed is known."""
        return derive(self.setting.seed, name, "gate")

    def make_server(self, groups: Sequence[Sequence[Node]], student: nn.Module | None = None) -> Server:
        """Create the server in its initial state.

        Args:
            student: replaces the simulation's student.
        """
        chosen = self.student if student is None else student
        engine = self._federation(groups)
        is_summed = self.setting.link.secure_aggregation
        federation = SecureAggregation.in_process(engine, self.nodes) if is_summed else engine
        return self._make_server(federation, chosen, self.kinds)

    def _federation(self, groups: Sequence[Sequence[Node]]) -> InProcess:
        return InProcess(self.nodes, groups, self.side, self.compute, self.setting.link)

    def _perceptual_features(self) -> nn.Module | None:
        if not self.setting.perceptual:
            return None
        from fedstill.models.vgg import load_vgg

        scale = [part.flatten().tolist() for part in (self.mean, self.std)]
        return self.compute.to_device(load_vgg(Path(self.setting.perceptual), *scale))

    def _nodes_by_architecture(self) -> tuple[tuple[tuple[str, ...], nn.Module], ...]:
        """Return the nodes' names by architecture, with an initial network of each."""
        kinds: dict[tuple[Any, ...], list[Node]] = {}
        for node in self.nodes:
            kinds.setdefault(kind_of(node.model), []).append(node)
        return tuple(
            (tuple(node.name for node in alike), deep_copy(alike[0].model)) for alike in kinds.values()
        )
