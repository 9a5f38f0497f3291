"""Requests for approval and the owner's decisions: one file per description and server, in ``requests/``.

A run without approval is refused, and its description is stored for the owner. An approval holds for one
description (by its SHA-256), one server (by its identity) and the privacy configuration of that time. A
single changed option makes another description. The same description from another server is another
request, which does not change the first one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedstill.core import private_files
from fedstill.core.compute import Compute
from fedstill.core.config_tables import flatten, read_table, to_table
from fedstill.core.errors import ArgumentError, RunFolderError
from fedstill.core.hashing import group_digits, parse_fingerprint
from fedstill.core.run_writer import read_object
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.core.text_format import format_bytes, format_count, to_printable_line
from fedstill.data.data_spec import DataSpec
from fedstill.node.admission import owner_refusals, refuse
from fedstill.node.audit_entries import APPROVED, REJECTED, WAITS
from fedstill.node.folder_log import SecurityEvents, process_user_name
from fedstill.node.node_file import NodeFile
from fedstill.node.policy import EACH_RUN, POLICY
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, build_node_side
from fedstill.protocol.node_side import NodeSetting, placeholder_public
from fedstill.protocol.recalibration import Recalibration
from fedstill.protocol.run_plan import RunDescription

FOLDER = "requests"
USED = "used"  # an approval for one run, by that run; the other states are those of the audit log
MAX_WAITING_PER_SERVER = 20  # a server could fill the owner's list
MAX_WAITING = 500  # of all servers: one with changing keys could fill the disk
MAX_DESCRIPTION_BYTES = 200_000  # of a description, which the owner is shown in full
MAX_RUNS = 1000  # runs of one approval that are remembered: a server could fill the disk with refused joins
# Digits of a SHA-256 that name a request, and that approve it: a server can make a description that agrees
# with another in few of them.
MIN_DIGITS, MIN_DIGITS_TO_APPROVE = 8, 32
UNPROVEN = "none"  # name of a server without a proven identity


@dataclass(frozen=True)
class ApprovalRequest:
    """Request of one server, and the owner's decision.

    Args:
        description: the run's description, as canonical text.
        run: name of the latest run with this description.
        server: identity of the server, as in ``NodeService.server_fingerprint``; empty: no proof.
        requested_at: time of the request, in UTC.
        state: ``waits``, ``approved``, ``used`` (for its one run) or ``rejected``.
        protection: privacy configuration at the time of approval, as canonical text.
        runs: names of this server's last runs under the approval.
    """

    description: str
    run: str
    server: str
    requested_at: str
    state: str = WAITS
    protection: str = ""
    runs: tuple[str, ...] = ()

    @property
    def run_description(self) -> RunDescription:
        """Description of the requested run."""
        return RunDescription(json.loads(self.description))

    @property
    def sha256(self) -> str:
        """SHA-256 of the description."""
        return self.run_description.sha256

    @property
    def server_name(self) -> str:
        """The server as shown to the owner."""
        return server_label(self.server)


class ApprovalRequests:
    """Requests in a node's folder.

    Args:
        folder: the node's folder.
        file: its ``node.toml``.
        events: security events of this process, into which requests and decisions are written; None: own
            ones.
    """

    def __init__(self, folder: Path, file: NodeFile, events: SecurityEvents | None = None) -> None:
        self._folder, self._file = folder / FOLDER, file
        self._events = SecurityEvents(folder, file) if events is None else events

    # --- at the node -------------------------------------------------------------------------------------

    def require_approved(self, run: str, description: RunDescription, server: str) -> None:
        """Refuse a run that the owner has not approved, and store its description for the owner.

        Raises:
            QueryRefused: it waits, was rejected, or was approved under another privacy configuration.
        """
        sha256 = description.sha256
        with self._locked():
            request = self._read(_file_stem(sha256, server))
            state = self._approval_state(request, run)
            if state == APPROVED and request is not None:
                if run not in request.runs:
                    state_after = USED if self._file.policy.approve == EACH_RUN else APPROVED
                    runs = (*request.runs, run)[-MAX_RUNS:]  # a forgotten run may need another approval
                    self._write(replace(request, state=state_after, runs=runs))
                return
            if state == WAITS:
                self._store_waiting(description, run, server, request)
        self._refuse("join", sha256, state)

    def require_still_approved(self, run: str, server: str, sha256: str, query: str) -> None:
        """Refuse a query once the owner has withdrawn the approval, with QueryRefused."""
        with self._locked():
            state = self._approval_state(self._read(_file_stem(sha256, server)), run)
        if state != APPROVED:
            self._refuse(query, sha256, state)

    def _approval_state(self, request: ApprovalRequest | None, run: str) -> str:
        if request is None or request.state == REJECTED:
            return WAITS if request is None else REJECTED
        is_granted = request.state == APPROVED
        if self._file.policy.approve == EACH_RUN:  # the approval holds for one run
            is_granted = is_granted and request.run == run
        if not is_granted and run not in request.runs:
            return WAITS
        return APPROVED if request.protection == self._privacy_config_json() else WAITS

    def _refuse(self, query: str, sha256: str, state: str) -> None:
        rule = f"run {group_digits(sha256)} is rejected by its owner"
        if state == WAITS:
            rule = f"run {group_digits(sha256)} waits until its owner approves it"
        refuse(self._file.name, query, f"approve: {rule}")

    def _store_waiting(
        self, description: RunDescription, run: str, server: str, previous: ApprovalRequest | None
    ) -> None:
        if previous is not None and (previous.run, previous.state) == (run, WAITS):
            return
        sha256 = description.sha256
        waiting = [
            request.server
            for request in self.list_all()
            if request.state == WAITS and (request.sha256, request.server) != (sha256, server)
        ]
        if waiting.count(server) >= MAX_WAITING_PER_SERVER or len(waiting) >= MAX_WAITING:
            limit = f"{MAX_WAITING_PER_SERVER} requests of this server or {MAX_WAITING} of all"
            refuse(self._file.name, "join", f"approve: {limit} are waiting already")
        if (size := len(description.text)) > MAX_DESCRIPTION_BYTES:
            limit = f"a description has up to {MAX_DESCRIPTION_BYTES} bytes, and this one {size}"
            refuse(self._file.name, "join", f"approve: {limit}")
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        new = ApprovalRequest(description.text, run, server, time)
        if previous is not None:  # other runs may depend on the earlier approval
            new = replace(new, runs=previous.runs, protection=previous.protection)
        earlier = "" if previous is None or previous.state == WAITS else previous.state
        reason = f"approve = {self._file.policy.approve!r}"
        self._events.write_once(WAITS, server, reason, run=run, description=sha256, earlier=earlier)
        self._write(new)  # last: a request without a log would look like a lost log

    def _privacy_config_json(self) -> str:
        return json.dumps(to_table(self._file.privacy), sort_keys=True)

    # --- for the owner -----------------------------------------------------------------------------------

    def list_all(self) -> list[ApprovalRequest]:
        """Return all requests, the latest first, without a lock."""
        read = (self._read(path.stem) for path in sorted(self._folder.glob("*.json")))
        requests = [request for request in read if request is not None]
        return sorted(requests, key=lambda request: request.requested_at, reverse=True)

    def decide(
        self, sha256: str, approved: bool, because: str = "", *, server: str | None = None
    ) -> ApprovalRequest:
        """Approve or reject a request, also one that was decided otherwise before.

        Args:
            sha256: of the description, or its beginning: at least eight digits, and 32 to approve it.
            server: whose request, by its whole identity; empty or ``none`` is an unproven server.
                It may be left out where one server alone asked for the description.

        Returns:
            The request as it is now.

        Raises:
            ArgumentError: no request fits, or several do.
            AuditError: it cannot be written into the audit log; then nothing is decided.
        """
        with self._locked():
            request = find_request(
                self.list_all(), sha256, server, MIN_DIGITS_TO_APPROVE if approved else MIN_DIGITS
            )
            state = APPROVED if approved else REJECTED
            # Runs that began under another protection need an approval of their own.
            is_same_protection = request.protection == self._privacy_config_json()
            runs = request.runs if approved and is_same_protection else ()
            decided = replace(request, state=state, protection=self._privacy_config_json(), runs=runs)
            details = {"run": request.run, "description": request.sha256, "server": request.server_name}
            self._events.write(state, process_user_name(), because or "no reason given", **details)
            self._write(decided)
        return decided

    # --- the files ---------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the requests; no other process decides or requests meanwhile."""
        private_files.make_folder(self._folder)
        with open(self._folder / "lock", "ab", opener=private_files.private_opener) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self, name: str) -> ApprovalRequest | None:
        path = self._folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            request = read_table(ApprovalRequest, dict(read_object(path)))
            is_valid = _file_stem(request.sha256, request.server) == name
        except (ArgumentError, ValueError, TypeError):
            is_valid = False
        if not is_valid:
            raise RunFolderError(f"{path} does not match its name: delete it")
        return request

    def _write(self, request: ApprovalRequest) -> None:
        path = self._folder / f"{_file_stem(request.sha256, request.server)}.json"
        private_files.replace_file(path, json.dumps(asdict(request)).encode(), sync=True)


