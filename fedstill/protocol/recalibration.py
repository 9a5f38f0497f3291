"""Batch norm recalibration: the running statistics of the student, from the nodes' data.

A student with batch norm that learned from generated or public inputs normalizes by the statistics of these.
On the nodes' data its activations have others. The server queries for one layer after another, in the order
of the forward pass. It sends the student's parameters, each node releases sums over its examples, and the
layer gets the statistics of all nodes' data before the next query. Nothing is trained.

Let h be the input of a layer with running mean mu and variance sigma^2, and
z = (h - mu) / sqrt(sigma^2 + eps). Each example has one vector v of 2 C numbers: the means over its positions
of z and of z^2, for the C channels of the layer. The student is in evaluation mode, so that v depends on no
other example, and the sums do not depend on how examples are split over batches and nodes: the result is
that of ``torch.optim.swa_utils.update_bn`` for one batch of all nodes' examples. v is shortened to a root
mean square of at most R, and divided by R. The released vector is the sum of (1, v) over the examples: one
example moves its M = 1 + 2 C numbers by sqrt(M) at most in L2, as
:class:`fedstill.privacy.release_rules.NoisySums` assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstill.core.errors import ArgumentError
from fedstill.core.options import CheckedOptions
from fedstill.models.inference import inference_batch_size
from fedstill.models.module_utils import deep_copy, in_mode, load_vector
from fedstill.protocol.payload_kinds import PARAMETERS, PayloadKind
from fedstill.protocol.queries import Query, QueryDetails

QUERY = "sum_batch_norm_statistics"
BATCH_NORM_STATISTICS = PayloadKind(
    "batch-norm statistics",
    "how many examples a node holds, and the mean and mean square over them of each channel that a layer of "
    "the student's batch norm normalizes",
    category="moments",
)
LAYER = PayloadKind("layer", "number of a layer of the student", category="query")
CLIP = PayloadKind("clip", "largest root mean square of one example's part of a sum", category="query")
LARGEST = 1e30  # of the numbers that are shortened together, so that no square overflows
MIN_VARIANCE_RATIO = 0.01  # of a channel's new variance to its old one, as noise can make variances negative

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Recalibration(CheckedOptions):
    """Recalibration of the student in a run, as the server declares it to its nodes.

    Args:
        layers: number of batch norm layers, and of queries; 0: unknown.
        channels: largest number of channels of a layer; 0: unknown.
    """

    section: ClassVar[str] = "recalibration"

    layers: Annotated[int, Interval(ge=0, lt=2**31)] = 0
    channels: Annotated[int, Interval(ge=0, lt=2**31)] = 0

    @classmethod
    def of(cls, network: nn.Module) -> Recalibration:
        """Return the recalibration of a network.

        >>> Recalibration.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LayerNorm(3)))
        Recalibration(layers=1, channels=3)
        """
        widths = [layer.num_features for layer in batch_norm_layers(network)]
        return cls(len(widths), max(widths, default=0))

    def query(self, network: nn.Module | None, *, is_summed: bool) -> Query:
        """Return the query for a node's statistics.

        Args:
            network: a network of the student's architecture; None: the query is declared only.
            is_summed: the server sees sums of the nodes' responses only.
        """
        return Query(
            partial(sum_batch_norm_statistics, network),
            sends={"parameters": PARAMETERS, "layer": LAYER, "clip": CLIP},
            releases={"moments": BATCH_NORM_STATISTICS},
            times=self.layers,
            depends_on_records=("moments",),
            sums={"moments": "sum"} if is_summed else {},
            name=QUERY,
            details=QueryDetails(postprocess=_in_float32, width=self.channels and 1 + 2 * self.channels),
        )


def batch_norm_layers(network: nn.Module) -> list[Any]:
    """Return the batch norm layers that normalize by running statistics."""
    return [
        layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats
    ]


def forward_order(network: nn.Module, x: torch.Tensor) -> list[int]:
    """Return the numbers of the batch norm layers in the order in which they see inputs ``(B, ...)``.

    Raises:
        ArgumentError: a layer does not see each input once.
    """
    layers, order = batch_norm_layers(network), list[int]()
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(in_mode(network, False))
        for number, layer in enumerate(layers):
            stack.enter_context(
                layer.register_forward_pre_hook(lambda *_, number=number: order.append(number))
            )
        network(x)
    if sorted(order) != list(range(len(layers))):
        raise _unsuitable(network)
    for number in order:
        example_statistics(network, x, number)
    return order


def _unsuitable(network: nn.Module) -> ArgumentError:
    expected = "a network whose batch norm layers see each input once"
    return ArgumentError("student.recalibrate", type(network).__name__, expected)


# --- at a node ------------------------------------------------------------------------------------------


def sum_batch_norm_statistics(
    network: nn.Module | None, node: Any, parameters: torch.Tensor, layer: int, clip: float
) -> Tensors:
    """Return the sums of (1, v) over the node's examples, ``(1 + 2 C,)`` float64, as ``moments``.

    Args:
        network: a network of the student's architecture, which stays as it is.
        node: a :class:`fedstill.node.node_view.NodeView`.
        parameters: the student's parameters and buffers ``(P,)``.
        layer: number of the batch norm layer.
        clip: R.

    Raises:
        ArgumentError: parameters of another network, no such layer, or a clip that is not above 0.
    """
    if network is None:
        raise ArgumentError("student", None, "a network, to respond to queries for its statistics")
    compute = node.setting.compute
    student = compute.to_device(deep_copy(network))  # other nodes may compute at the same time
    load_vector(student, parameters)
    with compute.in_float32():
        return {"moments": sum_statistics(student, node.data.inputs, layer, clip)}


def sum_statistics(student: nn.Module, x: torch.Tensor, number: int, clip: float) -> torch.Tensor:
    """Return the sum of (1, v) over inputs ``(N, ...)``, of one layer: ``(1 + 2 C,)`` float64.

    Raises:
        ArgumentError: no such layer, a clip that is not above 0 and finite, or a layer that does not see each
            input once.

    >>> norm = nn.BatchNorm1d(1, eps=0.0)  # running mean 0 and variance 1
    >>> sum_statistics(norm, torch.tensor([[1.0], [3.0]]), 0, clip=10.0) * torch.tensor([1, 10, 10])
    tensor([ 2.,  4., 10.], dtype=torch.float64)
    """
    if not 0 < clip < torch.inf:
        raise ArgumentError("clip", clip, "above 0 and finite")
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in torch.split(x, inference_batch_size(x)):
        v = example_statistics(student, part, number)
        rms = v.square().mean(1, keepdim=True).sqrt()
        total = total + torch.cat([torch.ones_like(rms), v / rms.clamp_min(clip)], 1).sum(0)
    return total


def example_statistics(student: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
    """Return the vector v of each input, of one layer: ``(B, 2 C)`` float64, finite.

    Raises:
        ArgumentError: there is no such layer, or it does not see each input once.
    """
    layers, seen = batch_norm_layers(student), list[torch.Tensor]()
    if type(number) is not int or not 0 <= number < len(layers):
        raise ArgumentError("layer", number, f"a number below {len(layers)}")
    layer = layers[number]
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(in_mode(student, False))
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        stack.enter_context(hook)
        student(x)
    if len(seen) != 1 or len(seen[0]) != len(x):
        raise _unsuitable(student)
    h = seen[0].double().reshape(*seen[0].shape[:2], -1)  # (B, C, positions)
    mu, variance = layer.running_mean.double(), layer.running_var.double() + layer.eps
    z = (h - mu.view(-1, 1)) / variance.sqrt().view(-1, 1)
    v = torch.cat([z.mean(2), z.square().mean(2)], 1)
    return v.nan_to_num().clamp(-LARGEST, LARGEST)


def _in_float32(response: Tensors, sent: Tensors) -> Tensors:
    """Return a response in float32, after the gate's noise on float64 sums."""
    return {name: tensor.float() for name, tensor in response.items()}


# --- at the server --------------------------------------------------------------------------------------


def set_statistics(layer: Any, moments: torch.Tensor, clip: float) -> None:
    """Set the running statistics of a batch norm layer from the sums over all nodes, in place.

    Variances are those of the population: the mean square less the square of the mean.

    Args:
        layer: the layer, with the statistics that the nodes received.
        moments: the sums ``(1 + 2 C,)``.
        clip: R.

    >>> norm = nn.BatchNorm1d(1)
    >>> set_statistics(norm, sum_statistics(norm, torch.tensor([[1.0], [3.0]]), 0, 10.0), 10.0)
    >>> norm.running_mean, norm.running_var
    (tensor([2.]), tensor([1.]))
    """
    examples = moments[0].double().clamp_min(1)  # noise may make it smaller
    m, q = (moments[1:].double() * clip / examples).chunk(2)  # means of z and z^2
    variance = layer.running_var.double() + layer.eps
    layer.running_mean += variance.sqrt() * m
    layer.running_var.copy_(variance * (q - m.square()).clamp_min(MIN_VARIANCE_RATIO))
