"""Draws of noise by name: fast ones for simulations, cryptographic ones for nodes with something to hide.

Nothing is drawn from a stream whose position depends on what happened before: the same secret and names
give the same draws, so a release that is asked for again after a crash is the same release, and paid once.

**Floating point.** Textbook noise in floating point tells its secret: only some numbers can come out of a
sampler, and which sums of value and noise are possible depends on the value (Mironov, "On Significance of
the Least Significant Bits for Differential Privacy", CCS 2012). So magnitudes come from a uniform number with
105 bits, kept to 53 significant ones, without holes in the tail; value and noise are added in float64; and
the sum is rounded to a grid of about 2^-20 of the noise's scale (:func:`add_noise`). Some 2^31 draws lead to
each point of the grid, whatever the value. For values within 30 scales of 0 a point's probability is right to
a relative 2^-26: an epsilon below 1e-7 a number, which is not charged. That is an estimate and no proof, as
discrete samplers have one (Canonne, Kamath, Steinke, NeurIPS 2020).
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

UNIFORM_BITS = 52  # of a uniform number: a float64 tells all of them apart, halves included
MIN_GRID_STEP = 2.0**-149  # the smallest step of float32


class NoiseSampler(Protocol):
    """Independent numbers, all float64 on the CPU; each call gives new ones."""

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """From the open interval (0, 1), never an end of it."""
        ...

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """From N(0, 1)."""
        ...

    def laplace(self, shape: Sequence[int]) -> torch.Tensor:
        """From Lap(1), density ``exp(-|x|) / 2``."""
        ...


class _BitSampler:
    """Draws by the inverse of a distribution function, from random whole numbers.

    Args:
        bits: gives so many of them, int64 from 0 up to 2^53 - 1.
    """

    def __init__(self, bits: Callable[[int], torch.Tensor]) -> None:
        self._bits = bits

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """Of 52 bits, in the middle of each of 2^52 intervals."""
        whole = self._bits(math.prod(shape)) >> 1
        return ((whole.double() + 0.5) / 2.0**UNIFORM_BITS).view(tuple(shape))

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """The lower half, of either sign."""
        sign, v = self._signs_and_uniforms(shape)
        samples: torch.Tensor = -sign * torch.special.ndtri(v / 2)
        return samples

    def laplace(self, shape: Sequence[int]) -> torch.Tensor:
        """An exponential magnitude of either sign."""
        sign, v = self._signs_and_uniforms(shape)
        return -sign * torch.log(v)

    def _signs_and_uniforms(self, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Signs, and uniform numbers in (0, 1] that are as fine near 0 as float64 is."""
        high, low = self._bits(2 * math.prod(shape)).view(2, *shape)
        sign = 1 - 2 * (low & 1).double()
        v = (high.double() + ((low >> 1).double() + 0.5) / 2.0**UNIFORM_BITS) / 2.0**53
        return sign, v


def seeded(secret: int, *names: str | int) -> NoiseSampler:
    """Draws of torch's generator, which is seeded by secret and names.

    For simulations, and to try things: **who sees some noise of this generator can find the rest**. torch
    seeds it with 32 bits, few enough to try them all, and its state follows from its output.

    >>> bool((seeded(0, "a").normal((2,)) == seeded(0, "a").normal((2,))).all())
    True
    """
    generator = torch_generator(secret, *names)
    return _BitSampler(lambda count: torch.randint(2**53, (count,), generator=generator))


def secure(secret: int, *names: str | int) -> NoiseSampler:
    """Draws of SHAKE-256 (FIPS 202), keyed with the secret.

    Whoever does not know the secret cannot tell them from chance, nor one purpose's from another's. Sound
    with a secret of 128 random bits, as ``fedstill node init`` writes one.

    >>> bool((secure(0, "a").normal((2,)) == secure(0, "b").normal((2,))).any())
    False
    """
    # JSON tells ("a", "b") from ("a,b") and 1 from "1". Hashed to a block of its own, it is a key.
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
    """:func:`seeded` or :func:`secure`, by the word in an owner's file."""
    return seeded if randomness == "seeded" else secure


def add_noise(values: torch.Tensor, noise: torch.Tensor, scale: float) -> torch.Tensor:
    """``values + scale noise`` float32, rounded to a grid of about a millionth of the scale (see above).

    Args:
        noise: of the shape of the values, from :class:`NoiseSampler`.
        scale: 0 or more and finite; 0 adds nothing and rounds nothing.

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
    """The power of two between 2^-21 and 2^-20 of a scale above 0.

    >>> grid_step(1.0) == 2.0**-20, grid_step(0.75) == 2.0**-21
    (True, True)
    """
    return math.ldexp(1.0, max(math.frexp(scale)[1] - 21, -1022))
