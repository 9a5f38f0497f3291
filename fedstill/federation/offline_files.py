"""Files of queries and of responses, carried by hand to and from nodes without a network connection.

A file of queries contains all queries of a one-round method and their public inputs. A file of responses
contains one node's replies, in the same form as over a link. Both are safetensors data with a JSON header,
and signed (:mod:`fedstill.federation.signed_files`). :mod:`fedstill.federation.offline_files` lets a server
train from such files as from nodes that it can reach.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fedstill.core import private_files
from fedstill.core.compute import Compute
from fedstill.core.config_tables import read_table
from fedstill.core.errors import (
    ArgumentError,
    DataError,
    FedstillError,
    QueryFileError,
    QueryMismatch,
    QueryRefused,
    RunFolderError,
)
from fedstill.core.name_normalization import natural_sort_key
from fedstill.core.registry import USER_CODE_ERRORS, searching_in
from fedstill.core.version import __version__
from fedstill.data.public import PublicData
from fedstill.federation import signed_files
from fedstill.federation.transport import parse_node_status, parse_release_cost, parse_reply
from fedstill.node import folder_log, owner_folder
from fedstill.node.admission import POLICY_RULES, QueryFacts, first_reason
from fedstill.node.audit_entries import NODE_DATA, RESPONSE, RESPONSE_FILE, Entry
from fedstill.node.limits import enforce_limits
from fedstill.node.node_service import NodeService
from fedstill.node.policy import PolicyConfig
from fedstill.node.replies import NodeVersions
from fedstill.node.session import Session
from fedstill.privacy.budget import describe_total_cost
from fedstill.protocol.digests import digest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.messages import AnswerQuery, ComputeGradients, IdentifyNode, JoinRun, read_message
from fedstill.protocol.method import QueryCall, build_node_side
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import PUBLIC_TENSORS, RunPlan, public_tensors, read_public
from fedstill.protocol.wire_format import MAX_HEADER, Tensors, bytes_by_kind, pack, unpack

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = 6  # version of both kinds of file
QUERIES, RESPONSES = "queries", "responses"
PUBLIC = "public."  # prefix of the names of public tensors

H = TypeVar("H")


# --- queries --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueriesHeader:
    """Header of a file of queries, without its table ``plan``: names of the queries, in order."""

    queries: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Queries:
    """All queries of a run.

    Args:
        plan: method, spec of inputs and classes, fingerprint of the public data.
        public: public data, or None.
        calls: the queries, in order; a query's index is its number.
        sha256: SHA-256 of the file, in hexadecimal digits.
        signer: fingerprint of the key that signed it.
        trusted: whether that key was expected.
    """

    plan: RunPlan
    public: PublicData | None
    calls: tuple[QueryCall, ...]
    sha256: str = ""
    signer: str = ""
    trusted: bool = False

    def query_declarations(self) -> Mapping[str, Query]:
        """Return the method's query declarations by name."""
        setting = NodeSetting(self.plan.model_spec.make_task(), LocalConfig(), Compute(), self.public)
        queries: Mapping[str, Query] = build_node_side(self.plan.make_method(), setting).queries
        return queries

    def content_digests(self) -> tuple[str, ...]:
        """Return the digest of each query's name and tensors."""
        return tuple(digest(call.query, call.tensors) for call in self.calls)


def write_queries(path: Path, queries: Queries, key: Ed25519PrivateKey) -> str:
    """Write and sign a file of queries. Equal queries give equal bytes.

    Returns:
        SHA-256 of the file.

    Raises:
        QueryFileError: the path holds other queries, to which nodes may be responding.
    """
    tensors = _flatten_by_number({number: call.tensors for number, call in enumerate(queries.calls)})
    if queries.public is not None:
        given = public_tensors(queries.public)
        tensors |= {PUBLIC + name: tensor for name, tensor in given.items()}
    names = [call.query for call in queries.calls]
    blob = _pack(QUERIES, {"queries": names, "plan": queries.plan.to_dict()}, tensors)
    if path.exists() and path.read_bytes() != blob:
        raise QueryFileError(f"{path} exists and holds other data: choose another path for these queries")
    signed_files.write(path, blob, key)
    return hashlib.sha256(blob).hexdigest()


