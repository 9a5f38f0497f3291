"""FENS: all nodes' models are combined by a small network, which the nodes train together by FedAvg.

Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma: "Revisiting Ensembling in One-Shot
Federated Learning", NeurIPS 2024. Each node i trains its own model h_i to the end and uploads it once. The
server sends all models to all nodes, which evaluate them on examples that their own model has not seen. On
these outputs they train the aggregator f_lambda in rounds, of which only lambda is transmitted. The global
model is f_lambda(h_1(x), ..., h_K(x)).

The server applies FedAdam, as in the published code, or the plain average of FedAvg. The student is the
ensemble as one network. The paper's distillation of the ensemble is not part of this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from annotated_types import Interval
from torch import nn

from fedstill.core.compute import copy_to_device
from fedstill.core.optimizers import SGD
from fedstill.core.options import NonNegativeFloat, PositiveInt
from fedstill.methods import (
    ArgumentError,
    Method,
    NamedNetwork,
    Needs,
    Node,
    NodeSetting,
    NodeView,
    Query,
    QueryDetails,
    Responses,
    Server,
    TensorData,
    Tensors,
    descend,
    predict,
    seeded,
)
from fedstill.methods._teachers import upload_query
from fedstill.models import MODELS, build
from fedstill.models.ensemble import Ensemble, EnsembleName, make_aggregator, stack_outputs
from fedstill.models.model_config import encoder_backbone
from fedstill.models.module_utils import deep_copy, load_vector, to_vector, weighted_mean
from fedstill.protocol.payload_kinds import DATA_SIZES, PARAMETERS, SCHEDULE, PayloadKind

ARCHITECTURES = PayloadKind("architectures", "the names of the nodes' networks", category="query")
AGGREGATOR_PARAMETERS = PayloadKind(
    "aggregator parameters",
    "the weights of a network that combines the outputs of all nodes' models",
    category="model",
    normal_size=1.0,
)
HELD_OUT = "held_out"  # role of a node's examples for f_lambda
BETA_1, BETA_2, TAU = 0.9, 0.99, 1e-3  # of FedAdam, in the published code


class HeldOut(nn.Module):
    """Examples of a node that its own model does not learn from, with the outputs of all models for them.

    Only the outputs are saved with the node: the examples follow from its data and seed. Neither is a buffer,
    as nodes of one architecture have different numbers of examples.
    """

    def __init__(self, data: TensorData) -> None:
        super().__init__()
        self._data, self._z = data, torch.zeros(0)

    @property
    def data(self) -> TensorData:
        """The examples."""
        return self._data

    def get_extra_state(self) -> torch.Tensor:
        """Return the outputs ``(n, K, C)`` of all K models; empty before they are computed."""
        return self._z

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Set the outputs."""
        self._z = state.to(self._data.inputs.device)


@dataclass
class FENSState:
    """Server state besides the student."""

    m: torch.Tensor  # FedAdam's moments (P,)
    v: torch.Tensor
    n: dict[str, float] = field(default_factory=dict)  # held-out examples by node; empty before the uploads


