"""What a server says to a node: a form for each message, which the server writes and the node reads.

A message is a header of JSON values with named tensors beside it (:mod:`fedstill.protocol.wire_format`).
``do`` says which form it has; an :class:`Envelope` says which run it is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import Interval, MaxLen

from fedstill.core.config_tables import read_table
from fedstill.core.errors import ArgumentError
from fedstill.core.options import Checked
from fedstill.core.text_format import clip
from fedstill.protocol.secure_aggregation import SumCall, SumNumber

MOST = 2**31  # numbers of queries are below it
LONGEST = 100  # characters of a value that an error quotes
Number = Annotated[int, Interval(ge=0, lt=MOST), f"a whole number from 0 to {MOST - 1}"]

T = TypeVar("T", "Message", "Envelope")


@dataclass(frozen=True)
class Envelope(Checked):
    """What every message carries beside its own.

    Args:
        run: the run's name.
        server: names the server process that sends it.
        message: its number among that process's messages, the same when it is sent again; None: not counted.
    """

    run: str = ""
    server: Annotated[str, MaxLen(100), "up to 100 letters"] = ""
    message: Number | None = None


@dataclass(frozen=True)
class Message(Checked):
    """One thing that a server says to a node; a subclass for each."""

    do: ClassVar[str]

    def header(self, envelope: Envelope) -> dict[str, Any]:
        """As JSON values; :func:`read_message` gives the same back."""
        told = {"do": self.do, **asdict(self), **asdict(envelope)}
        return {name: value for name, value in told.items() if value is not None}


@dataclass(frozen=True)
class SayHello(Message):
    """Say who you are."""

    do: ClassVar[str] = "hello"


@dataclass(frozen=True)
class JoinRun(Message):
    """Make ready for a run, or for its going on. The tensors are the public data, once a node wants them.

    Args:
        plan: a table of a :class:`fedstill.protocol.run_plan.Plan`; it is read once its server is admitted.
    """

    do: ClassVar[str] = "join"
    plan: Any


@dataclass(frozen=True)
class Learn(Message):
    """Go on with the local training that the method wants first, for so many seconds."""

    do: ClassVar[str] = "learn"
    seconds: float


@dataclass(frozen=True)
class AnswerQuery(Message):
    """Answer a query about the tensors.

    Args:
        number: of the query in the run, rising.
        differentiable: gradients may be pulled back through the answer.
        sum: of which nodes a sum is made; None: the answer leaves by itself.
    """

    do: ClassVar[str] = "answer"
    query: str
    number: Number
    differentiable: bool
    sum: SumCall | None = None


@dataclass(frozen=True)
class PullBack(Message):
    """Pull gradients that reached an answer back to the query's tensors.

    Args:
        number: of that query.
        query: as what this is written down.
        sum: as of an answer.
    """

    do: ClassVar[str] = "pull back"
    number: Number
    query: str = "gradient"
    sum: SumCall | None = None


@dataclass(frozen=True)
class Introduce(Message):
    """Show your card: whose keys hide your part of a sum."""

    do: ClassVar[str] = "introduce"


@dataclass(frozen=True)
class Meet(Message):
    """The tensors are the cards of all that add to sums."""

    do: ClassVar[str] = "meet"


@dataclass(frozen=True)
class Agree(Message):
    """Say who added to a sum, sealed for each other survivor."""

    do: ClassVar[str] = "agree"
    sum: SumNumber
    survivors: tuple[str, ...]


@dataclass(frozen=True)
class Reveal(Message):
    """Reveal those masks of a sum that do not cancel: all survivors agree, in these words, who they are."""

    do: ClassVar[str] = "reveal"
    sum: SumNumber
    words: Mapping[str, str]


@dataclass(frozen=True)
class Remember(Message):
    """Keep your state as it is before query ``mark``."""

    do: ClassVar[str] = "remember"
    mark: Number


@dataclass(frozen=True)
class Recall(Message):
    """Go back to where you were before query ``mark``; 0 is before the first."""

    do: ClassVar[str] = "recall"
    mark: Number


@dataclass(frozen=True)
class LeaveRun(Message):
    """The run is over."""

    do: ClassVar[str] = "leave"


MESSAGES: Mapping[str, type[Message]] = {form.do: form for form in Message.__subclasses__()}


def read_message(header: Mapping[str, Any]) -> tuple[Message, Envelope]:
    """What somebody sent, and on which envelope, by its form alone: nothing is known of the run yet.

    Raises:
        ArgumentError: it is of no form.

    >>> read_message({"do": "recall", "mark": 3, "run": "one"})
    (Recall(mark=3), Envelope(run='one', server='', message=None))
    >>> read_message({"do": "recall", "mark": "../x"})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid mark = '../x' (expected a whole number)
    """
    do = header.get("do")
    form = MESSAGES.get(do) if isinstance(do, str) else None
    if form is None:
        raise ArgumentError("do", do, f"one of {', '.join(MESSAGES)}")
    try:
        return _read(form, header), _read(Envelope, header)
    except ArgumentError as error:  # of a long value what is allowed would be cut off
        if len(repr(error.value)) <= LONGEST:
            raise
        raise ArgumentError(error.name, clip(error.value, LONGEST), error.allowed) from error


def _read(form: type[T], header: Mapping[str, Any]) -> T:
    names = [part.name for part in fields(form)]
    return read_table(form, {name: header[name] for name in names if name in header})
