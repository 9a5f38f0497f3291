"""What a server may be told of an error, and how what a server sent stands in a line of a log."""

from __future__ import annotations

from fedstill.core.errors import FedstillError, OwnDataError, PluginError, PredictorError, RunFolderError
from fedstill.node.audit_database import AuditError
from fedstill.node.security_log import SecurityLogError

OWN_TROUBLES = (
    AuditError,
    OwnDataError,
    PluginError,
    PredictorError,
    RunFolderError,
    SecurityLogError,
)  # whose texts are the owner's alone


def telling(error: Exception) -> str:
    """What a server may be told of an error: of the node's own troubles only that there are some."""
    if isinstance(error, OWN_TROUBLES):
        return "its data or model fail here: its own log says more"
    if isinstance(error, FedstillError):
        return " ".join(str(error).split()) or type(error).__name__
    return getattr(error, "strerror", None) or f"{type(error).__name__}: its own log says more"


def short(value: object, most: int = 200) -> str:
    """What a server sent, for a line of a log: never more than one line, and not a long one."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)[:most]).split())
