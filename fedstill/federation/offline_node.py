"""A node's side of a run by files: respond to a file of queries through the gate, into a signed file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedstill.core import private_files
from fedstill.core.errors import ArgumentError, FedstillError, QueryFileError, QueryRefused, RunFolderError
from fedstill.core.registry import USER_CODE_ERRORS, searching_in
from fedstill.federation import signed_files
from fedstill.federation.offline_files import (
    QUERIES,
    RESPONSES,
    Queries,
    Replies,
    ResponsesHeader,
    answered_queries_hash,
    pack_responses,
    read_queries,
    unpack_responses,
)
from fedstill.node import audit_log_inspection, owner_folder
from fedstill.node.audit_entries import NODE_DATA, RESPONSE, RESPONSE_FILE, Entry
from fedstill.node.gate import policy_refusal
from fedstill.node.message_limits import enforce_limits
from fedstill.node.node_service import NodeService
from fedstill.node.session import Session
from fedstill.privacy.budget import describe_total_cost
from fedstill.protocol.method import QueryCall
from fedstill.protocol.run_plan import RunPlan, public_tensors
from fedstill.protocol.wire_format import Tensors, bytes_by_kind

RELEASED_FILE = "responses.safetensors"  # in the node's folder of the run: what was released
REPORT_INTERVAL = 0.5  # seconds between two progress reports of local training


@dataclass(frozen=True)
class OfflineResult:
    """Result of :func:`answer_queries`.

    Args:
        path: file of responses.
        replies: its content.
        signer: fingerprint of the key that signed it.
        queries: the queries.
        released_bytes: bytes that passed the gate, by payload kind.
        cost: privacy cost of all releases from these data so far, in words.
        was_released: whether the same responses had been released before; then nothing was charged.
    """

    path: Path
    replies: Replies
    signer: str
    queries: Queries
    released_bytes: Mapping[str, int]
    cost: str
    was_released: bool = False


def answer_queries(
    folder: Path,
    queries: Path,
    out: Path | None = None,
    *,
    server_key: str | None = None,
    report: Callable[[int], None] = lambda percent: None,
) -> OfflineResult:
    """Respond to a file of queries at a node, through its gate, and write a signed file of responses.

    The same file of queries returns the stored responses and is not charged again, even if data or model have
    changed since; the current policy is checked first. A call that was interrupted before the responses were
    stored is repeated, with the same data and model.

    Args:
        folder: of the node, created by ``fedstill node init``. It contains the node's key, ``node.key``.
        queries: the file of queries.
        out: the file of responses; None is ``responses-NAME.safetensors`` in the working folder.
        server_key: fingerprint of the server's key; None accepts any key as not trusted.
        report: called with the progress of local training in percent.

    Raises:
        QueryFileError: the file is malformed, or its signature is invalid or unexpected.
        QueryRefused: the owner's policy forbids a query; then nothing is trained or released.
        FedstillError: data, model and queries do not fit together.
    """
    # Custom modules are imported from the owner's folder, never from the working folder.
    with closing(NodeService(folder)) as service, searching_in(folder):
        try:
            return _answer_queries(service, queries, out, server_key, report)
        except FedstillError as error:
            service.refusals.record(service.server_fingerprint, getattr(error, "query", QUERIES), error, "")
            raise


def _answer_queries(
    service: NodeService,
    queries: Path,
    out: Path | None,
    server_key: str | None,
    report: Callable[[int], None],
) -> OfflineResult:
    folder, policy = service.folder, service.file.policy
    bytes = queries.stat().st_size if queries.is_file() else 0
    if 0 < policy.max_message < bytes:
        rule = f"max_message: {policy.max_message}, and {queries} has {bytes} bytes"
        raise QueryRefused(service.name, QUERIES, rule)
    with enforce_limits(service.name, QUERIES):
        signers = None if server_key is None else [server_key]
        queries_file = read_queries(queries, signers, policy.max_header, policy.methods, policy.tasks)
    # Named after the file's content: another file is another run, which is charged.
    plan = replace(queries_file.plan, run=f"{QUERIES}-{queries_file.sha256[:32]}")
    service.server_fingerprint = queries_file.signer
    path = Path(f"{RESPONSES}-{service.name}.safetensors") if out is None else out
    key = signed_files.load_or_create_key(folder / "node.key")
    signer = signed_files.fingerprint(signed_files.public_key_bytes(key))
    signed_files.require_same_signer(path, signer)
    _require_same_queries(path, queries_file)
    stored = folder / "runs" / plan.run / RELEASED_FILE
    was_released = stored.exists()
    if was_released:
        service.require_approved(plan, queries_file.public)
    else:
        _release_responses(service, plan, queries_file, stored, report)
    header, replies = _stored_responses(service, queries_file, stored)
    signed_files.write(path, pack_responses(header, replies), key)
    spent = audit_log_inspection.read_total_spent(service.file, folder)
    mixed = "no total: some runs were charged per record and some per group"
    total_cost = (
        mixed
        if len(spent.units) > 1
        else describe_total_cost(service.file.privacy, spent.events, spent.no_guarantee)
    )
    return OfflineResult(
        path, replies, signer, queries_file, _released_bytes(queries_file, replies), total_cost, was_released
    )


def _require_same_queries(path: Path, queries_file: Queries) -> None:
    """Raise ArgumentError if the file holds this node's responses to other queries."""
    if path.exists() and answered_queries_hash(path) != queries_file.sha256:
        raise ArgumentError("--out", str(path), "another file: this one has responses to other queries")


