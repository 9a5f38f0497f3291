"""Nodes in processes and places of their own, whatever carries the messages there.

A question goes to all nodes at once; each has ``link.wait`` seconds. A message that is lost is sent again:
nodes answer the same question under the same number once, and say the same again.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fedstill.compute import Compute
from fedstill.data.public import Public
from fedstill.errors import DataError, FedstillError, NodeFault, QuestionMismatch, QuestionRefused
from fedstill.federation.contract import Federation, Out
from fedstill.federation.link import LinkConfig
from fedstill.node.ledger import ANSWER, Ledger
from fedstill.node.plan import PROTOCOL, Plan, public_tensors
from fedstill.node.questions import GRADIENTS, Question, digest
from fedstill.wire import Tensors, kind_of, pack, size, unpack

ATTEMPTS = 5  # at least so often is a message sent again while a node has time to answer
PAUSE = 0.5  # seconds between two attempts where nothing is connected
LEARN = 2.0  # seconds of local training between two looks at how far it has come
PROBE = 5.0  # seconds between two looks whether a node is back


class LinkError(Exception):
    """A message found no way, or no answer came in time."""


class Link(Protocol):
    """What carries messages to nodes."""

    nodes: Sequence[str]

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """What a node replies.

        Raises:
            LinkError: no way there, or no reply within so many seconds.
        """
        ...


@dataclass
class Meter:
    """What a link costs: seconds of the run by whose they were, and bytes.

    Of a question's time the slowest node's own work is ``nodes``, of which ``waiting`` is what the others
    wait for it on average; the rest is ``link``.
    """

    questions: int = 0
    seconds: float = 0.0
    nodes: float = 0.0
    waiting: float = 0.0
    bytes: int = 0

    def add(self, seconds: float, own: Sequence[float], bytes: int) -> None:
        """One round of messages."""
        self.questions += 1
        self.seconds += seconds
        self.nodes += max(own, default=0.0)
        self.waiting += max(own, default=0.0) - sum(own) / max(len(own), 1)
        self.bytes += bytes

    def figures(self, total: float, training: float) -> dict[str, float]:
        """For the report.

        Args:
            total: seconds of the whole run.
            training: of these, seconds of local training before the first question.
        """
        return {
            "messages": self.questions,
            "seconds_each": self.seconds / max(self.questions, 1),
            "bytes_each": self.bytes / max(self.questions, 1),
            "link": self.seconds - self.nodes,
            "nodes": self.nodes - self.waiting,
            "waiting": self.waiting,
            "training": training,
            "server": max(total - training - self.seconds, 0.0),
            "share": (self.seconds - self.nodes) / max(total, 1e-9),
        }


class Remote(Federation):
    """Nodes at the other end of a link.

    Args:
        link: carries messages.
        plan: what the nodes get to know of the run.
        questions: what they can be asked.
        config: forms, patience, quorum.
        ledger: the server's own account of what arrived.
        compute: where, and in which layout, answers are computed with.
        public: public data, for nodes that do not have them yet.
    """

    def __init__(
        self,
        link: Link,
        plan: Plan,
        questions: Mapping[str, Question],
        config: LinkConfig,
        ledger: Ledger,
        compute: Compute,
        public: Public | None = None,
    ) -> None:
        super().__init__(list(link.nodes), questions, config)
        self.classes = len(plan.form.classes)
        self.carrier, self.plan, self.ledger = link, plan, ledger
        self._compute, self._public = compute, public
        self.about: dict[str, dict[str, Any]] = {}  # what each node told of itself
        self.meter = Meter()
        self._pool = ThreadPoolExecutor(max(len(self.nodes), 1) * 2, thread_name_prefix="ask")
        self._probes: dict[str, Future[dict[str, Any]]] = {}
        self._probed = time.monotonic()

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
        waiting = [node for node in self.present if not self.about[node]["learned"]]
        while waiting:
            told = self._each(
                waiting, "learn", lambda node: self._tell(node, {"do": "learn", "seconds": LEARN})
            )
            waiting = [node for node, reply in told.items() if not reply["learned"]]
            progress(min((int(reply["percent"]) for reply in told.values()), default=100))

    def remember(self, mark: int) -> None:
        """Have all nodes keep their state as it is before question ``mark``."""
        self._each(self.present, "remember", lambda node: self._tell(node, {"do": "remember", "mark": mark}))

    def recall(self, mark: int) -> None:
        """Have all nodes go back to where they were before question ``mark``."""
        self._each(self.present, "recall", lambda node: self._tell(node, {"do": "recall", "mark": mark}))

    def leave(self) -> None:
        """Tell all nodes that the run is over; who is not there need not know."""
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
        found = {node: self.about[node]["objections"].get(question.name) for node in self.present}
        return {node: str(rule) for node, rule in found.items() if rule is not None}

    def limits(self) -> Mapping[str, int]:
        """See :class:`Federation`."""
        most = {node: int(self.about[node]["most_questions"]) for node in self.present}
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
        for node, (told, answer) in replies.items():
            self._count(node, number, question, ANSWER, content, down, answer, told)
        return {node: self._compute.here(answer) for node, (_, answer) in replies.items()}

    def _pull_back(self, number: int, question: str, pulls: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
        header = {"do": "pull back", "number": number, "question": "gradient"}
        messages = {node: self._pack(header, pull) for node, pull in pulls.items()}
        replies = self._timed(tuple(pulls), "gradient", messages)
        for node, (told, gradients) in replies.items():
            pull = {name: tensor.cpu() for name, tensor in pulls[node].items()}
            down = self._sizes(pull, dict.fromkeys(pull, GRADIENTS))
            content = digest(question, pull)
            self._count(node, number, question, "gradient", content, down, gradients, told)
        return {node: self._compute.here(gradients) for node, (_, gradients) in replies.items()}

    # --- messages -------------------------------------------------------------------------------------

    def _pack(self, header: Mapping[str, Any], tensors: Tensors | None = None) -> bytes:
        return pack({**header, "run": self.plan.run}, tensors)

    def _tell(self, node: str, header: Mapping[str, Any], tensors: Tensors | None = None) -> dict[str, Any]:
        """One message that is no question, and what the node replied to it."""
        _, told, _ = self._deliver(node, str(header["do"]), self._pack(header, tensors))
        return told

    def _deliver(
        self, node: str, question: str, message: bytes
    ) -> tuple[float, dict[str, Any], dict[str, torch.Tensor]]:
        """A node's own seconds, and its reply; asked again as long as it has time.

        Raises:
            LinkError: no reply in time.
            FedstillError: the node refused, or failed.
        """
        until = time.monotonic() + self.link.wait
        while True:
            left = until - time.monotonic()
            try:
                reply = self.carrier.call(node, message, max(min(left, self.link.wait / ATTEMPTS), 0.1))
                break
            except LinkError as error:
                if until - time.monotonic() < PAUSE:
                    raise LinkError(f"no answer within {self.link.wait:g} s: {error}") from error
                time.sleep(PAUSE)
        header, tensors = unpack(reply)
        try:
            failure = _revived(node, question, header["error"]) if "error" in header else None
            own, told = float(header.get("seconds", 0)), dict(header.get("told", {}))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"it replied in a form that is not known: {error}") from error
        if failure is not None:
            raise failure
        return own, told, tensors

    def _timed(
        self, nodes: Sequence[str], question: str, messages: Mapping[str, bytes], since: int | None = None
    ) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        """One message to each of some nodes, on the meter."""
        start = time.perf_counter()
        replies = self._each(
            nodes, question, lambda node: self._deliver(node, question, messages[node]), since
        )
        carried = sum(len(messages[node]) for node in replies)
        carried += sum(size(tensor) for _, _, out in replies.values() for tensor in out.values())
        own = [seconds for seconds, _, _ in replies.values()]
        self.meter.add(time.perf_counter() - start, own, carried)
        return {node: (told, tensors) for node, (_, told, tensors) in replies.items()}

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
        for node, failure in failed:
            everyone = self.link.least(len(self.nodes)) == len(self.nodes)
            if isinstance(failure, QuestionMismatch) or (everyone and isinstance(failure, QuestionRefused)):
                raise failure
            reason = failure.reason if isinstance(failure, NodeFault) else str(failure)
            nonsense = isinstance(failure, QuestionRefused | DataError)
            self.leave_out(node, question, reason, back=not nonsense, since=since)
        return told

    def _joined(self, node: str) -> dict[str, Any]:
        """Have one node join, with the public data if it has none."""
        hello = self._tell(node, {"do": "hello"})
        if hello["protocol"] != PROTOCOL:
            raise NodeFault(node, "hello", f"it speaks protocol {hello['protocol']}, the server {PROTOCOL}")
        joining = {"do": "join", "plan": self.plan.to_dict()}
        told = self._tell(node, joining)
        if told.get("wants_public") and self._public is not None:
            told = self._tell(node, joining, public_tensors(self._public))
        return {**told, "versions": hello["versions"]}

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

    def _rejoined(self, node: str) -> dict[str, Any]:
        """A node that was away, ready again: where it is now.

        Or at its latest mark, if it is behind that (it was started anew) or ahead of the run (which was
        stopped meanwhile, and has gone back).
        """
        self.carrier.call(node, self._pack({"do": "hello"}), PROBE)
        told = self._joined(node)
        while not told["learned"]:
            told = {**told, **self._tell(node, {"do": "learn", "seconds": LEARN})}
        number = self.number
        mark = max((mark for mark in told["marks"] if mark <= number), default=0)
        if not mark - 1 <= told["last"] < number:
            self._tell(node, {"do": "recall", "mark": mark})
        return told

    # --- the server's own account ---------------------------------------------------------------------

    def _count(
        self,
        node: str,
        number: int,
        question: str,
        part: str,
        content: str,
        down: Mapping[str, int],
        released: Tensors,
        told: Mapping[str, Any],
    ) -> None:
        if self.ledger.released(node, number, part) == content:
            return
        kinds = self.questions[question].kinds()
        up = self._sizes({name: tensor for name, tensor in released.items() if _known(name, kinds)}, kinds)
        self.ledger.write(
            node=node,
            number=number,
            question=question,
            part=part,
            content=content,
            down=down,
            up=up,
            privacy=told.get("privacy", {}),
        )

    def _sizes(self, tensors: Tensors, kinds: Mapping[str, str]) -> dict[str, int]:
        sizes: dict[str, int] = defaultdict(int)
        for name, tensor in tensors.items():
            sizes[kind_of(name, kinds)] += size(tensor)
        return dict(sizes)


def _known(name: str, kinds: Mapping[str, str]) -> bool:
    """Whether a tensor that arrived was declared; what was not will be found faulty, and is not counted."""
    return name in kinds or name.partition(":")[0] in kinds


def _revived(node: str, question: str, told: Mapping[str, Any]) -> FedstillError:
    """A node's error as it is raised at the server."""
    asked = str(told.get("question", question))
    if told["kind"] == "QuestionRefused":
        return QuestionRefused(node, asked, str(told.get("rule")))
    if told["kind"] == "QuestionMismatch":
        return QuestionMismatch(node, asked, int(told.get("number", -1)))
    return NodeFault(node, asked, str(told["text"]))


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


__all__ = ["Link", "LinkError", "Loopback", "Meter", "Out", "Remote"]
