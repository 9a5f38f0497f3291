"""Errors that a user of fedstill can cause, each one clear line.

Every error names the argument, the value that was given and what is allowed. The command
line prints the line and exits with 2; from Python they are ordinary exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedstillError(Exception):
    """Base of every error that a user's input, data or policy can cause."""


class ArgumentError(FedstillError, ValueError):
    """An argument has a value that is not allowed.

    >>> raise ArgumentError("split.nodes", 0, "a whole number from 1 up")
    Traceback (most recent call last):
    ...
    fedstill.errors.ArgumentError: split.nodes is 0: allowed is a whole number from 1 up
    """

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name, self.value, self.allowed = name, value, allowed
        super().__init__(f"{name} is {value!r}: allowed is {allowed}")


class UnknownName(ArgumentError):
    """Something was named that does not exist: a key, an option, a preset, a method, a command.

    Args:
        what: the kind of thing.
        value: what was given.
        known: what there is.
        see: said in place of all that there is, where that would be too long for one line.

    >>> raise UnknownName("preset", "digit-fediod", ["demo", "digits-fediod"])
    Traceback (most recent call last):
    ...
    fedstill.errors.UnknownName: unknown preset 'digit-fediod': did you mean 'digits-fediod'?
    >>> raise UnknownName("preset", "x", ["demo", "digits-fediod"])
    Traceback (most recent call last):
    ...
    fedstill.errors.UnknownName: unknown preset 'x': allowed are demo, digits-fediod
    """

    def __init__(self, what: str, value: str, known: Iterable[str], see: str = "") -> None:
        choices = list(known)
        self.name, self.value, self.allowed = what, value, ", ".join(choices)
        close = difflib.get_close_matches(value, choices, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]!r}?" if close else see or f"allowed are {self.allowed}"
        Exception.__init__(self, f"unknown {what} {value!r}: {hint}")


class DataError(FedstillError, ValueError):
    """Data cannot be used as it is: wrong shape, labels outside the classes, NaN, missing file."""


class OwnDataError(DataError):
    """A node's own data cannot be used. The text may quote them, so that it is for their owner alone."""


class RunNeeded(DataError):
    """Data that may be sound, but are read only in the form of a run, and none is named."""


class ModelError(FedstillError, ValueError):
    """A model does not fit its task: wrong output shape, an input size that it cannot take."""


class RunFolderError(FedstillError):
    """A run's folder cannot be used: it holds another run, or nothing to resume."""


class QuestionRefused(FedstillError):
    """A node's gate does not answer this question.

    >>> raise QuestionRefused("clinic", "examine", "questions: count_labels")
    Traceback (most recent call last):
    ...
    fedstill.errors.QuestionRefused: node 'clinic' refuses question 'examine' by rule questions: count_labels
    """

    def __init__(self, node: str, question: str, rule: str) -> None:
        self.node, self.question, self.rule = node, question, rule
        way_out = "; its owner may allow it: policy outputs_only = false" if "outputs_only" in rule else ""
        super().__init__(f"node {node!r} refuses question {question!r} by rule {rule}{way_out}")


class QuestionMismatch(FedstillError):
    """A question came again under a number already used, with other content."""

    def __init__(self, node: str, question: str, number: int) -> None:
        self.node, self.question, self.number = node, question, number
        super().__init__(
            f"node {node!r} was asked question {question!r} again as number {number} with other "
            "content: allowed is the same content, or a new number"
        )


class MethodRefused(FedstillError):
    """A federation in which a method cannot run; said before anything is trained."""

    def __init__(self, method: str, node: str, reason: str) -> None:
        super().__init__(f"{method} cannot run here: {node}: {reason}")
        self.method, self.node, self.reason = method, node, reason


class NodeFault(FedstillError):
    """A node failed, stays away, or answers what no sound node answers.

    >>> raise NodeFault("clinic", "examine", "logits hold NaN")
    Traceback (most recent call last):
    ...
    fedstill.errors.NodeFault: node 'clinic', question 'examine': logits hold NaN
    """

    def __init__(self, node: str, question: str, reason: str) -> None:
        self.node, self.question, self.reason = node, question, reason
        super().__init__(f"node {node!r}, question {question!r}: {reason}")


class BundleError(FedstillError, ValueError):
    """A file of questions or answers is not what it says, or not what is wanted here."""


class DeployError(FedstillError):
    """A server or node process cannot be started, reached or stopped."""
