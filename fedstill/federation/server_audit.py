"""The server's own audit log: queries sent to each node, payloads received, and their privacy cost."""

from __future__ import annotations

from collections.abc import Mapping

from fedstill.federation.transport import Reply
from fedstill.node.audit_entries import RESPONSE, Entry
from fedstill.node.audit_log import AuditLog
from fedstill.protocol.digests import digest
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import SCALE, bytes_by_kind


class ServerAuditLog:
    """The server's audit log of one run.

    Args:
        masked: secure aggregation: responses are masked, and the server sees sums.
    """

    def __init__(self, audit: AuditLog, run: str, queries: Mapping[str, Query], masked: bool) -> None:
        self._audit, self._run, self._queries, self._masked = audit, run, queries, masked

    def record_release(
        self,
        node: str,
        number: int,
        query: str,
        part: str,
        content: str,
        down: Mapping[str, int],
        reply: Reply,
    ) -> None:
        """Record a node's release: its response, or the gradients of one.

        Args:
            content: hash of the message that was sent.
            down: bytes that were sent, by payload kind.
        """
        kinds = self._queries[query].released_kinds()
        # Undeclared tensors will be rejected, and are not counted.
        known = {name: tensor for name, tensor in reply.tensors.items() if name.removesuffix(SCALE) in kinds}
        entry = Entry(
            *(self._run, node, node, number, query, part, content),
            history_hash=reply.privacy.history_hash,
            # Other bits (e.g., after a restart with another number of threads) are another release, which is
            # charged again. Masked bits differ each time.
            release_hash=reply.privacy.release_hash if self._masked else digest(part, reply.tensors),
            down=down,
            up=bytes_by_kind(known, kinds),
            mechanism=reply.privacy.mechanism,
            cost=reply.privacy.cost or {},
            no_guarantee=int(reply.privacy.cost is None),
            queries=int(part == RESPONSE),
        )
        self._audit.charge(entry)
