"""What a server says to a node: a form for each message, which the server writes and the node reads.

A message is a header of JSON values with named tensors beside it (:mod:`fedstill.protocol.wire_format`).
``operation`` says which form it has; an :class:`Envelope` says which run it is of.
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
from fedstill.protocol.secure_aggregation import SumNumber, SumRequest

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

    operation: ClassVar[str]

    def header(self, envelope: Envelope) -> dict[str, Any]:
        """As JSON values; :func:`read_message` gives the same back."""
        told = {"operation": self.operation, **asdict(self), **asdict(envelope)}
        return {name: value for name, value in told.items() if value is not None}


@dataclass(frozen=True)
class IdentifyNode(Message):
    """Say who you are."""

    operation: ClassVar[str] = "identify"


@dataclass(frozen=True)
class JoinRun(Message):
    """Make ready for a run, or for its going on. The tensors are the public data, once a node wants them.

    Args:
        plan: a table of a :class:`fedstill.protocol.run_plan.RunPlan`; it is read once its server is admitted.
    """

    operation: ClassVar[str] = "join"
    plan: Any


@dataclass(frozen=True)
class TrainLocally(Message):
    """Go on with the local training that the method wants first, for so many seconds."""

    operation: ClassVar[str] = "train_locally"
    seconds: float


@dataclass(frozen=True)
class AnswerQuery(Message):
    """Answer a query about the tensors.

    Args:
        number: of the query in the run, rising.
        differentiable: gradients may be pulled back through the answer.
        sum: of which nodes a sum is made; None: the answer leaves by itself.
    """

    operation: ClassVar[str] = "answer_query"
    query: str
    number: Number
    differentiable: bool
    sum: SumRequest | None = None


@dataclass(frozen=True)
class ComputeGradients(Message):
    """Pull gradients that reached an answer back to the query's tensors.

    Args:
        number: of that query.
        query: as what this is written down.
        sum: as of an answer.
    """

    operation: ClassVar[str] = "compute_gradients"
    number: Number
    query: str = "gradient"
    sum: SumRequest | None = None


@dataclass(frozen=True)
class SendKeys(Message):
    """Show your card: whose keys hide your part of a sum."""

    operation: ClassVar[str] = "send_keys"


@dataclass(frozen=True)
class ReceiveKeys(Message):
    """The tensors are the cards of all that add to sums."""

    operation: ClassVar[str] = "receive_keys"


@dataclass(frozen=True)
class ConfirmSurvivors(Message):
    """Say who added to a sum, sealed for each other survivor."""

    operation: ClassVar[str] = "confirm_survivors"
    sum: SumNumber
    survivors: tuple[str, ...]


@dataclass(frozen=True)
class RevealMasks(Message):
    """Reveal those masks of a sum that do not cancel: all survivors agree, in these words, who they are."""

    operation: ClassVar[str] = "reveal_masks"
    sum: SumNumber
    words: Mapping[str, str]


@dataclass(frozen=True)
class SaveCheckpoint(Message):
    """Save the node's state as it is before query number ``checkpoint``."""

    operation: ClassVar[str] = "save_checkpoint"
    checkpoint: Number


@dataclass(frozen=True)
class LoadCheckpoint(Message):
    """Restore the state before query number ``checkpoint``; 0 is the state before the first query."""

    operation: ClassVar[str] = "load_checkpoint"
    checkpoint: Number


@dataclass(frozen=True)
class LeaveRun(Message):
    """The run is over."""

    operation: ClassVar[str] = "leave"


MESSAGES: Mapping[str, type[Message]] = {form.operation: form for form in Message.__subclasses__()}


def read_message(header: Mapping[str, Any]) -> tuple[Message, Envelope]:
    """What somebody sent, and on which envelope, by its form alone: nothing is known of the run yet.

    Raises:
        ArgumentError: it is of no form.

    >>> read_message({"operation": "load_checkpoint", "checkpoint": 3, "run": "one"})
    (LoadCheckpoint(checkpoint=3), Envelope(run='one', server='', message=None))
    >>> read_message({"operation": "load_checkpoint", "checkpoint": "../x"})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid checkpoint = '../x' (expected a whole number)
    """
    operation = header.get("operation")
    form = MESSAGES.get(operation) if isinstance(operation, str) else None
    if form is None:
        raise ArgumentError("operation", operation, f"one of {', '.join(MESSAGES)}")
    try:
        return _read(form, header), _read(Envelope, header)
    except ArgumentError as error:  # of a long value what is allowed would be cut off
        if len(repr(error.value)) <= LONGEST:
            raise
        raise ArgumentError(error.name, clip(error.value, LONGEST), error.allowed) from error


def _read(form: type[T], header: Mapping[str, Any]) -> T:
    names = [part.name for part in fields(form)]
    return read_table(form, {name: header[name] for name in names if name in header})
