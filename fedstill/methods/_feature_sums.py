"""Sums over a node's feature vectors, from which means and covariances follow: FedCGS and FedPFT.

A node with features x of its examples releases, in one vector, its number of examples of each class, the sum
of x of each class, and sums of products of two features. Each feature vector is first shortened to a length
of at most R, and divided by R. An example then moves each of the three parts by 1 at most in L2, and all
together by sqrt(3). The vector of M sums is scaled by sqrt(M / 3), so that an example moves it by sqrt(M) at
most: the sensitivity that the gate's noise on sums assumes, and charges
(:class:`fedstill.privacy.release_rules.NoisySums`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from fedstill.core.errors import ArgumentError
from fedstill.methods import PayloadKind, Tensors
from fedstill.privacy.clipping import to_finite

Products = Literal["pooled", "full", "diag", "spherical"]
"""Products of two features that are summed. ``pooled``: all, x x^T, over all classes together. By class:
``full``: all; ``diag``: squares; ``spherical``: the squared length.
"""

FEATURE_SUMS = PayloadKind(
    "feature sums",
    "a node's number of examples of each class, with the sums of their features and of products of features",
    category="moments",
)
UNBOUNDED_SUMS = PayloadKind(  # of another name, as who lets noisy sums leave may not want exact ones to
    "unbounded feature sums",
    f"{FEATURE_SUMS.description}, of any length",
    category="records",
    opt_out="noise can protect the sums of features of a bounded length (method.clip)",
)
PARTS = 3  # of the vector, each of which an example moves by 1 at most
MAX_CLIP = 1e6


def sums_kind(clip: float) -> PayloadKind:
    """Return the payload kind of the sums: without a bound no noise can protect them."""
    return UNBOUNDED_SUMS if math.isinf(clip) else FEATURE_SUMS


def require_clip(clip: float) -> None:
    """Check the largest root mean square of a feature vector, whose square is computed in float64.

    Raises:
        ArgumentError: it is finite and very large.
    """
    if not math.isinf(clip) and clip > MAX_CLIP:
        raise ArgumentError("method.clip", clip, f"above 0 and up to {MAX_CLIP:g}, or inf")


def require_vectors(x: torch.Tensor) -> torch.Tensor:
    """Return a node's inputs.

    Raises:
        ArgumentError: they are no vectors.
    """
    if x.ndim != 2 or not x.is_floating_point():
        raise ArgumentError("inputs", f"{x.dtype} {tuple(x.shape)}", "vectors (N, F) of features")
    return x


def bound_vectors(x: torch.Tensor, clip: float) -> tuple[torch.Tensor, float]:
    """Return vectors ``(N, F)`` of length 1 at most, and the factor R that brings them back to their units.

    Args:
        x: feature vectors ``(N, F)``.
        clip: largest root mean square of a vector, so that R is sqrt(F) times as long; longer ones are
            shortened. inf: vectors are returned as they are, and R is 1.

    >>> bound_vectors(torch.tensor([[3.0, -3.0], [0.5, 0.5]]), 1.0)[0]
    tensor([[ 0.7071, -0.7071],
            [ 0.3536,  0.3536]], dtype=torch.float64)
    """
    if math.isinf(clip):
        return x.double(), 1.0
    R = clip * math.sqrt(x.shape[1])
    x = to_finite(x).double()  # whatever they hold
    return x / x.norm(dim=1, keepdim=True).clamp_min(R), R


@dataclass(frozen=True)
class FeatureSums:
    """Layout of the released vector of sums.

    Args:
        classes: C.
        products: products of features that are summed.
        clip: largest root mean square of a feature vector; inf: none, and no guarantee.
    """

    classes: int
    products: Products
    clip: float

    def compute(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the sums ``(M,)`` float64 of features ``(N, F)`` with labels ``(N,)``."""
        x, _ = bound_vectors(require_vectors(x), self.clip)
        held = F.one_hot(y, self.classes).to(x)  # (N, C)
        parts = [held.sum(0), held.T @ x, self._sum_products(x, y, held)]
        vector = torch.cat([part.flatten() for part in parts])
        return vector * self._scale(len(vector))

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the number of sums M for inputs of a shape ``(F,)``; 0 for an unknown one.

        >>> FeatureSums(10, "pooled", 1.0).size((1280,)), FeatureSums(10, "diag", 1.0).size(())
        (832650, 0)
        """
        return sum(self._lengths(shape[0])) if len(shape) == 1 else 0

    def _lengths(self, features: int) -> list[int]:
        return [self.classes, self.classes * features, self._product_count(features)]

    def read(self, vector: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sums of a released vector ``(M,)``, in float64 and in units of the features.

        Returns:
            Numbers of examples by class ``(C,)``, sums of x by class ``(C, F)``, and sums of products:
            ``(F, F)`` if pooled, otherwise by class, ``(C, F, F)``, ``(C, F)`` or ``(C,)``.

        Raises:
            ArgumentError: a vector of another length.
        """
        lengths = self._lengths(features)
        if vector.shape != (sum(lengths),):
            raise ArgumentError("feature sums", tuple(vector.shape), f"({sum(lengths)},)")
        counts, sums, products = torch.split(vector.double() / self._scale(len(vector)), lengths)
        R = 1.0 if math.isinf(self.clip) else self.clip * math.sqrt(features)
        return counts, R * sums.view(self.classes, features), R**2 * self._unpack(products, features)

    def _scale(self, count: int) -> float:
        """Return the factor that makes the sensitivity of ``count`` sums that of :class:`.NoisySums`."""
        return 1.0 if math.isinf(self.clip) else math.sqrt(count / PARTS)

    def _sum_products(self, x: torch.Tensor, y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        if self.products == "pooled":
            return _pack(x.T @ x)
        if self.products == "full":
            by_class = (x[y == c] for c in range(self.classes))
            return torch.stack([_pack(each.T @ each) for each in by_class])
        squares = held.T @ x.square()  # (C, F)
        return squares if self.products == "diag" else squares.sum(1)

    def _product_count(self, features: int) -> int:
        pairs = features * (features + 1) // 2
        each = {"full": pairs, "diag": features, "spherical": 1}
        return pairs if self.products == "pooled" else self.classes * each[self.products]

    def _unpack(self, products: torch.Tensor, features: int) -> torch.Tensor:
        if self.products == "pooled":
            return _unpack(products, features)
        by_class = products.view(self.classes, -1)
        if self.products == "full":
            return torch.stack([_unpack(each, features) for each in by_class])
        return by_class if self.products == "diag" else by_class.squeeze(1)


def _pack(matrix: torch.Tensor) -> torch.Tensor:
    """Return the upper triangle of a symmetric matrix, of the same L2 norm: two equal numbers are one, times
    sqrt(2).

    >>> _pack(torch.tensor([[1.0, 2.0], [2.0, 4.0]])).square().sum()
    tensor(25.)
    """
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns] * torch.where(rows == columns, 1.0, math.sqrt(2)).to(matrix)


def _unpack(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Return the symmetric matrix ``(size, size)`` of :func:`_pack`."""
    rows, columns = torch.triu_indices(size, size, device=packed.device)
    matrix = packed.new_zeros(size, size)
    matrix[rows, columns] = packed / torch.where(rows == columns, 1.0, math.sqrt(2)).to(packed)
    return matrix + matrix.triu(1).T


def in_float32(response: Tensors, sent: Tensors) -> Tensors:
    """Return a response in float32, after the gate's noise on float64 sums."""
    return {name: tensor.float() for name, tensor in response.items()}
