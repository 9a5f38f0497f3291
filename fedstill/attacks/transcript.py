"""Replays of finished runs, and transcripts of the releases that their servers received.

A simulation is determined by its configuration, so that it can be repeated. Two checks compare the replay
with the run: its releases have the sizes that the run's audit log counts, for each node and payload kind,
and it reaches the same student, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedstill import models
from fedstill.core.compute import RayConfig
from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ArgumentError, RunFolderError
from fedstill.core.run_writer import ATTACK_NEEDS_CONFIG, read_result, reject_run_of_python_objects
from fedstill.data.loading import load
from fedstill.data.public import PublicData
from fedstill.federation.federation import SentQuery
from fedstill.federation.inprocess import InProcess
from fedstill.node.audit_entries import GRADIENT, RESPONSE
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.node import Node
from fedstill.protocol.payload_kinds import INDICES, INPUTS, payload_kind
from fedstill.protocol.secure_aggregation import SUM, add_contributions, decode_sums
from fedstill.protocol.wire_format import Tensors, decompress
from fedstill.runs.build import LoadedData, Setting, build_setting, prepare_data
from fedstill.runs.feature_space import FeatureSpace
from fedstill.runs.simulation import Simulation
from fedstill.runs.spec import RunSpec, load_toml
from fedstill.runs.student_file import file_module

STUDENT_TOLERANCE = 1e-2  # relative distance, above the accumulated rounding of other engines


@dataclass(frozen=True, eq=False)
class ObservedRelease:
    """One release, with its query.

    Args:
        node: name.
        number: of the query.
        query: its name.
        part: ``"response"`` or ``"gradient"``.
        kinds: payload kind of each released tensor.
        tensors: released tensors by name.
        sent: tensors sent to the node, by name.
        query_kinds: payload kind of each tensor of the query; empty for gradients.
        is_shifted: the node shifted the inputs before its response.
    """

    node: str
    number: int
    query: str
    part: str
    kinds: Mapping[str, str]
    tensors: Tensors
    sent: Tensors
    query_kinds: Mapping[str, str]
    is_shifted: bool = False


ReleaseListener = Callable[[ObservedRelease], Any]
DecodeScores = Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]


@dataclass(eq=False)
class ServerTranscript:
    """Data that the server of a run received, as far as attacks use it.

    Args:
        max_rows: number of last rows of queries and responses that are kept.
        decode: values of released scores (:meth:`~fedstill.protocol.method.Method.decode_scores`).
        counts: first label counts of each node, ``(C,)``.
        contributors: nodes that released anything but counts.
        has_generated_inputs: the server generated the queried inputs.
    """

    max_rows: int
    decode: DecodeScores = lambda scores, sent: scores
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    contributors: set[str] = field(default_factory=set)
    has_generated_inputs: bool = False
    _inputs_by_query: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # by query number
    _logits_by_node: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def record_release(self, release: ObservedRelease, public: PublicData | None) -> None:
        """Add one release."""
        kinds = {name: payload_kind(kind) for name, kind in release.kinds.items()}
        if any(kind.category != "counts" for kind in kinds.values()):
            self.contributors.add(release.node)
        counted = [release.tensors[name] for name, kind in kinds.items() if kind.by_class]
        if counted:  # by class, and perhaps their sum
            self.counts.setdefault(release.node, max(counted, key=torch.Tensor.numel).flatten())
        logits = next(
            (release.tensors[name] for name, kind in kinds.items() if kind.category == "scores"), None
        )
        if logits is not None:
            logits = self.decode(logits, release.sent)
        inputs = None if logits is None else _query_inputs(release, public, len(logits))
        if logits is None or inputs is None or len(logits) != len(inputs):
            return
        if not self._inputs_by_query or self._inputs_by_query[-1][0] != release.number:
            self._inputs_by_query.append((release.number, inputs))
            self.has_generated_inputs = self.has_generated_inputs or INPUTS in release.query_kinds.values()
            self._drop_old_queries()
        self._logits_by_node.setdefault(release.node, {})[release.number] = logits

    def _drop_old_queries(self) -> None:
        """Drop queries that are not needed for the last rows."""
        while (
            len(self._inputs_by_query) > 1
            and sum(len(inputs) for _, inputs in self._inputs_by_query[1:]) >= self.max_rows
        ):
            number, _ = self._inputs_by_query.pop(0)
            for logits in self._logits_by_node.values():
                logits.pop(number, None)

    @property
    def inputs(self) -> torch.Tensor | None:
        """Queried inputs ``(Q, ...)``, on the CPU; None without queries about inputs."""
        return (
            torch.cat([about.cpu() for _, about in self._inputs_by_query])[-self.max_rows :]
            if self._inputs_by_query
            else None
        )

    def responses(self, node: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the inputs ``(Q, ...)`` and logits ``(Q, classes)`` of a node; None without responses."""
        logits = self._logits_by_node.get(node, {})
        if not logits:
            return None
        inputs = torch.cat([about.cpu() for number, about in self._inputs_by_query if number in logits])
        outputs = torch.cat(
            [logits[number].cpu().float() for number, _ in self._inputs_by_query if number in logits]
        )
        return inputs[-self.max_rows :], outputs[-self.max_rows :]


