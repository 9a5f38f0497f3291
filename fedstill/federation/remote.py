"""Federation of remote nodes, over any link that carries messages.

A query goes to all nodes at once; each has ``link.wait`` seconds. A lost message is sent again: a node
answers a query once, and repeats its response when it gets the same query under the same number again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import (
    DataError,
    DeployError,
    FedstillError,
    NodeFault,
    QueryMismatch,
    QueryRefused,
    combine_refusals,
    list_names,
)
from fedstill.core.text_format import format_seconds
from fedstill.data.public import PublicData
from fedstill.federation import transport
from fedstill.federation.federation import Federation, SentQuery
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.response_checks import require_finite_gradients
from fedstill.federation.transport import (
    EndlessReply,
    Link,
    LinkError,
    MessageSender,
    Reply,
    parse_node_status,
    parse_reply,
)
from fedstill.node.audit_entries import GRADIENT, RESPONSE, Entry
from fedstill.node.audit_log import AuditLog
from fedstill.node.replies import NodeStatus, NodeVersions, TrainingProgress
from fedstill.protocol.digests import digest
from fedstill.protocol.messages import (
    AnswerQuery,
    ComputeGradients,
    IdentifyNode,
    JoinRun,
    LeaveRun,
    LoadCheckpoint,
    Message,
    SaveCheckpoint,
    TrainLocally,
)
from fedstill.protocol.payload_kinds import GRADIENTS
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import PROTOCOL, RunPlan, public_tensors
from fedstill.protocol.wire_format import SCALE, Tensors, bytes_by_kind, tensor_bytes

logger = logging.getLogger("fedstill.server")

FIRST_WARNING = 2.0  # seconds until late nodes are logged; the interval then doubles
MAX_WARNING_INTERVAL = 60.0  # seconds
MAX_MESSAGES = 3  # messages in one call to a node: a join with public data
GRACE = 30.0  # additional seconds for processing a reply
PROBE_INTERVAL = 5.0  # seconds between two probes of an unreachable node


class Remote(Federation):
    """Nodes at the other end of a link.

    Args:
        link: carries messages to the nodes.
        plan: the run as the nodes see it.
        queries: queries that the method declares, by name.
        config: wire formats, timeout and quorum.
        audit: the server's own audit log.
        compute: device and memory layout for responses.
        public: public data, for nodes that do not have them yet.

    Attributes:
        node_status: reply of each node that has joined, by name.
        sender: sends messages to nodes.
        link_costs: time and bytes of communication.
        on_waiting: called with the names of the nodes that are late.
    """

    def __init__(
        self,
        link: Link,
        plan: RunPlan,
        queries: Mapping[str, Query],
        config: LinkConfig,
        audit: AuditLog,
        compute: Compute,
        public: PublicData | None = None,
    ) -> None:
        super().__init__(list(link.nodes), queries, config)
        self.outputs = plan.model_spec.output_shape
        self.carrier, self.plan = link, plan
        self._audit = ServerAuditLog(audit, plan.run, queries, config.secure_aggregation)
        self._compute = compute
        self.node_status: dict[str, NodeStatus] = {}
        self.link_costs = LinkCosts()
        self.on_waiting: Callable[[Sequence[str]], None] = lambda nodes: None
        self._pool = ThreadPoolExecutor(max(len(self.nodes), 1) * 2, thread_name_prefix="ask")
        self._probes: dict[str, Future[NodeStatus]] = {}
        self._last_probe = time.monotonic()
        self.sender = MessageSender(link, plan.run, config.wait)
        self._joiner = NodeJoiner(self.sender, plan, public, config.wait)

    # --- before the first query and after the last -------------------------------------------------

    def join(self) -> None:
        """Have all nodes join the run.

        Raises:
            FedstillError: a node cannot take part, or too few can be reached.
        """
        self.node_status |= self.call_nodes(self.present, "join", self._joiner.join)

    def train_nodes(self, report_percent: Callable[[int], None]) -> None:
        """Have all nodes do the local training that precedes the first query.

        Args:
            report_percent: called with the progress of the slowest node.
        """
        training = [node for node in self.present if not self.node_status[node].is_trained]
        progress = {node: NodeProgress(node) for node in training}
        while training:
            replies = self.call_nodes(
                training, "train_locally", lambda node: self._joiner.train(progress[node])
            )
            training = [node for node, reply in replies.items() if not reply.is_trained]
            report_percent(min((reply.percent for reply in replies.values()), default=100))

    def save_checkpoint(self, number: int) -> None:
        """Have all nodes save their state before query ``number``."""
        self._broadcast(SaveCheckpoint(number))

    def restore_checkpoint(self, number: int) -> None:
        """Have all nodes restore their state before query ``number``."""
        self._broadcast(LoadCheckpoint(number))

    def _broadcast(self, message: Message) -> None:
        self.call_nodes(self.present, message.operation, lambda node: self.sender.send(node, message))

    def end_run(self) -> None:
        """Tell all nodes that the run has ended, and stop all calls; nodes that cannot be reached are
        skipped."""
        self.sender.ended.set()
        message = self.sender.pack(LeaveRun())
        calls = [self._pool.submit(self.carrier.call, node, message, PROBE_INTERVAL) for node in self.present]
        wait(calls, timeout=PROBE_INTERVAL + GRACE)
        self._pool.shutdown(wait=False)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Federation`; nodes that were unreachable and have joined again take part again."""
        newly_excluded = self.excluded  # while all nodes joined and restored their state
        super().load_state_dict(state)
        for node, excluded in list(self.excluded.items()):
            if excluded.may_rejoin and node in self.node_status and node not in newly_excluded:
                del self.excluded[node]
                self._log_return(node)
        for node, excluded in newly_excluded.items():
            if node not in self.excluded:
                self.exclude(node, "load_checkpoint", excluded.reason, may_rejoin=excluded.may_rejoin)

    # --- the federation's interface --------------------------------------------------------------------

    def _refusal_rule(self, node: str, query: Query) -> str | None:
        return self.node_status[node].refused_queries.get(query.name)

    def _query_limit(self, node: str) -> int | None:
        return self.node_status[node].max_queries

    def collect_responses(self, queried: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        self._readmit_nodes()
        query, number, encoding = sent.query, sent.number, sent.encoding
        request = AnswerQuery(query, number, sent.differentiable, encoding)
        message = self.sender.pack(request, sent.tensors)
        down = bytes_by_kind(sent.tensors, self.queries[query].sends)
        content = digest(query, {name: tensor.cpu() for name, tensor in sent.tensors.items()})
        replies = self._call_and_measure(queried, query, dict.fromkeys(queried, message), number)
        for node, reply in replies.items():
            self._audit.record_release(node, number, query, RESPONSE, content, down, reply)
        return {node: self._reply_tensors(reply, encoding) for node, reply in replies.items()}

    def collect_gradients(
        self, number: int, query: str, output_gradients: Mapping[str, Tensors], encoding: Any = None
    ) -> Mapping[str, Tensors]:
        require_finite_gradients(
            output_gradients, query
        )  # otherwise each node would refuse it and be excluded
        request = ComputeGradients(number, sum=encoding)
        messages = {
            node: self.sender.pack(request, node_gradients)
            for node, node_gradients in output_gradients.items()
        }
        replies = self._call_and_measure(tuple(output_gradients), "gradient", messages)
        for node, reply in replies.items():
            node_gradients = {name: tensor.cpu() for name, tensor in output_gradients[node].items()}
            down = bytes_by_kind(node_gradients, dict.fromkeys(node_gradients, GRADIENTS))
            content = digest(query, node_gradients)
            self._audit.record_release(node, number, query, GRADIENT, content, down, reply)
        return {node: self._reply_tensors(reply, encoding) for node, reply in replies.items()}

    def _reply_tensors(self, reply: Reply, encoding: Any) -> Tensors:
        """Return a reply's tensors on the server's device; encoded ones stay as they are."""
        return self._compute.tensors_to_device(reply.tensors) if encoding is None else reply.tensors

    def to_device(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return self._compute.tensors_to_device(tensors)

    # --- messages -------------------------------------------------------------------------------------

    def _call_and_measure(
        self, nodes: Sequence[str], query: str, messages: Mapping[str, bytes], since_query: int | None = None
    ) -> dict[str, Reply]:
        """Send one message to each of some nodes, and add time and bytes to the link's costs."""
        start = time.monotonic()
        replies: dict[str, Reply] = self.call_nodes(
            nodes, query, lambda node: self.sender.deliver(node, query, messages[node]), since_query
        )
        total_bytes = sum(len(messages[node]) for node in replies)
        total_bytes += sum(
            tensor_bytes(tensor) for reply in replies.values() for tensor in reply.tensors.values()
        )
        seconds, node_seconds = time.monotonic() - start, [reply.node_seconds for reply in replies.values()]
        last = max((reply.elapsed for reply in replies.values()), default=0.0)
        absent = 0.0 if len(replies) == len(nodes) else seconds - last
        self.link_costs.add_round(seconds, node_seconds, total_bytes, absent)
        return replies

    def call_nodes(
        self, nodes: Sequence[str], query: str, call: Callable[[str], Any], since_query: int | None = None
    ) -> dict[str, Any]:
        """Call some nodes at once and return the results by node; exclude those that fail, if a quorum
        remains.

        All calls end before any error is handled, so that no node is still computing when a run stops. Only a
        reply that never ends is not awaited.
        """
        futures = {node: self._pool.submit(call, node) for node in nodes}
        self._wait(futures, query)
        results: dict[str, Any] = {}
        failed: list[tuple[str, Exception]] = []
        for node, future in futures.items():
            try:
                if not future.done():
                    raise EndlessReply(
                        f"its request or reply has not ended after {self._max_call_seconds:g} s"
                    )
                results[node] = future.result()
            except (LinkError, FedstillError) as error:
                failed.append((node, error))
        needs_all = self.link.min_nodes(len(self.nodes)) == len(self.nodes)
        refusals = [failure for _, failure in failed if isinstance(failure, QueryRefused)]
        if refusals and needs_all:
            raise combine_refusals(refusals)
        too_few: list[NodeFault] = []
        for node, failure in failed:
            if isinstance(failure, DeployError) or (needs_all and isinstance(failure, QueryMismatch)):
                raise failure
            reason = failure.reason if isinstance(failure, NodeFault) else str(failure)
            is_invalid = isinstance(failure, QueryRefused | QueryMismatch | DataError | EndlessReply)
            try:
                self.exclude(node, query, reason, may_rejoin=not is_invalid, since_query=since_query)
            except NodeFault as fault:
                too_few.append(fault)
        if len(too_few) > 1:  # name all; the last message says how many are left
            *before, last = too_few
            reasons = [f"{fault.node}: {self.excluded[fault.node].reason}" for fault in before]
            names = list_names(fault.node for fault in too_few)
            raise NodeFault(names, query, "; ".join([*reasons, f"{last.node}: {last.reason}"]))
        if too_few:
            raise too_few[0]
        return results

    @property
    def _max_call_seconds(self) -> float:
        """Seconds after which a call to a node is abandoned."""
        return MAX_MESSAGES * self.link.wait + GRACE

    def _wait(self, futures: Mapping[str, Future[Any]], query: str) -> None:
        """Wait until all calls have ended or their time is over; log late nodes from time to time.

        The time limit is needed as a link may only limit the time without data, and a slow reply keeps
        sending some.
        """
        start, pause = time.monotonic(), FIRST_WARNING
        until = start + self._max_call_seconds
        while late := wait(futures.values(), timeout=min(pause, max(until - time.monotonic(), 0.0))).not_done:
            if time.monotonic() >= until:
                break
            nodes = [node for node, future in futures.items() if future in late]
            waited = format_seconds(time.monotonic() - start)
            limit = f"for {waited}; a node has {self.link.wait:g} s (link.wait)"
            logger.warning("no answer from %s to %s %s", list_names(nodes), query, limit)
            self.on_waiting(nodes)
            pause = min(2 * pause, MAX_WARNING_INTERVAL)
        self.on_waiting(())

    # --- nodes that rejoin -----------------------------------------------------------------------------

    def _readmit_nodes(self) -> None:
        """Readmit nodes that were unreachable as soon as they can be reached."""
        for node, probe in list(self._probes.items()):
            if probe.done():
                del self._probes[node]
                if probe.exception() is None:
                    self.node_status[node] = probe.result()
                    del self.excluded[node]
                    self._log_return(node)
        if time.monotonic() - self._last_probe < PROBE_INTERVAL:
            return
        self._last_probe = time.monotonic()
        for node, excluded in self.excluded.items():
            if excluded.may_rejoin and node not in self._probes:
                self._probes[node] = self._pool.submit(self._rejoin, node)

    def _log_return(self, node: str) -> None:
        self.exclusions.events.append(
            {"node": node, "number": self.number, "event": "rejoined", "reason": ""}
        )

    def _rejoin(self, node: str) -> NodeStatus:
        """Have a node that was unreachable join again and return its status.

        It keeps its state if that fits the run. It loads its latest checkpoint if it is behind it (it was
        restarted), or ahead of the run (which was stopped meanwhile and resumed from an earlier state).
        """
        self.carrier.call(node, self.sender.pack(IdentifyNode()), PROBE_INTERVAL)
        status, progress = self._joiner.join(node), NodeProgress(node)
        is_trained = status.is_trained
        while not is_trained:
            if self.sender.ended.is_set():
                raise LinkError("the run is over")
            is_trained = self._joiner.train(progress).is_trained
        number = self.number
        checkpoint = max((each for each in status.checkpoints if each <= number), default=0)
        if not checkpoint - 1 <= status.last_query < number:
            self.sender.send(node, LoadCheckpoint(checkpoint))
        return status


# --- messages before a node's first query ---------------------------------------------------------------

TRAINING_SECONDS = 2.0  # seconds of local training per message


@dataclass
class NodeProgress:
    """Progress of a node's local training.

    Args:
        node: its name.
        percent: progress so far; -1 before the first message.
        seconds: seconds since the last progress.
    """

    node: str
    percent: int = -1
    seconds: float = 0.0


class NodeJoiner:
    """Sends the messages before a node's first query in one run.

    Args:
        send: sends messages to nodes.
        plan: the run's plan.
        public: public data, for nodes that do not have them yet.
        patience: seconds after which local training without progress counts as stuck.
    """

    def __init__(
        self, send: MessageSender, plan: RunPlan, public: PublicData | None, patience: float
    ) -> None:
        self._send, self._plan, self._public, self._patience = send, plan, public, patience

    def join(self, node: str) -> NodeStatus:
        """Make one node join the run.

        Raises:
            NodeFault: it speaks another protocol, or does not take the public data.
        """
        versions = parse_reply(NodeVersions, self._send.send(node, IdentifyNode()))
        if versions.protocol != PROTOCOL:
            raise NodeFault(
                node, "identify", f"it speaks protocol {versions.protocol}, the server {PROTOCOL}"
            )
        message = JoinRun(self._plan.to_dict())
        status = parse_node_status(self._send.send(node, message), versions.versions)
        if status.needs_public_data and self._public is not None:
            body = self._send.send(node, message, public_tensors(self._public))
            status = parse_node_status(body, versions.versions)
        if status.needs_public_data:
            raise NodeFault(node, "join", "it does not take the run's public data")
        return status

    def train(self, node_progress: NodeProgress) -> TrainingProgress:
        """Continue one node's local training for a few seconds.

        Raises:
            NodeFault: it made no progress for too long.
        """
        start = time.monotonic()
        reply = parse_reply(
            TrainingProgress, self._send.send(node_progress.node, TrainLocally(TRAINING_SECONDS))
        )
        if reply.is_trained or reply.percent > node_progress.percent:
            node_progress.percent, node_progress.seconds = reply.percent, 0.0
            return reply
        if time.monotonic() - start < TRAINING_SECONDS / 2:  # it replied earlier than it was asked to
            self._send.ended.wait(transport.PAUSE)
        node_progress.seconds += time.monotonic() - start
        if node_progress.seconds > self._patience:
            waited = format_seconds(node_progress.seconds)
            reason = f"its local training stays at {node_progress.percent}%, after {waited} more"
            raise NodeFault(node_progress.node, "train_locally", reason)
        return reply


# --- time and bytes of communication --------------------------------------------------------------------


@dataclass
class LinkCosts:
    """Accumulated time and bytes of a link.

    Attributes:
        queries: rounds of messages.
        seconds: total time of these rounds.
        nodes: seconds of the slowest node, added over rounds.
        waiting: part of ``nodes`` that the other nodes wait for the slowest one, on average.
        bytes: bytes in both directions.
        absent: seconds spent waiting for nodes that failed. The remaining time is the link's.
    """

    queries: int = 0
    seconds: float = 0.0
    nodes: float = 0.0
    waiting: float = 0.0
    bytes: int = 0
    absent: float = 0.0

    def add_round(
        self, seconds: float, node_seconds: Sequence[float], bytes: int, absent: float = 0.0
    ) -> None:
        """Add one round of messages.

        Args:
            seconds: duration of the round.
            node_seconds: computing time of each node that replied.
            bytes: bytes in both directions.
            absent: seconds from the last reply until nodes without one were given up.
        """
        self.queries += 1
        self.seconds += seconds
        self.nodes += max(node_seconds, default=0.0)
        self.waiting += max(node_seconds, default=0.0) - sum(node_seconds) / max(len(node_seconds), 1)
        self.bytes += bytes
        self.absent += absent

    def costs(self, total: float, training: float) -> dict[str, float]:
        """Return the costs as ``link`` in ``result.json``.

        Args:
            total: seconds of the run.
            training: seconds of local training before the first query.
        """
        link = max(self.seconds - self.nodes - self.absent, 0.0)
        return {
            "messages": self.queries,
            "seconds_each": self.seconds / max(self.queries, 1),
            "bytes_each": self.bytes / max(self.queries, 1),
            "link": link,
            "nodes": self.nodes - self.waiting,
            "waiting": self.waiting,
            "absent": self.absent,
            "training": training,
            "server": max(total - training - self.seconds, 0.0),
            "share": link / max(total, 1e-9),
        }


# --- the server's own audit log -------------------------------------------------------------------------


class ServerAuditLog:
    """The server's audit log of one run.

    Args:
        masked: secure aggregation: responses are masked, and the server sees sums.
    """

    def __init__(self, audit: AuditLog, run: str, queries: Mapping[str, Query], masked: bool) -> None:
        self._audit, self._run, self._queries, self._masked = audit, run, queries, masked

    def record_release(
        self,
        node: str,
        number: int,
        query: str,
        part: str,
        content: str,
        down: Mapping[str, int],
        reply: Reply,
    ) -> None:
        """Record a node's release: its response, or the gradients of one.

        Args:
            content: hash of the message that was sent.
            down: bytes that were sent, by payload kind.
        """
        kinds = self._queries[query].released_kinds()
        # Undeclared tensors will be rejected, and are not counted.
        known = {name: tensor for name, tensor in reply.tensors.items() if name.removesuffix(SCALE) in kinds}
        entry = Entry(
            *(self._run, node, node, number, query, part, content),
            history_hash=reply.privacy.history_hash,
            # Other bits (e.g., after a restart with another number of threads) are another release, which is
            # charged again. Masked bits differ each time.
            release_hash=reply.privacy.release_hash if self._masked else digest(part, reply.tensors),
            down=down,
            up=bytes_by_kind(known, kinds),
            mechanism=reply.privacy.mechanism,
            cost=reply.privacy.cost or {},
            no_guarantee=int(reply.privacy.cost is None),
            queries=int(part == RESPONSE),
        )
        self._audit.charge(entry)
