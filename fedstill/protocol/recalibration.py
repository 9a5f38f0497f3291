"""Batch norm recalibration: the running statistics of the student, from the nodes' data.

A student with batch norm that learned from generated or public inputs normalizes by the statistics of these.
On the nodes' data its activations have others. The server sends the student's parameters, and each node
releases sums over its examples, from which the statistics of all nodes' data follow. Nothing is trained.

Let h be the input of a batch norm layer, with running mean mu and variance sigma^2, and
z = (h - mu) / sqrt(sigma^2 + eps). Each example has one vector v of 2 C numbers: the means over its positions
of z and of z^2, for all C channels of all layers. The student is in evaluation mode, so that v depends on no
other example, and the sums do not depend on how examples are split over batches and nodes. v is shortened to
a root mean square of at most R, and divided by R. The released vector is the sum of (1, v) over the examples:
an example moves its M = 1 + 2 C numbers by sqrt(M) at most in L2, as
:class:`fedstill.privacy.release_rules.NoisySums` assumes.

All layers change at once, so that each layer's statistics belong to earlier ones of its inputs. A further
pass corrects them. Layer-wise statistics of train-mode batches, as ``torch.optim.swa_utils.update_bn`` takes
them, would mix examples: no bound of one example's influence is known.
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
    "how many examples a node holds, and the mean and mean square over them of each channel that the "
    "student's batch norm normalizes",
    category="moments",
)
CLIP = PayloadKind("clip", "largest root mean square of one example's part of a sum", category="query")
LARGEST = 1e30  # of the numbers that are shortened together, so that no square overflows
MIN_VARIANCE_RATIO = 0.01  # of a channel's new variance to its old one, as noise can make variances negative

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Recalibration(CheckedOptions):
    """Recalibration of the student in a run, as the server declares it to its nodes.

    Args:
        passes: number of queries for the statistics.
        channels: C, the number of channels that the student's batch norm normalizes; 0: unknown.
    """

    section: ClassVar[str] = "recalibration"

    passes: Annotated[int, Interval(ge=1, lt=2**31)]
    channels: Annotated[int, Interval(ge=0, lt=2**31)] = 0

    def query(self, network: nn.Module | None, *, is_summed: bool) -> Query:
        """Return the query for a node's statistics.

        Args:
            network: a network of the student's architecture; None: the query is declared only.
            is_summed: the server sees sums of the nodes' responses only.
        """
        return Query(
            partial(sum_batch_norm_statistics, network),
            sends={"parameters": PARAMETERS, "clip": CLIP},
            releases={"moments": BATCH_NORM_STATISTICS},
            times=self.passes,
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


def count_channels(network: nn.Module) -> int:
    """Return C, the number of channels of all batch norm layers with running statistics.

    >>> count_channels(nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.GroupNorm(1, 3)))
    3
    """
    return sum(layer.num_features for layer in batch_norm_layers(network))


# --- at a node ------------------------------------------------------------------------------------------


def sum_batch_norm_statistics(
    network: nn.Module | None, node: Any, parameters: torch.Tensor, clip: float
) -> Tensors:
    """Return the sums of (1, v) over the node's examples, ``(1 + 2 C,)`` float64, as ``moments``.

    Args:
        network: a network of the student's architecture, which stays as it is.
        node: a :class:`fedstill.node.node_view.NodeView`.
        parameters: the student's parameters and buffers ``(P,)``.
        clip: R.

    Raises:
        ArgumentError: parameters of another network, or a clip that is not above 0.
    """
    if network is None:
        raise ArgumentError("student", None, "a network, to respond to queries for its statistics")
    compute = node.setting.compute
    student = compute.to_device(deep_copy(network))  # other nodes may compute at the same time
    load_vector(student, parameters)
    with compute.in_float32():
        return {"moments": sum_statistics(student, node.data.inputs, clip)}


def sum_statistics(student: nn.Module, x: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the sum of (1, v) over inputs ``(N, ...)``: ``(1 + 2 C,)`` float64.

    Raises:
        ArgumentError: a clip that is not above 0 and finite, or a batch norm layer that sees other rows than
            the inputs'.

    >>> norm = nn.BatchNorm1d(1, eps=0.0)  # running mean 0 and variance 1
    >>> sum_statistics(norm, torch.tensor([[1.0], [3.0]]), clip=10.0) * torch.tensor([1, 10, 10])
    tensor([ 2.,  4., 10.], dtype=torch.float64)
    """
    if not 0 < clip < torch.inf:
        raise ArgumentError("clip", clip, "above 0 and finite")
    total = torch.zeros(1 + 2 * count_channels(student), dtype=torch.float64, device=x.device)
    for part in torch.split(x, inference_batch_size(x)):
        v = example_statistics(student, part)
        rms = v.square().mean(1, keepdim=True).sqrt()
        total += torch.cat([torch.ones_like(rms), v / rms.clamp_min(clip)], 1).sum(0)
    return total


def example_statistics(student: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the vector v of each input: ``(B, 2 C)`` float64, finite.

    Raises:
        ArgumentError: a batch norm layer does not see each input once.
    """
    seen: dict[int, torch.Tensor] = {}

    def note(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        h = inputs[0]
        if len(h) != len(x) or id(layer) in seen:
            expected = "a network whose batch norm layers see each input once"
            raise ArgumentError("student.recalibrate", type(student).__name__, expected)
        h = h.double().reshape(*h.shape[:2], -1)  # (B, channels, positions)
        mu, variance = layer.running_mean.double(), layer.running_var.double() + layer.eps
        z = (h - mu.view(-1, 1)) / variance.sqrt().view(-1, 1)
        seen[id(layer)] = torch.stack([z.mean(2), z.square().mean(2)])

    layers = batch_norm_layers(student)
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(in_mode(student, False))
        for layer in layers:
            stack.enter_context(layer.register_forward_pre_hook(note))
        student(x)
    v = torch.cat([seen[id(layer)] for layer in layers], 2)  # (2, B, C)
    return v.transpose(0, 1).flatten(1).nan_to_num().clamp(-LARGEST, LARGEST)


def _in_float32(response: Tensors, sent: Tensors) -> Tensors:
    """Return a response in float32, after the gate's noise on float64 sums."""
    return {name: tensor.float() for name, tensor in response.items()}


# --- at the server --------------------------------------------------------------------------------------


def set_statistics(student: nn.Module, moments: torch.Tensor, clip: float) -> None:
    """Set the running statistics of a student from the sums over all nodes, in place.

    Variances are those of the population: the mean square less the square of the mean.

    Args:
        student: the network with the parameters that the nodes received.
        moments: the sums ``(1 + 2 C,)``.
        clip: R.

    >>> norm = nn.BatchNorm1d(1)
    >>> set_statistics(norm, sum_statistics(norm, torch.tensor([[1.0], [3.0]]), 10.0), 10.0)
    >>> norm.running_mean, norm.running_var
    (tensor([2.]), tensor([1.]))
    """
    layers = batch_norm_layers(student)
    examples = moments[0].double().clamp_min(1)  # noise may make it smaller
    means, squares = (moments[1:].double() * clip / examples).chunk(2)
    sizes = [layer.num_features for layer in layers]
    for layer, m, q in zip(layers, torch.split(means, sizes), torch.split(squares, sizes), strict=True):
        variance = layer.running_var.double() + layer.eps
        layer.running_mean += variance.sqrt() * m
        layer.running_var.copy_(variance * (q - m.square()).clamp_min(MIN_VARIANCE_RATIO))
