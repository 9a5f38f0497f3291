"""DP-SGD (Abadi et al. 2016, "Deep Learning with Differential Privacy"): learning at a price known before.

Pure functions; :mod:`fedstill.node.dp_training` takes the steps.

Each step draws each record by itself (Poisson sampling), shortens each record's gradient to an L2 norm of at
most ``clip``, and adds Gaussian noise of standard deviation ``noise * clip`` to their sum. One record moves
that sum by ``clip`` at most, so a step is the sampled Gaussian event that :func:`training_cost` names.

An example's gradient follows from that record and the step's name alone, never from which others were drawn
or in what order: networks that draw at random while they learn (dropout) are refused, and how an image is
augmented follows from what it shows.

Assumed: neighboring data differ by one record (or one group of ``group`` records) added or removed; how many
records there are sets rate and steps, and counts as known.
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
from fedstill.core.options import Checked, NonNegativeFloat, PositiveFloat, PositiveInt
from fedstill.privacy.clipping import MIN_NORM, clip_factors, row_norms
from fedstill.privacy.config import COUNTED, NOT_CHOSEN, POISSON, DPTrainingConfig, PrivacyConfig
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import NoiseSampler
from fedstill.privacy.per_example import PerExample

# Losses (B,) of a network on inputs (B, C, H, W) and targets (B, ...), each of its own example alone.
PrivateLoss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
PublicLoss = Callable[[nn.Module], torch.Tensor]  # a scalar that no record of the node enters
EXAMPLES_AT_ONCE = 64  # examples computed at once, where nothing else is said
MAX_KEY_NUMBERS = 1024  # numbers of a tensor that a loss may be told apart by
MAX_GRADIENT_NUMBERS = (
    2**25
)  # numbers of examples' gradients in memory at once (128 MiB): as many examples as fit, or one
MAX_FLOAT64_NUMBERS = (
    2**18
)  # numbers that are made float64 at once (2 MiB), so that a processor keeps them near


@dataclass(frozen=True, kw_only=True)
class DPSGD(PrivacyConfig):
    """Its networks learn with DP-SGD, and what follows from them is free."""

    about: ClassVar[str] = "its networks learned from clipped gradients with noise, and what they say follows"
    assumes: ClassVar[tuple[str, ...]] = (POISSON, COUNTED, NOT_CHOSEN)
    dp_trained: ClassVar[Mapping[str, str]] = {"model": "training", "critic": "critic"}

    training: DPTrainingConfig = field(default_factory=DPTrainingConfig)
    """How the node's model learns."""
    critic: DPTrainingConfig = field(default_factory=DPTrainingConfig)
    """How its critic learns, where a method has one."""


@dataclass(frozen=True)
class DPParameters(Checked):
    """How a network learns privately.

    Args:
        noise: its standard deviation over ``clip`` (the noise multiplier); 0: none, and no guarantee.
        clip: largest L2 norm of one record's gradient.
        draws: names to random draws, of which none is told to anyone. The same names give the same draws:
            they must differ from run to run, and between steps that could both be told of.
        group: records of one protected unit.
    """

    noise: NonNegativeFloat
    clip: PositiveFloat
    sampler: Callable[..., NoiseSampler]
    group: PositiveInt = 1


def sampling_rate(n: int, batch: int) -> float:
    """The probability at which each of ``n`` records is drawn, for ``batch`` of them on average.

    >>> sampling_rate(200, 50), sampling_rate(20, 50)
    (0.25, 1.0)
    """
    return min(1.0, batch / n)