def _released_bytes(queries_file: Queries, replies: Replies) -> dict[str, int]:
    """Return the bytes that passed the gate, by payload kind."""
    declared, total = queries_file.query_declarations(), Counter[str]()
    for number, response in sorted(replies.tensors.items()):
        total.update(bytes_by_kind(response, declared[queries_file.calls[number].query].releases))
    return dict(total)


def _release_responses(
    service: NodeService, plan: RunPlan, queries_file: Queries, stored: Path, report: Callable[[int], None]
) -> None:
    """Train, respond through the gate, and store the releases with their replies."""
    try:
        status = service.join(
            plan, None if queries_file.public is None else public_tensors(queries_file.public)
        )
        session = service.session
        if session is None:
            raise QueryFileError("the file of queries lacks its public data")
        _check_refusals(service, status.refused_queries, status.max_queries, queries_file.calls, plan.run)
        responses = _compute_responses(service, session, status.is_trained, queries_file.calls, report)
        privacy = [asdict(session.node.gate.release_cost(number, RESPONSE)) for number in responses]
        header = ResponsesHeader(
            queries_file.sha256, queries_file.signer, queries_file.trusted, service.name, service.file.policy
        )
        final_status = replace(
            status, is_trained=True, last_query=-1, checkpoints=()
        )  # all queries are answered
        blob = pack_responses(
            header, Replies(asdict(service.versions()), asdict(final_status), privacy, responses)
        )
        service.require_still_allowed(session, QUERIES)
        # The audit log first, as a stored file without an entry is not released.
        session.audit.charge(_file_entry(plan.run, blob, service.folder))
        private_files.replace_file(stored, blob, sync=True)
    finally:
        service.leave()


def _file_entry(run: str, blob: bytes, folder: Path) -> Entry:
    """Return the audit entry of the stored file, which may be released again without a charge.

    Its hash is keyed by the node's secret. With an unkeyed hash, a reader of the log could test guesses of
    responses without noise.
    """
    key = hashlib.blake2b(str(owner_folder.read_secret(folder)).encode(), person=b"let out").digest()
    return Entry(
        run=run,
        payer=NODE_DATA,
        node=NODE_DATA,
        number=-1,
        query="answers",
        part=RESPONSE_FILE,
        content_hash=hashlib.blake2b(blob, key=key, digest_size=32).hexdigest(),
        rule="the same bytes may leave again",
    )


def _stored_responses(
    service: NodeService, queries_file: Queries, stored: Path
) -> tuple[ResponsesHeader, Replies]:
    """Return the stored responses if policy and audit log still allow them, with the current server's key.

    Data and model are not read. They may have changed, and nothing of them is released.
    """
    policy = service.file.policy
    rules = {name: policy_refusal(policy, query) for name, query in queries_file.query_declarations().items()}
    blob, run = stored.read_bytes(), stored.parent.name
    audit = service.events.audit
    audit.verify()
    objections = {name: rule for name, rule in rules.items() if rule is not None}
    _check_refusals(service, objections, policy.max_queries or None, queries_file.calls, run)
    if not audit.totals.entry_number(vars(_file_entry(run, blob, service.folder))):
        raise RunFolderError(
            f"{stored} was modified, or {service.file.privacy.audit_log} is another audit log, or the "
            "node's secret has changed: no entry has the hash of this file. Restore the one that has "
            "changed. Or delete the stored responses: then the queries are answered and charged again"
        )
    header, replies = unpack_responses(stored, blob)
    return replace(header, server_key=queries_file.signer, key_verified=queries_file.trusted), replies


def _compute_responses(
    service: NodeService,
    session: Session,
    learned: bool,
    calls: Sequence[QueryCall],
    report: Callable[[int], None],
) -> Mapping[int, Tensors]:
    """Train the local model and return the responses released by the gate; record refusals.

    As training can take hours, the owner's approval is checked again before each step.
    """
    while not learned:
        service.require_still_allowed(session, "train_locally")
        final_status = session.train_locally(REPORT_INTERVAL)
        learned = final_status.is_trained
        report(final_status.percent)
    responses = {}
    for number, call in enumerate(calls):
        try:
            service.require_still_allowed(session, call.query)
            responses[number] = session.respond(call.query, number, call.tensors, False)
        except (FedstillError, *USER_CODE_ERRORS) as error:
            service.refusals.record_query(service.server_fingerprint, session, call.query, number, error)
            raise
    return responses


def _check_refusals(
    service: NodeService,
    objections: Mapping[str, str],
    max_queries: int | None,
    calls: Sequence[QueryCall],
    run: str,
) -> None:
    """Refuse queries before training that the policy would refuse after it."""
    for number, call in enumerate(calls):
        rule = objections.get(call.query)
        if rule is None and max_queries is not None and max_queries < len(calls):
            rule = f"max_queries: {max_queries}, and the file asks {len(calls)}"
        if rule is not None:
            service.events.record_refused_query(service.server_fingerprint, rule, run, call.query, number)
            raise QueryRefused(service.name, call.query, rule)
