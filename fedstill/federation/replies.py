"""What nodes reply, read as soon as it arrives: of the right kind, in range, and no longer than it need be.

A node's word ends up in the run's state, its audit log and its report, and on a terminal. What is not of its
form is that node's fault, and goes no further. Each form is a dataclass, whose types say what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge, Interval, MaxLen

from fedstill.core.checked import NonNegativeInt, fits
from fedstill.core.errors import (
    ArgumentError,
    DataError,
    FedstillError,
    NodeFault,
    QuestionMismatch,
    QuestionRefused,
)
from fedstill.core.words import clip
from fedstill.privacy.events import as_text, from_text
from fedstill.privacy.statement import Statement

LONGEST = 300  # characters that are kept of a text
MOST = 1000  # entries that a list or table may have
LARGEST = 2**53  # whole numbers up to this are the same for everyone who reads JSON

T = TypeVar("T")


@dataclass(frozen=True)
class Hello:
    """Who a node is: versions of its software for the report, and the protocol that it speaks."""

    versions: Mapping[str, str]
    protocol: NonNegativeInt


@dataclass(frozen=True)
class About:
    """A node that has joined: what it says of itself, and where it is.

    Args:
        objections: the rule by which each question will be refused, by the question's name.
        most_questions: that it answers; 0 is no limit.
        learned: whether its local training is done.
        marks: that it could go back to.
        last: number of the last question that it answered, -1 before the first.
        model: its class, for the report.
        parameters: how many its model has.
        architecture: a fingerprint of its model's.
        frozen: whether nothing of its model may be trained.
        wants_public: it cannot join before it gets the public data; then nothing else is known.
        versions: of its software, as it said before.
        privacy: how it says that it protects its records.
        notes: what is switched off there, and why.
    """

    objections: Mapping[str, str]
    most_questions: NonNegativeInt
    learned: bool
    marks: tuple[NonNegativeInt, ...]
    last: Annotated[int, Ge(-1)]
    model: str | None = None
    parameters: NonNegativeInt | None = None
    architecture: str = ""
    frozen: bool = False
    wants_public: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    privacy: Statement = field(default_factory=Statement)
    notes: Annotated[tuple[str, ...], MaxLen(10)] = ()


NOTHING = About({}, 0, False, (), -1)  # is known of a node that has not joined


def read_about(told: Mapping[str, Any], versions: Mapping[str, str]) -> About:
    """A reply to ``join`` of a node that runs these versions of its software.

    Raises:
        DataError: it is none.
    """
    if told.get("wants_public") is True:
        return replace(NOTHING, wants_public=True, versions=versions)
    return read(About, {**told, "versions": versions})


@dataclass(frozen=True)
class Progress:
    """How far a node's local training has come."""

    percent: Annotated[int, Interval(ge=0, le=100)]
    learned: bool


@dataclass(frozen=True)
class Paid:
    """Under which mechanism a release left, and at which price, as far as the node says it.

    Args:
        mechanism: its name; empty: not said.
        price: events as text and how often each; None: no guarantee.
        after: a fingerprint of what the node had answered before: the same question after something else is
            another release.
    """

    mechanism: str = ""
    price: Annotated[Mapping[str, int], MaxLen(100)] | None = None
    after: str = ""


def read_paid(told: Mapping[str, Any]) -> Paid:
    """What a node says under ``privacy`` of how a release left.

    Raises:
        DataError: it says it in another form.

    >>> read_paid({"privacy": {"mechanism": "pate", "price": {"gaussian(2.0)": 1}}}).price
    {'gaussian(2.0)': 1}
    """
    paid = read(Paid, told.get("privacy", {}), "privacy")
    try:
        return paid if paid.price is None else replace(paid, price=as_text(from_text(paid.price)))
    except ArgumentError as error:
        raise DataError(f"price: {error}") from error


def read_seconds(header: Mapping[str, Any], most: float) -> float:
    """A node's own seconds: from 0 up to those that went by.

    Raises:
        DataError: they are no number.

    >>> read_seconds({"seconds": 7.5}, 2.0), read_seconds({"seconds": -1}, 2.0), read_seconds({}, 2.0)
    (2.0, 0.0, 0.0)
    """
    seconds: float = _value(float, header.get("seconds", 0.0), "seconds")
    return min(max(seconds, 0.0), most)


@dataclass(frozen=True)
class _Failure:
    kind: str
    text: str = ""
    rule: str = ""
    number: int = -1


def read_failure(node: str, question: str, header: Mapping[str, Any]) -> FedstillError | None:
    """A node's error as it is raised at the server; None for a reply that is none.

    Raises:
        DataError: it is told in another form.
    """
    if "error" not in header:
        return None
    failure = read(_Failure, header["error"], "error")
    if failure.kind == "QuestionRefused":
        return QuestionRefused(node, question, failure.rule)
    if failure.kind == "QuestionMismatch":
        return QuestionMismatch(node, question, failure.number)
    return NodeFault(node, question, failure.text)


def read(kind: type[T], told: object, name: str = "reply") -> T:
    """A node's words as one of the forms above; more than the form has is let go.

    Args:
        kind: the form, a dataclass.
        told: JSON values.
        name: by which the node told them, for the error.

    Raises:
        DataError: they are not of that form.

    >>> read(Progress, {"percent": 40, "learned": False, "mood": "good"})
    Progress(percent=40, learned=False)
    >>> read(Progress, {"percent": 140, "learned": False})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: it replied in a form that is not known: percent is 140
    """
    table, form = read_table(told, name), kind
    hints, values = get_type_hints(form, include_extras=True), {}
    for each in fields(form):  # type: ignore[arg-type]
        if each.name in table or each.default is each.default_factory is MISSING:
            values[each.name] = _value(hints[each.name], table.get(each.name), each.name)
    return kind(**values)


def read_table(told: object, name: str) -> Mapping[str, Any]:
    """A node's words as a table of no particular form.

    Raises:
        DataError: they are none.
    """
    if not isinstance(told, dict) or len(told) > MOST:
        raise _odd(name, told)
    return told


def _value(kind: Any, value: Any, name: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        told = _value(parts[0], value, name)
        if not fits(kind, told):
            raise _odd(name, value)
        return told
    if NoneType in parts:
        return None if value is None else _value(parts[0], value, name)
    if is_dataclass(kind):
        return read(kind, value, name)  # type: ignore[arg-type]
    if origin is Mapping:
        table = read_table(value, name)
        return {clip(key, 80): _value(parts[1], each, clip(key, 40)) for key, each in table.items()}
    if origin in (tuple, Sequence):
        if not isinstance(value, list) or len(value) > MOST:
            raise _odd(name, value)
        return tuple(_value(parts[0], each, name) for each in value)
    number = kind in (int, float)
    if not fits(kind, value) or (number and not abs(value) <= LARGEST):  # NaN too is not below anything
        raise _odd(name, value)
    return clip(value, LONGEST) if kind is str else float(value) if kind is float else value


def _odd(name: str, value: object) -> DataError:
    told = clip(repr(value), 60) if isinstance(value, str | int | float | None) else type(value).__name__
    return DataError(f"it replied in a form that is not known: {name} is {told}")