def training_cost(dp: DPParameters, n: int, batch: int, steps: int) -> PrivacyCost | None:
    """What so many steps cost; None without noise.

    The Gaussian mechanism on a Poisson sample; at rate 1 a group moves the sum by as many clips as it has
    records, and the noise counts so much less.

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
    """Examples computed at once, where ``batch`` of ``n`` are drawn on average: mostly all that were drawn.

    It follows from how many there are, which counts as known, and never from how many were drawn, as how an
    example's numbers round could follow from it.

    >>> examples_at_once(200, 64), examples_at_once(50, 50)
    (80, 50)
    """
    return min(round(batch + 2 * math.sqrt(batch)), n)


def poisson_sample(data: TensorData, rate: float, sampler: NoiseSampler) -> TensorData:
    """Records drawn each by itself (Poisson sampling): none, some or all of them, which are not copied."""
    if rate == 1:
        return data
    selected = (sampler.uniform((len(data),)) < rate).nonzero().flatten()
    return data.subset(selected.to(data.inputs.device))


def clipped_sum(
    module: nn.Module,
    trained: dict[str, nn.Parameter],
    private_loss: PrivateLoss,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    clip: float,
    rows: int = EXAMPLES_AT_ONCE,
) -> tuple[torch.Tensor, float]:
    """The sum of the examples' gradients, each shortened to an L2 norm of at most ``clip``, all trained
    parameters in one vector ``(P,)`` float64; and the examples' mean loss.

    An example's gradient is computed from that example alone, whatever the network: layers that look at the
    whole batch see a batch of one, random draws end in torch's error, and not even a last bit depends on the
    others (:mod:`fedstill.privacy.per_example`). A gradient that is not finite
    counts nothing. All are added in float64: one example less, and a sum in float32 may round otherwise from
    there on, which moves it by more than the clip (Casacuberta, Shoaff, Vadhan, Wagaman, "Widespread
    Underestimation of Sensitivity in Differentially Private Libraries and How to Fix It", CCS 2022).

    Args:
        module: the network, as it is to learn (its mode is not changed here).
        trained: its parameters in training, by name.
        inputs, targets: ``(B, ...)``; B may be 0.
        rows: examples computed at once; says nothing of how many were drawn.
    """
    if not len(inputs):
        width = sum(parameter.numel() for parameter in trained.values())
        return torch.zeros(width, dtype=torch.float64, device=inputs.device), 0.0
    if type(module) is nn.Linear and inputs.ndim == 2 and len(trained) == len(list(module.parameters())):
        return _linear_clipped_sum(module, private_loss, inputs, targets, clip, rows)
    # vmap knows no channels last: with parameters laid out so, it only takes longer.
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
    per_example = PerExample(
        per_example_gradient,
        rows,
        module,
        leaves,
        *tensors,
        postprocess=with_norms,
        depends_on=_loss_key(private_loss),
    )
    for norms, values, *gradients in per_example(leaves, *tensors):  # (b,) float64, (b,), (b, P_i) each
        losses += values.sum().item()
        factors, finite = clip_factors(norms, clip), norms.isfinite()
        if not finite.all():
            gradients = [torch.where(finite.unsqueeze(1), g, 0.0) for g in gradients]
        for parameter, g in zip(sums, gradients, strict=True):
            parameter += _weighted_row_sums(factors.unsqueeze(1), g)[0]
    return torch.cat(sums), losses / len(inputs)


def _linear_clipped_sum(
    layer: nn.Linear,
    private_loss: PrivateLoss,
    f: torch.Tensor,
    targets: torch.Tensor,
    clip: float,
    rows: int,
) -> tuple[torch.Tensor, float]:
    """:func:`clipped_sum` of one linear layer on features f ``(B, d)``, no example's P numbers written out.

    An example's gradient is the outer product of r, the loss's gradient by the outputs, and f, so its norm
    is ``|r| |f|``; a bias is one more feature, 1 (Goodfellow, "Efficient Per-Example Gradient Computations",
    2015, arXiv:1510.01799).
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
        per_example = PerExample(
            per_example_gradient, rows, layer, leaves, f, targets, depends_on=_loss_key(private_loss)
        )
        r, losses = (torch.cat(parts) for parts in zip(*per_example(leaves, f, targets), strict=True))
        r = r.double()
        # Either may be shorter than squares in float32 tell, and the other as long as makes up for it.
        feature_norms = (row_norms(f).clamp(min=MIN_NORM).square() + has_bias).sqrt()
        norms = torch.linalg.vector_norm(r, dim=1) * feature_norms  # (B,) float64
        if not (finite := norms.isfinite()).all():
            r, f = (torch.where(finite.unsqueeze(1), tensor, 0.0) for tensor in (r, f))
        r = r * clip_factors(norms, clip).unsqueeze(1)
        sums = [_weighted_row_sums(r, f).flatten(), *([r.sum(0)] if has_bias else [])]
    return torch.cat(sums), losses.sum().item() / len(f)


def _weighted_row_sums(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows ``(B, n)``, each so many ``times`` (B, k), added: ``(k, n)``, in float64."""
    total = weights.new_zeros(weights.shape[1], rows.shape[1])
    chunk = max(MAX_FLOAT64_NUMBERS // max(rows.shape[1], 1), 1)
    for weight_chunk, row_chunk in zip(torch.split(weights, chunk), torch.split(rows, chunk), strict=True):
        total += weight_chunk.T @ row_chunk.double()
    return total


def _loss_key(private_loss: PrivateLoss) -> Hashable:
    """What tells losses apart that are made anew at each step: where they are written, and about what."""
    cells = [cell.cell_contents for cell in getattr(private_loss, "__closure__", None) or ()]
    values = [
        (type(captured), *_plain_values(captured))
        for captured in (*cells, getattr(private_loss, "__self__", None))
    ]
    return (private_loss.__module__, private_loss.__qualname__, *values)


def _plain_values(owner: object) -> Iterator[Hashable]:
    """Plain values, or those that an object has: the options of a task, or of local training."""
    for name, value in (("", owner), *getattr(owner, "__dict__", {}).items()):
        if isinstance(value, torch.Tensor) and value.numel() <= MAX_KEY_NUMBERS:
            yield name, value.shape, value.cpu().numpy().tobytes()
        elif isinstance(value, str | int | float | tuple | None):
            yield name, str(value)


class _ModuleFunction(nn.Module):
    """A function of a network as a network, so that its parameters can be given in the call."""

    def __init__(self, module: nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(self.module, *args)


def public_gradient(
    module: nn.Module, trained: dict[str, nn.Parameter], public_loss: PublicLoss
) -> torch.Tensor:
    """``(P,)``, as :func:`clipped_sum` orders it."""
    leaves = {f"module.{name}": parameter.detach().requires_grad_() for name, parameter in trained.items()}
    with torch.enable_grad():
        loss = functional_call(_ModuleFunction(module, public_loss), leaves, ())
        leaf_tensors = list(leaves.values())
        gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, leaf_tensors, allow_unused=True)
    pairs = zip(gradients, leaf_tensors, strict=True)
    return torch.cat([(torch.zeros_like(leaf) if g is None else g).flatten() for g, leaf in pairs])


def augmentation_numbers(inputs: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
    """Four random numbers of each input, ``(4, B)`` int64 from 0: a keyed hash of what it holds.

    Drawn by its place in the batch, one record less would change the numbers of those after it.

    Args:
        inputs: ``(B, ...)``.
        draws: give the key, which nobody is to know.
    """
    key = sampler.uniform((8,)).numpy().tobytes()  # 64 bytes, of which 416 bits are random
    rows = inputs.cpu().numpy()
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=32, key=key).digest() for row in rows)
    numbers = np.frombuffer(b"".join(hashes), "<u8") >> 1
    return torch.from_numpy(numbers.astype(np.int64)).view(-1, 4).T


def tensor_digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.cpu().numpy().tobytes(), digest_size=16).hexdigest()
