"""Whether a server may have a run at a node at all: by whom it is, when it asks and who takes part.

It comes before data and model are read, and so before anything is computed. What the run may ask is for the
gate to say, and whether its owner wants it for :mod:`fedstill.node.requests`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from fedstill.core.errors import QueryRefused
from fedstill.core.hashing import parse_fingerprint
from fedstill.core.table_schema import Schema
from fedstill.node.policy import PolicyConfig

Clock = Callable[[], datetime]


def require_server(node: str, policy: PolicyConfig, server: str) -> None:
    """Refuse servers that the policy does not list, by the fingerprint of what proves who they are.

    Args:
        server: the fingerprint; empty: nothing proves it.

    Raises:
        QueryRefused: naming the rule.
    """
    if policy.allowed_servers and parse_fingerprint(server) not in map(
        parse_fingerprint, policy.allowed_servers
    ):
        raise QueryRefused(node, "join", f"allowed_servers: not {server or 'one that nothing proves'}")


def require_nodes(node: str, policy: PolicyConfig, min_nodes: int) -> None:
    """Refuse a run that would go on with too few nodes; 0: its server does not say. QueryRefused."""
    if min_nodes < policy.min_nodes:
        reason = f"the run may go on with {min_nodes}" if min_nodes else "it is not said how many are asked"
        raise QueryRefused(node, "join", f"min_nodes: {policy.min_nodes}, and {reason}")


def require_schema(node: str, own: Schema, schema: Schema) -> None:
    """Refuse all schemas but the owner's, of a run on anything but rows, too; without an own one, none.

    What differs is not said: ranges that an owner took from the data would be found column by column.

    Raises:
        QueryRefused: naming the rule.
    """
    if own and schema != own:
        raise QueryRefused(node, "join", "schema: the run's is not the one that the owner names")


def require_classes(node: str, own: tuple[str, ...], classes: tuple[str, ...]) -> None:
    """Refuse all classes but the owner's; without own ones, none. QueryRefused says nothing of the data:
    which classes these have would be found list by list."""
    if own and classes != own:
        raise QueryRefused(node, "join", "classes: the run's are not those that the owner names")


def require_records(node: str, policy: PolicyConfig, records: int) -> None:
    """Refuse while there are too few records; how many there are is not said. QueryRefused."""
    if records < policy.min_records:
        raise QueryRefused(node, "join", f"min_records: {policy.min_records}, and here are fewer")


def require_hour(node: str, policy: PolicyConfig, query: str, clock: Clock = datetime.now) -> None:
    """Refuse outside the policy's hours, with :class:`QueryRefused`."""
    first, _, last = policy.hours.partition("-")
    now = f"{clock():%H:%M}"
    is_inside = first <= now < last if first <= last else now >= first or now < last
    if policy.hours and not is_inside:
        raise QueryRefused(node, query, f"hours: {policy.hours}, by the clock of the node")
