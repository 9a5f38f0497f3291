"""What the server of a run heard: releases as they left their nodes' gates, and what attacks use of them.

A finished run, done once more to hear what left its nodes: all that attacks on it are given.

A simulation follows from its configuration, so it can be repeated. Whether the repetition is the run is
checked twice: it let out what the run's own audit log counts, node by node and kind by kind, and where there
is a student, it came to the same one.
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

from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ArgumentError, RunFolderError
from fedstill.core.run_writer import ATTACK_NEEDS_CONFIG, read_result, require_no_objects
from fedstill.data.loading import load
from fedstill.data.public import PublicData
from fedstill.federation.inprocess import InProcess
from fedstill.federation.secure_aggregation import SentQuery
from fedstill.node.audit_entries import GRADIENT, RESPONSE
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.node import Node
from fedstill.protocol.payload_kinds import INDICES, INPUTS, payload_kind
from fedstill.protocol.secure_aggregation import SUM, SumRequest, add_contributions, decode_sums
from fedstill.protocol.wire_format import Tensors, decompress
from fedstill.runs.build import assemble, divide
from fedstill.runs.config import RunConfig, load_toml
from fedstill.runs.run import REHEARSED
from fedstill.runs.setting import Setting
from fedstill.runs.simulation import Simulation

STUDENT_TOLERANCE = 1e-2  # of a student's length: rounding of other engines grows to less than that


@dataclass(frozen=True, eq=False)
class ObservedRelease:
    """One release, with the query that it answers.

    Args:
        part: ``"response"`` or ``"gradient"``.
        kinds: the kind of each tensor that left.
        sent: what had come down, by name.
        asked: the kind of each tensor of the query; empty for what was pulled back.
        moved: whether it is about inputs that the node moved before it answered.
    """

    node: str
    number: int
    query: str
    part: str
    kinds: Mapping[str, str]
    tensors: Tensors
    sent: Tensors
    asked: Mapping[str, str]
    moved: bool = False


ReleaseListener = Callable[[ObservedRelease], Any]


@dataclass(eq=False)
class ServerTranscript:
    """What the server of a run saw, as far as attacks use it.

    Args:
        most: rows of queries and answers that are kept, the last ones.
        counts: label counts as each node told them first, ``(C,)``.
        contributors: nodes of which something was heard beside how much they hold.
        has_generated_inputs: whether the server made what it asked about, by itself.
    """

    most: int
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    contributors: set[str] = field(default_factory=set)
    has_generated_inputs: bool = False
    _inputs_by_query: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # by number of the query
    _logits_by_node: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def record_release(self, release: ObservedRelease, public: PublicData | None) -> None:
        """Hear one release."""
        kinds = {name: payload_kind(kind) for name, kind in release.kinds.items()}
        if any(kind.category != "counts" for kind in kinds.values()):
            self.contributors.add(release.node)
        counted = [release.tensors[name] for name, kind in kinds.items() if kind.by_class]
        if counted:  # by class, and perhaps their sum
            self.counts.setdefault(release.node, max(counted, key=torch.Tensor.numel).flatten())
        logits = next(
            (release.tensors[name] for name, kind in kinds.items() if kind.category == "scores"), None
        )
        inputs = None if logits is None else _query_inputs(release, public, len(logits))
        if logits is None or inputs is None or len(logits) != len(inputs):
            return
        if not self._inputs_by_query or self._inputs_by_query[-1][0] != release.number:
            self._inputs_by_query.append((release.number, inputs))
            self.has_generated_inputs = self.has_generated_inputs or INPUTS in release.asked.values()
            self._drop_old_queries()
        self._logits_by_node.setdefault(release.node, {})[release.number] = logits

    def _drop_old_queries(self) -> None:
        """Keep as many queries as are needed for the rows that are wanted."""
        while (
            len(self._inputs_by_query) > 1
            and sum(len(inputs) for _, inputs in self._inputs_by_query[1:]) >= self.most
        ):
            number, _ = self._inputs_by_query.pop(0)
            for logits in self._logits_by_node.values():
                logits.pop(number, None)

    @property
    def inputs(self) -> torch.Tensor | None:
        """What nodes were asked about ``(Q, ...)``, on the CPU; None where they were asked about nothing."""
        return (
            torch.cat([about.cpu() for _, about in self._inputs_by_query])[-self.most :]
            if self._inputs_by_query
            else None
        )

    def responses(self, node: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a node was asked about ``(Q, ...)`` and what it answered ``(Q, classes)``; None: nothing."""
        logits = self._logits_by_node.get(node, {})
        if not logits:
            return None
        inputs = torch.cat([about.cpu() for number, about in self._inputs_by_query if number in logits])
        outputs = torch.cat(
            [logits[number].cpu().float() for number, _ in self._inputs_by_query if number in logits]
        )
        return inputs[-self.most :], outputs[-self.most :]


