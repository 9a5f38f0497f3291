"""What nodes reply, read as soon as it arrives: of the right kind, in range, and no longer than it need be.

A node's word ends up in the run's state, its audit log and its report, and on a terminal. What is not of its
form is that node's fault, and goes no further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from fedstill.core.errors import (
    ArgumentError,
    DataError,
    FedstillError,
    NodeFault,
    QuestionMismatch,
    QuestionRefused,
)
from fedstill.core.words import clip
from fedstill.privacy.config import Accountant
from fedstill.privacy.events import as_text, from_text
from fedstill.privacy.statement import Statement

LONGEST = 300  # characters that are kept of a text
MOST_EVENTS = 100  # kinds of event in one price
MOST = 1000  # entries that a list or table may have
MOST_NOTES = 10
LARGEST = 2**53  # whole numbers up to this are the same for everyone who reads JSON


@dataclass(frozen=True)
class Hello:
    """Who a node is: the protocol that it speaks, and versions of its software for the report."""

    protocol: int
    versions: Mapping[str, str]

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Hello:
        """Read a reply to ``hello``.

        Raises:
            DataError: it is none.
        """
        versions = _table(told, "versions")
        return cls(
            _whole(told, "protocol", 0),
            {clip(name, 40): _text(versions, name, 80) for name in versions},
        )


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
        versions: of its software.
        privacy: how it says that it protects its records.
        notes: what is switched off there, and why.
    """

    objections: Mapping[str, str] = field(default_factory=dict)
    most_questions: int = 0
    learned: bool = False
    marks: tuple[int, ...] = ()
    last: int = -1
    model: str | None = None
    parameters: int | None = None
    architecture: str = ""
    frozen: bool = False
    wants_public: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    privacy: Statement = field(default_factory=Statement)
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, told: Mapping[str, Any], versions: Mapping[str, str]) -> About:
        """Read a reply to ``join``.

        Args:
            told: the reply.
            versions: what it said before.

        Raises:
            DataError: it is none.
        """
        if told.get("wants_public") is True:
            return cls(wants_public=True, versions=versions)
        objections = _table(told, "objections")
        return cls(
            objections={clip(name): _text(objections, name) for name in objections},
            most_questions=_whole(told, "most_questions", 0),
            learned=_flag(told, "learned"),
            marks=tuple(_whole({"mark": mark}, "mark", 0) for mark in _list(told, "marks")),
            last=_whole(told, "last", -1),
            model=_text(told, "model", 80) if "model" in told else None,
            parameters=_whole(told, "parameters", 0) if "parameters" in told else None,
            architecture=_text(told, "architecture", 80) if "architecture" in told else "",
            frozen=_flag(told, "frozen") if "frozen" in told else False,
            versions=versions,
            privacy=_statement(_table(told, "privacy")) if told.get("privacy") else Statement(),
            notes=_texts({"notes": [], **told}, "notes", MOST_NOTES),
        )


def _statement(table: Mapping[str, Any]) -> Statement:
    """What a node says of its protection.

    Raises:
        DataError: it is none.
    """
    delta, budget, accountant = _number(table, "delta"), table.get("budget"), table.get("accountant")
    if not 0 < delta < 1:
        raise _odd("delta", delta)
    if accountant not in get_args(Accountant):
        raise _odd("accountant", accountant)
    noise = _table(table, "noise")
    return Statement(
        mechanism=_text(table, "mechanism", 80),
        says=_text(table, "says"),
        unit=_text(table, "unit"),
        delta=delta,
        budget=None if budget is None else _number(table, "budget"),
        accountant="rdp" if accountant == "rdp" else "pld",
        randomness=_text(table, "randomness"),
        noise={clip(name, 80): _number(noise, name) for name in noise},
        rules=_texts(table, "rules"),
        assumes=_texts(table, "assumes"),
    )


@dataclass(frozen=True)
class Progress:
    """How far a node's local training has come."""

    percent: int
    learned: bool

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Progress:
        """Read a reply to ``learn``.

        Raises:
            DataError: it is none.
        """
        return cls(_whole(told, "percent", 0, 100), _flag(told, "learned"))


