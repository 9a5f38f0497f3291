"""Files of queries and of answers, which people carry to and from nodes that allow no link at all.

A file of queries holds all that a one-round method asks, and the public inputs that it asks about; a file
of answers holds what one node replied, as it replies over a link. Each is one blob of safetensors with a JSON
header, and signed (:mod:`fedstill.federation.signed_files`). The server learns from such files as it does
from nodes that it can reach: they are a link, which carries queries to replies that are there already.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fedstill.core.compute import Compute
from fedstill.core.config_tables import read_table
from fedstill.core.errors import BundleError, DataError, FedstillError
from fedstill.core.version import __version__
from fedstill.data.public import PublicData
from fedstill.federation import signed_files
from fedstill.federation.replies import parse_node_status, parse_release_cost, parse_reply
from fedstill.node.policy import PolicyConfig
from fedstill.node.replies import NodeVersions
from fedstill.protocol.digests import digest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import QueryCall, build_node_side
from fedstill.protocol.queries import NodeSetting, Query
from fedstill.protocol.run_plan import RunPlan, public_tensors, read_public
from fedstill.protocol.wire_format import MAX_HEADER, Tensors, pack, unpack

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


FORMAT = 6  # of both kinds of file
QUERIES, ANSWERS = "queries", "answers"
PUBLIC = "public."  # begins the names of its tensors

H = TypeVar("H")


# --- queries --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueriesHeader:
    """The header of a file of queries, beside its table ``plan``: their names, in order."""

    queries: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Queries:
    """All that a run asks.

    Args:
        plan: method, spec of inputs and classes, fingerprint of the public data.
        public: what is asked about, or None.
        calls: the queries, in order; their places are their numbers.
        sha256: of the file, in hexadecimal digits.
        signer: fingerprint of the key that signed it.
        trusted: whether that key was expected.
    """

    plan: RunPlan
    public: PublicData | None
    calls: tuple[QueryCall, ...]
    sha256: str = ""
    signer: str = ""
    trusted: bool = False

    def declared(self) -> Mapping[str, Query]:
        """What the method declares about its queries."""
        setting = NodeSetting(self.plan.spec.make_task(), LocalConfig(), Compute(), self.public)
        queries: Mapping[str, Query] = build_node_side(self.plan.make_method(), setting).queries
        return queries

    def contents(self) -> tuple[str, ...]:
        """The digest of each query's name and tensors."""
        return tuple(digest(call.query, call.tensors) for call in self.calls)


def write_queries(path: Path, queries: Queries, key: Ed25519PrivateKey) -> str:
    """Write and sign a file of queries; the same queries give the same bytes.

    Returns:
        Its SHA-256.

    Raises:
        BundleError: the place is taken by other queries, on which nodes may be at work.
    """
    tensors = _numbered({number: call.tensors for number, call in enumerate(queries.calls)})
    if queries.public is not None:
        given = public_tensors(queries.public)
        tensors |= {PUBLIC + name: tensor for name, tensor in given.items()}
    names = [call.query for call in queries.calls]
    blob = _pack(QUERIES, {"queries": names, "plan": queries.plan.to_dict()}, tensors)
    if path.exists() and path.read_bytes() != blob:
        raise BundleError(f"{path} holds something else already: choose another place for these queries")
    signed_files.write(path, blob, key)
    return hashlib.sha256(blob).hexdigest()


def read_queries(
    path: Path,
    signers: Collection[str] | None = None,
    max_header: int = MAX_HEADER,
    methods: Collection[str] = (),
    tasks: Collection[str] = (),
) -> Queries:
    """The queries in a file, once its signature has been found good.

    Args:
        signers: fingerprints of keys of which one must have signed; None is any.
        max_header: bytes before its tensors; 0 is no limit.
        methods, tasks: names that may be looked up beside the package's own.

    Raises:
        BundleError: missing, changed, unsigned, of a key that is not expected, or no queries that this
            version knows.
    """
    blob, signer = signed_files.read(path, signers)
    table, tensors = _unpack(path, QUERIES, blob, max_header)
    try:
        plan = RunPlan.from_dict(table.pop("plan", None), methods, tasks)
    except (FedstillError, ValueError, TypeError, LookupError) as error:
        raise BundleError(f"{path} has no plan that this version of fedstill can follow: {error}") from error
    names = _header(path, QueriesHeader, table).queries
    given = {name: tensors.pop(PUBLIC + name) for name in ("inputs", "labels") if PUBLIC + name in tensors}
    try:
        public = read_public(plan, given, 0)
    except DataError as error:
        raise BundleError(f"{path}: {error}") from error
    parts = _by_number(path, tensors)
    calls = tuple(QueryCall(name, parts.pop(number, {})) for number, name in enumerate(names))
    if parts:
        raise BundleError(f"{path}: its header does not list the queries that it holds")
    return Queries(plan, public, calls, hashlib.sha256(blob).hexdigest(), signer, signers is not None)


# --- answers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResponsesHeader:
    """The header of a file of answers, beside what the node ``told`` in its replies."""

    queries: str  # SHA-256 of the file of queries
    asked_by: str  # fingerprint of the key that signed it
    compared: bool  # whether the node knew that key beforehand
    node: str
    policy: PolicyConfig