def read_queries(
    path: Path,
    signers: Collection[str] | None = None,
    max_header: int = MAX_HEADER,
    plugins: Collection[str] = (),
) -> Queries:
    """Read a file of queries after verifying its signature.

    Args:
        signers: fingerprints of accepted keys; None accepts any key.
        max_header: largest size of the header in bytes; 0 is no limit.
        plugins: names of methods and tasks that may be imported in addition to the built-in ones.

    Raises:
        QueryFileError: the file is missing, modified, unsigned, signed by an unexpected key, or not a file of
            queries of this version.
    """
    blob, signer = signed_files.read(path, signers)
    table, tensors = _unpack(path, QUERIES, blob, max_header)
    try:
        plan = RunPlan.from_dict(table.pop("plan", None), plugins)
    except (FedstillError, ValueError, TypeError, LookupError) as error:
        raise QueryFileError(
            f"{path} has no plan that this version of fedstill can follow: {error}"
        ) from error
    names = _parse_header(path, QueriesHeader, table).queries
    given = {name: tensors.pop(PUBLIC + name) for name in PUBLIC_TENSORS if PUBLIC + name in tensors}
    try:
        public = read_public(plan, given, 0)
    except DataError as error:
        raise QueryFileError(f"{path}: {error}") from error
    parts = _group_by_number(path, tensors)
    calls = tuple(QueryCall(name, parts.pop(number, {})) for number, name in enumerate(names))
    if parts:
        raise QueryFileError(f"{path}: its header does not list the queries that it holds")
    return Queries(plan, public, calls, hashlib.sha256(blob).hexdigest(), signer, signers is not None)


# --- answers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResponsesHeader:
    """Header of a file of responses, without its table ``replies``."""

    queries: str  # SHA-256 of the file of queries
    server_key: str  # fingerprint of the key that signed it
    key_verified: bool  # whether the node knew that key beforehand
    node: str
    policy: PolicyConfig


@dataclass(frozen=True, eq=False)
class Replies:
    """A node's replies to a file of queries.

    Args:
        versions: reply with its versions.
        join: reply with its status.
        privacy: privacy cost of each response.
        tensors: responses by query number.
    """

    versions: Mapping[str, Any]
    join: Mapping[str, Any]
    privacy: Sequence[Mapping[str, Any]]
    tensors: Mapping[int, Tensors]

    def mechanisms(self) -> list[str]:
        """Return the privacy mechanisms of the responses."""
        return sorted({str(each["mechanism"]) for each in self.privacy})


@dataclass(frozen=True, eq=False)
class NodeResponses:
    """One node's file of responses.

    Args:
        path: of the file.
        header: its header.
        replies: its content.
        signer: fingerprint of the key that signed it.
        trusted: whether that key was expected.
        sha256: SHA-256 of the file.
    """

    path: Path
    header: ResponsesHeader
    replies: Replies
    signer: str
    trusted: bool
    sha256: str


def pack_responses(header: ResponsesHeader, replies: Replies) -> bytes:
    """Serialize a file of responses. Equal responses give equal bytes."""
    values = {name: getattr(replies, name) for name in ("versions", "join", "privacy")}
    return _pack(RESPONSES, {**asdict(header), "replies": values}, _flatten_by_number(replies.tensors))


def unpack_responses(path: Path, blob: bytes) -> tuple[ResponsesHeader, Replies]:
    """Parse the bytes that :func:`pack_responses` returns.

    Raises:
        QueryFileError: they are no responses, or of another version.
    """
    table, tensors = _unpack(path, RESPONSES, blob)
    values = table.pop("replies", None)
    header = _parse_header(path, ResponsesHeader, table)
    try:
        replies = Replies(**values, tensors=_group_by_number(path, tensors))
        parse_node_status(replies.join, parse_reply(NodeVersions, replies.versions).versions)
        for each in replies.privacy:
            if not parse_release_cost({"privacy": each}).mechanism:
                raise DataError("the mechanism of a response is missing")
    except (TypeError, AttributeError, DataError) as error:
        raise QueryFileError(f"{path}: its node's replies are malformed: {error}") from error
    return header, replies