def read_privacy(told: Mapping[str, Any]) -> dict[str, Any]:
    """Under which mechanism a release left, and at which price, as far as the node says it.

    The price is None, which is no guarantee, or events as text and how often each. ``after`` is a fingerprint
    of what the node had answered before: the same question after something else is another release.

    Raises:
        DataError: it says it in another form.

    >>> read_privacy({"privacy": {"mechanism": "none", "price": None}})
    {'mechanism': 'none', 'price': None}
    >>> read_privacy({"privacy": {"mechanism": "pate", "price": {"gaussian(2.0)": 1}}})["price"]
    {'gaussian(2.0)': 1}
    """
    table = _table(told, "privacy") if "privacy" in told else {}
    read: dict[str, Any] = {}
    if "mechanism" in table:
        read["mechanism"] = _text(table, "mechanism", 80)
    if "price" in table:
        read["price"] = None if table["price"] is None else _price(_table(table, "price"))
    if "after" in table:
        read["after"] = _text(table, "after", 80)
    return read


def _price(table: Mapping[str, Any]) -> dict[str, int]:
    """Events that a node says it has paid.

    Raises:
        DataError: they are none, or too many.
    """
    if len(table) > MOST_EVENTS:
        raise DataError(f"price has {len(table)} events: allowed are {MOST_EVENTS}")
    try:
        return as_text(from_text(table))
    except ArgumentError as error:
        raise DataError(f"price: {error}") from error


def read_seconds(header: Mapping[str, Any], most: float) -> float:
    """A node's own seconds: from 0 up to those that went by.

    Raises:
        DataError: they are no number.

    >>> read_seconds({"seconds": 7.5}, 2.0), read_seconds({"seconds": -1}, 2.0), read_seconds({}, 2.0)
    (2.0, 0.0, 0.0)
    """
    return min(max(_number(header, "seconds"), 0.0), most) if "seconds" in header else 0.0


def read_told(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a node says beside its tensors.

    Raises:
        DataError: it is no table.
    """
    return _table(header, "told") if "told" in header else {}


def read_failure(node: str, question: str, header: Mapping[str, Any]) -> FedstillError | None:
    """A node's error as it is raised at the server; None for a reply that is none.

    Raises:
        DataError: it is told in another form.
    """
    if "error" not in header:
        return None
    told = _table(header, "error")
    kind = _text(told, "kind")
    if kind == "QuestionRefused":
        return QuestionRefused(node, question, _text(told, "rule"))
    if kind == "QuestionMismatch":
        return QuestionMismatch(node, question, _whole(told, "number", -1) if "number" in told else -1)
    return NodeFault(node, question, _text(told, "text"))


def _odd(name: str, value: object) -> DataError:
    told = clip(repr(value), 60) if isinstance(value, str | int | float | None) else type(value).__name__
    return DataError(f"it replied in a form that is not known: {name} is {told}")


def _table(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = told.get(name)
    if not isinstance(value, dict) or len(value) > MOST:
        raise _odd(name, value)
    return value


def _list(told: Mapping[str, Any], name: str, most: int = MOST) -> list[Any]:
    value = told.get(name)
    if not isinstance(value, list) or len(value) > most:
        raise _odd(name, value)
    return value


def _texts(told: Mapping[str, Any], name: str, most: int = MOST) -> tuple[str, ...]:
    return tuple(_text({name: text}, name) for text in _list(told, name, most))


def _text(told: Mapping[str, Any], name: str, longest: int = LONGEST) -> str:
    value = told.get(name)
    if not isinstance(value, str):
        raise _odd(clip(name, 40), value)
    return clip(value, longest)


def _flag(told: Mapping[str, Any], name: str) -> bool:
    value = told.get(name)
    if not isinstance(value, bool):
        raise _odd(name, value)
    return value


def _whole(told: Mapping[str, Any], name: str, least: int, most: int = LARGEST) -> int:
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _odd(name, value)
    return value


def _number(told: Mapping[str, Any], name: str) -> float:
    value = told.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST:
        raise _odd(name, value)  # NaN too is not below anything
    return float(value)
