"""Errors that a user can cause, each as one clear line.

Each error names the argument, its value and what is expected. The command line prints the line and exits with
status 2. From Python they are ordinary exceptions.

Errors name an option by its dotted name, ``nodes.local.batch``. A caller of ``fedstill.distil`` has typed no
such name, so :func:`option_name` and :func:`format_option` translate it into the caller's terms.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Caller = Literal["command line", "options", "distil"]

# Arguments of ``distil`` by option, and by prefix of options that are fields of an object.
DISTIL_ARGUMENTS = {
    "student.model": "student",
    "nodes.models": "models",
    "public.name": "public",
    "public.limit": "public",
    "data.name": "data",
    "nodes.perceptual": "perceptual",
    "nodes.perceptual_weights": "perceptual_weights",
}
DISTIL_FIELDS = {
    "nodes.local": ("local", "local=fedstill.LocalConfig({})"),
    "nodes.policy": ("policies", "policies=[fedstill.PolicyConfig({}), ...]"),
    "nodes.privacy": ("privacies", "privacies=[..., {}]"),
    "link": ("link", "link=fedstill.LinkConfig({})"),
    "engine": ("engine", "engine=fedstill.EngineConfig({})"),
}

_caller: ContextVar[Caller] = ContextVar("caller", default="command line")  # one value per thread


@contextmanager
def caller_context(caller: Caller) -> Iterator[None]:
    """Put errors that are raised in the block into a caller's terms.

    Args:
        caller: the command line, ``"options"`` for a mapping of dotted names as in ``fedstill.run_preset``,
            or ``"distil"`` for the arguments of ``fedstill.distil``.
    """
    before = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(before)


def by_caller(command_line: str, options: str, distil: str) -> str:
    """Return the text that suits the current caller: of the command line, of options, or of ``distil``."""
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
    """Return the text by which the caller sets an option.

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
    """Base of every error that a user's input, data or policy can cause.

    Example::

        try:
            result = fedstill.run_preset("digits-fediod")
        except fedstill.FedstillError as error:
            print(error)  # one line
    """


class ArgumentError(FedstillError, ValueError):
    """Error of an argument or option with an invalid value, named in the caller's terms.

    Args:
        name: dotted name of the option.
        value: the invalid value.
        expected: the valid values, in words.

    >>> raise ArgumentError("split.nodes", 0, "an integer from 1 up")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid split.nodes = 0 (expected an integer from 1 up)
    """

    def __init__(self, name: str, value: object, expected: str) -> None:
        name = option_name(name)
        self.name, self.value, self.expected = name, value, expected
        super().__init__(f"invalid {name} = {_short_repr(value)} (expected {expected})")


def _short_repr(value: object) -> str:
    """Return the repr of a value in one line of at most 300 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


class UnknownName(ArgumentError):
    """Error of a name that does not exist: a key, an option, a preset, a method, a command.

    Args:
        what: the kind of thing.
        value: the unknown name.
        known: the existing names.
        see: advice that replaces the list of existing names if that would be too long.
        suggestion: the probable name, if it is not the closest of the existing ones.

    >>> raise UnknownName("preset", "digit-fediod", ["demo", "digits-fediod"])
    Traceback (most recent call last):
    ...
    fedstill.core.errors.UnknownName: unknown preset 'digit-fediod': did you mean 'digits-fediod'?
    >>> raise UnknownName("preset", "x", ["demo", "digits-fediod"])
    Traceback (most recent call last):
    ...
    fedstill.core.errors.UnknownName: unknown preset 'x' (expected demo, digits-fediod)
    """

    def __init__(
        self, what: str, value: str, known: Iterable[str], see: str = "", suggestion: str = ""
    ) -> None:
        self.known = tuple(known)
        self.name, self.value, self.expected = what, value, ", ".join(self.known)
        close = closest_name(value, self.known)
        suggestion = suggestion or (repr(close) if close else "")
        advice = f": {see}" if see else f" (expected {self.expected})"
        if suggestion:
            advice = f": did you mean {suggestion}?"
        Exception.__init__(self, f"unknown {what} {_short_repr(value)}{advice}")


def closest_name(value: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, or None if none is close.

    For dotted names, names that differ in their last part come first, then names with a similar last part,
    then similar names, then names like the first part. A name without a dot may also be the last part of one.

    >>> known = ["method.name", "method.tau", "nodes.local.epochs", "public.seed", "public.name"]
    >>> [closest_name(name, known) for name in ("method.nam", "nodes.epochs", "metod.tau", "epohcs")]
    ['method.name', 'nodes.local.epochs', 'method.tau', 'nodes.local.epochs']
    >>> closest_name("public", known), closest_name("method.xyz", known)
    ('public.name', None)
    >>> closest_name("--nodez.count", ["--nodes", "--seed"]), closest_name("fekdd", ["fedkd", "fedmd"])
    ('--nodes', 'fedkd')
    """
    spelled = {name.lower().removeprefix("--"): name for name in known}
    target = value.lower().removeprefix("--")
    if f"{target}.name" in spelled:  # a table whose class is chosen by name
        return spelled[f"{target}.name"]
    head, dot, last = target.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in spelled if name.rpartition(".")[0] == head}
    close = [siblings[name] for name in similar_names(last, siblings, 0.65 if dot else 0.7)]
    if dot and not close:
        last_parts = similar_names(last, {name.rpartition(".")[2] for name in spelled}, 0.8)
        elsewhere = [name for name in spelled if name.rpartition(".")[2] in last_parts]
        close = similar_names(target, elsewhere, 0.0)
    if not close and not (dot and siblings):
        close = similar_names(target, spelled)
    if not close and not dot:
        by_last_part = {name.rpartition(".")[2]: name for name in reversed(spelled)}
        close = [by_last_part[name] for name in similar_names(target, by_last_part)]
    if not close and dot and not siblings:
        close = similar_names(head, spelled)
    return spelled[close[0]] if close else None


