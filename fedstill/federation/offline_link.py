"""Nodes that have answered everything beforehand, as a link to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.core.errors import BundleError, QueryMismatch
from fedstill.federation.node_order import natural_sort_key
from fedstill.federation.offline_files import NodeResponses, Queries
from fedstill.protocol.digests import digest
from fedstill.protocol.messages import AnswerQuery, ComputeGradients, IdentifyNode, JoinRun, read_message
from fedstill.protocol.wire_format import Tensors, pack, unpack


class ResponseFiles:
    """Carries queries to files of answers.

    Raises:
        BundleError: no answers, or two files of one node.
    """

    def __init__(self, queries: Queries, responses: Sequence[NodeResponses]) -> None:
        if not responses:
            raise BundleError("there are no answers: name one file or more")
        self.bundles: dict[str, NodeResponses] = {}
        for each in sorted(responses, key=lambda each: natural_sort_key(each.header.node)):
            other = self.bundles.setdefault(each.header.node, each)
            if other is not each:
                raise BundleError(f"{other.path} and {each.path} are both of node {each.header.node!r}")
        self.nodes: Sequence[str] = list(self.bundles)
        self._contents = dict(enumerate(queries.contents()))

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """What a node's file replies: see :class:`fedstill.federation.transport.Link`."""
        header, tensors = unpack(message)
        replies = self.bundles[node].replies
        told: Mapping[str, Any] = {}
        response: Tensors = {}
        match read_message(header)[0]:
            case IdentifyNode():
                told = replies.hello
            case JoinRun():
                told = replies.join
            case ComputeGradients(query=query, number=number):
                return _mismatch(node, query, number)
            case AnswerQuery(query=query, number=number, differentiable=through):
                if through or self._contents.get(number) != digest(query, tensors):
                    return _mismatch(node, query, number)
                told, response = {"privacy": replies.privacy[number]}, replies.tensors[number]
        return pack({"body": told, "seconds": 0.0}, response)


def _mismatch(node: str, query: str, number: int) -> bytes:
    refusal = QueryMismatch(node, query, number)
    error = {"kind": "QueryMismatch", "text": str(refusal), "query": query, "number": number}
    return pack({"error": error})
