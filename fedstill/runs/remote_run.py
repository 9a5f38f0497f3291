"""Run with remote nodes, at the server, which has the method, a student and test data.

The server does not know the nodes' data, models or policies. A run that was interrupted resumes from its
folder, and its nodes restore the checkpoint that the server had reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from fedstill.core.errors import ArgumentError
from fedstill.data.data_spec import DataSpec
from fedstill.data.public import PublicData
from fedstill.federation.remote import LinkCosts, Remote
from fedstill.federation.secure_aggregation import SecureAggregation
from fedstill.federation.transport import Link
from fedstill.methods._label_histogram import LabelHistogram
from fedstill.methods._server import Server
from fedstill.node.model_setup import architecture_hash
from fedstill.node.replies import NOT_JOINED
from fedstill.privacy.statement import PrivacyStatement
from fedstill.protocol.feature_plan import FeaturePlan
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import NamedNetwork, build_node_side
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.payload_kinds import LABEL_COUNTS
from fedstill.protocol.recalibration import Recalibration
from fedstill.protocol.run_plan import RunPlan, describe, public_fingerprint
from fedstill.protocol.wire_format import WireConfig
from fedstill.runs.base import Run
from fedstill.runs.build import (
    Setting,
    build_server_setting,
    check_networks,
    describe_run,
    prepare_server_data,
)
from fedstill.runs.results import collect_results
from fedstill.runs.spec import RunSpec, to_dict

LINK = (
    "messages",
    "seconds_each",
    "nodes",
    "waiting",
    "absent",
    "link",
)  # costs that are logged during a run


def make_run_plan(
    spec: RunSpec,
    data_spec: DataSpec,
    public: PublicData | None,
    name: str,
    nodes: int,
    features: FeaturePlan | None = None,
    recalibration: Recalibration | None = None,
) -> RunPlan:
    """Return the plan of a run that the nodes get to know.

    Args:
        data_spec: spec of the inputs.
        public: public data as the models take them, or None.
        name: of the run.
        nodes: number of nodes.
        features: features that the models take in place of the inputs; None: they take the inputs.
        recalibration: recalibration of the student; None: none.
    """
    return RunPlan(
        name,
        to_dict(spec)["method"],
        data_spec,
        WireConfig(spec.link.inputs, spec.link.gradients),
        public_fingerprint(public),
        ("", "") if public is None else (public.name, public.note),
        re.sub(r"[^ -~]", "?", spec.student.model)[:200],
        spec.link.min_nodes(nodes),
        spec.link.secure_aggregation,
        features,
        recalibration,
    )


class RemoteRun(Run):
    """Run at the server, with remote nodes.

    Args:
        spec: the run. Its tables ``nodes`` and ``split`` are ignored, except for ``nodes.local``, the
            options of training at the server.
        link: carries messages to the nodes.
        name: by which the nodes identify the run.

    Raises:
        FedstillError: data, student and method do not fit together.
    """

    _initial_server: Server

    def __init__(self, spec: RunSpec, link: Link, name: str) -> None:
        if spec.adversary.count:
            expected = "none, as only nodes of a simulation can be made malicious"
            raise ArgumentError("adversary.name", spec.adversary.registered_name, expected)
        self.spec = spec
        loaded, data_spec = prepare_server_data(spec)
        self.data, public, self.feature_space = loaded.data, loaded.public, loaded.feature_space
        self._node_count = len(link.nodes)
        super().__init__(build_server_setting(spec, loaded))
        features = None if self.feature_space is None else self.feature_space.to_plan()
        plan = make_run_plan(spec, data_spec, public, name, len(link.nodes), features, self.recalibration)
        self.description = describe(plan, public)
        # The queries follow from the method alone; the nodes' data are unknown here.
        at = NodeSetting(
            self.task,
            LocalConfig(),
            self.compute,
            self.public,
            secure_aggregation=spec.link.secure_aggregation,
            recalibration=self.recalibration,
        )
        self.side = build_node_side(self.method, at)
        self.federation = Remote(link, plan, self.side.queries, spec.link, self.audit, self.compute, public)
        is_summed = spec.link.secure_aggregation
        self._aggregator = SecureAggregation.remote(self.federation) if is_summed else self.federation
        self.federation.on_waiting = lambda nodes: self.bars.set_waiting(nodes)

    def describe_run(self) -> dict[str, Any]:
        """Describe the run for its result."""
        split = {"name": "as it is", "nodes": len(self.federation.nodes)}
        about = describe_run(self.spec, self.data, None, split)
        space = self.feature_space
        return about if space is None else {**about, "features": space.to_record()}

    def _node_models(self, setting: Setting) -> Iterator[NamedNetwork]:
        """Yield ``student.model`` for each node, as no other architecture is known here."""
        for _ in range(self._node_count):
            yield NamedNetwork(setting.spec.student.model, setting.student)

    # --- parts of the loop ----------------------------------------------------------------------------

    def _prepare_nodes(self, saved: Mapping[str, Any]) -> None:
        if saved:
            self._require_same_models(saved["models"])
            self.federation.link_costs = LinkCosts(**saved["link_costs"])
        self.federation.join()
        kind, joined = architecture_hash(self.configured_student), self.federation.node_status
        alike = {name: status.architecture == kind for name, status in joined.items()}
        # The server only knows the architecture of its student.
        same = self.needs.same_architecture or self.needs.student_architecture
        needs, frozen = replace(self.needs, same_architecture=same), {n: joined[n].is_frozen for n in joined}
        check_networks(self.method.title, needs, frozen, alike)
        # Created before training, to refuse queries that a node would refuse later.
        self._initial_server = self._make_server(
            self._aggregator, self.student, ((self.federation.nodes, self.configured_student),)
        )

    def _train_locally(self) -> None:
        with self.clock.phase("local_training"):
            self.federation.train_nodes(lambda percent: self.bars.update("local training", percent, 100))

    def _create_server(self, saved: Mapping[str, Any]) -> Server:
        server = self._initial_server
        # Also without a checkpoint, as nodes may have responded before the server was stopped.
        self.federation.restore_checkpoint(saved["checkpoint"] if saved else 0)
        if saved:
            server.load_state_dict(saved["server"])
        return server

    def _run_steps(self, server: Server) -> None:
        super()._run_steps(server)
        self.save_state()  # a final checkpoint of all nodes and the server, which a rehearsal evaluates

    def _node_state(self) -> Mapping[str, Any]:
        """Save the nodes' checkpoints first, so that each checkpoint of the server exists at the nodes."""
        checkpoint = self.federation.number
        self.federation.save_checkpoint(checkpoint)
        return {
            "checkpoint": checkpoint,
            "link_costs": asdict(self.federation.link_costs),
            "models": self._model_fingerprints(),
        }

    def _train_centralized(self, saved: Mapping[str, Any]) -> None:
        """Do nothing: the nodes' data are not here."""

    def _close(self) -> None:
        self.federation.end_run()

    def evaluate(self) -> Mapping[str, float]:
        """Evaluate the student on the server's test data; return its main metric and the link's costs."""
        cost = self.federation.link_costs.costs(0.0, 0.0)
        status = {f"link_{name}": cost[name] for name in LINK}
        outputs = self.responses(self.test.inputs)
        if outputs is not None:
            status[self.task.metric] = self.evaluation.main_metric(outputs)
        return status

    # --- result ---------------------------------------------------------------------------------------

    def results(self) -> dict[str, Any]:
        """See :class:`~fedstill.runs.base.Run`; with the link's costs."""
        self.notes = [*(self.feature_space.notes if self.feature_space else ()), *self._node_notes()]
        results = collect_results(self)
        total, training = results["seconds"]["total"], results["seconds"]["local_training"]
        return {**results, "link": self.federation.link_costs.costs(total, training)}

    def privacy_statements(self) -> Mapping[str, PrivacyStatement]:
        return {name: status.privacy for name, status in self.federation.node_status.items()}

    def describe_nodes(self) -> list[dict[str, Any]]:
        return [self._about(name) for name in self.federation.nodes]

    def _about(self, name: str) -> dict[str, Any]:
        """Describe a node from its status and, if the method queries them, its label counts."""
        node = self.federation.node_status.get(name, NOT_JOINED)
        histogram = (
            LabelHistogram.find_in(self.server.state) if LABEL_COUNTS in self.side.released_kinds() else None
        )
        row = None if histogram is None or name not in histogram.names else histogram.select([name])
        return {
            "name": name,
            "model": node.model,
            "parameters": node.parameters,
            "examples": None if row is None else round(float(row.sizes[0])),
            "label_counts": None if row is None else [round(float(count)) for count in row.counts[0]],
            "versions": dict(node.versions) or None,
        }

    def _node_notes(self) -> list[str]:
        """Return the nodes' notes, each once, with the nodes' names unless all sent it."""
        notes_by_node: dict[str, list[str]] = {}
        for node, status in self.federation.node_status.items():
            for note in status.notes:
                notes_by_node.setdefault(note, []).append(node)
        node_count = len(self.federation.node_status)
        return [
            n if len(names) == node_count else f"{', '.join(names)}: {n}"
            for n, names in notes_by_node.items()
        ]
