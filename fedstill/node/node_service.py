"""A node as a service: data, model and policy from its owner's folder, and replies to a server's messages.

Every transport (FLARE, files, loopback) calls it; ``session.py`` holds one run.
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
from fedstill.core.errors import ArgumentError, NodeDataError, QueryRefused
from fedstill.core.hashing import fingerprint
from fedstill.core.registry import searching_in
from fedstill.core.text_format import to_printable_line
from fedstill.core.version import __version__
from fedstill.data import node_data
from fedstill.data.public import PublicData
from fedstill.data.table_data import schema_text
from fedstill.node import admission, owner_folder
from fedstill.node.admission import RUN_RULES, SERVER_RULES, RunFacts
from fedstill.node.approvals import ApprovalRequests, requires_approval
from fedstill.node.audit_entries import GRADIENT, JOINED, RESPONSE
from fedstill.node.audit_log import AuditError
from fedstill.node.folder_log import SecurityEvents
from fedstill.node.limits import allowed_memory_bytes, enforce_limits, limit_process_memory
from fedstill.node.refusals import Refusals, public_text
from fedstill.node.replies import (
    NOT_JOINED,
    NodeStatus,
    NodeVersions,
    ReleaseReply,
    ReplyPayload,
)
from fedstill.node.run_folder import PublicDataCache
from fedstill.node.session import Session
from fedstill.protocol.messages import (
    AnswerQuery,
    ComputeGradients,
    Envelope,
    IdentifyNode,
    JoinRun,
    LeaveRun,
    LoadCheckpoint,
    SaveCheckpoint,
    SumMessage,
    TrainLocally,
    read_message,
)
from fedstill.protocol.run_plan import PROTOCOL, RunDescription, RunPlan, describe
from fedstill.protocol.wire_format import Tensors, header_size, pack, unpack

logger = logging.getLogger("fedstill.node")

MAX_JOINS = 1000  # joins per process


class NodeService:
    """One node, ready for messages of a server.

    Args:
        folder: the owner's folder, with ``node.toml`` and ``secret``.

    Attributes:
        server_fingerprint: fingerprint of the server's proof of identity: the authority of its certificate,
            or the key that signed a file; empty: no proof.

    Raises:
        FedstillError: the folder does not describe a node, or its audit log has a fault.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, owner_folder.read_node_file(folder)
        self.server_fingerprint = ""
        self.events = SecurityEvents(folder, self.file)
        self.requests = ApprovalRequests(folder, self.file, self.events)
        self.refusals = Refusals(self.events)
        self.schema = node_data.read_node_schema(self.file.data, folder)
        rules = {"policy": to_table(self.file.policy), "privacy": to_table(self.file.privacy)}
        rules["data"] = {"schema": fingerprint(schema_text(self.schema).encode()) if self.schema else ""}
        rules["data"]["classes"] = list(self.file.data.classes)
        self.events.audit.require_sound()
        self.events.record_rules({f"{of}.{name}": rules[of][name] for of in rules for name in rules[of]})
        self.compute = owner_folder.make_compute(self.file)
        self.session: Session | None = None
        self._public_cache = PublicDataCache(folder, self.file)
        self._lock = threading.Lock()
        self._server, self._last_message = "", -1  # current server process and its last message
        self._former_servers: deque[str] = deque(maxlen=1000)  # earlier server processes
        self._joins = 0

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.file.name

    def limit_process_memory(self) -> None:
        """Limit the memory of this process, from now on, to the policy's ``max_memory``."""
        device = self.compute.device
        limit_process_memory(allowed_memory_bytes(self.file.policy.max_memory, device), device)

    # --- messages -----------------------------------------------------------------------------------

    def serve(self, message: bytes) -> bytes:
        """Reply to one message, with an error if it fails; transports carry both as bytes.

        One message at a time: a repeated message waits while the first one is computed.
        """
        header: dict[str, Any] = {}
        try:  # before the lock: many large messages would wait in memory
            self._refuse_large(message)
        except Exception as error:  # as below; also if it is not bytes
            return pack(
                {"error": self.refusals.error_reply(header, error, self.server_fingerprint, self.session)}
            )
        with self._lock, searching_in(self.folder):
            start = time.perf_counter()
            try:
                with enforce_limits(self.name, "message"):
                    header, tensors = unpack(message, 0)
                with enforce_limits(self.name, to_printable_line(header.get("operation"))):
                    body, released = self._serve(header, tensors)
                    return self._reply(body, released, start)
            except Exception as error:  # the node keeps serving, and the reply holds public text only
                return pack(
                    {"error": self.refusals.error_reply(header, error, self.server_fingerprint, self.session)}
                )

    def _reply(self, body: ReplyPayload, released: Tensors, start: float) -> bytes:
        """Pack a reply and its released tensors, with the node's own computing time."""
        seconds = time.perf_counter() - start
        session = self.session  # exact times could reveal sampled records or their number
        if session is not None and (session.node.dp_sgd_parameters or session.plan.secure_aggregation):
            seconds = math.ceil(10 * seconds) / 10
        return pack({"body": {} if body is None else asdict(body), "seconds": seconds}, released)

    def _refuse_large(self, message: bytes) -> None:
        """Refuse a message by its size or its header's size, before it is parsed."""
        policy = self.file.policy
        for rule, size in (("max_message", len(message)), ("max_header", header_size(message))):
            limit = getattr(policy, rule)
            if limit and size > limit:
                admission.refuse(self.name, "message", f"{rule}: {limit}, and it has {size} bytes")

    def _serve(self, header: Mapping[str, Any], tensors: Tensors) -> tuple[ReplyPayload, Tensors]:
        """Return the reply to a message, and the released tensors."""
        message, envelope = read_message(header)
        match message:
            case IdentifyNode():
                return self.versions(), {}
            case JoinRun():
                return self._join_run(message, envelope.server, tensors), {}
        session = self.session
        if session is None or session.plan.run != envelope.run:
            if isinstance(message, LeaveRun):  # the run was not admitted
                return None, {}
            raise ArgumentError("run", envelope.run, "a run that this node has joined")
        if isinstance(message, SaveCheckpoint | LoadCheckpoint | LeaveRun) and self._is_duplicate(envelope):
            return None, {}
        if isinstance(message, TrainLocally | AnswerQuery | ComputeGradients | SumMessage):
            self.require_still_allowed(session, message.operation)
        gate = session.node.gate
        match message:
            case TrainLocally():
                return session.train_locally(message.seconds), {}
            case AnswerQuery(number=number):
                released = session.respond(
                    message.query, number, tensors, message.differentiable, message.sum
                )
                return ReleaseReply(gate.release_cost(number, RESPONSE)), released
            case ComputeGradients(number=number):
                released = session.backward(number, tensors, message.sum)
                return ReleaseReply(gate.release_cost(number, GRADIENT)), released
            case SaveCheckpoint():
                session.save_checkpoint(message.checkpoint)
            case LoadCheckpoint():
                session.load_checkpoint(message.checkpoint)
            case LeaveRun():
                self.leave()
            case SumMessage():
                return session.releases.serve(message, tensors)
            case _:
                raise ArgumentError("operation", message.operation, "a message that a node serves")
        return None, {}

    def _join_run(self, message: JoinRun, server: str, public_tensors: Tensors) -> NodeStatus:
        """Join a run for a server process; return the node's status."""
        if server in self._former_servers:  # its run may differ from the current one
            raise ArgumentError("server", server, "the current server process")
        policy = self.file.policy
        request = RunFacts(policy, self.server_fingerprint)
        admission.require(self.name, "join", SERVER_RULES, request)  # before the plan is parsed
        status = self.join(RunPlan.from_dict(message.plan, policy.plugins), public_tensors)
        if server != self._server:  # the earlier process ended; restart the message counter
            self._former_servers.append(self._server)
            self._server, self._last_message = server, -1
        return status

    def _is_duplicate(self, envelope: Envelope) -> bool:
        """Return whether a message that changes a state came before, or after a later one."""
        if envelope.server != self._server:
            return True
        number = self._last_message + 1 if envelope.message is None else envelope.message
        previous, self._last_message = self._last_message, max(self._last_message, number)
        return previous >= self._last_message

    # --- Python interface -----------------------------------------------------------------------------

    def versions(self) -> NodeVersions:
        """Return the versions of software and protocol."""
        python = platform.python_version()
        versions = {"fedstill": __version__, "torch": torch.__version__, "python": python}
        return NodeVersions(versions, PROTOCOL)

    def join(self, plan: RunPlan, public: Tensors | None = None) -> NodeStatus:
        """Prepare a run or resume it; nothing is trained, queried or released.

        Args:
            plan: the server's plan of the run.
            public: public data as named tensors. If the plan needs some that are not in this node's folder,
                nothing is prepared and ``needs_public_data`` is true.

        Returns:
            The node's status: kind of model, and refused queries with their rules.

        Raises:
            FedstillError: the plan exceeds the owner's policy, or data or model do not fit it.
        """
        with enforce_limits(self.name, "join", self.file.policy.max_seconds):
            public_data = self._public_cache.read(plan, public or {})
            if public_data is None and plan.public:
                self.require_admission(plan)
                return replace(NOT_JOINED, needs_public_data=True)
            approved = self.require_approved(plan, public_data)
            if public and plan.public:
                self._public_cache.store(plan, public)
                public_data = self._public_cache.read(plan, {})  # same memory layout as after a resume
            if self.session is None or (self.session.plan, self.session.server) != (
                plan,
                self.server_fingerprint,
            ):
                if self._joins >= MAX_JOINS:  # each join is an entry of the audit log
                    admission.refuse(self.name, "join", f"a process joins {MAX_JOINS} runs at most")
                self.leave()
                self.events.close()  # each run begins with a check of the whole log
                arguments = (
                    self.folder,
                    self.file,
                    self.compute,
                    plan,
                    public_data,
                    approved,
                    self.server_fingerprint,
                    self.events.audit,
                )
                session = Session(*arguments)
                self._joins += 1
                reason = f"approve = {self.file.policy.approve!r}"
                details = {} if approved is None else {"description": approved.sha256}
                try:
                    self.events.write(JOINED, self.server_fingerprint, reason, run=plan.run, **details)
                except AuditError:
                    session.close()
                    raise
                self.session = session
                logger.info("joined run %s: %s", plan.run, plan.method["name"])
                self._record_expected_refusals(session, plan.run)
            return self.session.status()

    def _record_expected_refusals(self, session: Session, run: str) -> None:
        """Log the refusals that the status announces, since the server will not send these queries."""
        for query, rule in session.rules_by_refused_query().items():
            logger.warning("run %s: %s will be refused: %s", run, query, to_printable_line(rule, 1000))
            self.refusals.record(self.server_fingerprint, query, QueryRefused(self.name, query, rule), run)

    def require_still_allowed(self, session: Session, query: str) -> None:
        """Refuse messages outside the owner's hours, or after the owner withdrew an approval.

        Raises:
            QueryRefused: with the rule.
        """
        admission.refuse(self.name, query, admission.hours(RunFacts(self.file.policy)))
        if session.approved is not None:
            self.requests.require_still_approved(
                session.plan.run, self.server_fingerprint, session.approved.sha256, query
            )

    def require_admission(self, plan: RunPlan) -> None:
        """Refuse servers, hours, schemas, classes and too few nodes, before anything of a run is stored."""
        spec, own = plan.spec, self.file.data
        names = (self.schema, own.classes, spec.schema, spec.classes)
        request = RunFacts(self.file.policy, self.server_fingerprint, *names, plan.min_nodes)
        admission.require(self.name, "join", RUN_RULES, request)

    def require_approved(self, plan: RunPlan, public: PublicData | None) -> RunDescription | None:
        """Refuse a run that the policy does not admit, or that waits for the owner's approval.

        Returns:
            The approved description, which limits the run; None: policy alone decides.

        Raises:
            QueryRefused: with the rule.
        """
        self.require_admission(plan)
        if not requires_approval(self.file):
            return None
        description = describe(plan, public)
        self.requests.require_approved(plan.run, description, self.server_fingerprint)
        return description

    def leave(self) -> None:
        """Leave the current run; its files stay."""
        if self.session is not None:
            logger.info("left run %s", self.session.plan.run)
            self.record_repeats()
            self.session.close()
            self.session = None
            self.events.close()  # an idle node's log is one file, which its owner may copy

    def close(self) -> None:
        """Leave the current run and close the audit log."""
        self.leave()
        self.record_repeats()
        self.events.close()

    def record_repeats(self) -> None:
        """Write the numbers of refusals that the audit log does not hold yet."""
        try:
            self.events.record_repeats()
        except (AuditError, OSError) as error:
            logger.error("the audit log cannot be written: %s", error)


def unavailable_reply(error: Exception) -> bytes:
    """Return the reply to all messages while the node's folder is invalid; its log holds the reason."""
    logger.error("no run can begin here: %s", error)
    body = {"kind": NodeDataError.__name__, "text": public_text(NodeDataError()), "query": "join"}
    return pack({"error": body})
