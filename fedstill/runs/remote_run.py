"""A run whose nodes are elsewhere: its server has a method, a student and test data of its own.

It knows no node's data, model or policy, and cannot name them. Its folder is a run's folder like any other;
a run that was stopped in it goes on from it, and its nodes go back to the mark that it had reached.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fedstill.core.dataset import DataSet
from fedstill.data.input_spec import InputSpec
from fedstill.data.loading import load
from fedstill.data.public import PublicData, load_public
from fedstill.federation.link_costs import LinkCosts
from fedstill.federation.remote import Remote
from fedstill.federation.transport import Link
from fedstill.methods._label_histogram import LabelHistogram
from fedstill.methods._server import Server
from fedstill.node.network_setup import architecture_hash
from fedstill.node.replies import NOT_JOINED
from fedstill.privacy.statement import Statement
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import build_node_side
from fedstill.protocol.payload_kinds import LABEL_COUNTS
from fedstill.protocol.queries import NodeSetting
from fedstill.protocol.run_plan import RunPlan, describe, public_fingerprint
from fedstill.protocol.wire_format import WireConfig
from fedstill.runs.build import about, servers
from fedstill.runs.config import RunConfig, to_dict
from fedstill.runs.loop import Run
from fedstill.runs.setting import check_networks

LINK = ("messages", "seconds_each", "nodes", "waiting", "absent", "link")  # what is told on a run's way


def plan_of(config: RunConfig, data: DataSet, public: PublicData | None, name: str, nodes: int) -> RunPlan:
    """What so many nodes get to know of a run by this name, with the server's own data and public data."""
    return RunPlan(
        name,
        to_dict(config)["method"],
        InputSpec.from_data(config.task, data),
        WireConfig(config.link.inputs, config.link.gradients),
        public_fingerprint(public),
        ("", "") if public is None else (public.name, public.note),
        re.sub(r"[^ -~]", "?", config.student.model)[:200],
        config.link.min_nodes(nodes),
        config.link.secure_aggregation,
    )


class RemoteRun(Run):
    """A run at the server, ready to begin.

    Args:
        config: the run. Its tables ``nodes`` and ``split`` are not read, but for ``nodes.local``, by which a
            server trains that does so by itself.
        name: by which the nodes know the run again.

    Raises:
        FedstillError: data, student and method do not fit together.
    """

    _initial_server: Server

    def __init__(self, config: RunConfig, link: Link, name: str) -> None:
        self.config = config
        self.data = load(config.data, config.task, train_needed=False)
        _, public = load_public(config.public, self.data, config.task)
        super().__init__(servers(config, self.data, public))
        plan = plan_of(config, self.data, public, name, len(link.nodes))
        self.description = describe(plan, public)
        # What the nodes are asked is the method's declaration; what they have is not known here.
        at = NodeSetting(
            self.task,
            LocalConfig(),
            self.compute,
            self.public,
            secure_aggregation=config.link.secure_aggregation,
        )
        self.side = build_node_side(self.method, at)
        self.federation = Remote(link, plan, self.side.queries, config.link, self.audit, self.compute, public)
        self.federation.on_waiting = lambda nodes: self.bars.set_waiting(nodes)

    def about(self) -> dict[str, Any]:
        """What the result says beside the figures."""
        split = {"name": "as it is", "nodes": len(self.federation.nodes)}
        return about(self.config, self.data, None, split)

    # --- the loop's parts -----------------------------------------------------------------------------

    def _prepare_nodes(self, saved: Mapping[str, Any]) -> None:
        if saved:
            self.federation.link_costs = LinkCosts(**saved["link_costs"])
        self.federation.join()
        kind, joined = architecture_hash(self.student), self.federation.node_status
        alike = {name: told.architecture == kind for name, told in joined.items()}
        # Of several architectures a server knows no other network than its student.
        same = self.needs.same_architecture or self.needs.student_architecture
        needs, frozen = replace(self.needs, same_architecture=same), {n: joined[n].is_frozen for n in joined}
        check_networks(self.method.title, needs, frozen, alike)
        # Made before anything is trained: it refuses what a node would refuse later.
        self._initial_server = self._server(
            self.federation, self.student, ((self.federation.nodes, self.student),)
        )

    def _train_locally(self) -> None:
        with self.clock.phase("local_training"):
            self.federation.train_nodes(lambda percent: self.bars.update("local training", percent, 100))

    def _create_server(self, saved: Mapping[str, Any]) -> Server:
        server = self._initial_server
        # Also without a saved state: nodes may have answered before the server was stopped.
        self.federation.restore_checkpoint(saved["checkpoint"] if saved else 0)
        if saved:
            server.load_state_dict(saved["server"])
        return server

    def _run_steps(self, server: Server) -> None:
        super()._run_steps(server)
        self._save()  # all nodes and the server at one mark, as a rehearsal is looked into

    def _node_state(self) -> Mapping[str, Any]:
        """First the nodes remember: the server's mark is always one of theirs."""
        checkpoint = self.federation.number
        self.federation.save_checkpoint(checkpoint)
        return {"checkpoint": checkpoint, "link_costs": asdict(self.federation.link_costs)}

    def _train_centralized(self, saved: Mapping[str, Any]) -> None:
        """No data of any node are here."""

    def _close(self) -> None:
        self.federation.end_run()

    def evaluate(self) -> Mapping[str, float]:
        """What the server can measure by itself: its student on its own test data, and what the link cost."""
        cost = self.federation.link_costs.costs(0.0, 0.0)
        told = {f"link_{name}": cost[name] for name in LINK}
        outputs = self.responses(self.test.inputs)
        if outputs is not None:
            told[self.task.metric] = self.evaluation.main_metric(outputs)
        return told

    # --- what the result says -------------------------------------------------------------------------

    def results(self) -> dict[str, Any]:
        """See :class:`~fedstill.runs.loop.Run`; and what the link cost."""
        self.notes = self._said()
        results = super().results()
        total, training = results["seconds"]["total"], results["seconds"]["local_training"]
        return {**results, "link": self.federation.link_costs.costs(total, training)}

    def _privacy_statements(self) -> Mapping[str, Statement]:
        return {name: told.privacy for name, told in self.federation.node_status.items()}

    def _describe_nodes(self) -> list[dict[str, Any]]:
        return [self._about(name) for name in self.federation.nodes]

    def _about(self, name: str) -> dict[str, Any]:
        """What a node said of itself, and the label counts that it answered."""
        node = self.federation.node_status.get(name, NOT_JOINED)
        told = LabelHistogram.among(self.server.state) if LABEL_COUNTS in self.side.released_kinds() else None
        row = None if told is None or name not in told.names else told.of([name])
        return {
            "name": name,
            "model": node.model,
            "parameters": node.parameters,
            "examples": None if row is None else round(float(row.sizes[0])),
            "label_counts": None if row is None else [round(float(count)) for count in row.counts[0]],
            "versions": dict(node.versions) or None,
        }

    def _said(self) -> list[str]:
        """What nodes said is switched off there, each once; by whom, unless all said it."""
        said: dict[str, list[str]] = {}
        for node, told in self.federation.node_status.items():
            for note in told.notes:
                said.setdefault(note, []).append(node)
        everyone = len(self.federation.node_status)
        return [n if len(who) == everyone else f"{', '.join(who)}: {n}" for n, who in said.items()]