def _file_stem(sha256: str, server: str) -> str:
    """Return the file name of a request, without its suffix: one per description and server."""
    return f"{sha256}-{hashlib.sha256(server.encode()).hexdigest()[:32]}"


def server_label(server: str) -> str:
    """Return a server's fingerprint, or a text if there is none."""
    return server or "an unproven server"


def requires_approval(file: NodeFile) -> bool:
    """Return whether a node's runs need its owner's approval."""
    return file.policy.approve != POLICY


def find_requests_by_hash(
    requests: Sequence[ApprovalRequest], sha256: str, min_digits: int = MIN_DIGITS
) -> list[ApprovalRequest]:
    """Return the requests of the one description whose SHA-256 has this prefix, one per server.

    Args:
        requests: all requests.
        sha256: first digits of the SHA-256.
        min_digits: minimum number of digits.

    Raises:
        ArgumentError: there is no such description, or there are several.
    """
    digits_ = parse_fingerprint(sha256)
    matches = [
        request for request in requests if len(digits_) >= min_digits and request.sha256.startswith(digits_)
    ]
    if len({request.sha256 for request in matches}) != 1:
        command = "`fedstill node requests`"
        expected = f"the SHA-256 of one request, or its first digits, {min_digits} or more: {command}"
        raise ArgumentError("HASH", sha256, expected)
    return matches