def list_names(names: Iterable[str], most: int = 5) -> str:
    """Join names for a message; a thousand nodes are not printed one by one.

    >>> list_names(["a", "b"]), list_names(f"node-{k}" for k in range(1000))
    ('a, b', 'node-0, node-1, node-2, node-3, node-4 and 995 others')
    """
    every = list(names)
    if len(every) <= most + 1:
        return ", ".join(every)
    return f"{', '.join(every[:most])} and {len(every) - most:,} others"


def similar_names(target: str, names: Iterable[str], least: float = 0.7) -> list[str]:
    """Return the names whose letters are similar to those of a name, the most similar first.

    The measure averages common letters in order and in any order. So swapped letters count less than other
    letters.

    Args:
        target: the name.
        names: the names to compare.
        least: the least similarity, from 0 to 1.

    >>> similar_names("fekdd", ["fedmd", "fedavg", "fedkd"])
    ['fedkd', 'fedmd']
    """

    def similarity(name: str) -> float:
        matcher = difflib.SequenceMatcher(None, target, name)
        return (matcher.ratio() + matcher.quick_ratio()) / 2

    found = {name: similarity(name) for name in names}
    return sorted((name for name in found if found[name] >= least), key=found.__getitem__, reverse=True)


class PluginError(ArgumentError):
    """Error of custom code that cannot be imported.

    The text may quote that code or paths of this machine. It is therefore meant only for the person who
    installed it.
    """


class DataError(FedstillError, ValueError):
    """Error of unusable data: wrong shape, labels outside the classes, NaN, missing file."""


class NodeDataError(DataError):
    """Error of a node's private data. The text may quote them, so it is shown to their owner only."""


class MemoryLimitExceeded(FedstillError, ValueError):
    """A request would exceed the memory limit. It is raised before memory is allocated.

    Args:
        what: description of the request. The requester may see it.
        required_bytes: bytes that the request needs. They may reveal the amount of data, so only the owner
            may see them.
        max_bytes: the limit in bytes.
    """

    def __init__(self, what: str, required_bytes: float, max_bytes: int) -> None:
        self.what = what
        super().__init__(
            f"{what} would take {required_bytes:.3g} bytes of memory (expected <= {max_bytes:.3g})"
        )


class UnknownInputFormatError(DataError):
    """Error of data that can be read only in the input format of a run, if no run is given."""


class ModelError(FedstillError, ValueError):
    """Error of a model that does not fit its task: wrong output shape, or an unsupported input size."""


class PredictorError(ModelError):
    """Error of a custom predictor during a query. The text may quote the predictor: for its owner only."""


class RunFolderError(FedstillError):
    """Error of a run's folder: it holds another run, or nothing to resume."""


