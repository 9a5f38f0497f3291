"""Nodes in processes and places of their own, whatever carries the messages there.

A question goes to all nodes at once; each has ``link.wait`` seconds. A message that is lost is sent again:
nodes answer the same question under the same number once, and say the same again.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from fedstill.core.compute import Compute
from fedstill.core.errors import (
    DataError,
    DeployError,
    FedstillError,
    NodeFault,
    QuestionMismatch,
    QuestionRefused,
    refused_by,
)
from fedstill.data.public import Public
from fedstill.federation.contract import Federation, Out
from fedstill.federation.link import LinkConfig
from fedstill.federation.replies import (
    About,
    Hello,
    Progress,
    read_failure,
    read_privacy,
    read_seconds,
    read_told,
)
from fedstill.node.audit import AuditLog
from fedstill.node.entries import ANSWER, Entry
from fedstill.protocol.digests import digest
from fedstill.protocol.kinds import GRADIENTS
from fedstill.protocol.messages import SCALE, Tensors, kind_of, pack, size, unpack
from fedstill.protocol.plan import PROTOCOL, Plan, public_tensors
from fedstill.protocol.questions import Question

logger = logging.getLogger("fedstill.server")

ATTEMPTS = 5  # at least so often is a message sent again while a node has time to answer
PAUSE = 0.5  # seconds between two attempts where nothing is connected
LEARN = 2.0  # seconds of local training between two looks at how far it has come
SAID = 5.0  # seconds between two lines of the log about a node that is waited for
PROBE = 5.0  # seconds between two looks whether a node is back


class LinkError(Exception):
    """A message found no way, or no answer came in time."""


class Silent(LinkError):
    """No answer came in time; nothing else is known of why."""


class Unreachable(LinkError):
    """There is no way to this node, and there will be none as long as this link lasts."""


class Link(Protocol):
    """What carries messages to nodes."""

    nodes: Sequence[str]

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """What a node replies.

        Raises:
            Silent: no reply within so many seconds.
            LinkError: no way there.
        """
        ...


@dataclass(frozen=True)
class Reply:
    """What a node said to one message.

    Args:
        told: beside its tensors.
        privacy: of that, how these are protected.
        tensors: as they travelled.
        own: seconds that it took itself.
        elapsed: seconds until the reply was there.
    """

    told: Mapping[str, Any]
    privacy: Mapping[str, Any]
    tensors: Tensors
    own: float
    elapsed: float


@dataclass
class _Coming:
    """How far a node has come in its local training, and seconds that it was at work since without result."""

    node: str
    percent: int = -1
    seconds: float = 0.0


@dataclass
class Meter:
    """What a link costs: seconds of the run by whose they were, and bytes.

    Of a question's time the slowest node's own work is ``nodes``, of which ``waiting`` is what the others
    wait for it on average; ``absent`` is what was waited after that for nodes that failed; the rest is
    ``link``.
    """

    questions: int = 0
    seconds: float = 0.0
    nodes: float = 0.0
    waiting: float = 0.0
    bytes: int = 0
    absent: float = 0.0

    def add(self, seconds: float, own: Sequence[float], bytes: int, absent: float = 0.0) -> None:
        """One round of messages.

        Args:
            seconds: that it took.
            own: of these, what each node that replied took itself.
            bytes: that were carried.
            absent: of these, from the last reply until those without one were given up.
        """
        self.questions += 1
        self.seconds += seconds
        self.nodes += max(own, default=0.0)
        self.waiting += max(own, default=0.0) - sum(own) / max(len(own), 1)
        self.bytes += bytes
        self.absent += absent

    def figures(self, total: float, training: float) -> dict[str, float]:
        """For the report.

        Args:
            total: seconds of the whole run.
            training: of these, seconds of local training before the first question.
        """
        link = max(self.seconds - self.nodes - self.absent, 0.0)
        return {
            "messages": self.questions,
            "seconds_each": self.seconds / max(self.questions, 1),
            "bytes_each": self.bytes / max(self.questions, 1),
            "link": link,
            "nodes": self.nodes - self.waiting,
            "waiting": self.waiting,
            "absent": self.absent,
            "training": training,
            "server": max(total - training - self.seconds, 0.0),
            "share": link / max(total, 1e-9),
        }


class Remote(Federation):
    """Nodes at the other end of a link.

    Args:
        link: carries messages.
        plan: what the nodes get to know of the run.
        questions: what they can be asked.
        config: forms, patience, quorum.
        audit: the server's own log of what arrived.
        compute: where, and in which layout, answers are computed with.
        public: public data, for nodes that do not have them yet.
    """

    def __init__(
        self,
        link: Link,
        plan: Plan,
        questions: Mapping[str, Question],
        config: LinkConfig,
        audit: AuditLog,
        compute: Compute,
        public: Public | None = None,
    ) -> None:
        super().__init__(list(link.nodes), questions, config)
        self.outputs = plan.spec.outputs
        self.carrier, self.plan, self.audit = link, plan, audit
        self._compute, self._public = compute, public
        self.about: dict[str, About] = {}  # what each node told of itself
        self.meter = Meter()
        self._pool = ThreadPoolExecutor(max(len(self.nodes), 1) * 2, thread_name_prefix="ask")
        self._probes: dict[str, Future[About]] = {}
        self._probed = time.monotonic()
        self._over = threading.Event()  # nobody is waited for any more
        self._process, self._messages = secrets.token_hex(8), itertools.count()

    # --- before the first question and after the last -------------------------------------------------

    def join(self) -> None:
        """Make all nodes ready for the run.

        Raises:
            FedstillError: a node cannot take part, or too few can be reached.
        """
        for node, told in self._each(self.present, "join", self._joined).items():
            self.about[node] = told

    def learn(self, progress: Callable[[int], None]) -> None:
        """Have all nodes do the local training that the method wants first.

        Args:
            progress: is told how far they have come, in percent.
        """
        waiting = [node for node in self.present if not self.about[node].learned]
        coming = {node: _Coming(node) for node in waiting}
        while waiting:
            told = self._each(waiting, "learn", lambda node: self._learn(coming[node]))
            waiting = [node for node, come in told.items() if not come.learned]
            progress(min((come.percent for come in told.values()), default=100))

    def remember(self, mark: int) -> None:
        """Have all nodes keep their state as it is before question ``mark``."""
        self._each(self.present, "remember", lambda node: self._tell(node, {"do": "remember", "mark": mark}))

    def recall(self, mark: int) -> None:
        """Have all nodes go back to where they were before question ``mark``."""
        self._each(self.present, "recall", lambda node: self._tell(node, {"do": "recall", "mark": mark}))

    def leave(self) -> None:
        """Tell all nodes that the run is over; who is not there need not know."""
        self._over.set()
        message = self._pack({"do": "leave"})
        for future in [self._pool.submit(self.carrier.call, node, message, PROBE) for node in self.present]:
            future.exception()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Federation`; who was away and has joined again takes part again."""
        missing = self.out  # while all were joining and going back, just now
        super().load(state)
        for node in [node for node, out in self.out.items() if out.back and node in self.about]:
            if node not in missing:
                del self.out[node]
                self._back(node)
        for node, out in missing.items():
            if node not in self.out:
                self.leave_out(node, "recall", out.reason, back=out.back)

    # --- the contract ---------------------------------------------------------------------------------

    def objections(self, question: Question) -> Mapping[str, str]:
        """See :class:`Federation`."""
        found = {node: self.about[node].objections.get(question.name) for node in self.present}
        return {node: rule for node, rule in found.items() if rule is not None}

    def limits(self) -> Mapping[str, int]:
        """See :class:`Federation`."""
        most = {node: self.about[node].most_questions for node in self.present}
        return {node: limit for node, limit in most.items() if limit > 0}

    def _answer(
        self, asked: tuple[str, ...], question: str, number: int, tensors: Tensors, differentiable: bool
    ) -> Mapping[str, Tensors]:
        self._welcome()
        header = {"do": "answer", "question": question, "number": number, "differentiable": differentiable}
        message = self._pack(header, tensors)
        down = self._sizes(tensors, self.questions[question].sends)
        content = digest(question, {name: tensor.cpu() for name, tensor in tensors.items()})
        replies = self._timed(asked, question, dict.fromkeys(asked, message), number)
        for node, reply in replies.items():
            self._count(node, number, question, ANSWER, content, down, reply)
        return {node: self._compute.here(reply.tensors) for node, reply in replies.items()}

    def _pull_back(self, number: int, question: str, pulls: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
        header = {"do": "pull back", "number": number, "question": "gradient"}
        messages = {node: self._pack(header, pull) for node, pull in pulls.items()}
        replies = self._timed(tuple(pulls), "gradient", messages)
        for node, reply in replies.items():
            pull = {name: tensor.cpu() for name, tensor in pulls[node].items()}
            down = self._sizes(pull, dict.fromkeys(pull, GRADIENTS))
            content = digest(question, pull)
            self._count(node, number, question, "gradient", content, down, reply)
        return {node: self._compute.here(reply.tensors) for node, reply in replies.items()}

    # --- messages -------------------------------------------------------------------------------------

    def _pack(self, header: Mapping[str, Any], tensors: Tensors | None = None) -> bytes:
        message = next(self._messages)  # the same when it is sent again
        return pack({**header, "run": self.plan.run, "server": self._process, "message": message}, tensors)

    def _tell(
        self, node: str, header: Mapping[str, Any], tensors: Tensors | None = None
    ) -> Mapping[str, Any]:
        """One message that is no question, and what the node replied to it."""
        return self._deliver(node, str(header["do"]), self._pack(header, tensors)).told

    def _deliver(self, node: str, question: str, message: bytes) -> Reply:
        """A node's reply; asked again as long as it has time.

        Raises:
            LinkError: no reply in time.
            DataError: a reply that is none.
            FedstillError: the node refused, or failed.
        """
        start = said = time.monotonic()
        until = start + self.link.wait
        while True:
            left = until - time.monotonic()
            try:
                reply = self.carrier.call(node, message, max(min(left, self.link.wait / ATTEMPTS), 0.1))
                break
            except Unreachable:
                raise
            except LinkError as error:
                if until - time.monotonic() < PAUSE:
                    why = "" if isinstance(error, Silent) else f": {error}"
                    raise LinkError(f"no answer within {self.link.wait:g} s (link.wait){why}") from error
                if self._over.wait(PAUSE):
                    raise LinkError("the run is over") from error
                now = time.monotonic()
                if now - said > SAID:
                    gone = f"for {now - start:.0f} s; it has {max(until - now, 0):.0f} s more (link.wait)"
                    logger.warning("node %r has not answered %s %s", node, question, gone)
                    said = now
        header, tensors = unpack(reply)
        failure = read_failure(node, question, header)
        if failure is not None:
            raise failure
        told, elapsed = read_told(header), time.monotonic() - start
        return Reply(told, read_privacy(told), tensors, read_seconds(header, elapsed), elapsed)

    def _timed(
        self, nodes: Sequence[str], question: str, messages: Mapping[str, bytes], since: int | None = None
    ) -> dict[str, Reply]:
        """One message to each of some nodes, on the meter."""
        start = time.monotonic()
        replies: dict[str, Reply] = self._each(
            nodes, question, lambda node: self._deliver(node, question, messages[node]), since
        )
        carried = sum(len(messages[node]) for node in replies)
        carried += sum(size(tensor) for reply in replies.values() for tensor in reply.tensors.values())
        seconds, own = time.monotonic() - start, [reply.own for reply in replies.values()]
        last = max((reply.elapsed for reply in replies.values()), default=0.0)
        self.meter.add(seconds, own, carried, 0.0 if len(replies) == len(nodes) else seconds - last)
        return replies

    def _each(
        self, nodes: Sequence[str], question: str, call: Callable[[str], Any], since: int | None = None
    ) -> dict[str, Any]:
        """A call to each of some nodes at once; those that fail are left out, if a quorum remains.

        All are heard before anything is decided, so that no node is still at work when a run stops.
        """
        futures = {node: self._pool.submit(call, node) for node in nodes}
        told: dict[str, Any] = {}
        failed: list[tuple[str, Exception]] = []
        for node, future in futures.items():
            try:
                told[node] = future.result()
            except (LinkError, FedstillError) as error:
                failed.append((node, error))
        everyone = self.link.least(len(self.nodes)) == len(self.nodes)
        refusals = [failure for _, failure in failed if isinstance(failure, QuestionRefused)]
        if refusals and everyone:
            raise refused_by(refusals)
        too_few: list[NodeFault] = []
        for node, failure in failed:
            if isinstance(failure, DeployError) or (everyone and isinstance(failure, QuestionMismatch)):
                raise failure
            reason = failure.reason if isinstance(failure, NodeFault) else str(failure)
            nonsense = isinstance(failure, QuestionRefused | QuestionMismatch | DataError)
            try:
                self.leave_out(node, question, reason, back=not nonsense, since=since)
            except NodeFault as fault:
                too_few.append(fault)
        if len(too_few) > 1:  # all are named; the last one says how many are left
            *before, last = too_few
            reasons = [f"{fault.node}: {self.out[fault.node].reason}" for fault in before]
            names = ", ".join(fault.node for fault in too_few)
            raise NodeFault(names, question, "; ".join([*reasons, f"{last.node}: {last.reason}"]))
        if too_few:
            raise too_few[0]
        return told

    def _joined(self, node: str) -> About:
        """Have one node join, with the public data if it has none."""
        hello = Hello.read(self._tell(node, {"do": "hello"}))
        if hello.protocol != PROTOCOL:
            raise NodeFault(node, "hello", f"it speaks protocol {hello.protocol}, the server {PROTOCOL}")
        joining = {"do": "join", "plan": self.plan.to_dict()}
        about = About.read(self._tell(node, joining), hello.versions)
        if about.wants_public and self._public is not None:
            told = self._tell(node, joining, public_tensors(self._public))
            about = About.read(told, hello.versions)
        if about.wants_public:
            raise NodeFault(node, "join", "it does not take the run's public data")
        return about

    def _learn(self, coming: _Coming) -> Progress:
        """Have one node go on with its local training for a while.

        Raises:
            NodeFault: it has not come on for as long as an answer may take.
        """
        start = time.monotonic()
        come = Progress.read(self._tell(coming.node, {"do": "learn", "seconds": LEARN}))
        if come.learned or come.percent > coming.percent:
            coming.percent, coming.seconds = come.percent, 0.0
            return come
        if time.monotonic() - start < LEARN / 2:  # it was asked to be at work for longer
            self._over.wait(PAUSE)
        coming.seconds += time.monotonic() - start
        if coming.seconds > self.link.wait:
            stuck = f"its local training stays at {coming.percent}%, after {coming.seconds:.0f} s more"
            raise NodeFault(coming.node, "learn", stuck)
        return come

    # --- nodes that come back --------------------------------------------------------------------------

    def _welcome(self) -> None:
        """Let nodes that stayed away take part again, as soon as they can be reached."""
        for node, probe in list(self._probes.items()):
            if probe.done():
                del self._probes[node]
                if probe.exception() is None:
                    self.about[node] = probe.result()
                    del self.out[node]
                    self._back(node)
        if time.monotonic() - self._probed < PROBE:
            return
        self._probed = time.monotonic()
        for node, out in self.out.items():
            if out.back and node not in self._probes:
                self._probes[node] = self._pool.submit(self._rejoined, node)

    def _back(self, node: str) -> None:
        self.events.append({"node": node, "number": self.number, "event": "back", "reason": ""})

    def _rejoined(self, node: str) -> About:
        """A node that was away, ready again: where it is now.

        Or at its latest mark, if it is behind that (it was started anew) or ahead of the run (which was
        stopped meanwhile, and has gone back).
        """
        self.carrier.call(node, self._pack({"do": "hello"}), PROBE)
        about, coming = self._joined(node), _Coming(node)
        learned = about.learned
        while not learned:
            if self._over.is_set():
                raise LinkError("the run is over")
            learned = self._learn(coming).learned
        number = self.number
        mark = max((mark for mark in about.marks if mark <= number), default=0)
        if not mark - 1 <= about.last < number:
            self._tell(node, {"do": "recall", "mark": mark})
        return about

    # --- the server's own log -----------------------------------------------------------------------

    def _count(
        self,
        node: str,
        number: int,
        question: str,
        part: str,
        content: str,
        down: Mapping[str, int],
        reply: Reply,
    ) -> None:
        privacy = dict(reply.privacy)
        # Other bits, as after a start with other threads, are another release, and the node has paid anew.
        after, left = privacy.pop("after", ""), digest(part, reply.tensors)
        kinds = self.questions[question].kinds()
        # What was not declared will be found faulty, and is not counted.
        known = {name: tensor for name, tensor in reply.tensors.items() if name.removesuffix(SCALE) in kinds}
        price = privacy.get("price")
        entry = Entry(
            run=self.plan.run,
            payer=node,
            node=node,
            number=number,
            question=question,
            part=part,
            content=content,
            after=after,
            left=left,
            down=down,
            up=self._sizes(known, kinds),
            mechanism=privacy.get("mechanism", ""),
            price=price or {},
            bare=int(price is None),
            questions=int(part == ANSWER),
        )
        self.audit.charge(entry)

    def _sizes(self, tensors: Tensors, kinds: Mapping[str, str]) -> dict[str, int]:
        sizes: dict[str, int] = defaultdict(int)
        for name, tensor in tensors.items():
            sizes[kind_of(name, kinds)] += size(tensor)
        return dict(sizes)


class Loopback:
    """Nodes of this process behind real messages: for tests, and for files carried by hand.

    Args:
        serve: by node, what replies to a message.
    """

    def __init__(self, serve: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.nodes: Sequence[str] = list(serve)
        self._serve = serve
        self._alone = threading.Lock()  # nodes of one process share torch's global generator

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """See :class:`Link`."""
        with self._alone:
            return self._serve[node](message)


__all__ = ["Link", "LinkError", "Loopback", "Meter", "Out", "Remote", "Silent"]
