"""A node's half of a federation by files: queries answered through its gate, into a signed file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedstill.core import private_files
from fedstill.core.errors import ArgumentError, BundleError, FedstillError, QueryRefused, RunFolderError
from fedstill.core.registry import OWN, looking_in
from fedstill.federation import signed_files
from fedstill.federation.offline_files import (
    ANSWERS,
    QUERIES,
    Queries,
    Replies,
    ResponsesHeader,
    answered_queries_hash,
    pack_responses,
    read_queries,
    unpack_responses,
)
from fedstill.node import audit_file, owner_folder
from fedstill.node.audit_entries import NODE_DATA, REFUSED, RESPONSE, RESPONSE_FILE, Entry
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import policy_refusal
from fedstill.node.message_limits import enforce_limits
from fedstill.node.node_service import NodeService
from fedstill.node.refusals import record_in_audit_log
from fedstill.node.session import Session
from fedstill.privacy.budget import describe_total_cost
from fedstill.protocol.method import QueryCall
from fedstill.protocol.run_plan import RunPlan, public_tensors
from fedstill.protocol.wire_format import Tensors, bytes_by_kind

RELEASED_FILE = (
    "answers.safetensors"  # in the node's folder of the run: what was let out, and what was said of it
)
SECONDS_BETWEEN = 0.5  # between two reports of local training


@dataclass(frozen=True)
class OfflineResult:
    """What became of a file of queries at a node: where the answers are, what they are, whose key signed
    them. ``left``: bytes that crossed the gate, by kind. ``cost``: of all that ever left these data, in
    words. ``again``: these answers had left before; then nothing was charged."""

    path: Path
    replies: Replies
    signer: str
    queries: Queries
    left: Mapping[str, int]
    cost: str
    again: bool = False


def answer(
    folder: Path,
    queries: Path,
    out: Path | None = None,
    *,
    server_key: str | None = None,
    report: Callable[[int], None] = lambda percent: None,
) -> OfflineResult:
    """Answer a file of queries at the node of a folder, through its gate, and write a signed file.

    The same file again gives the answers that were let out the first time, and what was said of them then,
    and is not charged again, even if data or model are others by then; but today's policy is asked first.
    Whoever was stopped before there were answers does it again, with the same data and model.

    Args:
        folder: of the node, as ``fedstill node init`` made it. Its key lies there, ``node.key``.
        out: the file of answers; None is ``answers-NAME.safetensors`` in the working folder.
        server_key: fingerprint of the server's key; None takes any, which is then not trusted.
        report: is told now and then how far local training has come, in percent.

    Raises:
        BundleError: the file cannot be believed.
        QueryRefused: the owner's policy forbids a query; then nothing is trained and nothing leaves.
        FedstillError: data, model and queries do not fit.
    """
    host = NodeService(folder)
    with looking_in(folder):  # what the file names is the owner's own, and never the working folder's
        try:
            return _collect_responses(host, queries, out, server_key, report)
        except FedstillError as error:
            host.refusals.record(host.server_fingerprint, getattr(error, "query", QUERIES), error, "")
            raise


def _collect_responses(
    host: NodeService, queries: Path, out: Path | None, server_key: str | None, report: Callable[[int], None]
) -> OfflineResult:
    folder, policy = host.folder, host.file.policy
    bytes = queries.stat().st_size if queries.is_file() else 0
    if 0 < policy.max_message < bytes:
        rule = f"max_message: {policy.max_message}, and {queries} has {bytes} bytes"
        raise QueryRefused(host.name, QUERIES, rule)
    with enforce_limits(host.name, QUERIES):
        signers = None if server_key is None else [server_key]
        given = read_queries(queries, signers, policy.max_header, policy.methods, policy.tasks)
    # Named after what the file holds: another file is another run, and is paid for.
    plan = replace(given.plan, run=f"{QUERIES}-{given.sha256[:32]}")
    host.server_fingerprint = given.signer
    path = Path(f"{ANSWERS}-{host.name}.safetensors") if out is None else out
    key = signed_files.own_key(folder / "node.key")
    signer = signed_files.fingerprint(signed_files.public_of(key))
    signed_files.require_own(path, signer)
    _require_same(path, given)
    kept = folder / "runs" / plan.run / RELEASED_FILE
    again = kept.exists()
    if again:
        host.require_approved(plan, given.public)
    else:
        _let_out(host, plan, given, kept, report)
    header, replies = _again(host, given, kept)
    signed_files.write(path, pack_responses(header, replies), key)
    spent = audit_file.read_total_spent(host.file, folder)
    mixed = "not one sum: runs were paid for by records and by groups of them"
    paid = (
        mixed
        if len(spent.units) > 1
        else describe_total_cost(host.file.privacy, spent.events, spent.no_guarantee)
    )
    return OfflineResult(path, replies, signer, given, _left(given, replies), paid, again)


def _require_same(path: Path, given: Queries) -> None:
    """Refuse to write over one's own answers to other queries, with ArgumentError."""
    if path.exists() and answered_queries_hash(path) != given.sha256:
        raise ArgumentError("--out", str(path), "another file: this one answers other queries")


