"""In whose terms an error names an option and gives advice: the command line's, or those of a Python call.

An error names an option as configurations do, ``nodes.local.batch``. Who called ``fedstill.distil`` has typed
no such name; :func:`option_name` and :func:`option_set` put it in the caller's terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Caller = Literal["command line", "options", "distil"]

# Options as arguments of ``distil``: whole ones, and those that are fields of an object.
WHOLE = {
    "student.model": "student",
    "nodes.models": "models",
    "public.name": "public",
    "public.limit": "public",
    "data.name": "data",
}
FIELDS = {
    "nodes.local": ("local", "local=fedstill.LocalConfig({})"),
    "nodes.policy": ("policies", "policies=[fedstill.PolicyConfig({}), ...]"),
    "nodes.privacy": ("privacies", "privacies=[..., {}]"),
    "link": ("link", "link=fedstill.LinkConfig({})"),
    "engine": ("engine", "engine=fedstill.EngineConfig({})"),
}

_caller: ContextVar[Caller] = ContextVar("caller", default="command line")  # of each thread its own


@contextmanager
def called_from(caller: Caller) -> Iterator[None]:
    """Put errors that are raised in the block in a caller's terms: ``options`` is a mapping of dotted names,
    as ``fedstill.run_preset`` takes one."""
    before = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(before)


def by_caller(command_line: str, options: str, distil: str) -> str:
    """The one of three texts that is in the caller's terms."""
    return {"command line": command_line, "options": options, "distil": distil}[_caller.get()]


def option_name(name: str) -> str:
    """Return an option's name in the caller's terms.

    >>> option_name("nodes.local.batch")
    'nodes.local.batch'
    >>> with called_from("distil"):
    ...     option_name("nodes.local.batch"), option_name("student.model"), option_name("method.tau")
    ('local.batch', 'student', 'method.tau')
    """
    if _caller.get() != "distil":
        return name
    for prefix, (argument, _) in FIELDS.items():
        if name.startswith(f"{prefix}."):
            return f"{argument}{name.removeprefix(prefix)}"
    return WHOLE.get(name, name)


def option_set(name: str, value: object) -> str:
    """Return the text by which the caller gives an option a value.

    >>> option_set("nodes.policy.outputs_only", False)
    '--nodes.policy.outputs_only false'
    >>> with called_from("options"):
    ...     option_set("nodes.policy.outputs_only", False)
    '{"nodes.policy.outputs_only": False}'
    >>> with called_from("distil"):
    ...     option_set("nodes.policy.outputs_only", False)
    'policies=[fedstill.PolicyConfig(outputs_only=False), ...]'
    """
    if _caller.get() == "command line":
        return f"--{name} {str(value).lower() if isinstance(value, bool) else value}"
    if _caller.get() == "options":
        return f'{{"{name}": {value!r}}}'
    prefix, _, field = name.rpartition(".")
    if prefix in FIELDS:
        return FIELDS[prefix][1].format(f"{field}={value!r}")
    return f"{option_name(name)}={value!r}"
