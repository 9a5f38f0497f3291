"""A node as its owner started it: data, model and policy from its own folder, and what a server may ask.

Every wire (FLARE, files, loopback) ends here; what a run is at a node, is in ``session.py``.
"""

from __future__ import annotations

import logging
import math
import platform
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedstill.core.config_tables import to_table
from fedstill.core.errors import (
    ArgumentError,
    NodeDataError,
    QueryRefused,
)
from fedstill.core.hashing import fingerprint
from fedstill.core.registry import searching_in
from fedstill.core.text_format import clip_text
from fedstill.core.version import __version__
from fedstill.data import node_data
from fedstill.data.public import PublicData
from fedstill.data.tables import schema_text
from fedstill.node import admission, owner_folder
from fedstill.node.audit_entries import GRADIENT, RESPONSE
from fedstill.node.memory_limits import limit_process, memory_limit
from fedstill.node.message_limits import enforce_limits
from fedstill.node.public_cache import PublicDataCache
from fedstill.node.refusal_text import public_text
from fedstill.node.refusals import Refusals
from fedstill.node.replies import (
    NOT_JOINED,
    AgreementCodes,
    NodeStatus,
    NodeVersions,
    ReleaseReply,
    ReplyPayload,
)
from fedstill.node.requests import ApprovalRequests, requires_approval
from fedstill.node.security_log import SecurityLog, SecurityLogError
from fedstill.node.session import Session
from fedstill.protocol.messages import (
    AnswerQuery,
    ComputeGradients,
    ConfirmSurvivors,
    Envelope,
    IdentifyNode,
    JoinRun,
    LeaveRun,
    LoadCheckpoint,
    ReceiveKeys,
    RevealMasks,
    SaveCheckpoint,
    SendKeys,
    TrainLocally,
    read_message,
)
from fedstill.protocol.run_plan import PROTOCOL, RunDescription, RunPlan, describe
from fedstill.protocol.wire_format import Tensors, header_size, pack, unpack

logger = logging.getLogger("fedstill.node")

MAX_JOINS = 1000  # of runs by one process, or of one again and again


