"""In whose terms an error names an option and gives advice: the command line's, or those of a Python call.

An error names an option as configurations do, ``nodes.local.batch``. Who called ``fedstill.distil`` has typed
no such name; :func:`option_name` and :func:`format_option` put it in the caller's terms.

Errors that a user of fedstill can cause, each one clear line.

Every error names the argument, the value that was given and what is allowed. The command
line prints the line and exits with 2; from Python they are ordinary exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Caller = Literal["command line", "options", "distil"]

# Options as arguments of ``distil``: whole ones, and those that are fields of an object.
DISTIL_ARGUMENTS = {
    "student.model": "student",
    "nodes.models": "models",
    "public.name": "public",
    "public.limit": "public",
    "data.name": "data",
}
DISTIL_FIELDS = {
    "nodes.local": ("local", "local=fedstill.LocalConfig({})"),
    "nodes.policy": ("policies", "policies=[fedstill.PolicyConfig({}), ...]"),
    "nodes.privacy": ("privacies", "privacies=[..., {}]"),
    "link": ("link", "link=fedstill.LinkConfig({})"),
    "engine": ("engine", "engine=fedstill.EngineConfig({})"),
}

_caller: ContextVar[Caller] = ContextVar("caller", default="command line")  # of each thread its own


@contextmanager
def caller_context(caller: Caller) -> Iterator[None]:
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
    >>> with caller_context("distil"):
    ...     option_name("nodes.local.batch"), option_name("student.model"), option_name("method.tau")
    ('local.batch', 'student', 'method.tau')
    """
    if _caller.get() != "distil":
        return name
    for prefix, (argument, _) in DISTIL_FIELDS.items():
        if name.startswith(f"{prefix}."):
            return f"{argument}{name.removeprefix(prefix)}"
    return DISTIL_ARGUMENTS.get(name, name)


def format_option(name: str, value: object) -> str:
    """Return the text by which the caller gives an option a value.

    >>> format_option("nodes.policy.outputs_only", False)
    '--nodes.policy.outputs_only false'
    >>> with caller_context("options"):
    ...     format_option("nodes.policy.outputs_only", False)
    '{"nodes.policy.outputs_only": False}'
    >>> with caller_context("distil"):
    ...     format_option("nodes.policy.outputs_only", False)
    'policies=[fedstill.PolicyConfig(outputs_only=False), ...]'
    """
    if _caller.get() == "command line":
        return f"--{name} {str(value).lower() if isinstance(value, bool) else value}"
    if _caller.get() == "options":
        return f'{{"{name}": {value!r}}}'
    prefix, _, field = name.rpartition(".")
    if prefix in DISTIL_FIELDS:
        return DISTIL_FIELDS[prefix][1].format(f"{field}={value!r}")
    return f"{option_name(name)}={value!r}"


class FedstillError(Exception):
    """Base of every error that a user's input, data or policy can cause."""


class ArgumentError(FedstillError, ValueError):
    """An argument or option with an invalid value, named in the caller's terms (Python or command line).

    >>> raise ArgumentError("split.nodes", 0, "a whole number from 1 up")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid split.nodes = 0 (expected a whole number from 1 up)
    """

    def __init__(self, name: str, value: object, expected: str) -> None:
        name = option_name(name)
        self.name, self.value, self.expected = name, value, expected
        super().__init__(f"invalid {name} = {_short_repr(value)} (expected {expected})")


def _short_repr(value: object) -> str:
    """A value as an error quotes it: one line, however long the value."""
    told = " ".join(repr(value).split())
    return told if len(told) <= 300 else f"{told[:300]}..."


class UnknownName(ArgumentError):
    """Something was named that does not exist: a key, an option, a preset, a method, a command.

    Args:
        what: the kind of thing.
        value: what was given.
        known: what there is.
        see: said in place of all that there is, where that would be too long for one line.
        suggestion: what was probably meant, where the name alone does not tell.

    >>> raise UnknownName("preset", "digit-fediod", ["demo", "digits-fediod"])
    Traceback (most recent call last):
    ...
    fedstill.core.errors.UnknownName: unknown preset 'digit-fediod': did you mean 'digits-fediod'?
    >>> raise UnknownName("preset", "x", ["demo", "digits-fediod"])
    Traceback (most recent call last):
    ...
    fedstill.core.errors.UnknownName: unknown preset 'x': allowed are demo, digits-fediod
    """

    def __init__(
        self, what: str, value: str, known: Iterable[str], see: str = "", suggestion: str = ""
    ) -> None:
        self.known = tuple(known)
        self.name, self.value, self.expected = what, value, ", ".join(self.known)
        close = closest_name(value, self.known)
        suggestion = suggestion or (repr(close) if close else "")
        hint = f"did you mean {suggestion}?" if suggestion else see or f"allowed are {self.expected}"
        Exception.__init__(self, f"unknown {what} {_short_repr(value)}: {hint}")


def closest_name(value: str, known: Iterable[str]) -> str | None:
    """The name that somebody most likely meant, or None where none is close.

    Of dotted names first those that differ in the last part alone, then those whose last part is the same.

    >>> known = ["method.name", "method.tau", "nodes.local.epochs", "public.seed", "public.name"]
    >>> closest_name("method.nam", known), closest_name("nodes.epochs", known), closest_name("metod.tau", known)
    ('method.name', 'nodes.local.epochs', 'method.tau')
    >>> closest_name("public", known), closest_name("method.xyz", known)
    ('public.name', None)
    """
    spelled = {name.lower(): name for name in known}
    wanted = value.lower()
    if f"{wanted}.name" in spelled:  # a table, of which one kind is chosen by name
        return spelled[f"{wanted}.name"]
    head, dot, last = wanted.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in spelled if name.rpartition(".")[0] == head}
    close = [beside[name] for name in difflib.get_close_matches(last, beside, n=1, cutoff=0.7)]
    if dot and not close:
        elsewhere = [name for name in spelled if name.rpartition(".")[2] == last]
        close = difflib.get_close_matches(wanted, elsewhere, n=1, cutoff=0.0)
    if not close and not (dot and beside):
        close = difflib.get_close_matches(wanted, spelled, n=1, cutoff=0.7)
    return spelled[close[0]] if close else None


