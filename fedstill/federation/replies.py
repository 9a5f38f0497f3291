"""What nodes reply, read as soon as it arrives: of the right kind, in range, and no longer than it need be.

A node's word ends up in the run's state, its audit log and its report, and on a terminal. What is not of its
form is that node's fault, and goes no further. Each form is a dataclass, whose types say what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Interval, MaxLen

from fedstill.core.checked import Checked, NonNegativeInt
from fedstill.core.config_tables import load
from fedstill.core.errors import (
    ArgumentError,
    DataError,
    FedstillError,
    NodeFault,
    QuestionMismatch,
    QuestionRefused,
    RunFolderError,
)
from fedstill.core.text_format import clip
from fedstill.node.audit_entries import LARGEST
from fedstill.privacy.events import as_text, from_text
from fedstill.privacy.statement import Statement

LONGEST = 300  # characters that are kept of a text
MOST = 1000  # entries that a list or table may have
DEEPEST = 20  # lists and tables within each other

T = TypeVar("T")


@dataclass(frozen=True)
class Hello(Checked):
    """Who a node is: versions of its software for the report, and the protocol that it speaks."""

    versions: Mapping[str, str]
    protocol: NonNegativeInt


@dataclass(frozen=True)
class About(Checked):
    """A node that has joined: what it says of itself, and where it is.

    Args:
        objections: the rule by which each question will be refused, by the question's name.
        most_questions: that it answers in this run, with those that it has answered; None: no limit.
        marks: that it could go back to.
        last: number of the last question that it answered, -1 before the first.
        architecture: a fingerprint of its model's.
        wants_public: it cannot join before it gets the public data; then nothing else is known.
        versions: of its software, as it said before.
        privacy: how it says that it protects its records.
        notes: what is switched off there, and why.
    """

    objections: Mapping[str, str]
    most_questions: NonNegativeInt | None
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


NOTHING = About({}, None, False, (), -1)  # is known of a node that has not joined


def read_about(told: Mapping[str, Any], versions: Mapping[str, str]) -> About:
    """A reply to ``join`` of a node that runs these versions of its software.

    Raises:
        DataError: it is none.
    """
    if told.get("wants_public") is True:
        return replace(NOTHING, wants_public=True, versions=versions)
    return read(About, {**told, "versions": versions})


@dataclass(frozen=True)
class Progress(Checked):
    """How far a node's local training has come."""

    percent: Annotated[int, Interval(ge=0, le=100)]
    learned: bool


@dataclass(frozen=True)
class Paid(Checked):
    """Under which mechanism a release left, and at which price, as far as the node says it.

    Args:
        mechanism: its name; empty: not said.
        price: events as text and how often each; None: no guarantee.
        after: a fingerprint of what the node had answered before: the same question after something else is
            another release.
        left: of what left, before masks, sealed by the node's secret; empty: it is not told apart.
    """

    mechanism: str = ""
    price: Annotated[Mapping[str, int], MaxLen(100)] | None = None
    after: str = ""
    left: str = ""


@dataclass(frozen=True)
class _Released:
    privacy: Paid = field(default_factory=Paid)


def read_paid(told: Mapping[str, Any]) -> Paid:
    """What a node says under ``privacy`` of how a release left.

    Raises:
        DataError: it says it in another form.

    >>> read_paid({"privacy": {"mechanism": "pate", "price": {"gaussian(2.0)": 1}}}).price
    {'gaussian(2.0)': 1}
    """
    paid = read(_Released, told).privacy
    try:
        return paid if paid.price is None else replace(paid, price=as_text(from_text(paid.price)))
    except ArgumentError as error:
        raise DataError(f"price: {error}") from error


@dataclass(frozen=True)
class Failure:
    """An error at a node: its class, its text, by which rule a question was refused, or which number was
    reused."""

    kind: str
    text: str = ""
    rule: str = ""
    number: int = -1

    def error(self, node: str, question: str) -> FedstillError:
        """As it is raised at the server."""
        if self.kind == "QuestionRefused":
            return QuestionRefused(node, question, self.rule)
        if self.kind == "QuestionMismatch":
            return QuestionMismatch(node, question, self.number)
        return NodeFault(node, question, self.text)


@dataclass(frozen=True)
class Header:
    """What stands beside the tensors of a reply: what is told, or the error, and the node's own seconds."""

    told: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: Failure | None = None


def read(kind: type[T], told: Mapping[str, Any]) -> T:
    """A node's words (JSON values) as one of the forms above; more than the form has is let go.

    Raises:
        DataError: they are not of that form.

    >>> read(Progress, {"percent": 40, "learned": False, "mood": "good"})
    Progress(percent=40, learned=False)
    >>> read(Progress, {"percent": 140, "learned": False})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: its reply: percent is 140: allowed is 0 or more and up to 100
    """
    try:
        return load(kind, _cut(told, "all of it", DEEPEST), Path("its reply"))
    except RunFolderError as error:
        raise DataError(clip(str(error))) from error


def _cut(value: Any, name: str, deep: int) -> Any:
    """JSON values with texts cut to a length; what is beyond all measure is refused."""
    if isinstance(value, str):
        return clip(value, LONGEST)
    if isinstance(value, Mapping | list):
        if len(value) > MOST:
            raise DataError(f"its reply: {name} has {len(value)} entries: allowed are {MOST}")
        if not deep:
            raise DataError(f"its reply: {name} lies deeper than {DEEPEST} lists and tables")
    if isinstance(value, Mapping):
        return {clip(key, LONGEST): _cut(each, clip(key, 40), deep - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_cut(each, name, deep - 1) for each in value]
    if isinstance(value, int | float) and not abs(value) <= LARGEST:  # NaN too is not below anything
        raise DataError(f"its reply: {name} is {clip(repr(value), 60)}: allowed are numbers up to {LARGEST}")
    return value