def read_responses(path: Path, queries: Queries, keys: Mapping[str, str] | None = None) -> NodeResponses:
    """Read one node's responses after verifying the signature and that they belong to the queries.

    Args:
        keys: fingerprints of the nodes' keys by name; None accepts any key as not trusted.

    Raises:
        QueryFileError: the file is missing, modified, unsigned, signed by an unknown key, or not a file of
            responses to these queries.
    """
    blob, signer = signed_files.read(path, None if keys is None else set(keys.values()))
    header, replies = unpack_responses(path, blob)
    if keys is not None and keys.get(header.node) != signer:
        raise QueryFileError(
            f"{path} claims to be from node {header.node!r}, but is signed by a key that is not that "
            f"node's: {signer}"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", header.node):
        raise QueryFileError(f"{path} names its node {header.node!r} (expected letters, digits, '-' and '_')")
    if header.queries != queries.sha256:
        raise QueryFileError(
            f"{path} responds to another file of queries (SHA-256 {header.queries[:16]}..., "
            f"not {queries.sha256[:16]}...)"
        )
    if header.server_key != queries.signer:
        raise QueryFileError(
            f"{path} responds to these queries as signed by another key ({header.server_key}): its node got "
            f"a file that was not signed by {queries.signer}"
        )
    count = len(queries.calls)
    if set(replies.tensors) != set(range(count)) or len(replies.privacy) != count:
        raise QueryFileError(f"{path} does not hold one response to each of the {count} queries")
    sha256 = hashlib.sha256(blob).hexdigest()
    return NodeResponses(path, header, replies, signer, keys is not None, sha256)


def answered_queries_hash(path: Path) -> str:
    """Return the SHA-256 of the queries that a file of responses belongs to.

    Raises:
        QueryFileError: it is not a file of responses.
    """
    return unpack_responses(path, path.read_bytes())[0].queries


# --- both -------------------------------------------------------------------------------------------


def _pack(kind: str, header: Mapping[str, Any], tensors: Tensors) -> bytes:
    return pack({"bundle": kind, "format": FORMAT, "fedstill": __version__, **header}, tensors)


def _unpack(
    path: Path, kind: str, blob: bytes, max_header: int = MAX_HEADER
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the header, without the entries that all files have, and the tensors."""
    try:
        header, tensors = unpack(blob, max_header)
    except (DataError, RecursionError) as error:
        raise QueryFileError(f"{path} holds no {kind}: {error}") from error
    found, version = header.pop("bundle", None), header.pop("format", None)
    header.pop("fedstill", None)
    if found != kind:
        raise QueryFileError(f"{path} holds {found or 'something else'} (expected {kind})")
    if version != FORMAT:
        raise QueryFileError(f"{path} is of format {version}: this version of fedstill reads {FORMAT}")
    return header, tensors


def _parse_header(path: Path, kind: type[H], table: dict[str, Any]) -> H:
    try:
        return read_table(kind, table)
    except FedstillError as error:
        raise QueryFileError(f"{path}: {error}") from error


def _flatten_by_number(parts: Mapping[int, Tensors]) -> dict[str, torch.Tensor]:
    return {f"{number}.{name}": each.clone() for number, part in parts.items() for name, each in part.items()}


def _group_by_number(path: Path, tensors: Tensors) -> dict[int, dict[str, torch.Tensor]]:
    """Group tensors named ``NUMBER.NAME`` by number and name."""
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for whole, tensor in tensors.items():
        number, dot, name = whole.partition(".")
        if not (dot and name and re.fullmatch("0|[1-9][0-9]{0,8}", number)):
            raise QueryFileError(f"{path} holds a tensor {whole!r}, which belongs to no query")
        parts.setdefault(int(number), {})[name] = tensor
    return parts


# --- the server's side: a link to files of responses ----------------------------------------------------


class ResponseFiles:
    """Link that replies to messages from files of responses.

    Args:
        queries: the file of queries.
        responses: one file per node.

    Raises:
        QueryFileError: there are no files, or two files of one node.
    """

    def __init__(self, queries: Queries, responses: Sequence[NodeResponses]) -> None:
        if not responses:
            raise QueryFileError("there are no responses: name one file or more")
        self.files: dict[str, NodeResponses] = {}
        for file in sorted(responses, key=lambda file: natural_sort_key(file.header.node)):
            other = self.files.setdefault(file.header.node, file)
            if other is not file:
                raise QueryFileError(f"{other.path} and {file.path} are both of node {file.header.node!r}")
        self.nodes: Sequence[str] = list(self.files)
        self._contents = dict(enumerate(queries.content_digests()))

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """Return the reply from a node's file; see :class:`fedstill.federation.transport.Link`."""
        header, tensors = unpack(message)
        replies = self.files[node].replies
        body: Mapping[str, Any] = {}
        response: Tensors = {}
        match read_message(header)[0]:
            case IdentifyNode():
                body = replies.versions
            case JoinRun():
                body = replies.join
            case ComputeGradients(query=query, number=number):
                return _mismatch_reply(node, query, number)
            case AnswerQuery(query=query, number=number, differentiable=is_differentiable):
                if is_differentiable or self._contents.get(number) != digest(query, tensors):
                    return _mismatch_reply(node, query, number)
                body, response = {"privacy": replies.privacy[number]}, replies.tensors[number]
        return pack({"body": body, "seconds": 0.0}, response)


def _mismatch_reply(node: str, query: str, number: int) -> bytes:
    refusal = QueryMismatch(node, query, number)
    error = {"kind": "QueryMismatch", "text": str(refusal), "query": query, "number": number}
    return pack({"error": error})


# --- a node's side: respond to a file of queries through the gate ---------------------------------------

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
        queries_file = read_queries(queries, signers, policy.max_header, policy.plugins)
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
    spent = folder_log.read_total_spent(service.file, folder)
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
    rules = {
        name: first_reason(POLICY_RULES, QueryFacts(query, policy))
        for name, query in queries_file.query_declarations().items()
    }
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
