"""Refusals of a node: the reply to the server, entries in the owner's logs, and public texts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from fedstill.core.errors import (
    FedstillError,
    NodeDataError,
    PluginError,
    PredictorError,
    QueryMismatch,
    QueryRefused,
    RunFolderError,
)
from fedstill.core.text_format import to_printable_line
from fedstill.node.audit_database import AuditError
from fedstill.node.folder_log import SecurityEvents
from fedstill.node.session import Session
from fedstill.protocol.messages import MAX_NUMBER

logger = logging.getLogger("fedstill.node")

SECONDS_PER_HOUR = 3600.0
MAX_REFUSALS = 1000  # lines of the process's log per hour


class Refusals:
    """Refusals of one process of a node.

    Args:
        events: security events of this process.
    """

    def __init__(self, events: SecurityEvents) -> None:
        self._events = events
        self._lock = threading.Lock()  # large messages are refused while another message is served
        self._hour, self._lines = time.monotonic(), 0

    def error_reply(
        self, header: Mapping[str, Any], error: Exception, server: str, session: Session | None
    ) -> dict[str, Any]:
        """Return an error as a message for the server; the owner's log gets the whole text.

        The server gets the details of its own faults. Internal errors get a fixed text, since theirs may
        quote paths, columns of a table, or output of the owner's code.

        Args:
            header: header of the refused message; empty if it could not be read.
            error: the error.
            server: identity of the server, as in :class:`~fedstill.node.node_service.NodeService`.
            session: the current run.
        """
        text = " ".join(str(error).split()) or type(error).__name__
        query = to_printable_line(header.get("query") or header.get("operation") or "message")
        number = header.get("number")
        query_number = number if type(number) is int and abs(number) < MAX_NUMBER else -1
        label = f"{query} (number {query_number})" if query_number >= 0 else query
        with self._lock:
            self._log(f"refused {label}: {to_printable_line(text, 1000)}")
            is_query = header.get("operation") in ("answer_query", "compute_gradients")
            if is_query and session is not None and session.plan.run == header.get("run"):
                self.record_query(server, session, query, query_number, error)
            elif isinstance(error, QueryRefused) or header.get("operation") == "join":
                self.record(server, query, error, to_printable_line(header.get("run") or ""))
        kind = NodeDataError if is_internal(error) else type(error)
        body: dict[str, Any] = {
            "kind": kind.__name__,
            "text": to_printable_line(public_text(error)),
            "query": query,
        }
        if isinstance(error, QueryRefused):  # no attributes of other errors, whose values may be private
            body["rule"] = refusal_rule(error)
        if isinstance(error, QueryMismatch):
            body["number"] = error.number
        return body

    def _log(self, line: str) -> None:
        """Write into the process's log, up to a number of lines per hour: a server could fill the disk."""
        if time.monotonic() - self._hour > SECONDS_PER_HOUR:
            self._hour, self._lines = time.monotonic(), 0
        self._lines += 1
        if self._lines <= MAX_REFUSALS:
            logger.warning("%s", line)
        if self._lines == MAX_REFUSALS:
            logger.warning("further refusals in this hour are not logged here")

    def record(self, server: str, query: str, error: Exception, run: str) -> None:
        """Write a refusal and its public reason into the audit log. The refusal holds even if the log cannot
        be written.
        """
        try:
            self._events.record_refusal(
                server, refusal_rule(error), run=run, query=query, rule_name=refusal_rule_name(error)
            )
        except (AuditError, OSError) as fault:
            logger.error("the audit log cannot be written: %s", fault)

    def record_query(self, server: str, session: Session, query: str, number: int, error: Exception) -> None:
        """Write a refused query of the joined run, with its number, as :meth:`record`."""
        try:
            self._events.record_refused_query(
                server,
                refusal_rule(error),
                session.plan.run,
                query,
                number,
                rule_name=refusal_rule_name(error),
                is_declared=query in session.side.queries,
                has_space=not session.run_folder.is_full(),
            )
        except (AuditError, OSError) as fault:
            logger.error("the audit log cannot be written: %s", fault)


INTERNAL_ERRORS = (
    AuditError,
    NodeDataError,
    PluginError,
    PredictorError,
    RunFolderError,
)  # their texts are for the owner only


# --- texts ------------------------------------------------------------------------------------------


def public_text(error: Exception) -> str:
    """Return the text of an error that a server may see; internal errors get a fixed text."""
    if is_internal(error):
        return "its data or model failed: see its log"
    if isinstance(error, OSError) and isinstance(error.errno, int):
        return os.strerror(error.errno)
    return " ".join(str(error).split()) or type(error).__name__


def is_internal(error: Exception) -> bool:
    """Return whether only the node's owner may see an error.

    All unexpected errors are internal: even the type may depend on a record. The operating system's texts
    about disks do not, but libraries raise the same error with their own texts, or a type derived from it.
    """
    if isinstance(error, INTERNAL_ERRORS):
        return True
    is_builtin = type(error).__module__ == "builtins"
    is_system_error = isinstance(error, OSError) and is_builtin and isinstance(error.errno, int)
    return not is_system_error and not isinstance(error, FedstillError)


def refusal_rule(error: Exception) -> str:
    """Return the reason of a refusal as a short line: the policy's rule, or the public text."""
    return to_printable_line(error.rule if isinstance(error, QueryRefused) else public_text(error))


def refusal_rule_name(error: Exception) -> str:
    """Return the name of the rule of a refusal, or the error's type.

    The names are a finite set of the node's own: no text of a server is in them, other than in the reasons.
    """
    if isinstance(error, QueryRefused):
        return to_printable_line(error.rule.partition(":")[0])
    return NodeDataError.__name__ if is_internal(error) else type(error).__name__
