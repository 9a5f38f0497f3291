"""Admission of runs at a node: server, hour and participants.

These checks come before data and model are read. The gate decides about queries, and
:mod:`fedstill.node.requests` about the owner's approval.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from fedstill.core.errors import QueryRefused
from fedstill.core.hashing import parse_fingerprint
from fedstill.core.table_schema import TableSchema
from fedstill.node.policy import PolicyConfig

Clock = Callable[[], datetime]


def require_server(node: str, policy: PolicyConfig, server: str) -> None:
    """Refuse servers that the policy does not list, by the fingerprint of their proof of identity.

    Args:
        server: the fingerprint; empty: no proof.

    Raises:
        QueryRefused: with the rule.
    """
    if policy.allowed_servers and parse_fingerprint(server) not in map(
        parse_fingerprint, policy.allowed_servers
    ):
        raise QueryRefused(node, "join", f"allowed_servers: not {server or 'an unproven server'}")


def require_nodes(node: str, policy: PolicyConfig, min_nodes: int) -> None:
    """Refuse a run that may continue with too few nodes (0: the server does not state the number), with
    QueryRefused.
    """
    if min_nodes < policy.min_nodes:
        reason = (
            f"the run may continue with {min_nodes}"
            if min_nodes
            else "the server does not state the number of nodes"
        )
        raise QueryRefused(node, "join", f"min_nodes: {policy.min_nodes}, and {reason}")


def require_schema(node: str, owners_schema: TableSchema, schema: TableSchema) -> None:
    """Refuse all schemas but the owner's; without one, all are allowed.

    The difference is not reported: ranges that an owner took from the data would be found column by column.

    Raises:
        QueryRefused: with the rule.
    """
    if owners_schema and schema != owners_schema:
        raise QueryRefused(node, "join", "schema: the run's schema differs from the owner's")


def require_classes(node: str, owners_classes: tuple[str, ...], classes: tuple[str, ...]) -> None:
    """Refuse all lists of classes but the owner's; without one, all are allowed.

    QueryRefused reports no difference: the classes of the data would be found list by list.
    """
    if owners_classes and classes != owners_classes:
        raise QueryRefused(node, "join", "classes: the run's classes differ from the owner's")


def require_records(node: str, policy: PolicyConfig, records: int) -> None:
    """Refuse a run while there are too few records, with QueryRefused; their number is not reported."""
    if records < policy.min_records:
        raise QueryRefused(node, "join", f"min_records: {policy.min_records}, and this node has fewer")


def require_hour(node: str, policy: PolicyConfig, query: str, clock: Clock = datetime.now) -> None:
    """Refuse a query outside the policy's hours, with :class:`QueryRefused`."""
    first, _, last = policy.hours.partition("-")
    now = f"{clock():%H:%M}"
    is_inside = first <= now < last if first <= last else now >= first or now < last
    if policy.hours and not is_inside:
        raise QueryRefused(node, query, f"hours: {policy.hours}, by the clock of the node")
