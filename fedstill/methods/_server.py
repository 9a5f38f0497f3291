"""Server side of a method, as a run drives it: step by step, saved and restored between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError, DataError, NodeFault
from fedstill.core.registry import check_registered_names
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.data.public import PublicData
from fedstill.federation.responses import Responses
from fedstill.federation.secure_aggregation import AnyFederation
from fedstill.methods._label_histogram import LabelHistogram
from fedstill.methods._saved_state import check_state_can_be_saved, restore, to_saved_form
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method, method_name
from fedstill.protocol.tensor_forms import sent_query_fault
from fedstill.tasks import Task


@dataclass(eq=False)
class Server:
    """Server of one run: the method's environment, its state and its progress.

    Args:
        method: the method.
        federation: the nodes.
        student: the global model, on the device. With ``Needs.split_models`` a ``SplitModel``.
        task: losses, ensemble, metrics.
        shape: ``(C, H, W)`` of an input, ``(L,)`` of a text, or ``(F,)`` of a row.
        mean, std: the data's declared normalization, by channel.
        compute: device and precision.
        seed: seed of all random streams at the server.
        local: the nodes' local training, which methods divide into rounds.
        public: public data, or None.
        architectures: names of the nodes of each architecture, with a network of it in its initial state, for
            methods with one student for each architecture.
        schema: columns of a table; empty for other inputs.
        feature_normalization: ``features.normalize``, if the inputs are features; empty for others.

    Attributes:
        completed_steps: number of completed steps.
        state: the method's state.

    Raises:
        QueryRefused: a node refuses a query that the method needs.
        ArgumentError: options that do not suit the task, the student or the public data, or unknown names.
    """

    method: Method
    federation: AnyFederation
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
    schema: TableSchema = NO_SCHEMA
    feature_normalization: str = ""
    completed_steps: int = field(default=0, init=False)
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        check_registered_names(self.method, "method")
        self.federation.expect_outputs(self.task.output_shape(self.shape))
        self.federation.exclude_refusing_nodes(tuple(self.federation.queries))
        self.state = self.method.init_state(self)
        check_state_can_be_saved(self.name, self.state)

    @property
    def device(self) -> torch.device:
        """Device of the server."""
        return self.compute.device

    @property
    def name(self) -> str:
        """Registered name of the method, which is part of the names of random streams."""
        return method_name(self.method)

    @property
    def total_steps(self) -> int:
        """Number of steps of a whole run."""
        return self.method.total_steps

    @property
    def unit(self) -> str:
        """Name of a step in reports."""
        return self.method.unit

    def step(self) -> Mapping[str, float]:
        """Run one step and return its losses."""
        losses = self.method.step(self, self.state, self.completed_steps)
        if not isinstance(losses, Mapping):
            raise ArgumentError(f"return value of {self.name}.step", losses, "losses by name, or {}")
        self.completed_steps += 1
        return losses

    def query(self, query: str, *, nodes: Sequence[str] | None = None, **inputs: Any) -> Responses:
        """Send a query and return the responses; see :meth:`fedstill.federation.federation.Federation.query`.

        Args:
            query: name of the query.
            nodes: names of the nodes; None is all. Excluded nodes are not queried.
            inputs: tensors of the query; numbers, which arrive as numbers; and JSON values, if the query
                declares them.

        Raises:
            DataError: a tensor of another dtype or shape than its kind's, such as inputs that are not of the
                task's shape, or that is not finite.
            ArgumentError: a call in ``init_state``, which runs before the nodes have trained and again at
                each resume. Or a tensor that requires a gradient and is not among the query's
                ``differentiable`` inputs, so that its gradient would lack the part through the nodes.

        Example:
            ``logits = server.query("predict_logits", x=x)["logits"]`` is ``(K, B, classes)``.
        """
        if not hasattr(self, "state"):
            expected = (
                "none, as init_state runs before training and at each resume: query in step, where t is 0"
            )
            raise ArgumentError(f"query in init_state of {self.name}", query, expected)
        declared = self.federation.queries.get(query)
        if declared is None:
            raise ArgumentError("query", query, f"one of {', '.join(self.federation.queries)}")
        json_values = declared.details.json_values
        sent: dict[str, Any] = {
            name: value if name in json_values else torch.as_tensor(value) for name, value in inputs.items()
        }
        for name, tensor in sent.items():
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.requires_grad
                and name not in declared.differentiable
            ):
                advice = f"{name}.detach(), or differentiable=({name!r},) in the declaration of the query"
                raise ArgumentError(f"{name} of query {query}", "a tensor that requires a gradient", advice)
        dtype = torch.int64 if self.task.form == "texts" else torch.float32
        fault = sent_query_fault(declared, sent, self.shape, self.task.output_shape(self.shape), dtype)
        if fault is not None:
            raise DataError(f"query {query!r}: {fault}")
        return self.federation.query(query, nodes=nodes, **sent)

    def query_or_none(self, query: str, *, nodes: Sequence[str], **inputs: Any) -> Responses | None:
        """Send a query and return the responses, or None if all of these nodes are excluded by it.

        Raises:
            NodeFault: too few nodes are left, or the faulty node is unknown.
        """
        federation = self.federation
        try:
            return self.query(query, nodes=nodes, **inputs)
        except NodeFault:
            too_few = len(federation.present) < federation.link.min_nodes(len(federation.nodes))
            if too_few or any(name in federation.present for name in nodes):
                raise
            return None

    def ensemble_responses(self, responses: Responses) -> torch.Tensor | None:
        """Return the nodes' responses to some inputs as one, ``(B, classes)``; None without an ensemble."""
        histogram = LabelHistogram.find_in(self.state)
        if histogram is not None and not histogram.names:  # the weights are not known yet
            return None
        return self.method.ensemble_responses(self, self.state, responses)

    def preview_samples(self, count: int) -> torch.Tensor | None:
        """Return ``count`` generated inputs ``(count, C, H, W)``, the same at each call; None without a
        generator."""
        return self.method.preview_samples(self, self.state, count)

    def preview_maps(self, count: int) -> torch.Tensor | None:
        """Return the maps ``(count, H, W)`` uint8 of :meth:`preview_samples`; None without maps."""
        return self.method.preview_maps(self, self.state, count)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to resume the run."""
        return {
            "completed_steps": self.completed_steps,
            "federation": self.federation.state_dict(),
            "student": dict(self.student.state_dict()),
            "method": {name: to_saved_form(value) for name, value in vars(self.state).items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.completed_steps = state["completed_steps"]
        self.federation.load_state_dict(state["federation"])
        self.student.load_state_dict(state["student"])
        for name, value in state["method"].items():
            setattr(self.state, name, restore(getattr(self.state, name), value, self.device))
