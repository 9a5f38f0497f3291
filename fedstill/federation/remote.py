"""Nodes in processes and places of their own, whatever carries the messages there.

A query goes to all nodes at once; each has ``link.wait`` seconds. A message that is lost is sent again:
nodes answer the same query under the same number once, and say the same again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
    refused_by,
)
from fedstill.core.text_format import human_seconds
from fedstill.data.public import PublicData
from fedstill.federation.federation import Federation
from fedstill.federation.joining import NodeJoiner, NodeProgress
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.link_costs import LinkCosts
from fedstill.federation.mask_exchange import MaskExchange
from fedstill.federation.response_checks import require_finite
from fedstill.federation.secure_aggregation import SentQuery
from fedstill.federation.server_audit import ServerAuditLog
from fedstill.federation.transport import Link, LinkError, MessageSender, Reply, UnfinishedReply
from fedstill.node.audit_entries import GRADIENT, RESPONSE
from fedstill.node.audit_log import AuditLog
from fedstill.node.replies import NodeStatus
from fedstill.protocol.digests import digest
from fedstill.protocol.messages import (
    AnswerQuery,
    ComputeGradients,
    IdentifyNode,
    LeaveRun,
    LoadCheckpoint,
    Message,
    SaveCheckpoint,
)
from fedstill.protocol.payload_kinds import GRADIENTS
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import RunPlan
from fedstill.protocol.secure_aggregation import SumRequest
from fedstill.protocol.wire_format import Tensors, size, sizes

logger = logging.getLogger("fedstill.server")

SAID = 2.0  # seconds until it is said who is waited for; then it is said ever more rarely
MESSAGES = 3  # at most, in one call to a node: a join with public data
SPARE = 30.0  # seconds beside, for what is done with a reply
RARELY = 60.0  # seconds
PROBE = 5.0  # seconds between two looks whether a node is back


class Remote(Federation):
    """Nodes at the other end of a link.

    Args:
        plan: what the nodes get to know of the run.
        audit: the server's own log of what arrived.
        compute: where, and in which layout, answers are computed with.
        public: public data, for nodes that do not have them yet.
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
        self.outputs = plan.spec.output_shape
        self.carrier, self.plan = link, plan
        self._arrivals = ServerAuditLog(audit, plan.run, queries, config.secure_aggregation)
        self._compute = compute
        self.about: dict[str, NodeStatus] = {}  # what each node told of itself
        self.meter = LinkCosts()
        self.waits: Callable[[Sequence[str]], None] = lambda nodes: None  # is told who is waited for
        self._pool = ThreadPoolExecutor(max(len(self.nodes), 1) * 2, thread_name_prefix="ask")
        self._probes: dict[str, Future[NodeStatus]] = {}
        self._probed = time.monotonic()
        self._send = MessageSender(link, plan.run, config.wait)
        self._joining = NodeJoiner(self._send, plan, public, config.wait)
        self._exchange = MaskExchange(self._send, self._each)

    # --- before the first query and after the last -------------------------------------------------

    def join(self) -> None:
        """Make all nodes ready for the run.

        Raises:
            FedstillError: a node cannot take part, or too few can be reached.
        """
        self.about |= self._each(self.present, "join", self._joining.join)

    def learn(self, progress: Callable[[int], None]) -> None:
        """Have all nodes do the local training that the method wants first; ``progress`` is told percents."""
        waiting = [node for node in self.present if not self.about[node].is_trained]
        coming = {node: NodeProgress(node) for node in waiting}
        while waiting:
            told = self._each(waiting, "train_locally", lambda node: self._joining.learn(coming[node]))
            waiting = [node for node, come in told.items() if not come.learned]
            progress(min((come.percent for come in told.values()), default=100))

    def remember(self, mark: int) -> None:
        """Have all nodes keep their state as it is before query ``mark``."""
        self._tell_all(SaveCheckpoint(mark))

    def recall(self, mark: int) -> None:
        """Have all nodes go back to where they were before query ``mark``."""
        self._tell_all(LoadCheckpoint(mark))

    def _tell_all(self, message: Message) -> None:
        self._each(self.present, message.operation, lambda node: self._send.tell(node, message))

    def leave(self) -> None:
        """Tell all nodes that the run is over; who is not there need not know."""
        self._send.over.set()
        message = self._send.pack(LeaveRun())
        calls = [self._pool.submit(self.carrier.call, node, message, PROBE) for node in self.present]
        wait(calls, timeout=PROBE + SPARE)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Federation`; who was away and has joined again takes part again."""
        missing = self.excluded  # while all were joining and going back, just now
        super().load(state)
        for node in [node for node, out in self.excluded.items() if out.back and node in self.about]:
            if node not in missing:
                del self.excluded[node]
                self._back(node)
        for node, out in missing.items():
            if node not in self.excluded:
                self.exclude(node, "load_checkpoint", out.reason, may_rejoin=out.back)

    # --- the contract ---------------------------------------------------------------------------------

    def _refusal_rule(self, node: str, query: Query) -> str | None:
        return self.about[node].refused_queries.get(query.name)

    def _query_limit(self, node: str) -> int | None:
        return self.about[node].max_queries

    def _collect_responses(self, asked: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        self._welcome()
        query, number, call = sent.query, sent.number, sent.call
        asking = AnswerQuery(query, number, sent.differentiable, call)
        message = self._send.pack(asking, sent.tensors)
        down = sizes(sent.tensors, self.queries[query].sends)
        content = digest(query, {name: tensor.cpu() for name, tensor in sent.tensors.items()})
        replies = self._timed(asked, query, dict.fromkeys(asked, message), number)
        for node, reply in replies.items():
            self._arrivals.note(node, number, query, RESPONSE, content, down, reply)
        return {node: self._arrived(reply, call) for node, reply in replies.items()}

    def _collect_gradients(
        self, number: int, query: str, pulls: Mapping[str, Tensors], call: SumRequest | None
    ) -> Mapping[str, Tensors]:
        require_finite(pulls, query)  # else each node would refuse it, and be left out
        pulling = ComputeGradients(number, sum=call)
        messages = {node: self._send.pack(pulling, pull) for node, pull in pulls.items()}
        replies = self._timed(tuple(pulls), "gradient", messages)
        for node, reply in replies.items():
            pull = {name: tensor.cpu() for name, tensor in pulls[node].items()}
            down = sizes(pull, dict.fromkeys(pull, GRADIENTS))
            content = digest(query, pull)
            self._arrivals.note(node, number, query, GRADIENT, content, down, reply)
        return {node: self._arrived(reply, call) for node, reply in replies.items()}

    def _arrived(self, reply: Reply, call: SumRequest | None) -> Tensors:
        """What a node gave: where the server computes, or in the ring until it is summed."""
        return self._compute.here(reply.tensors) if call is None else reply.tensors

    def _new_sum_call(self, members: tuple[str, ...]) -> SumRequest:
        self._exchange.introduce(members, {node: self.about[node] for node in members})
        return super()._new_sum_call(tuple(name for name in members if name not in self.excluded))

    def _unmask(self, call: SumRequest, ring: Tensors, added: tuple[str, ...]) -> Tensors:
        return self._exchange.unmask(call, ring, added) if call.recover else ring

    def _to_device(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return self._compute.here(tensors)

    # --- messages -------------------------------------------------------------------------------------

    def _timed(
        self, nodes: Sequence[str], query: str, messages: Mapping[str, bytes], since: int | None = None
    ) -> dict[str, Reply]:
        """One message to each of some nodes, on the meter."""
        start = time.monotonic()
        replies: dict[str, Reply] = self._each(
            nodes, query, lambda node: self._send.deliver(node, query, messages[node]), since
        )
        carried = sum(len(messages[node]) for node in replies)
        carried += sum(size(tensor) for reply in replies.values() for tensor in reply.tensors.values())
        seconds, own = time.monotonic() - start, [reply.own for reply in replies.values()]
        last = max((reply.elapsed for reply in replies.values()), default=0.0)
        self.meter.add(seconds, own, carried, 0.0 if len(replies) == len(nodes) else seconds - last)
        return replies

    def _each(
        self, nodes: Sequence[str], query: str, call: Callable[[str], Any], since: int | None = None
    ) -> dict[str, Any]:
        """A call to each of some nodes at once; those that fail are left out, if a quorum remains.

        All are heard before anything is decided, so that no node is still at work when a run stops; but for
        one whose reply never ends.
        """
        futures = {node: self._pool.submit(call, node) for node in nodes}
        self._wait(futures, query)
        told: dict[str, Any] = {}
        failed: list[tuple[str, Exception]] = []
        for node, future in futures.items():
            try:
                if not future.done():
                    raise UnfinishedReply(
                        f"what it is sent, or replies, has not ended after {self._longest:g} s"
                    )
                told[node] = future.result()
            except (LinkError, FedstillError) as error:
                failed.append((node, error))
        everyone = self.link.min_nodes(len(self.nodes)) == len(self.nodes)
        refusals = [failure for _, failure in failed if isinstance(failure, QueryRefused)]
        if refusals and everyone:
            raise refused_by(refusals)
        too_few: list[NodeFault] = []
        for node, failure in failed:
            if isinstance(failure, DeployError) or (everyone and isinstance(failure, QueryMismatch)):
                raise failure
            reason = failure.reason if isinstance(failure, NodeFault) else str(failure)
            nonsense = isinstance(failure, QueryRefused | QueryMismatch | DataError | UnfinishedReply)
            try:
                self.exclude(node, query, reason, may_rejoin=not nonsense, since_query=since)
            except NodeFault as fault:
                too_few.append(fault)
        if len(too_few) > 1:  # all are named; the last one says how many are left
            *before, last = too_few
            reasons = [f"{fault.node}: {self.excluded[fault.node].reason}" for fault in before]
            names = ", ".join(fault.node for fault in too_few)
            raise NodeFault(names, query, "; ".join([*reasons, f"{last.node}: {last.reason}"]))
        if too_few:
            raise too_few[0]
        return told

    @property
    def _longest(self) -> float:
        """Seconds after which a call to a node is not waited for any more."""
        return MESSAGES * self.link.wait + SPARE

    def _wait(self, futures: Mapping[str, Future[Any]], query: str) -> None:
        """Until all calls are over, or cannot be waited for; now and then it is said which nodes are late.

        What carries messages may count silence only, and a reply that trickles in is never silent.
        """
        start, pause = time.monotonic(), SAID
        until = start + self._longest
        while late := wait(futures.values(), timeout=min(pause, max(until - time.monotonic(), 0.0))).not_done:
            if time.monotonic() >= until:
                break
            nodes = [node for node, future in futures.items() if future in late]
            waited = human_seconds(time.monotonic() - start)
            gone = f"for {waited}; a node has {self.link.wait:g} s (link.wait)"
            logger.warning("no answer from %s to %s %s", ", ".join(nodes), query, gone)
            self.waits(nodes)
            pause = min(2 * pause, RARELY)
        self.waits(())

    # --- nodes that come back --------------------------------------------------------------------------

    def _welcome(self) -> None:
        """Let nodes that stayed away take part again, as soon as they can be reached."""
        for node, probe in list(self._probes.items()):
            if probe.done():
                del self._probes[node]
                if probe.exception() is None:
                    self.about[node] = probe.result()
                    del self.excluded[node]
                    self._back(node)
        if time.monotonic() - self._probed < PROBE:
            return
        self._probed = time.monotonic()
        for node, out in self.excluded.items():
            if out.back and node not in self._probes:
                self._probes[node] = self._pool.submit(self._rejoined, node)

    def _back(self, node: str) -> None:
        self.events.append({"node": node, "number": self.number, "event": "back", "reason": ""})

    def _rejoined(self, node: str) -> NodeStatus:
        """A node that was away, ready again: where it is now.

        Or at its latest mark, if it is behind that (it was started anew) or ahead of the run (which was
        stopped meanwhile, and has gone back).
        """
        self.carrier.call(node, self._send.pack(IdentifyNode()), PROBE)
        about, coming = self._joining.join(node), NodeProgress(node)
        learned = about.is_trained
        while not learned:
            if self._send.over.is_set():
                raise LinkError("the run is over")
            learned = self._joining.learn(coming).is_trained
        number = self.number
        mark = max((mark for mark in about.checkpoints if mark <= number), default=0)
        if not mark - 1 <= about.last_query < number:
            self._send.tell(node, LoadCheckpoint(mark))
        return about
