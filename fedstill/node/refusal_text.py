"""Texts of errors that a server may see."""

from __future__ import annotations

import os

from fedstill.core.errors import (
    FedstillError,
    NodeDataError,
    PluginError,
    PredictorError,
    QueryRefused,
    RunFolderError,
)
from fedstill.core.text_format import to_printable_line
from fedstill.node.audit_database import AuditError

INTERNAL_ERRORS = (
    AuditError,
    NodeDataError,
    PluginError,
    PredictorError,
    RunFolderError,
)  # their texts are for the owner only


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
    about disks do not, but libraries raise the same error with their own texts.
    """
    if isinstance(error, INTERNAL_ERRORS):
        return True
    is_system_error = isinstance(error, OSError) and isinstance(error.errno, int)
    return not is_system_error and not isinstance(error, FedstillError)


def refusal_rule(error: Exception) -> str:
    """Return the reason of a refusal for a log line: the policy's rule, or the public text."""
    return to_printable_line(error.rule if isinstance(error, QueryRefused) else public_text(error))
