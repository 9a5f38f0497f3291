"""Messages of the server to a node: one dataclass for each operation.

A message is a header of JSON values with named tensors (:mod:`fedstill.protocol.wire_format`). The header's
key ``operation`` selects the dataclass; an :class:`Envelope` identifies run and sender.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import Interval, MaxLen

from fedstill.core.config_tables import read_table
from fedstill.core.errors import ArgumentError
from fedstill.core.options import CheckedOptions
from fedstill.core.text_format import to_printable_line
from fedstill.protocol.secure_aggregation import SumNumber, SumRequest

MAX_NUMBER = 2**31  # upper bound of query numbers
MAX_QUOTED = 100  # characters of a value in an error
QueryNumber = Annotated[int, Interval(ge=0, lt=MAX_NUMBER), f"an integer from 0 to {MAX_NUMBER - 1}"]

T = TypeVar("T", "Message", "Envelope")


@dataclass(frozen=True)
class Envelope(CheckedOptions):
    """Run and sender of a message.

    Args:
        run: name of the run.
        server: identifier of the sending server process.
        message: number of the message in that process, equal when it is sent again; None: not numbered.
    """

    run: str = ""
    server: Annotated[str, MaxLen(100), "up to 100 letters"] = ""
    message: QueryNumber | None = None


@dataclass(frozen=True)
class Message(CheckedOptions):
    """Base class of all messages."""

    operation: ClassVar[str]

    def header(self, envelope: Envelope) -> dict[str, Any]:
        """Return the header as JSON values; :func:`read_message` is the inverse."""
        header = {"operation": self.operation, **asdict(self), **asdict(envelope)}
        return {name: value for name, value in header.items() if value is not None}


@dataclass(frozen=True)
class IdentifyNode(Message):
    """Request for the node's name, versions and protocol."""

    operation: ClassVar[str] = "identify"


@dataclass(frozen=True)
class JoinRun(Message):
    """Request to start or resume a run. The tensors are the public data, if the node needs them.

    Args:
        plan: table of a :class:`fedstill.protocol.run_plan.RunPlan`. Nodes read it after they have admitted
            its server.
    """

    operation: ClassVar[str] = "join"
    plan: Any


@dataclass(frozen=True)
class TrainLocally(Message):
    """Request to continue the initial local training for ``seconds`` seconds."""

    operation: ClassVar[str] = "train_locally"
    seconds: float


@dataclass(frozen=True)
class AnswerQuery(Message):
    """Query with its tensors.

    Args:
        query: name of the query.
        number: number of the query in the run, increasing.
        differentiable: the server may request gradients of the response.
        sum: the secure sum that the response is added to; None: the response is sent by itself.
    """

    operation: ClassVar[str] = "answer_query"
    query: str
    number: QueryNumber
    differentiable: bool
    sum: SumRequest | None = None


@dataclass(frozen=True)
class ComputeGradients(Message):
    """Request for gradients of a query's inputs. The tensors are the gradients of its response.

    Args:
        number: number of that query.
        query: name in the audit log.
        sum: as in :class:`AnswerQuery`.
    """

    operation: ClassVar[str] = "compute_gradients"
    number: QueryNumber
    query: str = "gradient"
    sum: SumRequest | None = None


@dataclass(frozen=True)
class SumMessage(Message):
    """Base class of the messages of secure aggregation between queries."""


@dataclass(frozen=True)
class SendKeys(SumMessage):
    """Request for the node's public keys."""

    operation: ClassVar[str] = "send_keys"


@dataclass(frozen=True)
class ReceiveKeys(SumMessage):
    """Public keys of all nodes that take part, as tensors."""

    operation: ClassVar[str] = "receive_keys"


@dataclass(frozen=True)
class ConfirmSurvivors(SumMessage):
    """Request to confirm, with an authentication code for each other survivor, which nodes added to a sum.

    Args:
        sum: number of the sum.
        survivors: names of the nodes that added to it.
    """

    operation: ClassVar[str] = "confirm_survivors"
    sum: SumNumber
    survivors: tuple[str, ...]


@dataclass(frozen=True)
class RevealMasks(SumMessage):
    """Request for the masks of a sum that do not cancel.

    Args:
        sum: number of the sum.
        words: the confirmations of all survivors, by name.
    """

    operation: ClassVar[str] = "reveal_masks"
    sum: SumNumber
    words: Mapping[str, str]


@dataclass(frozen=True)
class SaveCheckpoint(Message):
    """Request to save the node's state as it is before query number ``checkpoint``."""

    operation: ClassVar[str] = "save_checkpoint"
    checkpoint: QueryNumber


@dataclass(frozen=True)
class LoadCheckpoint(Message):
    """Request to restore the state before query number ``checkpoint``; 0 is before the first query."""

    operation: ClassVar[str] = "load_checkpoint"
    checkpoint: QueryNumber


@dataclass(frozen=True)
class LeaveRun(Message):
    """Notice that the run has ended."""

    operation: ClassVar[str] = "leave"


MESSAGES: Mapping[str, type[Message]] = {
    message_type.operation: message_type
    for message_type in (*Message.__subclasses__(), *SumMessage.__subclasses__())
    if message_type is not SumMessage
}


def read_message(header: Mapping[str, Any]) -> tuple[Message, Envelope]:
    """Return message and envelope of a received header. Only types and ranges are checked, not the run.

    Raises:
        ArgumentError: an unknown operation, or invalid values.

    >>> read_message({"operation": "load_checkpoint", "checkpoint": 3, "run": "one"})
    (LoadCheckpoint(checkpoint=3), Envelope(run='one', server='', message=None))
    >>> read_message({"operation": "load_checkpoint", "checkpoint": "../x"})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid checkpoint = '../x' (expected an integer)
    """
    operation = header.get("operation")
    message_type = MESSAGES.get(operation) if isinstance(operation, str) else None
    if message_type is None:
        raise ArgumentError("operation", operation, f"one of {', '.join(MESSAGES)}")
    try:
        return _read(message_type, header), _read(Envelope, header)
    except ArgumentError as error:  # a long value would push the expected one out of the message
        if len(repr(error.value)) <= MAX_QUOTED:
            raise
        raise ArgumentError(error.name, to_printable_line(error.value, MAX_QUOTED), error.expected) from error


def _read(message_type: type[T], header: Mapping[str, Any]) -> T:
    names = [part.name for part in fields(message_type)]
    return read_table(message_type, {name: header[name] for name in names if name in header})
