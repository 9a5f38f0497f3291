"""Files of queries and of responses, carried by hand to and from nodes without a network connection.

A file of queries contains all queries of a one-round method and their public inputs. A file of responses
contains one node's replies, in the same form as over a link. Both are safetensors data with a JSON header,
and signed (:mod:`fedstill.federation.signed_files`). :mod:`fedstill.federation.offline_link` lets a server
train from such files as from nodes that it can reach.
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
from fedstill.core.errors import DataError, FedstillError, QueryFileError
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
        setting = NodeSetting(self.plan.spec.make_task(), LocalConfig(), Compute(), self.public)
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
    given = {name: tensors.pop(PUBLIC + name) for name in ("inputs", "labels") if PUBLIC + name in tensors}
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
