"""Simulation whose nodes are computed in Ray actors (``engine.backend = "ray"``).

This process has the server, and a copy of every node, with which it evaluates and saves checkpoints as
:class:`~fedstill.runs.simulation.Simulation` does. The actors compute local training and queries. The copies
get the actors' state before each checkpoint and each evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedstill.core.checkpoint import State
from fedstill.core.config_tables import to_table
from fedstill.core.errors import ArgumentError
from fedstill.core.text_format import format_count
from fedstill.federation.inprocess import InProcess
from fedstill.federation.ray_actors import (
    RayActors,
    RayFederation,
    actor_count,
    connect,
    raise_error,
    require_ray,
    to_message,
)
from fedstill.node.audit_entries import ENTRY_FIELDS, SECURITY_EVENTS
from fedstill.node.node import Node
from fedstill.node.protection import needs_mechanism
from fedstill.protocol.local_config import Span
from fedstill.runs.build import Setting
from fedstill.runs.group_training import GroupTraining
from fedstill.runs.ray_nodes import RayNodes
from fedstill.runs.simulation import Simulation
from fedstill.runs.spec import RunSpec, to_dict

TRAINING_SECONDS = 1.0  # of local training between two looks at the progress and the next checkpoint


class RaySimulation(Simulation):
    """Simulation whose nodes are computed in Ray actors.

    Args:
        setting: as of :class:`~fedstill.runs.simulation.Simulation`, made from a configuration.

    Raises:
        DeployError: Ray is not installed.
        ArgumentError: an option that this backend does not support.
    """

    def __init__(self, setting: Setting) -> None:
        spec = setting.spec
        if spec.link.secure_aggregation:
            expected = "local or flare, with link.secure_aggregation"
            raise ArgumentError("engine.backend", "ray", expected)
        if needs_mechanism(spec.nodes.privacy):
            expected = "local or flare, with a privacy mechanism or a budget (nodes.privacy)"
            raise ArgumentError("engine.backend", "ray", expected)
        if spec.adversary.count:
            raise ArgumentError("engine.backend", "ray", "local, with malicious nodes (adversary)")
        require_ray()
        self._actors: RayActors | None = None
        self._has_connected = self._is_trained = self._has_trained_in_actors = False
        self._known_phases = set[str]()
        self._saved_steps: dict[str, int] = {}
        self._logged_steps: dict[str, int] = {}
        super().__init__(setting)

    # --- the actors -----------------------------------------------------------------------------------------

    @property
    def actors(self) -> RayActors:
        """The actors of a run that has started."""
        if self._actors is None:
            raise RuntimeError("the run has not started its actors")
        return self._actors

    def _prepare_nodes(self, saved: Mapping[str, Any]) -> None:
        super()._prepare_nodes(saved)
        spec, names = self.setting.spec, [node.name for node in self.nodes]
        for group in self.groups.get("local_training", ()):  # which may be divided over several actors
            self.local_steps.update(dict.fromkeys(group, self.local_steps.get(group[0], 0)))
        self._saved_steps = dict(self.local_steps)
        self._is_trained = bool(saved.get("server"))
        self._has_connected = connect(
            spec.engine.ray.address, (spec.engine.ray.actors or 1) * max(spec.engine.threads, 1)
        )
        count = actor_count(spec.engine, len(names))
        bounds = [len(names) * index // count for index in range(count + 1)]
        parts = [names[start:end] for start, end in pairwise(bounds)]
        self._actors = RayActors(RayNodes, parts, self._plan, spec.engine, spec.link.wait)

    def _plan(self, names: Sequence[str]) -> State:
        """Return the first message for an actor: its nodes in their saved state, and all that they need."""
        setting, part = self.setting, set(names)
        given = {
            node.name: {
                "index": index,
                "inputs": node.data.inputs,
                "targets": node.data.targets,
                "groups": node.data.groups,
            }
            for index, node in enumerate(setting.nodes)
            if node.name in part
        }
        public = setting.public
        return {
            "folder": str(Path.cwd()),
            "spec": to_dict(setting.spec),
            "classes": list(setting.classes),
            "shape": list(self.shape),
            "mean": list(setting.mean),
            "std": list(setting.std),
            "vocabulary": setting.vocabulary,
            "schema": to_table(setting.schema),
            "precision": self.compute.precision,
            "public": None
            if public is None
            else {"name": public.name, "inputs": public.inputs, "labels": public.labels, "note": public.note},
            "nodes": given,
            "states": self._states(names),
            "local_steps": {name: steps for name, steps in self._saved_steps.items() if name in part},
            "groups": self.groups,
            "is_trained": self._is_trained,
            "entries": [
                {name: entry[name] for name in ENTRY_FIELDS}
                for entry in self.audit.entries()
                if entry["node"] in part and entry["part"] not in SECURITY_EVENTS
            ],
        }

    def _states(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the saved state of some nodes by name."""
        return {name: self._named_nodes[name].state_dict() for name in names}

    @cached_property
    def _named_nodes(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def _load_states(self) -> None:
        """Load the actors' state into the copies of their nodes, unless it is there."""
        if self._is_trained and not self.actors.is_changed:
            return
        for reply in self.actors.call_all("states", is_repeated=False):
            self.local_steps.update(reply["steps"])
            for name, state in reply["states"].items():
                self._named_nodes[name].load_state_dict(state)
        self._saved_steps = dict(self.local_steps)
        self.actors.set_saved()

    def _close(self) -> None:
        import ray

        if self._actors is not None:
            self._actors.close()
        if self._has_connected:
            ray.shutdown()

    # --- parts of the loop ----------------------------------------------------------------------------------

    def _federation(self, groups: Sequence[Sequence[Node]]) -> InProcess:
        if self._actors is None:  # the trial server
            return super()._federation(groups)
        link = self.setting.spec.link
        return RayFederation(self.nodes, self._actors, self.side, self.compute, link, self.audit)

    def _grouped_nodes(self, phase: str, nodes: Sequence[Node]) -> list[list[Node]]:
        """Return the nodes in the groups in which the actors compute them."""
        if phase not in self._known_phases:
            replies = self.actors.call_all("group", phase, is_repeated=False)
            self.groups[phase] = [group for reply in replies for group in reply["groups"]]
            self._known_phases.add(phase)
        return super()._grouped_nodes(phase, nodes)

    def _train_locally(self) -> None:
        super()._train_locally()
        if self._is_trained:  # before the run was resumed
            return
        self._is_trained = True
        # Models of the cache are in the copies only.
        is_cached = self.side.initial_training is not None and not self._has_trained_in_actors
        arguments = {
            index: (to_message(self._states(names) if is_cached else {}),)
            for index, names in enumerate(self.actors.parts)
        }
        raise_error(self.actors.call("begin_queries", arguments, is_repeated=False))

    def _train(self, groups: Sequence[Sequence[Node]], phase: str, span: Span) -> None:
        if phase == "centralized":
            return super()._train(groups, phase, span)
        self._has_trained_in_actors = True
        local = self.setting.spec.nodes.local
        training = GroupTraining(groups, phase, span, self.task, local, self.compute, self.local_steps)
        while training.remaining_steps():
            for reply in self.actors.call_all("train", TRAINING_SECONDS, is_repeated=False):
                self.local_steps.update(reply["steps"])
                self._log_new_losses(reply["lines"])
            self.bars.update(*self._phase_and_steps(phase))
            if self.records.is_save_due():
                self.save_state()
        return self._load_states()

    def _log_new_losses(self, lines: Sequence[dict[str, Any]]) -> None:
        """Log losses, without those of steps that an actor has repeated after a restart."""
        for line in lines:
            if line["step"] > self._logged_steps.get(line["node"], 0):
                self._logged_steps[line["node"]] = line["step"]
                self.records.add_metrics(line)

    def _node_state(self) -> Mapping[str, Any]:
        self._load_states()
        return super()._node_state()

    # --- evaluation -----------------------------------------------------------------------------------------

    def evaluate(self) -> Mapping[str, float]:
        """See :class:`~fedstill.runs.simulation_metrics.MeasuredSimulation`."""
        self._load_states()
        return super().evaluate()

    def results(self) -> dict[str, Any]:
        """See :class:`~fedstill.runs.simulation.Simulation`."""
        self._load_states()
        if restarts := self.actors.restarts:
            self.notes.append(f"{format_count(restarts, 'Ray actor')} died and restarted during the run")
        return super().results()

    def group_info(self) -> Mapping[str, Any]:
        return {**super().group_info(), "actors": len(self.actors)}


def simulation_class(spec: RunSpec) -> type[Simulation]:
    """Return the class of a configuration's simulation, by ``engine.backend``."""
    return RaySimulation if spec.engine.backend == "ray" else Simulation