@dataclass(frozen=True, eq=False)
class Replies:
    """What a node replied to all that it was asked: of itself, how each answer is protected, and answers by
    number."""

    hello: Mapping[str, Any]
    join: Mapping[str, Any]
    privacy: Sequence[Mapping[str, Any]]
    tensors: Mapping[int, Tensors]

    def mechanisms(self) -> list[str]:
        """Those under which answers left."""
        return sorted({str(each["mechanism"]) for each in self.privacy})


@dataclass(frozen=True, eq=False)
class NodeResponses:
    """One node's file of answers: its header, what it holds, and who signed it, a known key of the node's or
    not."""

    path: Path
    header: ResponsesHeader
    replies: Replies
    signer: str
    trusted: bool
    sha256: str


def pack_responses(header: ResponsesHeader, replies: Replies) -> bytes:
    """What a file of answers holds; the same answers give the same bytes."""
    told = {name: getattr(replies, name) for name in ("hello", "join", "privacy")}
    return _pack(ANSWERS, {**asdict(header), "replies": told}, _numbered(replies.tensors))


def unpack_responses(path: Path, blob: bytes) -> tuple[ResponsesHeader, Replies]:
    """What :func:`pack_responses` was given.

    Raises:
        BundleError: the bytes are no answers, or those of another version.
    """
    table, tensors = _unpack(path, ANSWERS, blob)
    told = table.pop("replies", None)
    header = _header(path, ResponsesHeader, table)
    try:
        replies = Replies(**told, tensors=_by_number(path, tensors))
        parse_node_status(replies.join, parse_reply(NodeVersions, replies.hello).versions)
        for each in replies.privacy:
            if not parse_release_cost({"privacy": each}).mechanism:
                raise DataError("it does not say how an answer is protected")
    except (TypeError, AttributeError, DataError) as error:
        raise BundleError(f"{path}: what its node tells is of another form: {error}") from error
    return header, replies


def read_responses(path: Path, queries: Queries, keys: Mapping[str, str] | None = None) -> NodeResponses:
    """One node's answers, once signature and content have been found to fit the queries.

    Args:
        keys: fingerprints of the nodes' keys by name; None takes any key, and trusts none.

    Raises:
        BundleError: missing, changed, unsigned, of an unknown key, or no answers to these queries.
    """
    blob, signer = signed_files.read(path, None if keys is None else set(keys.values()))
    header, replies = unpack_responses(path, blob)
    if keys is not None and keys.get(header.node) != signer:
        raise BundleError(
            f"{path} says that it is of node {header.node!r}, and is signed by a key that is not that "
            f"node's: {signer}"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", header.node):
        raise BundleError(f"{path} names its node {header.node!r} (expected letters, digits, '-' and '_')")
    if header.queries != queries.sha256:
        raise BundleError(
            f"{path} answers another file of queries (SHA-256 {header.queries[:16]}..., "
            f"not {queries.sha256[:16]}...)"
        )
    if header.asked_by != queries.signer:
        raise BundleError(
            f"{path} answers these queries as signed by another key ({header.asked_by}): what its node was "
            f"given had a signature that is not that of {queries.signer}"
        )
    count = len(queries.calls)
    if set(replies.tensors) != set(range(count)) or len(replies.privacy) != count:
        raise BundleError(f"{path} does not hold one answer to each of the {count} queries")
    sha256 = hashlib.sha256(blob).hexdigest()
    return NodeResponses(path, header, replies, signer, keys is not None, sha256)


def answered_queries_hash(path: Path) -> str:
    """The SHA-256 of the queries that a file of answers is for.

    Raises:
        BundleError: it is none.
    """
    return unpack_responses(path, path.read_bytes())[0].queries


# --- both -------------------------------------------------------------------------------------------


def _pack(kind: str, header: Mapping[str, Any], tensors: Tensors) -> bytes:
    return pack({"bundle": kind, "format": FORMAT, "fedstill": __version__, **header}, tensors)


def _unpack(
    path: Path, kind: str, blob: bytes, max_header: int = MAX_HEADER
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The header, less what all files say, and the tensors."""
    try:
        header, tensors = unpack(blob, max_header)
    except (DataError, RecursionError) as error:
        raise BundleError(f"{path} holds no {kind}: {error}") from error
    found, version = header.pop("bundle", None), header.pop("format", None)
    header.pop("fedstill", None)
    if found != kind:
        raise BundleError(f"{path} holds {found or 'something else'} (expected {kind})")
    if version != FORMAT:
        raise BundleError(f"{path} is of format {version}: this version of fedstill reads {FORMAT}")
    return header, tensors


def _header(path: Path, kind: type[H], table: dict[str, Any]) -> H:
    try:
        return read_table(kind, table)
    except FedstillError as error:
        raise BundleError(f"{path}: {error}") from error


def _numbered(parts: Mapping[int, Tensors]) -> dict[str, torch.Tensor]:
    return {f"{number}.{name}": each.clone() for number, part in parts.items() for name, each in part.items()}


def _by_number(path: Path, tensors: Tensors) -> dict[int, dict[str, torch.Tensor]]:
    """Tensors named ``NUMBER.NAME`` by number and name."""
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for whole, tensor in tensors.items():
        number, dot, name = whole.partition(".")
        if not (dot and name and re.fullmatch("0|[1-9][0-9]{0,8}", number)):
            raise BundleError(f"{path} holds a tensor {whole!r}, which belongs to no query")
        parts.setdefault(int(number), {})[name] = tensor
    return parts
