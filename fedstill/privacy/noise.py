"""Named random numbers for noise: fast ones for simulations, cryptographic ones for nodes with private data.

No random stream depends on its position or on earlier events. The same secret and names give the same
numbers, so a release that is requested again after a crash is the same release, and is charged once.

**Floating point.** Textbook noise in floating point leaks the value it hides: only some numbers can come
out of a sampler, and the possible sums of value and noise depend on the value (Mironov, "On Significance of
the Least Significant Bits for Differential Privacy", CCS 2012). Magnitudes therefore come from a uniform
number with 105 bits, rounded to 53 significant ones, without holes in the tail; value and noise are added
in float64; and the sum is rounded to a grid of about 2^-20 of the noise's scale (:func:`add_noise`). Some
2^31 random numbers lead to each point of the grid, whatever the value. For values within 30 scales of 0 the
probability of a point is right to a relative 2^-26, which is an epsilon below 1e-7 a number and is not
charged. This is an estimate, not a proof such as discrete samplers have (Canonne, Kamath, Steinke, NeurIPS
2020).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator

UNIFORM_BITS = 52  # of a uniform number; float64 represents all of them exactly, including the added half
MIN_GRID_STEP = 2.0**-149  # the smallest step of float32


class NoiseSampler(Protocol):
    """Source of independent random numbers, float64 on the CPU; each call returns new ones."""

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """Uniform numbers from the open interval (0, 1)."""
        ...

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers from N(0, 1)."""
        ...

    def laplace(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers from Lap(1), density ``exp(-|x|) / 2``."""
        ...


class _BitSampler:
    """Samples by inverse distribution functions of random integers.

    Args:
        bits: returns a given number of them, int64 from 0 to 2^53 - 1.
    """

    def __init__(self, bits: Callable[[int], torch.Tensor]) -> None:
        self._bits = bits

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers of 52 bits, each in the middle of one of 2^52 intervals."""
        whole = self._bits(math.prod(shape)) >> 1
        return ((whole.double() + 0.5) / 2.0**UNIFORM_BITS).view(tuple(shape))

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Samples of the lower half, with a random sign."""
        sign, v = self._signs_and_uniforms(shape)
        samples: torch.Tensor = -sign * torch.special.ndtri(v / 2)
        return samples

    def laplace(self, shape: Sequence[int]) -> torch.Tensor:
        """Exponential magnitudes with a random sign."""
        sign, v = self._signs_and_uniforms(shape)
        return -sign * torch.log(v)

    def _signs_and_uniforms(self, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Signs, and uniform numbers in (0, 1] with the full resolution of float64 near 0."""
        high, low = self._bits(2 * math.prod(shape)).view(2, *shape)
        sign = 1 - 2 * (low & 1).double()
        v = (high.double() + ((low >> 1).double() + 0.5) / 2.0**UNIFORM_BITS) / 2.0**53
        return sign, v


def seeded_sampler(secret: int, *names: str | int) -> NoiseSampler:
    """Return a fast sampler, torch's generator seeded by secret and names.

    For simulations and tests only. **An observer of some of its noise can compute the rest**: torch uses a
    seed of 32 bits, few enough to try all of them, and its state follows from its output.

    >>> bool((seeded_sampler(0, "a").normal((2,)) == seeded_sampler(0, "a").normal((2,))).all())
    True
    """
    generator = torch_generator(secret, *names)
    return _BitSampler(lambda count: torch.randint(2**53, (count,), generator=generator))


def secure_sampler(secret: int, *names: str | int) -> NoiseSampler:
    """Return a cryptographic sampler, SHAKE-256 (FIPS 202) keyed with the secret.

    Without the secret, its numbers cannot be distinguished from chance, nor those of one purpose from
    another's. It is sound with a secret of 128 random bits, such as ``fedstill node init`` writes.

    >>> bool((secure_sampler(0, "a").normal((2,)) == secure_sampler(0, "b").normal((2,))).any())
    False
    """
    # JSON distinguishes ("a", "b") from ("a,b") and 1 from "1". Its hash serves as the key.
    purpose = json.dumps(["fedstill noise", secret, *names]).encode()
    key = hashlib.blake2b(purpose, digest_size=64).digest()
    calls = 0

    def bits(count: int) -> torch.Tensor:
        nonlocal calls
        stream = hashlib.shake_256(key + calls.to_bytes(8, "big")).digest(8 * count)
        calls += 1
        return torch.from_numpy((np.frombuffer(stream, "<u8") >> 11).astype(np.int64))

    return _BitSampler(bits)


def make_sampler(randomness: Literal["seeded", "secure"]) -> Callable[..., NoiseSampler]:
    """Return :func:`seeded_sampler` or :func:`secure_sampler`, by the option ``privacy.randomness``."""
    return seeded_sampler if randomness == "seeded" else secure_sampler


def add_noise(values: torch.Tensor, noise: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``values + scale noise`` in float32, rounded to a grid of about a millionth of the scale.

    Args:
        values: any shape.
        noise: same shape, from a :class:`NoiseSampler`.
        scale: 0 or more and finite; 0 adds nothing and rounds nothing.

    Raises:
        ArgumentError: a scale outside its range.

    >>> add_noise(torch.tensor([1.0, 2.0]), torch.tensor([0.25, -1.0]), 2.0)
    tensor([1.5000, 0.0000])
    """
    if not 0 <= scale < math.inf:
        raise ArgumentError("scale", scale, "0 or more")
    if scale == 0:
        return values.detach().float()
    step = max(grid_step(scale), MIN_GRID_STEP)
    noisy = values.detach().double() + scale * noise.double().to(values.device)
    return ((noisy / step).round() * step).float()


def grid_step(scale: float) -> float:
    """Return the power of two between 2^-21 and 2^-20 of a scale above 0.

    >>> grid_step(1.0) == 2.0**-20, grid_step(0.75) == 2.0**-21
    (True, True)
    """
    return math.ldexp(1.0, max(math.frexp(scale)[1] - 21, -1022))