@dataclass(frozen=True, kw_only=True)
class FENS(Method):
    """Ensemble of the nodes' models with an aggregator that they train together."""

    title: ClassVar[str] = "FENS"
    paper: ClassVar[str] = "Allouah et al., NeurIPS 2024"
    query_names: ClassVar[tuple[str, ...]] = ("upload_model", "evaluate_models", "train_aggregator")
    has_ensemble: ClassVar[bool] = True

    aggregator: Literal["nn", "linear", "weights"] = "nn"
    """Form of f_lambda. nn: a perceptron of all models' outputs with one hidden layer. linear: a weighted sum
    of the outputs with one weight for each model; weights: with one for each model and class. Both start as
    the mean.
    """
    width: PositiveInt = 4
    """Hidden units of nn for each node (d)."""
    held_out: Annotated[float, Interval(ge=0, lt=1), "0 to below 1"] = 0.1
    """Share of each node's examples on which f_lambda is trained, and no model; at least one example. 0:
    f_lambda and the node's model are trained on all.
    """
    rounds: PositiveInt = 500
    """Rounds of training f_lambda."""
    local_steps: PositiveInt = 1
    """Steps of SGD of a node in a round."""
    batch: PositiveInt = 128
    """Held-out examples in a step, at most all."""
    lr: NonNegativeFloat = 1.0
    """Learning rate of the nodes."""
    server: Literal["fedadam", "fedavg"] = "fedadam"
    """Update of lambda from the mean of the nodes' changes: a step of Adam, or the mean itself."""
    server_lr: NonNegativeFloat = 1e-3
    """Learning rate of fedadam."""

    def needs(self) -> Needs:
        return Needs(student_architecture=True, vector_outputs=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield upload_query()
        yield Query(
            self.evaluate_models,
            sends={"uploads": PARAMETERS, "architectures": ARCHITECTURES},
            releases={"sizes": DATA_SIZES},
            times=1,
            depends_on_records=("sizes",),
            details=QueryDetails(json_values=("architectures",)),
        )
        yield Query(
            self.train_aggregator,
            sends={"parameters": AGGREGATOR_PARAMETERS, "round": SCHEDULE},
            releases={"parameters": AGGREGATOR_PARAMETERS},
            times=self.rounds,
            depends_on_records=(),
            trains=("aggregator",),  # on records, and without noise: mechanisms refuse it
        )

    # --- at a node --------------------------------------------------------------------------------------

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Hold out a random part of the node's examples, from which its model will not learn."""
        data, n = node.data, len(node.data)
        count = min(max(round(self.held_out * n), 1), n - 1) if self.held_out else 0
        order = torch.randperm(n, generator=node.random_generator("held out"))
        rows = copy_to_device(order, data.inputs.device)
        node.modules[HELD_OUT] = HeldOut(data.subset(rows[:count]) if count else data)
        node.frozen[HELD_OUT] = frozenset()
        node.data = data.subset(rows[count:].sort().values)

    def evaluate_models(self, node: NodeView, uploads: torch.Tensor, architectures: Any) -> Tensors:
        """Compute h_1(x), ..., h_K(x) of the held-out examples and keep them; return the number of examples.

        Args:
            node: the node.
            uploads: parameters and buffers of all models, one after the other.
            architectures: list with the name of each model; empty if all are like the node's own.

        Raises:
            ArgumentError: numbers or names that are not those of networks.
        """
        held_out = held_out_examples(node)
        outputs, rest = [], uploads
        for network in empty_networks(node, architectures, len(uploads)):
            size = state_size(network)
            if len(rest) < size:
                raise ArgumentError("uploads", len(uploads), "more numbers, as the named networks have")
            network = network.to_empty(device=node.device) if architectures else network
            load_vector(network, rest[:size])
            outputs.append(predict(network, held_out.data.inputs, node.setting.compute))
            rest = rest[size:]
        if len(rest):
            raise ArgumentError("uploads", len(uploads), f"{len(rest)} numbers less, as the networks have")
        held_out.set_extra_state(stack_outputs(outputs))  # (n, K, C)
        return {"sizes": torch.tensor(float(len(held_out.data)), device=node.device)}

    def train_aggregator(self, node: NodeView, parameters: torch.Tensor, round: int) -> Tensors:
        """Take steps of SGD from lambda on the held-out examples, and return lambda_i."""
        held_out = held_out_examples(node)
        z, y = held_out.get_extra_state(), held_out.data.targets  # (n, K, C), (n, ...)
        if not len(z):
            raise ArgumentError("query", "train_aggregator", "evaluate_models before it")
        with torch.device("meta"):  # without random initial weights
            f = make_aggregator(self.aggregator_name(z.shape[1]), *z.shape[1:])
        if state_size(f) != len(parameters):  # before memory is allocated for it
            raise ArgumentError("parameters", len(parameters), f"{state_size(f)} numbers of the aggregator")
        f = f.to_empty(device=node.device)
        load_vector(f, parameters)
        optimizer = SGD(f.parameters(), self.lr)
        for step in range(self.local_steps):
            order = torch.randperm(len(z), generator=node.random_generator("aggregator", round, step))
            rows = copy_to_device(order[: self.batch], node.device)
            with torch.enable_grad():
                loss = node.loss(f(z[rows]), y[rows], smoothing=0.0)
                descend(optimizer, loss)
        return {"parameters": to_vector(f)}

    def aggregator_name(self, members: int) -> str:
        """Return the name of f_lambda for a number of models, as :func:`make_aggregator` takes it."""
        return f"nn{members * self.width}" if self.aggregator == "nn" else self.aggregator

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server ----------------------------------------------------------------------------------

    def make_student(
        self, network: nn.Module, nodes: Iterable[NamedNetwork], output_shape: Sequence[int], seed: int
    ) -> nn.Module:
        """Return the ensemble of networks like the nodes', and of an initial f_lambda."""
        names, models = zip(*nodes, strict=True)
        with seeded(seed, "student", "aggregator"):
            name = EnsembleName(self.aggregator_name(len(names)), names)
            return Ensemble(models, output_shape[0], name)

    def init_state(self, server: Server) -> FENSState:
        """Return the initial state.

        Raises:
            ArgumentError: models that cannot be sent to the nodes.
        """
        for nodes, like in server.architectures:
            if not state_size(like):
                expected = "a network, as it has no parameters to upload"
                raise ArgumentError(f"model of {nodes[0]}", type(like).__name__, expected)
        for name in architecture_names(server):
            if not is_buildable(name) or server.task.form == "texts":
                expected = (
                    "one architecture at all nodes; only fedstill's own networks may differ, not for texts"
                )
                raise ArgumentError("nodes.models", name, expected)
        zeros = torch.zeros_like(to_vector(ensemble(server).aggregator))
        return FENSState(zeros, zeros.clone())

    def step(self, server: Server, state: FENSState, t: int) -> Mapping[str, float]:
        """Run one round of training f_lambda; before the first one, exchange the models."""
        if not state.n:
            self.exchange_models(server, state)
        f = ensemble(server).aggregator
        lambda_ = to_vector(f)  # (P,)
        nodes = [name for name in server.federation.present if name in state.n]
        responses = server.query("train_aggregator", nodes=nodes, parameters=lambda_, round=t)
        seen = [min(state.n[name], self.local_steps * self.batch) for name in responses.nodes]
        n_i = torch.tensor(seen, device=server.device)  # examples of the round, as in the published code
        change = weighted_mean(responses["parameters"], n_i) - lambda_
        if self.server == "fedadam":
            state.m = BETA_1 * state.m + (1 - BETA_1) * change
            state.v = BETA_2 * state.v + (1 - BETA_2) * change.square()
            change = self.server_lr * state.m / (state.v.sqrt() + TAU)
        load_vector(f, lambda_ + change)
        return {"moved": change.norm().item()}

    def exchange_models(self, server: Server, state: FENSState) -> None:
        """Fetch all h_i, and have all nodes evaluate them. A model that does not arrive has weights of 0."""
        uploads = server.query("upload_model").by_node("parameters")
        models = []
        for name, member in zip(server.federation.nodes, ensemble(server).members, strict=True):
            empty = torch.zeros(state_size(member), device=server.device)
            models.append(uploads.get(name, empty))
            load_vector(member, models[-1])
        names = architecture_names(server)
        responses = server.query("evaluate_models", uploads=torch.cat(models), architectures=names)
        state.n = {name: size.item() for name, size in responses.by_node("sizes").items()}

    def ensemble_responses(self, server: Server, state: Any, responses: Responses) -> torch.Tensor:
        """Return the mean of the nodes' outputs, which f_lambda is compared with."""
        return responses["logits"].mean(0)


def held_out_examples(node: NodeView) -> HeldOut:
    """Return the node's held-out examples, which :meth:`FENS.prepare` has added."""
    return cast(HeldOut, node.network(HELD_OUT))


def ensemble(server: Server) -> Ensemble:
    """Return the student, which :meth:`FENS.make_student` has made."""
    return cast(Ensemble, server.student)


def architecture_names(server: Server) -> list[str]:
    """Return the name of each node's network; none if all have one architecture."""
    return list(ensemble(server).name.members) if len(server.architectures) > 1 else []


def state_size(network: nn.Module) -> int:
    """Return the number of parameters and buffers of a network."""
    return sum(tensor.numel() for tensor in network.state_dict().values())


def is_buildable(name: str) -> bool:
    """Return whether a node builds a network for a server: one of fedstill's own, without a backbone."""
    return name.partition(":")[0] in MODELS.builtin and not encoder_backbone(name)


def empty_networks(node: NodeView, names: Any, total: int) -> Iterator[nn.Module]:
    """Yield a network for each model that a server sent.

    Args:
        node: the node.
        names: names of the networks, which are yielded without storage, so that nothing is allocated that is
            larger than the message. Empty: all are like the node's own.
        total: number of all parameters and buffers.

    Raises:
        ArgumentError: a name that is not allowed, or a number of values that is no multiple of the own ones.
    """
    if not names:
        own = deep_copy(node.network())
        size = state_size(own)
        if not size or not total or total % size:
            raise ArgumentError("uploads", total, f"a multiple of {size} numbers, as the node's model has")
        for _ in range(total // size):
            yield own
    if not isinstance(names, list) or not all(isinstance(name, str) and is_buildable(name) for name in names):
        raise ArgumentError("architectures", names, "names of fedstill's own networks")
    for name in names:
        (outputs,) = node.task.output_shape(node.input_shape)
        try:
            with torch.device("meta"):
                network = build(name, node.input_shape, outputs, 0)
        except (RuntimeError, TypeError) as error:  # an overflow of bytes or elements
            raise ArgumentError("architectures", name, "networks that fit into memory") from error
        yield network
