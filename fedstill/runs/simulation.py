"""A run whose nodes are objects of this process: their local training, the mark, and what is remembered."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import DataError, ModelError, RunFolderError
from fedstill.core.progress import ProgressBar
from fedstill.core.run_writer import RunWriter
from fedstill.federation.inprocess import group_nodes, should_stack
from fedstill.methods._server import Server
from fedstill.models.predictors import file_fingerprint
from fedstill.node import local_training
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.gate import Gate
from fedstill.node.network_setup import architecture_hash
from fedstill.node.node import Node
from fedstill.node.node_group import stacking_key
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.local_config import FULL_TRAINING, Span
from fedstill.protocol.run_plan import public_fingerprint
from fedstill.runs.simulation_metrics import MeasuredSimulation
from fedstill.runs.trained_model_cache import TrainedModels

CHUNK = 50  # local steps between two looks at the clock
UPPER_BOUND = (
    "Training one model on all nodes' data together, the centralized upper bound: evaluation.centralized = "
    "false (--evaluation.centralized false) leaves it out."
)
METERED = 50  # local steps between two losses that are written down; each node's last is, too


def digest_of(parts: Sequence[TensorData]) -> str:
    """What examples are told apart by, to the last bit."""
    named = {f"inputs {k}": part.inputs for k, part in enumerate(parts)}
    named |= {f"targets {k}": part.targets for k, part in enumerate(parts)}
    named |= {f"groups {k}": part.groups for k, part in enumerate(parts) if part.groups is not None}
    return digest("data", named)


class Simulation(MeasuredSimulation):
    """A setting's run in this process; of its nodes' data and networks see :class:`PreparedSimulation`."""

    def load_remote_results(
        self, out: Path, server: Mapping[str, Any], nodes: Mapping[str, dict[str, Any]], bars: ProgressBar
    ) -> dict[str, Any]:
        """Take up what processes elsewhere have trained for this setting, and measure it.

        Args:
            out: the run's folder, with the audit log and the metrics that the server wrote.
            server: the state that the server saved last.
            nodes: each node's own state, at that moment or when it was left out. Who never took part has
                none, and no figures.
            bars: show progress.

        Returns:
            The figures, as :meth:`run` gives them.
        """
        self.clock.start()
        self.records, self.bars = RunWriter(out, self.listeners.log), bars
        self.listeners.start(out, self.method.title, finished=True)
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        (out / "metrics.jsonl").unlink()
        self.records.metrics = [json.loads(line) for line in lines]
        self.records.samples = server["samples"]
        self.evaluated_nodes = [node for node in self.nodes if node.name in nodes]
        for node in self.evaluated_nodes:
            for learner in node.learners:
                learner.optimizers.pop("model", None)
            node.load_state_dict(nodes[node.name])
        self._created_server = self.make_server([[node] for node in self.nodes])
        self._created_server.load_state_dict(server["server"])
        self.audit.open(out / FILE)
        self.audit.close()
        with self.bars:
            self._train_centralized({})
            return self._finish_results()

    # --- the loop's parts -----------------------------------------------------------------------------

    def _prepare_nodes(self, saved: Mapping[str, Any]) -> None:
        if not saved:
            return
        if not {"data", "models"} <= saved.keys():
            raise RunFolderError("the run began under an earlier fedstill (expected that one, or a new run)")
        if saved["data"] != self._data:
            raise DataError("the data are others than the run began with (expected those, or a new run)")
        models, now = saved["models"], self._models()
        if other := [name for name in models if models[name] != now.get(name)]:
            told = "another model than the run began with: allowed is that one, or a new run"
            raise ModelError(f"{', '.join(other)}: {told}")
        self.compute.precision = saved["precision"]  # as the run began, whatever machine this is
        self.local_steps, self.groups = saved["local_steps"], saved["groups"]
        for node in self.nodes:
            node.load_state_dict(saved["nodes"][node.name])

    def _train_locally(self) -> None:
        span = self.side.initial_training
        if span is None:
            return

        # A node that brings a finished model, all frozen, has nothing to train and only answers.
        learning = [node for node in self.learners if "model" in node.optimizers]
        with self.clock.phase("local_training"):
            self._train_once("local_training", self._parted("local_training", learning), "local", span)
        for node in self.learners:
            node.optimizers.pop("model", None)

    def _train_centralized(self, saved: Mapping[str, Any]) -> None:
        """The mark to reach: one model on what no server ever has, all nodes' data together, and public data
        whose labels the method uses."""
        if self.setting.centralized_model is None:
            return
        parts = [part.to(self.compute.device) for part in self.setting.parts]
        if self.needs.public_labels and self.public is not None and self.public.labels is not None:
            parts.append(TensorData(self.public.inputs, self.public.labels))
        together = TensorData.concat(parts)
        gate = Gate("centralized", PolicyConfig(), AuditLog())
        model = self.compute.to_device(self.setting.centralized_model)
        self.centralized_node = Node("centralized", together, model, gate, self.setting.seed)
        local_training.make_optimizers([self.centralized_node], self.setting.local)
        if saved.get("centralized"):
            self.centralized_node.load_state_dict(saved["centralized"])
        with self.clock.phase("centralized"):
            self._train_once("centralized", [[self.centralized_node]], "centralized", FULL_TRAINING)
        self.centralized_node.optimizers.clear()

    def _create_server(self, saved: Mapping[str, Any]) -> Server:
        server = self.make_server(self._parted("distillation", self.nodes))
        if saved.get("server"):
            server.load_state_dict(saved["server"])
        return server

    def _node_state(self) -> Mapping[str, Any]:
        return {
            "precision": self.compute.precision,
            "local_steps": self.local_steps,
            "groups": self.groups,
            "nodes": {node.name: node.state_dict() for node in self.nodes},
            "data": self._data,
            "models": self._models(),
            "centralized": None if self.centralized_node is None else self.centralized_node.state_dict(),
        }

    @cached_property
    def _data(self) -> str:
        """A fingerprint of what is learned from and tested on: a file may be another as a run goes on."""
        return chain_digest(
            digest_of([*self.setting.parts, self.setting.test]), public_fingerprint(self.public)
        )

    def _models(self) -> dict[str, str]:
        """What the networks are beside their weights, and the files of those that only predict."""
        told = {
            node.name: architecture_hash(node.model) + file_fingerprint(node.model) for node in self.nodes
        }
        return told | {"student": architecture_hash(self.student)}

    def _close(self) -> None:
        """Nodes of this process end with it."""

    def results(self) -> dict[str, Any]:
        """See :class:`~fedstill.runs.loop.Run`."""
        results = super().results()
        self.student.eval()  # as it will be used
        for node in self.nodes:  # and the nodes' models may learn on, but for what their owners froze
            for name, parameter in node.model.named_parameters():
                parameter.requires_grad_(name not in node.frozen["model"])
        return {**results, "data_digest": digest_of(self.setting.parts)}

    # --- local training -------------------------------------------------------------------------------

    def _train_once(self, counted: str, groups: Sequence[Sequence[Node]], phase: str, span: Span) -> None:
        """Train groups, or take what another run has trained alike: its seconds and losses, too."""
        begun = any(self.local_steps.get(group[0].name) for group in groups)
        nodes = [node for group in groups for node in group]
        about = (phase, span, self.compute.precision, [len(node.data) for node in nodes])
        file = None if self.trained is None or begun else self.trained.file(groups, *about)
        if file is None:
            self._train(groups, phase, span)
        elif file.exists():
            kept = TrainedModels.put(file, nodes)
            self.local_steps |= kept["steps"]
            self.clock.add_seconds(counted, kept["seconds"])
            for line in kept["losses"]:
                self.records.add_metrics(line)
        else:
            start, first = time.monotonic(), len(self.records.metrics)
            self._train(groups, phase, span)
            steps = {group[0].name: self.local_steps.get(group[0].name, 0) for group in groups}
            seconds, losses = time.monotonic() - start, self.records.metrics[first:]
            with suppress(OSError):  # on a full disk the next run trains for itself
                TrainedModels.keep(file, nodes, steps=steps, seconds=seconds, losses=losses)

    def _train(self, groups: Sequence[Sequence[Node]], phase: str, span: Span) -> None:
        """Train groups to the end of a span, from the steps that they have reached; several at once."""
        local, workers = self.setting.local, self.compute.workers
        nodes = [node for group in groups for node in group]
        lasts = {node.name: len(span.steps(local.steps(len(node.data)))) for node in nodes}
        ends = [max(lasts[node.name] for node in group) for group in groups]
        kinds = [(phase, stacking_key(group[0].model)) for group in groups]

        def advance(nodes: Sequence[Node]) -> tuple[int, list[dict[str, Any]]]:
            lines = []

            def report(nodes: Sequence[Node], step: int, losses: torch.Tensor) -> None:
                due = [at for at, node in enumerate(nodes) if step % METERED == 0 or step == lasts[node.name]]
                for at, loss in zip(due, losses[due].tolist() if due else (), strict=True):  # else no wait
                    line = {"phase": phase, "node": nodes[at].name, "step": step, "loss": round(loss, 5)}
                    lines.append(line)

            start = self.local_steps.get(nodes[0].name, 0)
            done = local_training.train(
                nodes, self.task, local, self.compute, span=span, start=start, steps=CHUNK, report=report
            )
            return done, lines

        def to_do() -> dict[int, int]:
            done = [self.local_steps.get(group[0].name, 0) for group in groups]
            return {at: end - done[at] for at, end in enumerate(ends) if end > done[at]}

        if to_do():
            if phase == "centralized":
                self.bars.print_line(UPPER_BOUND)
            self.bars.update(*self._local_progress(phase))
        while left := to_do():
            # Who has most to do comes first, so that no core has nothing to do before the end.
            places = sorted(left, key=lambda place: -left[place])[: workers.count]
            if any(groups[place][0].private_steps for place in places):  # which is charged while they learn
                places = places[:1]
            now = [groups[place] for place in places]
            work = (
                map(advance, now)
                if len(groups) == 1
                else workers.map(advance, now, [kinds[place] for place in places])
            )
            for group, (done, lines) in zip(now, work, strict=True):
                self.local_steps[group[0].name] = done
                for line in lines:
                    self.records.add_metrics(line)
            self.bars.update(*self._local_progress(phase))
            if self.records.is_save_due():
                self._save()

    def _local_progress(self, phase: str) -> tuple[str, int, int]:
        local = self.setting.local
        if phase == "centralized" and self.centralized_node is not None:
            return (
                "centralized",
                self.local_steps.get("centralized", 0),
                local.steps(len(self.centralized_node.data)),
            )
        span = self.side.initial_training or FULL_TRAINING
        totals = {node.name: len(span.steps(local.steps(len(node.data)))) for node in self.learners}
        groups = self.groups["local_training"]
        done = sum(min(totals[name], self.local_steps.get(group[0], 0)) for group in groups for name in group)
        return "local training", done, sum(totals[name] for group in groups for name in group)

    def _parted(self, phase: str, nodes: Sequence[Node]) -> list[list[Node]]:
        """Nodes in the groups of a phase; after a stop in the same, whatever machine this is."""
        if phase not in self.groups:
            groups = group_nodes(
                nodes, should_stack(self.compute, nodes, local_training=phase == "local_training")
            )
            self.groups[phase] = [[node.name for node in group] for group in groups]
        named = {node.name: node for node in nodes}
        groups = [[named[name] for name in group if name in named] for group in self.groups[phase]]
        return [group for group in groups if group]  # none of those that learn, once they have learned