def _query_inputs(release: ObservedRelease, public: PublicData | None, count: int) -> torch.Tensor | None:
    """The inputs that so many answers are about; None where they were moved."""
    for name, kind in release.asked.items():
        if kind == INPUTS and name in release.sent:
            return release.sent[name]
    rows = [name for name, kind in release.asked.items() if kind == INDICES and name in release.sent]
    if not rows or public is None or release.moved:
        return None
    indices = release.sent[rows[-1]].long().cpu()
    if len(indices) == 2 and int(indices[1] - indices[0]) == count:  # from one row up to another
        return public.inputs[int(indices[0]) : int(indices[1])]
    return public.inputs[indices.to(public.inputs.device)]


@dataclass(frozen=True, eq=False)
class ReplayedRun:
    """What a run was made of.

    Args:
        config: of the run, with its nodes in this process and without what only measures it.
    """

    config: RunConfig
    data: DataSet
    parts: Sequence[TensorData]
    public: PublicData | None

    @classmethod
    def of(cls, config: RunConfig) -> ReplayedRun:
        """Of a run's configuration.

        Raises:
            FedstillError: data that cannot be read or divided.
        """
        # Engines give the same figures, to rounding.
        is_deployed = config.engine.name in REHEARSED
        engine = replace(config.engine, name="one-by-one" if is_deployed else config.engine.name)
        no_evaluation = replace(config.evaluation, every=0, centralized=False, samples=0)
        config = replace(config, engine=engine, evaluation=no_evaluation)
        data = load(config.data, config.task)
        parts, public = divide(config, data)
        return cls(config, data, parts, public)

    @property
    def setting(self) -> Setting:
        """Data and networks in their first state, as objects; made anew each time."""
        return assemble(self.config, self.data, self.parts, self.public)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an input."""
        return tuple(self.data.test.inputs.shape[1:])

    def experiment(self, **changes: Any) -> ObservedSimulation:
        """The run's experiment, with other parts of its setting where they are given."""
        return ObservedSimulation(replace(self.setting, **changes))


def load_run(folder: Path) -> ReplayedRun:
    """What a finished run in a folder was made of.

    Raises:
        RunFolderError: there is no finished run in the folder.
        ArgumentError: its nodes' data are not here.
    """
    require_no_objects(folder, ATTACK_NEEDS_CONFIG)
    if not all((folder / name).exists() for name in ("result.json", "config.toml")):
        raise RunFolderError(
            f"{folder} holds no finished run: there is no result.json or no config.toml in it"
        )
    config = load_toml(folder / "config.toml")
    if config.engine.startup_kit:
        raise ArgumentError("run", str(folder), "a run whose nodes' data are on this machine")
    # Chosen anew, it could be another one on this machine.
    precision = read_result(folder / "result.json")["engine"]["precision"]
    return ReplayedRun.of(replace(config, engine=replace(config.engine, precision=precision)))


def replay_run(
    folder: Path, replayed: ReplayedRun, max_rows: int, listener: ReleaseListener = lambda release: None
) -> tuple[ObservedSimulation, ServerTranscript, str | None]:
    """Repeat a run to its end, with the student that it really came to; ``also`` is called with each release.

    Returns:
        The experiment at its end, what its server saw (of queries and answers the last ``most`` rows), and
        why that is not the run of the folder, if it is not.

    Raises:
        RunFolderError: the student in the folder is broken.
    """
    experiment, transcript = replayed.experiment(), ServerTranscript(max_rows)
    if not (folder / FILE).exists():
        raise RunFolderError(f"{folder} holds no {FILE}, against which what left can be checked")

    def listen(release: ObservedRelease) -> None:
        transcript.record_release(release, experiment.public)
        listener(release)

    experiment.listen(listen)
    with closing(AuditLog(folder / FILE, read_only=True)) as audit:
        disagreement = _find_disagreement(audit, experiment.audit)
    if experiment.has_student:
        file = folder / "student.safetensors"
        try:
            state = load_file(str(file))
        except (SafetensorError, OSError) as error:
            raise RunFolderError(f"{file} cannot be read: {error}") from error
        relative_distance = _relative_distance(experiment.student, state)
        if not relative_distance <= STUDENT_TOLERANCE and disagreement is None:
            disagreement = f"the repetition came to another student, {100 * relative_distance:.2g} % apart from the run's own"
        experiment.student.load_state_dict(state)
    return experiment, transcript, disagreement


