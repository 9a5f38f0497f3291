"""What a server may be told of an error."""

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
from fedstill.core.text_format import clip_text
from fedstill.node.audit_database import AuditError
from fedstill.node.security_log import SecurityLogError

INTERNAL_ERRORS = (
    AuditError,
    NodeDataError,
    PluginError,
    PredictorError,
    RunFolderError,
    SecurityLogError,
)  # whose texts are the owner's alone


def public_text(error: Exception) -> str:
    """What a server may be told of an error: of the node's own troubles only that there are some."""
    if is_internal(error):
        return "its data or model fail here: its own log says more"
    if isinstance(error, OSError) and isinstance(error.errno, int):
        return os.strerror(error.errno)
    return " ".join(str(error).split()) or type(error).__name__


def is_internal(error: Exception) -> bool:
    """Whether nobody but the node's owner may know what it is.

    That goes for all that no one foresaw: even of which type it is may follow from a record. What the system
    says of a disk does not, but libraries raise the same error with words of their own.
    """
    if isinstance(error, INTERNAL_ERRORS):
        return True
    is_system_error = isinstance(error, OSError) and isinstance(error.errno, int)
    return not is_system_error and not isinstance(error, FedstillError)


def refusal_rule(error: Exception) -> str:
    """Why something was refused, for a line of a log: the policy's rule, or what a server may know."""
    return clip_text(error.rule if isinstance(error, QueryRefused) else public_text(error))
