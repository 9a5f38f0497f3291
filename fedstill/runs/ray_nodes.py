"""The part of a simulation in a Ray actor: some of its nodes, built from the run's specification."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedstill.core.checkpoint import State
from fedstill.core.compute import Compute, RayConfig
from fedstill.core.config_tables import read_table
from fedstill.core.dataset import TensorData
from fedstill.core.errors import DeployError, FedstillError
from fedstill.core.table_schema import TableSchema
from fedstill.data.public import PublicData
from fedstill.federation.federation import SentQuery
from fedstill.federation.inprocess import InProcess
from fedstill.federation.ray_actors import Message, from_message, replies_with_message
from fedstill.models.backbones import RawInputs
from fedstill.models.interface import Interface
from fedstill.models.perceptual import load_perceptual
from fedstill.node import local_training
from fedstill.node.audit_entries import ENTRY_FIELDS, Entry
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.model_setup import prepare_model
from fedstill.node.node import Node
from fedstill.node.protection import run_uncharged_preparation
from fedstill.protocol.method import build_node_side
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.wire_format import Tensors
from fedstill.runs.build import build_node_model, run_task
from fedstill.runs.group_training import GroupTraining
from fedstill.runs.simulation import group_nodes, should_stack
from fedstill.runs.spec import RunSpec, from_dict


class RayNodes:
    """Nodes in a Ray actor. Its methods take and return messages, texts and numbers."""

    @replies_with_message
    def start(self, message: Message) -> State:
        """Build the nodes and restore their state. The message is that of :meth:`.RaySimulation._plan`.

        Raises:
            FedstillError: a file that the specification names is missing on this machine.
        """
        plan = from_message(message)
        try:
            os.chdir(plan["folder"])
        except OSError as error:
            folder = f"the folder in which the run was started, {plan['folder']}"
            raise DeployError(f"a Ray actor cannot open {folder}: {error.strerror}") from error
        spec = from_dict(plan["spec"])
        self._spec, engine = spec, spec.engine
        device = "cuda" if engine.device.startswith("cuda") else engine.device
        threads = max(engine.threads, 1)
        engine = replace(engine, backend="local", ray=RayConfig(), device=device, threads=threads)
        self._compute = Compute(engine)
        self._compute.precision = plan["precision"]
        self._audit = AuditLog()
        numbers = [self._audit.charge(Entry(**fields)) for fields in plan["entries"]]
        self._last_entry = max(numbers, default=0)
        self._build_nodes(spec, plan)
        self._steps: dict[str, int] = plan["local_steps"]
        self._groups: dict[str, list[list[str]]] = {
            phase: [part for group in groups if (part := [name for name in group if name in self._nodes])]
            for phase, groups in plan["groups"].items()
        }
        for name, node in self._nodes.items():
            node.load_state_dict(plan["states"][name])
        self._training: GroupTraining | None = None
        self._federation: InProcess | None = None
        if plan["is_trained"]:
            self._begin_queries()
        return {}

    def _build_nodes(self, spec: RunSpec, plan: Mapping[str, Any]) -> None:
        """Build the nodes in their initial state, as a simulation does."""
        method, compute, shape = spec.method, self._compute, tuple(plan["shape"])
        task, needs = run_task(spec, plan["classes"]), method.needs()
        schema = read_table(TableSchema, plan["schema"])
        mean, std = tuple(plan["mean"]), tuple(plan["std"])
        interface = Interface(task, tuple(plan["classes"]), shape, plan["vocabulary"], mean, std, schema)
        nodes = []
        for name, given in plan["nodes"].items():
            model = build_node_model(spec, interface, given["index"])
            label, vocabulary = f"model of {name}", plan["vocabulary"]
            model = prepare_model(
                model, compute, shape, spec.seed, label, split_=needs.split_models, vocabulary=vocabulary
            )
            data = TensorData(given["inputs"], given["targets"], given["groups"]).to(compute.device)
            gate = Gate(name, spec.nodes.policy, self._audit)
            gate.output_shape = task.output_shape(shape)
            nodes.append(Node(name, data, model, gate, spec.seed))
        self._nodes = {node.name: node for node in nodes}
        public = None if plan["public"] is None else PublicData(**plan["public"]).to(compute.device)
        raw = RawInputs((len(mean), *shape[1:]), mean, std)
        weights = spec.nodes.perceptual_weights
        perceptual = load_perceptual(spec.nodes.perceptual, weights, raw, "nodes.perceptual")
        if perceptual is not None:
            perceptual = compute.to_device(perceptual)
        setting = NodeSetting(task, spec.nodes.local, compute, public, perceptual, schema)
        self._side = build_node_side(method, setting)
        run_uncharged_preparation(self._side, nodes)
        for node in nodes:
            for module in node.modules.values():
                compute.to_device(module)
        if self._side.initial_training is not None:
            local_training.attach_optimizers(nodes, spec.nodes.local)

    def process(self) -> int:
        """Return the number of this actor's process."""
        return os.getpid()

    # --- local training -----------------------------------------------------------------------------------

    @replies_with_message
    def group(self, phase: str) -> State:
        """Return the groups in which the nodes are computed in a phase, and choose them at the first call."""
        self._grouped_nodes(phase)
        return {"groups": self._groups[phase]}

    def _grouped_nodes(self, phase: str) -> list[list[Node]]:
        training = phase == "local_training"
        nodes = [node for node in self._nodes.values() if not training or "model" in node.optimizers]
        if phase not in self._groups:
            groups = group_nodes(nodes, should_stack(self._compute, nodes, local_training=training))
            self._groups[phase] = [[node.name for node in group] for group in groups]
        names = {node.name for node in nodes}
        groups = [[self._nodes[name] for name in group if name in names] for group in self._groups[phase]]
        return [group for group in groups if group]

    @replies_with_message
    def train(self, seconds: float) -> State:
        """Train the nodes' models before the first query, for some seconds.

        Returns:
            Steps that each group has reached by the name of its first node, and lines of metrics.
        """
        end, lines = time.monotonic() + seconds, list[dict[str, Any]]()
        if self._training is None:
            span, side = self._side.initial_training, self._side
            assert span is not None
            self._training = GroupTraining(
                self._grouped_nodes("local_training"),
                "local",
                span,
                side.setting.task,
                side.setting.local,
                self._compute,
                self._steps,
            )
        while self._training.remaining_steps() and time.monotonic() < end:
            lines += self._training.advance()
        return {"steps": self._steps, "lines": lines}

    # --- queries ------------------------------------------------------------------------------------------

    @replies_with_message
    def begin_queries(self, message: Message) -> State:
        """Expect queries: local training has ended. The message holds states to restore, by node."""
        for name, state in from_message(message).items():
            self._nodes[name].load_state_dict(state)
        self._begin_queries()
        return {}

    def _begin_queries(self) -> None:
        for node in self._nodes.values():
            node.optimizers.pop("model", None)
        nodes, groups = list(self._nodes.values()), self._grouped_nodes("distillation")
        self._federation = InProcess(nodes, groups, self._side, self._compute, self._spec.link)

    @replies_with_message
    def respond(self, message: Message, names: Sequence[str] | None) -> State:
        """Return the responses of some nodes to a query, or of all, with the entries of their audit log."""
        content = from_message(message)
        tensors = self._to_device(content["tensors"])
        query = SentQuery(content["query"], content["number"], tensors, content["differentiable"])
        queried = tuple(self._nodes if names is None else names)
        return self._release(lambda federation: federation.collect_responses(queried, query))

    @replies_with_message
    def backpropagate(self, message: Message) -> State:
        """Return the input gradients of some nodes, with the entries of their audit log."""
        content = from_message(message)
        gradients = {name: self._to_device(tensors) for name, tensors in content["gradients"].items()}
        number, query = content["number"], content["query"]
        return self._release(lambda federation: federation.collect_gradients(number, query, gradients))

    def _release(self, collect: Callable[[InProcess], Mapping[str, Tensors]]) -> State:
        """Return what nodes release, with the new entries of their log, and the error if there is one."""
        if self._federation is None:
            raise RuntimeError("a query before the end of local training")
        reply: dict[str, Any] = {"released": {}}
        try:
            released = collect(self._federation)
            reply["released"] = {name: dict(tensors) for name, tensors in released.items()}
        except FedstillError as error:  # other nodes may have released before
            reply["error"] = str(error)
        entries = list(self._audit.entries(self._last_entry + 1))
        if entries:
            self._last_entry = entries[-1]["entry"]
        reply["entries"] = [{name: entry[name] for name in ENTRY_FIELDS} for entry in entries]
        return reply

    def _to_device(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return self._compute.tensors_to_device(tensors)

    # --- state --------------------------------------------------------------------------------------------

    @replies_with_message
    def states(self) -> State:
        """Return the state of all nodes by name, and the steps of local training that they have reached."""
        states = {name: node.state_dict() for name, node in self._nodes.items()}
        return {"states": states, "steps": self._steps}
