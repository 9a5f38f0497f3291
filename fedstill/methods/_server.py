"""A method's program at the server, as a run drives it: turn by turn, and stopped between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedstill.core.checkpoint import check_state
from fedstill.core.compute import Compute, match_parameter_layout
from fedstill.core.errors import ArgumentError, DataError, NodeFault
from fedstill.core.registry import check_registered_names
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.data.public import PublicData
from fedstill.federation.federation import Federation, Responses
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method, method_name
from fedstill.protocol.payload_kinds import INPUTS
from fedstill.tasks import Task


@dataclass(eq=False)
class Server:
    """What a method's program has to work with, and how far it has come.

    Args:
        method: the program.
        federation: the nodes.
        student: the central network, on the device. Under ``Needs.split`` a ``Split``.
        task: losses, ensemble, metrics.
        shape: ``(C, H, W)`` of an input, ``(L,)`` of a text, or ``(F,)`` of a row.
        mean, std: the data's declared normalization, per channel.
        compute: device and precision.
        seed: of everything drawn at the server.
        local: how nodes train, for methods that divide that budget into rounds.
        public: public data, or None.
        kinds: the nodes' names by architecture, one tuple an architecture, with a network of it in its
            first state; for methods that keep one student an architecture.
        schema: what the columns of rows of a table may be; none where inputs are no such rows.

    Attributes:
        done: turns.
        state: what the method has made, and changes from turn to turn.

    Raises:
        QueryRefused: a node would not answer a query that the method needs.
        ArgumentError: the method's options do not go with the task, the student or the public data, or name
            what nothing has.
    """

    method: Method
    federation: Federation
    student: nn.Module
    task: Task
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    compute: Compute
    seed: int
    local: LocalConfig
    public: PublicData | None = None
    architectures: tuple[tuple[tuple[str, ...], nn.Module], ...] = ()
    schema: Schema = NO_SCHEMA
    completed_steps: int = field(default=0, init=False)
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        check_registered_names(self.method, "method")
        self.federation.check_policies(tuple(self.federation.queries))
        self.state = self.method.init_state(self)
        _check_state(self.name, self.state)

    @property
    def device(self) -> torch.device:
        """Where the server computes."""
        return self.compute.device

    @property
    def name(self) -> str:
        """The method's name, which is part of the names of what is drawn here."""
        return method_name(self.method)

    @property
    def total_steps(self) -> int:
        """Turns of a whole run."""
        return self.method.total_steps

    @property
    def unit(self) -> str:
        """What a turn is, in reports."""
        return self.method.unit

    def step(self) -> Mapping[str, float]:
        """One turn, and its losses."""
        losses = self.method.step(self, self.state, self.completed_steps)
        self.completed_steps += 1
        return losses

    def query(self, query: str, *, of: Sequence[str] | None = None, **inputs: Any) -> Responses:
        """What nodes answer to a query; see :meth:`fedstill.federation.federation.Federation.call`.

        Args:
            query: its name.
            of: names of the nodes to ask; None is all. Those that are out are not asked.
            inputs: tensors that go down with it; numbers, which arrive as numbers; JSON values, where the
                query declares them.

        Raises:
            DataError: inputs are not of the task's shape, or not float32 (token ids: int64).
            ArgumentError: ``begin`` asks. It runs before nodes have learned anything, and anew at each
                resume: what it were told would leave again, and no training would be paid for.
        """
        if not hasattr(self, "state"):
            allowed = "none, as it runs before training and at each resume: ask in turn, where t is 0"
            raise ArgumentError(f"what begin of method {self.name} asks", query, allowed)
        values = self.federation.queries[query].json_values if query in self.federation.queries else ()
        sent: dict[str, Any] = {
            name: each if name in values else torch.as_tensor(each) for name, each in inputs.items()
        }
        kinds = self.federation.queries[query].sends if query in self.federation.queries else {}
        dtype = torch.int64 if self.task.form == "texts" else torch.float32
        for name in (name for name in sent if kinds.get(name) == INPUTS):
            found, wanted = sent[name], tuple(self.shape)
            if tuple(found.shape[1:]) != wanted or found.dtype != dtype:
                told = f"{name} is {found.dtype} of shape {tuple(found.shape)}"
                allowed = f"{dtype} of shape (B, {', '.join(map(str, wanted))})"
                raise DataError(f"query {query!r}: {told}: expected {allowed}")
        return self.federation.query(query, nodes=of, **sent)

    def query_or_none(self, query: str, *, of: Sequence[str], **inputs: Any) -> Responses | None:
        """What some nodes answer; None if all of them are left out, and the run goes on with the others.

        Raises:
            NodeFault: too few nodes are left to go on, or it is not known whose answer is wrong.
        """
        federation = self.federation
        try:
            return self.query(query, of=of, **inputs)
        except NodeFault:
            too_few = len(federation.present) < federation.link.min_nodes(len(federation.nodes))
            if too_few or any(name in federation.present for name in of):
                raise
            return None

    def ensemble_responses(self, responses: Responses) -> torch.Tensor | None:
        """The nodes' answers about some inputs as one, ``(B, classes)``; None where the method has none."""
        return self.method.ensemble_responses(self, self.state, responses)

    def preview_samples(self, count: int) -> torch.Tensor | None:
        """Inputs ``(count, C, H, W)`` that the server has made, the same each time; None if it makes none."""
        return self.method.preview_samples(self, self.state, count)

    def preview_maps(self, count: int) -> torch.Tensor | None:
        """The maps ``(count, H, W)`` uint8 that :meth:`preview_samples` makes its inputs from; None: from none."""
        return self.method.preview_maps(self, self.state, count)

    def state_dict(self) -> dict[str, Any]:
        """What the server must remember to go on."""
        return {
            "completed_steps": self.completed_steps,
            "federation": self.federation.state_dict(),
            "student": dict(self.student.state_dict()),
            "method": {name: _state_of(value) for name, value in vars(self.state).items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was remembered."""
        self.completed_steps = state["completed_steps"]
        self.federation.load_state_dict(state["federation"])
        self.student.load_state_dict(state["student"])
        for name, value in state["method"].items():
            setattr(self.state, name, _restore(getattr(self.state, name), value, self.device))


def adam(module: nn.Module, lr: float, beta: float = 0.9) -> torch.optim.Optimizer:
    """Adam on all of a network; ``beta`` is its momentum."""
    return torch.optim.Adam(module.parameters(), lr, betas=(beta, 0.999), fused=True)


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One step of an optimizer down a loss."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _check_state(name: str, state: Any) -> None:
    """Refuse at once what could not be remembered later."""
    if not hasattr(state, "__dict__"):
        allowed = "an object with attributes, as a dataclass without slots"
        raise ArgumentError(f"what method {name} begins with", type(state).__name__, allowed)
    for key, value in vars(state).items():
        try:
            check_state(_state_of(value))
        except TypeError as error:
            allowed = (
                "tensors, numbers, texts, lists and tables of these, networks, optimizers, or what has "
                f"state_dict() and load_state_dict(); {error}"
            )
            raise ArgumentError(f"state.{key} of method {name}", type(value).__name__, allowed) from error


def _state_of(value: Any) -> Any:
    """What is remembered of one current that a method has made."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return dict(value.state_dict())
    if isinstance(value, Mapping):
        return {name: _state_of(part) for name, part in value.items()}
    return value.state_dict() if hasattr(value, "state_dict") else value


def _restore(current: Any, saved: Any, device: torch.device) -> Any:
    """The current as it was; in the place of one that :meth:`Method.begin` has made, where it has a memory."""
    if isinstance(current, nn.Module | torch.optim.Optimizer):
        current.load_state_dict(saved)
        if isinstance(current, torch.optim.Optimizer):
            match_parameter_layout(current)
        return current
    if hasattr(current, "load_state_dict"):
        current.load_state_dict(saved, device)
        return current
    if isinstance(saved, Mapping):
        here = current if isinstance(current, Mapping) else {}
        return {name: _restore(here.get(name), part, device) for name, part in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_restore(None, part, device) for part in saved)
    return saved.to(device) if isinstance(saved, torch.Tensor) else saved