class PluginError(ArgumentError):
    """Something of somebody else's cannot be imported. The text may quote what its code says, or folders of
    this machine, so that it is for whoever installed it alone."""


class DataError(FedstillError, ValueError):
    """Data cannot be used as it is: wrong shape, labels outside the classes, NaN, missing file."""


class NodeDataError(DataError):
    """A node's own data cannot be used. The text may quote them, so that it is for their owner alone."""


class MemoryLimitExceeded(FedstillError, ValueError):
    """What was asked for would take more memory than is allowed; said before it has any.

    Args:
        what: that it is, which may be told to whoever asked for it.
        required_bytes: bytes that it would take, which may tell how much data there are: for their owner alone.
        max_bytes: bytes allowed.
    """

    def __init__(self, what: str, required_bytes: float, max_bytes: int) -> None:
        self.what = what
        super().__init__(f"{what} would take {required_bytes:.3g} bytes of memory (expected {max_bytes:.3g})")


class RunRequiredError(DataError):
    """Data that may be sound, but are read only in the form of a run, and none is named."""


class ModelError(FedstillError, ValueError):
    """A model does not fit its task: wrong output shape, an input size that it cannot take."""


class PredictorError(ModelError):
    """A model of somebody else's making fails as it is asked. The text may quote what it says, so that it is
    for its owner alone."""


class RunFolderError(FedstillError):
    """A run's folder cannot be used: it holds another run, or nothing to resume."""


class QueryRefused(FedstillError):
    """A node's gate does not answer this query.

    Args:
        node: its name.
        query: that it was asked.
        rule: by which it refuses.
        others: refusals of other nodes and queries, told beside this one.

    >>> raise QueryRefused("clinic", "predict_logits", "queries: count_labels")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.QueryRefused: node 'clinic' refuses query 'predict_logits' by rule ...
    >>> print(QueryRefused("clinic", "train", "outputs_only: no parameters"))
    node 'clinic' refuses query 'train' by rule outputs_only: no parameters; its owner may allow it: policy
    outputs_only = false; in a simulation: --nodes.policy.outputs_only false
    """

    def __init__(self, node: str, query: str, rule: str, others: Sequence[QueryRefused] = ()) -> None:
        self.node, self.query, self.rule = node, query, rule
        alike: dict[tuple[str, str], list[str]] = {}
        for refusal in (self, *others):
            alike.setdefault((refusal.query, refusal.rule), []).append(repr(refusal.node))
        super().__init__("; ".join(_refusal(nodes, *what) for what, nodes in alike.items()))


def _refusal(nodes: Sequence[str], query: str, rule: str) -> str:
    """That some nodes refuse one query, in words."""
    way_out = ""
    if "policy.kinds" in rule:  # which says what would allow it
        kinds, everything = _policy_option("kinds", ("NAME",), "NAME"), _policy_option("outputs_only", False)
        way_out = f"; in a simulation: {kinds}, or for all {everything}"
    elif "outputs_only" in rule:
        way_out = "; its owner may allow it: policy outputs_only = false; in a simulation: "
        way_out += _policy_option("outputs_only", False)
    who = f"node {nodes[0]} refuses" if len(nodes) == 1 else f"nodes {', '.join(nodes)} refuse"
    return f"{who} query {query!r} by rule {rule}{way_out}"


def _policy_option(field: str, value: object, placeholder: str = "") -> str:
    """Return the text by which the caller sets a field of the policy; ``placeholder``: on a command line."""
    name = f"nodes.policy.{field}"
    said = format_option(name, value)
    return by_caller(f"--{name} {placeholder}", said, said) if placeholder else said


def combine_refusals(refusals: Sequence[QueryRefused]) -> QueryRefused:
    """All refusals as one, so that whoever reads it can see to all of them at once."""
    first, *others = refusals
    return QueryRefused(first.node, first.query, first.rule, others)


class QueryMismatch(FedstillError):
    """A query came again under a number already used, with other content."""

    def __init__(self, node: str, query: str, number: int) -> None:
        self.node, self.query, self.number = node, query, number
        super().__init__(
            f"node {node!r} was asked query {query!r} again as number {number} with other "
            "content: allowed is the same content, or a new number; gradients are pulled back before the "
            "next query is asked"
        )


class MethodRefused(FedstillError):
    """A federation in which a method cannot run; said before anything is trained."""

    def __init__(self, method: str, node: str, reason: str) -> None:
        super().__init__(f"{method} cannot run here: {node}: {reason}")
        self.method, self.node, self.reason = method, node, reason


class NodeFault(FedstillError):
    """A node failed, stays away, or answers what no sound node answers.

    >>> raise NodeFault("clinic", "predict_logits", "logits hold NaN")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.NodeFault: node 'clinic', query 'predict_logits': logits hold NaN
    """

    def __init__(self, node: str, query: str, reason: str) -> None:
        self.node, self.query, self.reason = node, query, reason
        super().__init__(f"node {node!r}, query {query!r}: {reason}")


class BundleError(FedstillError, ValueError):
    """A file of queries or answers is not what it says, or not what is wanted here."""


class DeployError(FedstillError):
    """A server or node process cannot be started, reached or stopped."""