def find_request(
    requests: Sequence[ApprovalRequest], sha256: str, server: str | None, min_digits: int = MIN_DIGITS
) -> ApprovalRequest:
    """Return the request of one description by one server.

    Args:
        requests: all requests.
        sha256: first digits of the SHA-256.
        server: its whole identity, empty or ``none`` for a server without proof; None: the only one.
        min_digits: minimum number of digits of the SHA-256.

    Raises:
        ArgumentError: none fits, or there are several servers and none is given.
    """
    matches = find_requests_by_hash(requests, sha256, min_digits)
    servers = " or ".join(sorted(request.server or UNPROVEN for request in matches))
    if server is not None:
        unproven, wanted_digits = server in ("", UNPROVEN), parse_fingerprint(server)
        matches = [
            request
            for request in matches
            if (
                not request.server
                if unproven
                else request.server and parse_fingerprint(request.server) == wanted_digits
            )
        ]
    if len(matches) != 1:
        value = "not given" if server is None else server
        raise ArgumentError("--server", value, f"the request's server: {servers}")
    return matches[0]


# --- texts for the owner ----------------------------------------------------------------------------


def describe_request(request: ApprovalRequest) -> dict[str, str | list[str]]:
    """Return the facts of a request as texts by topic. No text is cut: the owner approves all of it."""
    description, run = request.run_description, request.run_description.table
    spec, public = dict(run["spec"]), run["public"]
    planned_queries = []
    for name, planned in description.queries.items():
        times = format_count(planned["times"], "time") if planned["times"] else "any number of times"
        rows = f", up to {planned['rows']} inputs" if planned["rows"] else ""
        size = f", up to {format_bytes(planned['bytes'])} each" if planned["bytes"] else ""
        kinds = ", ".join(dict.fromkeys(planned["releases"].values())) or "nothing"
        planned_queries.append(f"{name}: {times}{rows}; {kinds} leave{size}")
    max_queries = description.max_queries
    queries = format_count(max_queries, "query") if max_queries else "queries not limited by the plan"
    bytes_text = (
        format_bytes(description.max_bytes) if description.max_bytes else "bytes not limited by the plan"
    )
    student, min_nodes = run["student"] or "to be chosen", run["min_nodes"]
    quorum = (
        f"continues with {format_count(min_nodes, 'node')} or more"
        if min_nodes
        else "does not state the number of nodes"
    )
    schema, classes = read_table(TableSchema, spec.pop("schema")), spec.pop("classes")
    inputs = f"{len(classes)} classes, {' x '.join(map(str, spec.pop('shape')))}"
    target = f"; target {schema.target}" if schema else ""
    event = f"; event {schema.event}, {schema.intervals} intervals" if schema.event else ""
    task = _describe_options(spec.pop("task"))
    public_text = f"{json.dumps(public['name'])}, {public['inputs']} inputs, {public['fingerprint']}"
    facts = {
        "state": request.state,
        "run": f"{request.run}, requested {request.requested_at}",
        "server": request.server_name,
        "method": _describe_options(run["method"]),
        "queries": planned_queries,
        "at most": f"{queries}, {bytes_text}",
        "inputs": f"{task}; {inputs}{target}{event}",
        "input format": _describe_options(spec),
        **({"features": _describe_options(run["features"])} if "features" in run else {}),
        "public": public_text if public["fingerprint"] else "none",
        "wire": _describe_options(run["wire"]),
        "server sees": "sums of all nodes' responses (secure aggregation, experimental)"
        if run["secure_aggregation"]
        else "each node's responses",
        "server states": f"student {student}; {quorum}",
        # Last, as there may be many.
        **(
            {"columns": list(map(_describe_column, schema.columns))}
            if schema
            else {"classes": ", ".join(classes)}
        ),
    }
    return {
        topic: to_printable_line(text, None)
        if isinstance(text, str)
        else [to_printable_line(each, None) for each in text]
        for topic, text in facts.items()
    }