def _query_inputs(release: ObservedRelease, public: PublicData | None, count: int) -> torch.Tensor | None:
    """Return the inputs of a number of responses; None if the node shifted them."""
    for name, kind in release.query_kinds.items():
        if kind == INPUTS and name in release.sent:
            return release.sent[name]
    rows = [name for name, kind in release.query_kinds.items() if kind == INDICES and name in release.sent]
    if not rows or public is None or release.is_shifted:
        return None
    indices = release.sent[rows[-1]].long().cpu()
    if len(indices) == 2 and int(indices[1] - indices[0]) == count:  # from one row up to another
        return public.inputs[int(indices[0]) : int(indices[1])]
    return public.inputs[indices.to(public.inputs.device)]


@dataclass(frozen=True, eq=False)
class ReplayedRun:
    """Parts of a finished run.

    Args:
        config: of the run, with its nodes in this process and without evaluations.
        data: data set.
        parts: records of each node.
        public: public data.
        feature_space: backbone whose features are the records, if there is one.
    """

    config: RunSpec
    data: DataSet
    parts: Sequence[TensorData]
    public: PublicData | None
    feature_space: FeatureSpace | None = None

    @classmethod
    def from_config(cls, config: RunSpec) -> ReplayedRun:
        """Load the data of a run's configuration.

        Raises:
            FedstillError: data that cannot be read or divided.
        """
        # All backends give the same metrics, up to rounding.
        engine = config.engine
        if engine.backend != "local":
            engine = replace(engine, backend="local", batching="one-by-one", ray=RayConfig())
        no_evaluation = replace(config.evaluation, every=0, centralized=False, samples=0)
        config = replace(config, engine=engine, evaluation=no_evaluation)
        loaded = prepare_data(config, load(config.data, config.task))
        return cls(config, loaded.data, loaded.parts, loaded.public, loaded.feature_space)

    @property
    def new_setting(self) -> Setting:
        """Data and networks in their initial state, created at each access."""
        loaded = LoadedData(self.data, self.parts, self.public, self.feature_space)
        return build_setting(self.config, loaded)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of an input."""
        return tuple(self.data.test.inputs.shape[1:])

    def model_factory(self, name: str) -> Callable[[int], nn.Module]:
        """Return a factory of untrained networks of an architecture, by seed."""
        data, classes = self.data, len(self.data.classes)
        return lambda seed: models.build(
            name, self.input_shape, classes, seed, "shadow", vocabulary=data.vocabulary
        )

    def experiment(self, **changes: Any) -> ObservedSimulation:
        """Return the run before its start, with changes to its setting."""
        return ObservedSimulation(replace(self.new_setting, **changes))


def load_run(folder: Path) -> ReplayedRun:
    """Load the parts of a finished run from its folder.

    Raises:
        RunFolderError: there is no finished run in the folder.
        ArgumentError: the nodes' data are not on this machine.
    """
    reject_run_of_python_objects(folder, ATTACK_NEEDS_CONFIG)
    if not all((folder / name).exists() for name in ("result.json", "config.toml")):
        raise RunFolderError(
            f"{folder} holds no finished run: there is no result.json or no config.toml in it"
        )
    config = load_toml(folder / "config.toml")
    if config.engine.startup_kit:
        raise ArgumentError("run", str(folder), "a run whose nodes' data are on this machine")
    # This machine might choose another precision.
    precision = read_result(folder / "result.json")["engine"]["precision"]
    return ReplayedRun.from_config(replace(config, engine=replace(config.engine, precision=precision)))


def replay_run(
    folder: Path, replayed: ReplayedRun, max_rows: int, listener: ReleaseListener = lambda release: None
) -> tuple[ObservedSimulation, ServerTranscript, str | None]:
    """Replay a run to its end, and load the student of the original run.

    Args:
        folder: of the run.
        replayed: parts of the run.
        max_rows: number of last rows of queries and responses in the transcript.
        listener: called with each release.

    Returns:
        The experiment at its end, the transcript, and the difference to the original run, or None.

    Raises:
        RunFolderError: the student in the folder is broken.
    """
    experiment = replayed.experiment()
    transcript = ServerTranscript(max_rows, experiment.method.decode_scores)
    if not (folder / FILE).exists():
        raise RunFolderError(f"{folder} holds no {FILE}, against which what left can be checked")

    def record_and_notify(release: ObservedRelease) -> None:
        transcript.record_release(release, experiment.public)
        listener(release)

    experiment.run_with_listener(record_and_notify)
    with closing(AuditLog(folder / FILE, read_only=True)) as audit:
        disagreement = _find_disagreement(audit, experiment.audit)
    if experiment.has_student:
        file = folder / "student.safetensors"
        try:
            state = load_file(str(file))
        except (SafetensorError, OSError) as error:
            raise RunFolderError(f"{file} cannot be read: {error}") from error
        module = file_module(experiment.setting)
        relative_distance = _relative_distance(module, state)
        if not relative_distance <= STUDENT_TOLERANCE and disagreement is None:
            disagreement = (
                f"the replay reached another student, at a distance of {100 * relative_distance:.2g} %"
            )
        module.load_state_dict(state)
    return experiment, transcript, disagreement


def _find_disagreement(run: AuditLog, repetition: AuditLog) -> str | None:
    """Describe the first difference in released bytes between the run and the replay, by node and kind, or
    None.
    """
    logged, repeated = (
        {
            (node, kind): n
            for (_, node, direction, kind), n in audit.totals.bytes.items()
            if direction == "up" and n
        }
        for audit in (run, repetition)
    )
    for node, kind in sorted({*logged, *repeated}):
        logged_bytes, repeated_bytes = (counts.get((node, kind), 0) for counts in (logged, repeated))
        if logged_bytes != repeated_bytes:
            return f"{node}: {logged_bytes} bytes of {kind} in the audit log, {repeated_bytes} in the replay"
    return None


def _relative_distance(network: nn.Module, state: Mapping[str, torch.Tensor]) -> float:
    """Distance of a network from weights, divided by their norm; infinity for another architecture."""
    network_state = network.state_dict()
    if {name: value.shape for name, value in network_state.items()} != {
        n: value.shape for n, value in state.items()
    }:
        return math.inf
    pairs = [(network_state[name].cpu().double(), value.double()) for name, value in state.items()]
    length = sum(float(value.square().sum()) for _, value in pairs)
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs) / max(length, 1e-30))


class StopListening(Exception):
    """Raised by a listener to end the run."""


class ObservedSimulation(Simulation):
    """Simulation whose releases are passed to a listener."""

    on_release: ReleaseListener

    def run_with_listener(self, listener: ReleaseListener) -> bool:
        """Run to the end, and return True if it was reached. Later releases are not observed.

        ``listener`` is called with each release in order, and may raise :class:`StopListening` to end the
        run.
        """
        self.on_release = listener
        try:
            self.run()
        except StopListening:
            return False
        finally:
            self.on_release = lambda release: None  # later queries of an attacker are not part of the run
        return True

    def allow_queries_after_end(self) -> None:
        """Allow queries after the run's end, as to an ensemble in use.

        Their costs are charged to a new log, as the run's own is closed with the run.
        """
        self.audit.open(None)

    def _federation(self, groups: Sequence[Sequence[Node]]) -> InProcess:
        tapped = _ObservedEngine(self.nodes, groups, self.side, self.compute, self.setting.spec.link)
        tapped.on_release = lambda release: self.on_release(release)
        return tapped


class _ObservedEngine(InProcess):
    """Engine that passes the releases to a listener on their way to the server."""

    on_release: ReleaseListener

    def collect_responses(self, asked: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        responses = super().collect_responses(asked, sent)
        for node, tensors in self._releases_visible_to_server(sent.query, responses).items():
            self._notify(node, tensors, sent.query, sent.number, RESPONSE, sent.tensors)
        return responses

    def collect_gradients(
        self, number: int, query: str, output_gradients: Mapping[str, Tensors], encoding: Any = None
    ) -> Mapping[str, Tensors]:
        gradients = super().collect_gradients(number, query, output_gradients, encoding)
        for node, tensors in self._releases_visible_to_server(query, gradients).items():
            sent = (
                output_gradients[node] if node in output_gradients else next(iter(output_gradients.values()))
            )  # of a sum, the same to all
            self._notify(node, tensors, query, number, GRADIENT, sent)
        return gradients

    def _releases_visible_to_server(
        self, query: str, released: Mapping[str, Tensors]
    ) -> Mapping[str, Tensors]:
        """Return the releases that the server sees: those of each node, or their sum alone."""
        declared = self.queries[query]
        if not declared.sums:
            return released
        return {SUM: decode_sums(add_contributions(list(released.values())), declared.released_kinds())[0]}

    def _notify(
        self, node: str, released: Tensors, query: str, number: int, part: str, sent: Tensors
    ) -> None:
        kinds, shift_name = self.queries[query].released_kinds(), self.queries[query].details.shift_seed
        query_kinds = self.queries[query].sends if part == RESPONSE else {}
        # Copies, as the server later changes its tensors in place.
        tensors, received = (
            {name: tensor.detach().clone() for name, tensor in decompress(tensors_).items()}
            for tensors_ in (released, sent)
        )
        is_moved = shift_name in received and bool(received[shift_name].any())
        released_kinds = {name: kinds[name] for name in tensors}
        self.on_release(
            ObservedRelease(
                node, number, query, part, released_kinds, tensors, received, query_kinds, is_moved
            )
        )