def _find_disagreement(run: AuditLog, repetition: AuditLog) -> str | None:
    """Where the bytes that left in a repetition are not those of the run, by node and kind; or None."""
    logged, repeated = (
        {(node, kind): n for (_, node, way, kind), n in audit.totals.bytes.items() if way == "up" and n}
        for audit in (run, repetition)
    )
    for node, kind in sorted({*logged, *repeated}):
        logged_bytes, repeated_bytes = (counts.get((node, kind), 0) for counts in (logged, repeated))
        if logged_bytes != repeated_bytes:
            return f"{node}: {logged_bytes} bytes of {kind} by the audit log, {repeated_bytes} heard"
    return None


def _relative_distance(network: nn.Module, state: Mapping[str, torch.Tensor]) -> float:
    """How far a network is from weights, over their length; infinity for those of another architecture."""
    network_state = network.state_dict()
    if {name: value.shape for name, value in network_state.items()} != {
        n: value.shape for n, value in state.items()
    }:
        return math.inf
    pairs = [(network_state[name].cpu().double(), value.double()) for name, value in state.items()]
    length = sum(float(value.square().sum()) for _, value in pairs)
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs) / max(length, 1e-30))


class StopListening(Exception):
    """Everything wanted has been heard: the run is let go."""


class ObservedSimulation(Simulation):
    """An experiment in this process whose releases somebody hears."""

    hear: ReleaseListener

    def listen(self, listener: ReleaseListener) -> bool:
        """Run from the start to its end, whether it came to it; nothing is heard after that, or kept.

        ``hear`` is called with each release in order, and raises :class:`StopListening` to end the run.
        """
        self.hear = listener
        try:
            self.run()
        except StopListening:
            return False
        finally:
            self.hear = lambda release: None  # what an attacker asks later on is no part of the run
        return True

    def reopen(self) -> None:
        """Let nodes answer after the run's end, as those of an ensemble in use do.

        What that costs is charged to a log that begins anew: a run's own is closed with the run.
        """
        self.audit.open(None)

    def _federation(self, groups: Sequence[Sequence[Node]]) -> InProcess:
        tapped = _ObservedEngine(self.nodes, groups, self.side, self.compute, self.setting.link)
        tapped.hear = lambda release: self.hear(release)
        return tapped


class _ObservedEngine(InProcess):
    """An engine whose releases are heard on their way to the server."""

    hear: ReleaseListener

    def _collect_responses(self, asked: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        responses = super()._collect_responses(asked, sent)
        for node, tensors in self._visible_to_server(sent.query, responses, sent.call).items():
            self._notify(node, tensors, sent.query, sent.number, RESPONSE, sent.tensors)
        return responses

    def _collect_gradients(
        self, number: int, query: str, pulls: Mapping[str, Tensors], call: SumRequest | None
    ) -> Mapping[str, Tensors]:
        gradients = super()._collect_gradients(number, query, pulls, call)
        for node, tensors in self._visible_to_server(query, gradients, call).items():
            sent = pulls[node] if node in pulls else next(iter(pulls.values()))  # of a sum, the same to all
            self._notify(node, tensors, query, number, GRADIENT, sent)
        return gradients

    def _visible_to_server(
        self, query: str, released: Mapping[str, Tensors], call: SumRequest | None
    ) -> Mapping[str, Tensors]:
        """What a server sees: each node's, or their sum alone."""
        if call is None:
            return released
        return {
            SUM: decode_sums(
                add_contributions(list(released.values())), self.queries[query].released_kinds()
            )[0]
        }

    def _notify(
        self, node: str, released: Tensors, query: str, number: int, part: str, sent: Tensors
    ) -> None:
        kinds, shift_name = self.queries[query].released_kinds(), self.queries[query].shift_seed
        asked = self.queries[query].sends if part == RESPONSE else {}
        # Copies: a server goes on to change its tensors in place.
        tensors, received = (
            {name: tensor.detach().clone() for name, tensor in decompress(each).items()}
            for each in (released, sent)
        )
        is_moved = shift_name in received and bool(received[shift_name].any())
        released_kinds = {name: kinds[name] for name in tensors}
        self.hear(
            ObservedRelease(node, number, query, part, released_kinds, tensors, received, asked, is_moved)
        )