def _describe_options(table: Mapping[str, Any]) -> str:
    """Return the ``name`` in a table, if there is one, and all options with their values as JSON."""
    options = flatten(table)
    name = [str(options.pop("name"))] if "name" in options else []
    return ", ".join([*name, *(f"{option} = {json.dumps(value)}" for option, value in options.items())])


def _describe_column(column: SchemaColumn) -> str:
    """Return name, valid cells and scale of a column in one line."""
    scale = f", scaled by {column.scale[0]!r} to {column.scale[1]!r}" if column.scale else ""
    return f"{column.name}: {column.allowed_values}{scale}"


def always_refused_queries(request: ApprovalRequest, file: NodeFile) -> dict[str, str]:
    """Return the queries that ``node.toml`` refuses despite an approval, and their rules; without refusals
    by budget or model.
    """
    table = request.run_description.table
    spec, method = read_table(DataSpec, table["spec"], "spec."), dict(table["method"])
    config = read_table(METHODS[method.pop("name")], method, "method.")
    if features := table.get("features"):
        spec = spec.on_features(features.get("components") or features["width"])
    task, recalibration = spec.make_task(), table.get("recalibration")
    setting = NodeSetting(
        task,
        LocalConfig(),
        Compute(),
        placeholder_public(task, spec.shape),
        schema=spec.schema,
        secure_aggregation=bool(table["secure_aggregation"]),
        recalibration=None if recalibration is None else Recalibration(**recalibration),
    )
    return owner_refusals(file, True, build_node_side(config, setting).queries)


def describe_security_event(event: Mapping[str, Any]) -> str:
    """Return subject and reason of a security event."""
    subject = " ".join(str(event[name]) for name in ("run", "query", "number") if name in event)
    if event.get("server"):
        subject = f"{subject} of {event['server']}"
    sha256 = group_digits(str(event.get("description", ""))[:16])
    return "; ".join(to_printable_line(part) for part in (subject, str(event["reason"]), sha256) if part)
