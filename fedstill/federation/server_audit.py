"""The server's own log: what it asked of each node, what arrived, and how that is protected."""

from __future__ import annotations

from collections.abc import Mapping

from fedstill.federation.transport import Reply
from fedstill.node.audit_entries import RESPONSE, Entry
from fedstill.node.audit_log import AuditLog
from fedstill.protocol.digests import digest
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import SCALE, sizes


class ServerAuditLog:
    """What arrives in one run.

    Args:
        masked: answers leave under masks, and the server sees sums.
    """

    def __init__(self, audit: AuditLog, run: str, queries: Mapping[str, Query], masked: bool) -> None:
        self._audit, self._run, self._queries, self._masked = audit, run, queries, masked

    def note(
        self,
        node: str,
        number: int,
        query: str,
        part: str,
        content: str,
        down: Mapping[str, int],
        reply: Reply,
    ) -> None:
        """Write down what a node gave: its answer, or the gradient of one.

        Args:
            content: a fingerprint of what was sent.
            down: bytes that were sent, by kind.
        """
        kinds = self._queries[query].kinds()
        # What was not declared will be found faulty, and is not counted.
        known = {name: tensor for name, tensor in reply.tensors.items() if name.removesuffix(SCALE) in kinds}
        entry = Entry(
            *(self._run, node, node, number, query, part, content),
            history_hash=reply.privacy.after,
            # Other bits, as after a start with other threads, are another release, which is paid anew; under
            # masks they are others each time.
            release_hash=reply.privacy.left if self._masked else digest(part, reply.tensors),
            down=down,
            up=sizes(known, kinds),
            mechanism=reply.privacy.mechanism,
            cost=reply.privacy.price or {},
            no_guarantee=int(reply.privacy.price is None),
            queries=int(part == ANSWER),
        )
        self._audit.charge(entry)
