"""FedKD's perturbations of logits, as pure functions: a uniform quantizer and Laplace noise.

Gong et al., "Preserving Privacy in Federated Learning with Ensemble Cross-Domain Knowledge Distillation",
AAAI 2022, Eq. 2-4. **No guarantee**: nothing here bounds the influence of one training record on a logit, and
without such a bound neither rounding nor noise has an epsilon.
:class:`~fedstill.privacy.release_rules.BoundedNoisyRows` bounds first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fedstill.core.errors import ArgumentError, NodeFault, list_names

UNIFORM_BITS = 52  # of a uniform sample: float64 represents all values and their halves exactly


def index_dtype(levels: int) -> torch.dtype:
    """Return the smallest type that holds the level indices ``-ceil(S/2) .. ceil(S/2)``, S up to 2^32 - 2.

    >>> index_dtype(200), index_dtype(255), index_dtype(100_000)
    (torch.int8, torch.int16, torch.int32)
    """
    kinds = (torch.int8, torch.int16, torch.int32)
    return next(kind for kind in kinds if math.ceil(levels / 2) <= torch.iinfo(kind).max)


def quantize(z: torch.Tensor, levels: int, z_max: float) -> torch.Tensor:
    """Return the index of each value's interval, FedKD Eq. 4: ``ceil(S z / (2 z_max))``.

    Values beyond ``z_max`` are clipped first. Rounding goes up, as printed: an index stands for the upper end
    of its interval, so that values move up by half a step on average, equally for all classes. No guarantee:
    fewer digits are not privacy.

    Args:
        z: of any shape.
        levels: S, intervals between ``-z_max`` and ``z_max``.
        z_max: above 0.

    Returns:
        Whole numbers ``-floor(S/2) .. ceil(S/2)``, of the shape of z, in the type :func:`index_dtype`; its
        smallest number for NaN. Nodes call this on their releases, and a refusal would reveal a fact to the
        server that is neither charged nor counted.

    Raises:
        ArgumentError: a bound that is not above 0.

    >>> quantize(torch.tensor([-9.0, -0.5, 0.0, 0.1, 1.0]), 4, 2.0)
    tensor([-2,  0,  0,  1,  1], dtype=torch.int8)
    """
    if not 0 < z_max < math.inf:
        raise ArgumentError("z_max", z_max, "above 0")
    # In double precision: rounding in float32 would move values over a grid point.
    scaled, kind = z.double().clamp(-z_max, z_max) * levels / (2 * z_max), index_dtype(levels)
    return scaled.ceil().nan_to_num(nan=torch.iinfo(kind).min).to(kind)


def dequantize(index: torch.Tensor, levels: int, z_max: float) -> torch.Tensor:
    """Return the values of level indices, FedKD Eq. 4: ``index 2 z_max / S``, float32, or NaN.

    >>> dequantize(torch.tensor([-2, 0, 1], dtype=torch.int8), 4, 2.0)
    tensor([-2.,  0.,  1.])
    """
    values = index.double() * (2 * z_max) / levels
    return values.where(index != torch.iinfo(index.dtype).min, math.nan).float()


def check_no_nan(nodes: Sequence[str], z: torch.Tensor) -> None:
    """Check that the nodes' logits ``(K, ...)`` contain no NaN.

    Raises:
        NodeFault: names the faulty nodes.
    """
    if z.isnan().any():
        lost = [name for name, own in zip(nodes, z, strict=True) if own.isnan().any()]
        raise NodeFault(list_names(lost), "predict", "logits hold NaN: has a model diverged?")


def sample_laplace(shape: tuple[int, ...], scale: float, generator: torch.Generator) -> torch.Tensor:
    """Sample from Lap(scale), location 0, by the inverse of its distribution function.

    Always finite: at most 36 scales from 0. No guarantee: noise of a fixed scale on values of unbounded
    sensitivity has no epsilon.

    Args:
        shape: shape of the samples.
        scale: b of the density ``exp(-|x| / b) / 2b``; 0 gives zeros.
        generator: on the CPU, so that devices agree.

    Returns:
        float32, on the CPU.
    """
    whole = torch.randint(2**UNIFORM_BITS, shape, generator=generator)
    v = (whole.double() + 0.5) / 2**UNIFORM_BITS - 0.5  # uniform on (-1/2, 1/2), never an end of it
    draws: torch.Tensor = -scale * v.sign() * torch.log1p(-2 * v.abs())
    return draws.float()
