"""The nodes' models as teachers of generated inputs, for DENSE, Co-Boosting, FedHydra and Co-Dream.

Nodes are queried about each batch x, with input gradients; or, as published for one-shot methods, they upload
their models once and the server evaluates these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from fedstill.methods import ArgumentError, NodeView, Query, QueryDetails, Responses, Server, Tensors
from fedstill.models.module_utils import deep_copy, load_vector
from fedstill.models.norm_layers import outputs_and_batch_norm_loss
from fedstill.protocol.payload_kinds import INPUTS, LOGITS, PARAMETERS, PayloadKind

BATCH_NORM_DISTANCE = PayloadKind(
    "batch norm distance",
    "the distance of the server's inputs, inside a node's model, from the means and variances of its "
    "training data in batch norm: one number for all inputs",
    category="responses",
    opt_out="with method.bn = 0 none is released",
)
TeacherModels = Literal["queried", "uploaded"]


def predict_logits(node: NodeView, x: torch.Tensor) -> Tensors:
    """Return z_k = f_k(x) ``(B, C)``."""
    return {"logits": node.model(node.task.observe(x))}


def predict_with_batch_norm(node: NodeView, x: torch.Tensor) -> Tensors:
    """Return z_k = f_k(x) ``(B, C)``, and the distance to f_k's batch norm statistics as ``statistics``."""
    node.model.train(False)

    def evaluate(node: NodeView, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs_and_batch_norm_loss(node.network(), x)  # hooks work on a model by itself only

    z_k, distance = node.separately(evaluate, node.task.observe(x))
    return {"logits": z_k, "statistics": distance}


def teacher_query(*, bn: float, times: int, rows: int) -> Query:
    """Return the query for the logits of x and, if it has a weight, the distance to batch norm statistics."""
    return Query(
        predict_with_batch_norm if bn else predict_logits,
        sends={"x": INPUTS},
        releases={"logits": LOGITS, **({"statistics": BATCH_NORM_DISTANCE} if bn else {})},
        differentiable=("x",),
        times=times,
        rows=rows,
        depends_on_records=(),
        stackable=True,
        name="predict_logits",
        details=QueryDetails(reads_values=bool(bn)),
    )


def upload_model(node: NodeView) -> Tensors:
    """Return the node's model."""
    return {"parameters": node.parameters()}


def upload_query() -> Query:
    """Return the query for each node's model, which a policy of outputs only refuses."""
    return Query(
        upload_model,
        releases={"parameters": PARAMETERS},
        times=1,
        depends_on_records=(),
        details=QueryDetails(ragged=("parameters",)),
    )


class UploadedModels:
    """The nodes' models at the server, uploaded once.

    Args:
        server: the server.

    Raises:
        ArgumentError: a model has no parameters to upload.
    """

    def __init__(self, server: Server) -> None:
        self.models = {name: deep_copy(like) for names, like in server.architectures for name in names}
        self.received = False
        for name, model in self.models.items():
            if not len(model.state_dict()):
                allowed = f"queried, as the model of {name} has no parameters to upload"
                raise ArgumentError("method.models", "uploaded", allowed)
            server.compute.to_device(model).eval().requires_grad_(False)

    def fetch(self, server: Server, nodes: Sequence[str] | None = None) -> None:
        """Query the nodes for their models, unless that is done."""
        if not self.received:
            responses = server.query("upload_model", nodes=nodes).by_node("parameters")
            self.models = {name: model for name, model in self.models.items() if name in responses}
            for name, model in self.models.items():
                load_vector(model, responses[name])
            self.received = True

    def respond(
        self, server: Server, x: torch.Tensor, bn: float, nodes: Sequence[str] | None = None
    ) -> Responses:
        """Return the models' responses to x ``(B, ...)``, as nodes would return them; None: of all nodes."""
        names = tuple(self.models) if nodes is None else tuple(nodes)
        each = [outputs_and_batch_norm_loss(self.models[name], server.task.observe(x)) for name in names]
        tensors = {"logits": torch.stack([z for z, _ in each])}
        if bn:
            tensors["statistics"] = torch.stack([distance for _, distance in each])
        return Responses(-1, names, tensors)

    def state_dict(self) -> dict[str, Any]:
        models = {name: dict(model.state_dict()) for name, model in self.models.items()}
        return {"models": models, "received": self.received}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.received = state["received"]
        self.models = {name: self.models[name] for name in state["models"]}
        for name, values in state["models"].items():
            self.models[name].load_state_dict(values)
