"""DP-SGD (Abadi et al. 2016, "Deep Learning with Differential Privacy"), whose privacy cost is known in
advance.

All functions here are pure; :mod:`fedstill.node.dp_training` takes the training steps.

Each step samples each record independently (Poisson sampling), clips each record's gradient to an L2 norm
of at most ``clip``, and adds Gaussian noise of standard deviation ``noise * clip`` to their sum. One record
moves that sum by ``clip`` at most, so that a step is the sampled Gaussian event that :func:`training_cost`
returns.

The gradient of an example depends on that record and the step's name alone, and never on the other sampled
records or their order. Networks that draw random numbers in training (dropout) are therefore refused, and the
augmentation of an image is derived from its content.

Assumptions: neighboring data sets differ by one record (or one group of ``group`` records) added or
removed. The number of records determines rate and steps, and counts as known.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value

from fedstill.core.dataset import TensorData
from fedstill.core.options import CheckedOptions, NonNegativeFloat, PositiveFloat, PositiveInt
from fedstill.privacy.clipping import MIN_NORM, clip_factors, row_norms
from fedstill.privacy.config import COUNTED, NOT_CHOSEN, POISSON, DPTrainingConfig, PrivacyConfig
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import NoiseSampler
from fedstill.privacy.per_example import PerExampleFunction

# Losses (B,) of a network on inputs (B, C, H, W) and targets (B, ...), each of one example alone.
PrivateLoss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
PublicLoss = Callable[[nn.Module], torch.Tensor]  # a scalar that depends on no record of the node
EXAMPLES_AT_ONCE = 64  # default
MAX_KEY_NUMBERS = 1024  # of a captured tensor in the key of a loss function
MAX_GRADIENT_NUMBERS = 2**25  # of examples' gradients in memory at once (128 MiB); one example always fits
MAX_FLOAT64_NUMBERS = 2**18  # converted at once (2 MiB), to stay in the processor's cache


@dataclass(frozen=True, kw_only=True)
class DPSGD(PrivacyConfig):
    """DP-SGD training of the node's networks; outputs that follow from them are free."""

    about: ClassVar[str] = "its networks learned from clipped gradients with noise, and their outputs follow"
    assumes: ClassVar[tuple[str, ...]] = (POISSON, COUNTED, NOT_CHOSEN)
    dp_trained: ClassVar[Mapping[str, str]] = {"model": "training", "critic": "critic"}

    training: DPTrainingConfig = field(default_factory=DPTrainingConfig)
    """DP-SGD options of the node's model."""
    critic: DPTrainingConfig = field(default_factory=DPTrainingConfig)
    """DP-SGD options of the node's critic, for methods that have one."""


@dataclass(frozen=True)
class DPParameters(CheckedOptions):
    """Parameters of DP-SGD for one network.

    Args:
        noise: noise multiplier, its standard deviation divided by ``clip``; 0: no noise, and no guarantee.
        clip: largest L2 norm of one record's gradient.
        sampler: maps names to secret random numbers. Equal names give equal numbers, so they must differ
            between runs, and between steps whose results could both become known.
        group: number of records of one protected unit.
        isolate_rounding: compute examples so that no last bit depends on others
            (:mod:`fedstill.privacy.per_example`).
    """

    noise: NonNegativeFloat
    clip: PositiveFloat
    sampler: Callable[..., NoiseSampler]
    group: PositiveInt = 1
    isolate_rounding: bool = False


def sampling_rate(n: int, batch: int) -> float:
    """Return the probability with which each of ``n`` records is sampled, for ``batch`` of them on average.

    >>> sampling_rate(200, 50), sampling_rate(20, 50)
    (0.25, 1.0)
    """
    return min(1.0, batch / n)


def training_cost(dp: DPParameters, n: int, batch: int, steps: int) -> PrivacyCost | None:
    """Return the privacy cost of a number of steps; None without noise.

    A step is a Gaussian mechanism on a Poisson sample. At rate 1 a group moves the sum by one clip for each
    of its records, so that the noise is divided by the group size.

    >>> dp = DPParameters(2.0, 1.0, sampler=None, group=4)
    >>> [str(event) for n in (100, 10) for event in training_cost(dp, n, 10, 7)]
    ['gaussian(2.0, rate=0.1, group=4)', 'gaussian(0.5)']
    """
    if dp.noise == 0:
        return None
    q = sampling_rate(n, batch)
    event = Event("gaussian", dp.noise / dp.group) if q == 1 else Event("gaussian", dp.noise, q, dp.group)
    return PrivacyCost({event: steps} if steps else {})