def _left(given: Queries, replies: Replies) -> dict[str, int]:
    """Bytes that crossed the gate, by kind."""
    declared, total = given.declared(), Counter[str]()
    for number, response in sorted(replies.tensors.items()):
        total.update(bytes_by_kind(response, declared[given.calls[number].query].releases))
    return dict(total)


def _let_out(
    host: NodeService, plan: RunPlan, given: Queries, kept: Path, report: Callable[[int], None]
) -> None:
    """Train, answer through the gate, and keep what left with all that is to be said of it."""
    try:
        told = host.join(plan, None if given.public is None else public_tensors(given.public))
        session = host.session
        if session is None:
            raise BundleError("the public data that the queries are about are not in their file")
        _admit(host, told.refused_queries, told.max_queries, given.calls, session.audit, plan.run)
        responses = _answers(host, session, told.is_trained, given.calls, report)
        privacy = [asdict(session.node.gate.release_cost(number, RESPONSE)) for number in responses]
        header = ResponsesHeader(given.sha256, given.signer, given.trusted, host.name, host.file.policy)
        done = replace(told, is_trained=True, last_query=-1, checkpoints=())  # it has answered all there is
        blob = pack_responses(header, Replies(asdict(host.versions()), asdict(done), privacy, responses))
        host.require_still_allowed(session, QUERIES)
        # First the audit log: what is kept without an entry of its own does not leave.
        session.audit.charge(_letting_out(plan.run, blob, host.folder))
        private_files.replace(kept, blob, sync=True)
    finally:
        host.leave()


def _letting_out(run: str, blob: bytes, folder: Path) -> Entry:
    """The entry that says which bytes were let out, and so may leave again; it costs nothing.

    Their fingerprint is keyed by the node's secret: by a plain one, whoever reads the log could try out which
    answers without noise these are.
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


def _again(host: NodeService, given: Queries, kept: Path) -> tuple[ResponsesHeader, Replies]:
    """What was let out, byte for byte, if policy and log still allow it; who asked is said as it is now.

    Neither data nor model are read: they may be others by now, and nothing of them leaves.
    """
    policy = host.file.policy
    rules = {name: policy_refusal(policy, query) for name, query in given.declared().items()}
    blob, run = kept.read_bytes(), kept.parent.name
    with closing(audit_file.open_audit(host.file, host.folder)) as audit:
        audit.require_sound()
        objections = {name: rule for name, rule in rules.items() if rule is not None}
        _admit(host, objections, policy.max_queries or None, given.calls, audit, run)
        if not audit.totals.entry_number(vars(_letting_out(run, blob, host.folder))):
            raise RunFolderError(
                f"{kept} is not what was let out, or {host.file.privacy.audit_log} is not the audit log that "
                "knows, or the node's secret is another: no entry has these bytes. Put the one that was "
                "changed back as it was. Or delete the answers: then the queries are answered anew, and "
                "charged anew"
            )
    header, replies = unpack_responses(kept, blob)
    return replace(header, asked_by=given.signer, compared=given.trusted), replies


def _answers(
    host: NodeService,
    session: Session,
    learned: bool,
    calls: Sequence[QueryCall],
    report: Callable[[int], None],
) -> Mapping[int, Tensors]:
    """What the gate lets out, after the training that comes first; a refusal is written down.

    That takes hours at times: before each step the owner's word is asked for again.
    """
    while not learned:
        host.require_still_allowed(session, "train_locally")
        done = session.train_locally(SECONDS_BETWEEN)
        learned = done.is_trained
        report(done.percent)
    responses = {}
    for number, call in enumerate(calls):
        try:
            host.require_still_allowed(session, call.query)
            responses[number] = session.respond(call.query, number, call.tensors, False)
        except (FedstillError, *OWN) as error:
            record_in_audit_log(session, call.query, number, error)
            raise
    return responses


def _admit(
    host: NodeService,
    objections: Mapping[str, str],
    most: int | None,
    calls: Sequence[QueryCall],
    audit: AuditLog,
    run: str,
) -> None:
    """Refuse before any training what would be refused after it, and what is refused today."""
    for number, call in enumerate(calls):
        rule = objections.get(call.query)
        if rule is None and most is not None and most < len(calls):
            rule = f"max_queries: {most}, and the file asks {len(calls)}"
        if rule is not None:
            audit.append(Entry(run, NODE_DATA, host.name, number, call.query, REFUSED, rule=rule))
            raise QueryRefused(host.name, call.query, rule)