class QueryRefused(FedstillError):
    """Refusal of a query by a node's gate.

    Args:
        node: name of the node.
        query: name of the query.
        rule: the policy rule that refuses it.
        others: refusals of other nodes and queries, which the message includes.

    >>> raise QueryRefused("clinic", "predict_logits", "queries: count_labels")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.QueryRefused: node 'clinic' refuses query 'predict_logits' by rule ...
    >>> print(QueryRefused("clinic", "train", "outputs_only: parameters may not leave"))
    node 'clinic' refuses query 'train' by rule outputs_only: parameters may not leave. In a simulation, pass
    --nodes.policy.outputs_only false. In a deployed federation, its owner sets policy.outputs_only = false in
    node.toml
    """

    def __init__(self, node: str, query: str, rule: str, others: Sequence[QueryRefused] = ()) -> None:
        self.node, self.query, self.rule = node, query, rule
        nodes_by_refusal: dict[tuple[str, str], list[str]] = {}
        for refusal in (self, *others):
            nodes_by_refusal.setdefault((refusal.query, refusal.rule), []).append(repr(refusal.node))
        queries_by_reason: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for (refused, reason), nodes in nodes_by_refusal.items():
            queries_by_reason.setdefault((tuple(nodes), reason), []).append(repr(refused))
        texts = (_refusal_text(*reason, queries) for reason, queries in queries_by_reason.items())
        super().__init__("; ".join(texts))


def _refusal_text(nodes: Sequence[str], rule: str, queries: Sequence[str]) -> str:
    remedy = ""
    if "policy.kinds" in rule:  # the rule itself names the remedy
        kinds, everything = _policy_option("kinds", ("NAME",), "NAME"), _policy_option("outputs_only", False)
        remedy = f"; in a simulation: {kinds}, or for all {everything}"
    elif "outputs_only" in rule:
        owner = "its owner sets" if len(nodes) == 1 else "their owners set"
        remedy = f". In a simulation, pass {_policy_option('outputs_only', False)}. "
        remedy += f"In a deployed federation, {owner} policy.outputs_only = false in node.toml"
    subject = f"node {nodes[0]} refuses" if len(nodes) == 1 else f"nodes {list_names(nodes)} refuse"
    noun = "query" if len(queries) == 1 else "queries"
    return f"{subject} {noun} {', '.join(queries)} by rule {rule}{remedy}"


def _policy_option(field: str, value: object, placeholder: str = "") -> str:
    """Return the text by which the caller sets a field of the policy.

    Args:
        field: name of the field.
        value: its value.
        placeholder: text for the value on the command line, if it is not the value itself.
    """
    name = f"nodes.policy.{field}"
    text = format_option(name, value)
    return by_caller(f"--{name} {placeholder}", text, text) if placeholder else text


def combine_refusals(refusals: Sequence[QueryRefused]) -> QueryRefused:
    """Combine refusals into one error, so that all of them can be fixed at once."""
    first, *others = refusals
    return QueryRefused(first.node, first.query, first.rule, others)


class QueryMismatch(FedstillError):
    """A query number was used again with other content."""

    def __init__(self, node: str, query: str, number: int) -> None:
        self.node, self.query, self.number = node, query, number
        super().__init__(
            f"node {node!r} got query {query!r} again as number {number} with other content (expected the "
            "same content, or a new number). Gradients must be propagated before the next query"
        )


class MethodRefused(FedstillError):
    """A method cannot run in this federation. It is raised before training.

    Args:
        method: title of the method.
        node: name of the node; empty: the reason holds for all nodes.
        reason: requirement that is not met.
    """

    def __init__(self, method: str, node: str, reason: str) -> None:
        super().__init__(f"{method} cannot run here: {node + ': ' if node else ''}{reason}")
        self.method, self.node, self.reason = method, node, reason


class MethodCheckError(FedstillError):
    """A method fails checks of ``fedstill.check_method``.

    Args:
        method: title of the method.
        faults: reason of each failure, by the name of the check.

    >>> print(MethodCheckError("Mine", {"times": "query train was sent 3 times (expected 2, as declared)"}))
    Mine fails a check: times: query train was sent 3 times (expected 2, as declared)
    """

    def __init__(self, method: str, faults: Mapping[str, str]) -> None:
        self.method, self.faults = method, dict(faults)
        count = "a check" if len(faults) == 1 else f"{len(faults)} checks"
        reasons = "; ".join(f"{name}: {reason}" for name, reason in faults.items())
        super().__init__(f"{method} fails {count}: {reasons}")


class NodeFault(FedstillError):
    """A node failed, does not respond, or sent an invalid response.

    >>> raise NodeFault("clinic", "predict_logits", "logits hold NaN")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.NodeFault: node 'clinic', query 'predict_logits': logits hold NaN
    """

    def __init__(self, node: str, query: str, reason: str) -> None:
        self.node, self.query, self.reason = node, query, reason
        super().__init__(f"node {node!r}, query {query!r}: {reason}")


class QueryFileError(FedstillError, ValueError):
    """A file of queries or responses is damaged, or is not the expected one."""


class DeployError(FedstillError):
    """A server or node process cannot be started, reached or stopped."""
