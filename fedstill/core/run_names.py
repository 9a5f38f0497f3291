"""Names of runs: each is a folder at the server and at every node."""

from __future__ import annotations

import re

from fedstill.core.errors import ArgumentError


def is_run_name(name: str) -> bool:
    """Whether a text can be the name of a run.

    >>> is_run_name("digits-0.5"), is_run_name("../other")
    (True, False)
    """
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is not None


def check_run_name(name: str) -> None:
    """Refuse what is no name of a run.

    Raises:
        ArgumentError: it is none.
    """
    if not is_run_name(name):
        raise ArgumentError("run", name, "up to 100 letters, digits, '.', '_' and '-'")
