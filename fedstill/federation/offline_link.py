"""Link to files of responses, for nodes without a network connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.core.errors import QueryFileError, QueryMismatch
from fedstill.federation.node_order import natural_sort_key
from fedstill.federation.offline_files import NodeResponses, Queries
from fedstill.protocol.digests import digest
from fedstill.protocol.messages import AnswerQuery, ComputeGradients, IdentifyNode, JoinRun, read_message
from fedstill.protocol.wire_format import Tensors, pack, unpack


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