def examples_at_once(n: int, batch: float) -> int:
    """Return the number of examples computed at once, if ``batch`` of ``n`` are sampled on average; mostly
    all samples.

    The result depends on the number of records, which counts as known, and never on the number of sampled
    ones, as the rounding of an example's numbers could depend on it.

    >>> examples_at_once(200, 64), examples_at_once(50, 50)
    (80, 50)
    """
    return min(round(batch + 2 * math.sqrt(batch)), n)


def poisson_sample(data: TensorData, rate: float, sampler: NoiseSampler) -> TensorData:
    """Sample each record independently (Poisson sampling): none, some or all of them. All records are not
    copied.
    """
    if rate == 1:
        return data
    selected = (sampler.uniform((len(data),)) < rate).nonzero().flatten()
    return data.subset(selected.to(data.inputs.device))


def clipped_sum_and_loss(
    module: nn.Module,
    trained: dict[str, nn.Parameter],
    private_loss: PrivateLoss,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    clip: float,
    rows: int = EXAMPLES_AT_ONCE,
    isolate_rounding: bool = False,
) -> tuple[torch.Tensor, float]:
    """Return the sum of the examples' clipped gradients, and the examples' mean loss.

    The sum holds all trained parameters in one vector ``(P,)`` float64; each example's gradient is clipped
    to an L2 norm of at most ``clip``. An example's gradient is computed from that example alone, whatever
    the network: layers that use the whole batch see a batch of one, and random numbers raise torch's error. A
    gradient that is not finite counts as zero.

    All are added in float64. In float32, one example less may change the rounding of all further additions,
    which moves the sum by more than the clip (Casacuberta, Shoaff, Vadhan, Wagaman, "Widespread
    Underestimation of Sensitivity in Differentially Private Libraries and How to Fix It", CCS 2022).

    Args:
        module: network in the mode in which it is to be trained.
        trained: its trained parameters by name.
        private_loss: losses (B,), each of its own example alone.
        inputs, targets: ``(B, ...)``; B may be 0.
        clip: above 0.
        rows: examples computed at once; must not depend on the number of sampled ones.
        isolate_rounding: not even the last bit of a gradient depends on other examples
            (:mod:`fedstill.privacy.per_example`).
    """
    if not len(inputs):
        width = sum(parameter.numel() for parameter in trained.values())
        return torch.zeros(width, dtype=torch.float64, device=inputs.device), 0.0
    if type(module) is nn.Linear and inputs.ndim == 2 and len(trained) == len(list(module.parameters())):
        return _linear_clipped_sum_and_loss(
            module, private_loss, inputs, targets, clip, rows, isolate_rounding
        )
    # vmap does not use channels-last parameters; they only make it slower.
    leaves = {f"module.{name}": parameter.detach().contiguous() for name, parameter in trained.items()}
    bound = _ModuleFunction(module, lambda *args: private_loss(*args)[0])

    def loss(leaves: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = functional_call(bound, leaves, (x.unsqueeze(0), y.unsqueeze(0)))
        return value

    def per_example_gradient(
        leaves: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> list[torch.Tensor]:
        gradients, value = grad_and_value(loss)(leaves, x, y)
        return [value, *(gradients[name].flatten() for name in leaves)]

    def with_norms(value: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values, *gradients = value
        return [torch.stack([row_norms(g) for g in gradients]).norm(dim=0), values, *gradients]

    sums = [
        torch.zeros(parameter.numel(), dtype=torch.float64, device=inputs.device)
        for parameter in trained.values()
    ]
    losses = 0.0
    rows = max(min(rows, MAX_GRADIENT_NUMBERS // sum(map(len, sums))), 1)
    tensors = (inputs, targets)
    per_example = PerExampleFunction(
        per_example_gradient,
        rows,
        module,
        leaves,
        *tensors,
        postprocess=with_norms,
        depends_on=_loss_key(private_loss),
        isolate_rounding=isolate_rounding,
    )
    for norms, values, *gradients in per_example(leaves, *tensors):  # (b,) float64, (b,), (b, P_i) each
        losses += values.sum().item()
        factors, finite = clip_factors(norms, clip), norms.isfinite()
        if not finite.all():
            gradients = [torch.where(finite.unsqueeze(1), g, 0.0) for g in gradients]
        for parameter, g in zip(sums, gradients, strict=True):
            parameter += _sum_rows_over_batch(factors.unsqueeze(1), g)[0]
    return torch.cat(sums), losses / len(inputs)


def _linear_clipped_sum_and_loss(
    layer: nn.Linear,
    private_loss: PrivateLoss,
    f: torch.Tensor,
    targets: torch.Tensor,
    clip: float,
    rows: int,
    isolate_rounding: bool,
) -> tuple[torch.Tensor, float]:
    """:func:`clipped_sum_and_loss` of one linear layer on features f ``(B, d)``, without materializing (B, P)
    gradients.

    An example's gradient is the outer product of r, the gradient of its loss by the outputs, and f, so its
    norm is ``|r| |f|``. A bias is one more feature, 1 (Goodfellow, "Efficient Per-Example Gradient
    Computations", 2015, arXiv:1510.01799).
    """

    def loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return private_loss(nn.Identity(), z.unsqueeze(0), y.unsqueeze(0))[0]

    def per_example_gradient(
        leaves: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        r, value = grad_and_value(loss)(functional_call(layer, leaves, (x,)), y)
        return r, value

    leaves = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    has_bias = len(leaves) == 2
    with torch.no_grad(), torch.autocast(f.device.type, enabled=False):
        f = f.float()
        per_example = PerExampleFunction(
            per_example_gradient,
            rows,
            layer,
            leaves,
            f,
            targets,
            depends_on=_loss_key(private_loss),
            isolate_rounding=isolate_rounding,
        )
        r, losses = (torch.cat(parts) for parts in zip(*per_example(leaves, f, targets), strict=True))
        r = r.double()
        # One factor may be too short for its squares in float32, and the other long enough to compensate.
        feature_norms = (row_norms(f).clamp(min=MIN_NORM).square() + has_bias).sqrt()
        norms = torch.linalg.vector_norm(r, dim=1) * feature_norms  # (B,) float64
        if not (finite := norms.isfinite()).all():
            r, f = (torch.where(finite.unsqueeze(1), tensor, 0.0) for tensor in (r, f))
        r = r * clip_factors(norms, clip).unsqueeze(1)
        sums = [_sum_rows_over_batch(r, f).flatten(), *([r.sum(0)] if has_bias else [])]
    return torch.cat(sums), losses.sum().item() / len(f)


def _sum_rows_over_batch(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Sums ``(k, n)`` of rows ``(B, n)`` with weights (B, k), in float64."""
    total = weights.new_zeros(weights.shape[1], rows.shape[1])
    chunk = max(MAX_FLOAT64_NUMBERS // max(rows.shape[1], 1), 1)
    for weight_chunk, row_chunk in zip(torch.split(weights, chunk), torch.split(rows, chunk), strict=True):
        total += weight_chunk.T @ row_chunk.double()
    return total


def _loss_key(private_loss: PrivateLoss) -> Hashable:
    """Key of a loss function that is created at each step: its source position and the values it captures."""
    cells = [cell.cell_contents for cell in getattr(private_loss, "__closure__", None) or ()]
    values = [
        (type(captured), *_plain_values(captured))
        for captured in (*cells, getattr(private_loss, "__self__", None))
    ]
    return (private_loss.__module__, private_loss.__qualname__, *values)


def _plain_values(owner: object) -> Iterator[Hashable]:
    """Plain values, or those among an object's attributes, such as the options of a task or of local
    training.
    """
    for name, value in (("", owner), *getattr(owner, "__dict__", {}).items()):
        if isinstance(value, torch.Tensor) and value.numel() <= MAX_KEY_NUMBERS:
            yield name, value.shape, value.cpu().numpy().tobytes()
        elif isinstance(value, str | int | float | tuple | None):
            yield name, str(value)


class _ModuleFunction(nn.Module):
    """A function of a network as a module, so that ``functional_call`` can pass the network's parameters."""

    def __init__(self, module: nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(self.module, *args)


def public_gradient(
    module: nn.Module, trained: dict[str, nn.Parameter], public_loss: PublicLoss
) -> torch.Tensor:
    """Return the gradient of a loss that depends on no record, ``(P,)`` in the order of
    :func:`clipped_sum_and_loss`.
    """
    parameters = list(trained.values())
    required = [parameter.requires_grad for parameter in parameters]
    gradients: Sequence[torch.Tensor | None] = [None] * len(parameters)
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            loss = public_loss(module)
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    finally:
        for parameter, before in zip(parameters, required, strict=True):
            parameter.requires_grad_(before)
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def augmentation_numbers(inputs: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
    """Return four random numbers for each input, ``(4, B)`` int64 from 0: a keyed hash of its content.

    Random numbers by position in the batch would change for all later inputs if one record were missing.

    Args:
        inputs: ``(B, ...)``.
        sampler: source of the secret key.
    """
    key = sampler.uniform((8,)).numpy().tobytes()  # 64 bytes, of which 416 bits are random
    rows = inputs.cpu().numpy()
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=32, key=key).digest() for row in rows)
    numbers = np.frombuffer(b"".join(hashes), "<u8") >> 1
    return torch.from_numpy(numbers.astype(np.int64)).view(-1, 4).T


def tensor_digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.cpu().numpy().tobytes(), digest_size=16).hexdigest()