class NodeService:
    """One node, ready to be asked.

    Args:
        folder: its owner's, with ``node.toml`` and ``secret``.

    Attributes:
        server_fingerprint: the fingerprint of what proves who asks: the authority of the server's certificate, or the key
            that signed a file; empty: nothing does.

    Raises:
        FedstillError: the folder does not describe a node, or its security log is not sound.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, owner_folder.read_node_file(folder)
        self.server_fingerprint = ""
        self.security = SecurityLog(folder, self.file.policy.max_disk)
        self.requests = ApprovalRequests(folder, self.file)
        self.refusals = Refusals(self.security)
        if (fault := self.security.verify()) is not None:
            raise SecurityLogError(f"the security log in {folder}: {fault}")
        self.schema = node_data.read_node_schema(self.file.data, folder)
        rules = {"policy": to_table(self.file.policy), "privacy": to_table(self.file.privacy)}
        rules["data"] = {"schema": fingerprint(schema_text(self.schema).encode()) if self.schema else ""}
        rules["data"]["classes"] = list(self.file.data.classes)
        self.security.record_policy({f"{of}.{name}": rules[of][name] for of in rules for name in rules[of]})
        self.compute = owner_folder.make_compute(self.file)
        self.session: Session | None = None
        self._public_cache = PublicDataCache(folder, self.file)
        self._lock = threading.Lock()
        self._server, self._last_message = (
            "",
            -1,
        )  # the server process that asks, and the last of its messages
        self._former_servers: deque[str] = deque(maxlen=1000)  # server processes before it
        self._joins = 0

    @property
    def name(self) -> str:
        """The node's name."""
        return self.file.name

    def limit_process(self) -> None:
        """Let this process, from now on, take no more memory than the owner's policy allows."""
        device = self.compute.device
        limit_process(memory_limit(self.file.policy.max_memory, device), device)

    # --- messages -----------------------------------------------------------------------------------

    def serve(self, message: bytes) -> bytes:
        """Answer one message, with an error if need be: what a wire carries in and out.

        One at a time: a server that asks again while an answer is still computed waits for that one.
        """
        header: dict[str, Any] = {}
        try:  # out of turn: many large ones would wait in memory
            self._refuse_large(message)
        except Exception as error:  # as below; of what is no bytes, too
            return pack(
                {"error": self.refusals.error_reply(header, error, self.server_fingerprint, self.session)}
            )
        with self._lock, searching_in(self.folder):
            start = time.perf_counter()
            try:
                with enforce_limits(self.name, "message"):
                    header, tensors = unpack(message, 0)
                with enforce_limits(self.name, clip_text(header.get("operation"))):
                    body, released = self._serve(header, tensors)
                    return self._reply(body, released, start)
            except Exception as error:  # the node goes on serving, and says no more than it may
                return pack(
                    {"error": self.refusals.error_reply(header, error, self.server_fingerprint, self.session)}
                )

    def _reply(self, body: ReplyPayload, released: Tensors, start: float) -> bytes:
        """What a node tells and lets out, with the seconds that it took itself."""
        seconds = time.perf_counter() - start
        session = self.session  # records are drawn in secret, or their number is not to be told
        if session is not None and (session.node.private_steps or session.plan.secure_aggregation):
            seconds = math.ceil(10 * seconds) / 10
        return pack({"body": {} if body is None else asdict(body), "seconds": seconds}, released)

    def _refuse_large(self, message: size) -> None:
        """Refuse a message by its size or its header's, before anything of it is parsed."""
        policy = self.file.policy
        for rule, size in (("max_message", len(message)), ("max_header", header_size(message))):
            limit = getattr(policy, rule)
            if limit and size > limit:
                raise QueryRefused(self.name, "message", f"{rule}: {limit}, and it has {size} bytes")

    def _serve(self, header: Mapping[str, Any], tensors: Tensors) -> tuple[ReplyPayload, Tensors]:
        """What the node tells in reply to a message, and what leaves."""
        message, envelope = read_message(header)
        match message:
            case IdentifyNode():
                return self.versions(), {}
            case JoinRun():
                return self._join_run(message, envelope.server, tensors), {}
        session = self.session
        if session is None or session.plan.run != envelope.run:
            if isinstance(message, LeaveRun):  # of a run that was not let in
                return None, {}
            raise ArgumentError("run", envelope.run, "a run that this node has joined")
        if isinstance(message, SaveCheckpoint | LoadCheckpoint | LeaveRun) and self._is_duplicate(envelope):
            return None, {}
        if isinstance(
            message, TrainLocally | AnswerQuery | ComputeGradients | ConfirmSurvivors | RevealMasks
        ):
            self.require_still_allowed(session, message.operation)
        gate, is_summed = session.node.gate, session.plan.secure_aggregation
        match message:
            case TrainLocally():
                return session.train_locally(message.seconds), {}
            case AnswerQuery(number=number):
                released = session.respond(
                    message.query, number, tensors, message.differentiable, message.sum
                )
                return ReleaseReply(gate.release_cost(number, RESPONSE, is_summed)), released
            case ComputeGradients(number=number):
                released = session.backward(number, tensors, message.sum)
                return ReleaseReply(gate.release_cost(number, GRADIENT, is_summed)), released
            case SaveCheckpoint():
                session.save_checkpoint(message.checkpoint)
            case LoadCheckpoint():
                session.load_checkpoint(message.checkpoint)
            case LeaveRun():
                self.leave()
            case SendKeys() | ReceiveKeys() | ConfirmSurvivors() | RevealMasks():
                return self._serve_secure_aggregation(session, message, tensors)
            case _:
                raise ArgumentError("operation", message.operation, "a message that a node serves")
        return None, {}

    def _join_run(self, message: JoinRun, server: str, public_tensors: Tensors) -> NodeStatus:
        """What a server process gets to know as it joins this node to a run."""
        if server in self._former_servers:  # its run may be another than the one that goes on here
            raise ArgumentError("server", server, "a server process that none has followed")
        policy = self.file.policy
        admission.require_server(
            self.name, policy, self.server_fingerprint
        )  # before a plan of any size is read
        admission.require_hour(self.name, policy, "join")
        status = self.join(RunPlan.from_dict(message.plan, policy.methods, policy.tasks), public_tensors)
        if server != self._server:  # the one before it is over, and messages are counted anew
            self._former_servers.append(self._server)
            self._server, self._last_message = server, -1
        return status

    @staticmethod
    def _serve_secure_aggregation(
        session: Session, message: SendKeys | ReceiveKeys | ConfirmSurvivors | RevealMasks, tensors: Tensors
    ) -> tuple[ReplyPayload, Tensors]:
        """What nodes whose answers are summed say to each other by way of the server."""
        masks = session.masks
        if masks is None:
            raise ArgumentError("operation", message.operation, "no sums: the plan of this run has none")
        match message:
            case SendKeys():
                return None, {"card": torch.tensor(list(masks.card()), dtype=torch.uint8)}
            case ReceiveKeys():
                for name, card in tensors.items():
                    if card.dtype != torch.uint8 or card.ndim != 1:
                        description = f"{card.dtype} {tuple(card.shape)}"
                        raise ArgumentError(f"card of {name}", description, "bytes: uint8, (N,)")
                masks.exchange_keys({name: card.numpy().tobytes() for name, card in tensors.items()})
                return None, {}
            case ConfirmSurvivors():
                return AgreementCodes(masks.agree(message.sum, message.survivors)), {}
            case RevealMasks():
                return AgreementCodes(masks.reveal(message.sum, message.words)), {}

    def _is_duplicate(self, envelope: Envelope) -> bool:
        """Whether a message that changes a state has come before, or after a later one: it was sent twice."""
        if envelope.server != self._server:
            return True
        number = self._last_message + 1 if envelope.message is None else envelope.message
        previous, self._last_message = self._last_message, max(self._last_message, number)
        return previous >= self._last_message

    # --- the same from Python ------------------------------------------------------------------------

    def versions(self) -> NodeVersions:
        """Who this is."""
        python = platform.python_version()
        versions = {"fedstill": __version__, "torch": torch.__version__, "python": python}
        return NodeVersions(versions, PROTOCOL)

    def join(self, plan: RunPlan, public: Tensors | None = None) -> NodeStatus:
        """Make ready for a run, or for its going on; nothing is trained, asked or released.

        Args:
            public: the public data as named tensors; without them, where the plan needs some that are not
                in this node's folder, nothing is made ready and ``wants_public`` is true.

        Returns:
            What the server may know: the kind of model, and which queries will be refused by which rule.

        Raises:
            FedstillError: the plan asks for more than the owner's policy allows, or data or model do not have
            its spec.
        """
        with enforce_limits(self.name, "join", self.file.policy.max_seconds):
            public_data = self._public_cache.read(plan, public or {})
            if public_data is None and plan.public:
                self.require_admission(plan)
                return replace(NOT_JOINED, needs_public_data=True)
            approved = self.require_approved(plan, public_data)
            if public:
                self._public_cache.store(plan, public)
                public_data = self._public_cache.read(
                    plan, {}
                )  # laid out in memory as it will be after a stop
            if self.session is None or (self.session.plan, self.session.server) != (
                plan,
                self.server_fingerprint,
            ):
                if self._joins >= MAX_JOINS:  # each is a line of the security log
                    raise QueryRefused(self.name, "join", f"a process joins {MAX_JOINS} runs, and no more")
                self.leave()
                arguments = (
                    self.folder,
                    self.file,
                    self.compute,
                    plan,
                    public_data,
                    approved,
                    self.server_fingerprint,
                )
                session = Session(*arguments)
                self._joins += 1
                reason = f"approve = {self.file.policy.approve!r}"
                details = {} if approved is None else {"description": approved.sha256}
                try:
                    self.security.write("joined", self.server_fingerprint, reason, run=plan.run, **details)
                except SecurityLogError:
                    session.close()
                    raise
                self.session = session
                logger.info("joined run %s: %s", plan.run, plan.method["name"])
                self._record_expected_refusals(session, plan.run)
            return self.session.status()

    def _record_expected_refusals(self, session: Session, run: str) -> None:
        """Write down what a server is told beforehand that it is refused, as it will not ask."""
        for query, rule in session.refused_queries().items():
            logger.warning("run %s: %s will be refused: %s", run, query, clip_text(rule, 1000))
            self.refusals.record(self.server_fingerprint, query, QueryRefused(self.name, query, rule), run)

    def require_still_allowed(self, session: Session, query: str) -> None:
        """Refuse what comes outside the owner's hours, or after the owner has taken an approval back.

        Raises:
            QueryRefused: naming the rule.
        """
        admission.require_hour(self.name, self.file.policy, query)
        if session.approved is not None:
            self.requests.require_still_approved(
                session.plan.run, self.server_fingerprint, session.approved.sha256, query
            )

    def require_admission(self, plan: RunPlan) -> None:
        """Refuse servers, hours, schemas, classes, too few nodes, before anything of a run is kept."""
        admission.require_server(self.name, self.file.policy, self.server_fingerprint)
        admission.require_hour(self.name, self.file.policy, "join")
        admission.require_schema(self.name, self.schema, plan.spec.schema)
        admission.require_classes(self.name, self.file.data.classes, plan.spec.classes)
        admission.require_nodes(self.name, self.file.policy, plan.min_nodes)

    def require_approved(self, plan: RunPlan, public: PublicData | None) -> RunDescription | None:
        """Refuse a run that the owner's policy does not let in, or that waits for the owner's approval.

        Returns:
            What was approved, to which the run is held; None: policy alone decides.

        Raises:
            QueryRefused: naming the rule.
        """
        self.require_admission(plan)
        if not requires_approval(self.file):
            return None
        description = describe(plan, public)
        self.requests.require_approved(plan.run, description, self.server_fingerprint)
        return description

    def leave(self) -> None:
        """End with a run; its files stay."""
        if self.session is not None:
            logger.info("left run %s", self.session.plan.run)
            self.session.close()
            self.session = None


def unavailable_reply(error: Exception) -> bytes:
    """What a node answers to all messages while its own folder lets it serve none; its log says why."""
    logger.error("no run can begin here: %s", error)
    body = {"kind": NodeDataError.__name__, "text": public_text(NodeDataError()), "query": "join"}
    return pack({"error": body})
