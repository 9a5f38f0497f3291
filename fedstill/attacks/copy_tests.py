"""Do generated images copy private ones? Each one's nearest private and nearest held-out neighbour.

Two tests, since each misses what the other finds:

* **nearer to private than to held-out images**: who is private is drawn anew, many times, and of images made
  without the private ones the truth does not stand out among the drawings. A small p-value shows that images
  depend on these very private ones, as the mean and covariance of a few would, too.
* **nearer to private than held-out images are** (Meehan, Chaudhuri, Dasgupta: "A Non-Parametric Test to
  Detect Data-Copying in Generative Models", AISTATS 2020; here all of the space is one cell). Poor images,
  far from everything, pass it even where some are copies; images of few kinds fail it without a copy.

Both are about generated images on the whole: one copy in a thousand is looked for among the closest pairs.
Both assume that private and held-out images were parted by chance: where a part is another hospital, its
images differ for that reason too. And the features of a network that has learned from the private images may
tell them from others without any copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fedstill.attacks.generative_metrics import Extractor
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator

NUMBERS = 1 << 23  # float64 in memory at once while neighbours are looked for, beside the vectors: 64 MiB


def nearest(x: torch.Tensor, y: torch.Tensor, *, other: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each vector in x the nearest one in y: Euclidean distances ``(N,)`` float64, and places ``(N,)``.

    Args:
        x: ``(N, d)``.
        y: ``(M, d)``; of equally near ones the first is told.
        other: the second nearest, which is the nearest other one where x is y, of two vectors or more.

    >>> nearest(torch.tensor([[0.0], [5.0]]), torch.tensor([[4.0], [1.0]]))
    (tensor([1., 1.], dtype=torch.float64), tensor([1, 0]))
    """
    distances, places = _sorted(x.double(), y.double(), 4)  # four, lest rounding part equals
    return distances[:, int(other)], places[:, int(other)]


class Neighbours:
    """Vectors, and others sorted by their distance to each, so that the nearest of any part is found fast.

    Args:
        x: ``(N, d)``.
        y: the others ``(M, d)``.
        width: how long the lists are; they grow where a part is not met in them.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, width: int = 32) -> None:
        self.x, self.y, self.width = x.double(), y.double(), width
        self.distances, self.places = _sorted(self.x, self.y, width)  # (N, width), ascending

    def first(self, among: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The nearest of a part ``among`` (M,) bool of the others, not empty: distances ``(N,)``, places."""
        while True:
            met, column = among[self.places].byte().max(1, keepdim=True)  # of equal ones the first
            if met.all():
                return self.distances.gather(1, column).squeeze(1), self.places.gather(1, column).squeeze(1)
            self.width *= 2
            self.distances, self.places = _sorted(self.x, self.y, self.width)

    def count(self, among: torch.Tensor, limit: torch.Tensor, *, ties: bool) -> torch.Tensor:
        """How many of a part are nearer than a limit ``(N,)`` that :meth:`first` found: ``(N,)``.

        Args:
            ties: whether those count that are as far as the limit.
        """
        bound = limit.unsqueeze(1)
        near = self.distances <= bound if ties else self.distances < bound
        return (near & among[self.places]).sum(1)


def _sorted(x: torch.Tensor, y: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest ``width`` of y, or all: distances and places ``(N, width)``, of equal ones the first first.

    Who they are is found by ``|x|^2 - 2 x y + |y|^2``, a product of matrices; how far they are, and their
    order, by the differences themselves, since the former loses digits where distances are small.
    """
    width = min(width, len(y))
    middle = y.mean(0)
    centred = y - middle
    norms = centred.square().sum(1)
    found, where = [], []
    for part in torch.split(x, max(1, NUMBERS // len(y))):
        squares = torch.addmm(norms.unsqueeze(0), part - middle, centred.T, alpha=-2)  # less |x|^2 (B, M)
        near = squares.topk(width, largest=False).indices.sort(1).values  # (B, width)
        rows = max(1, NUMBERS // (width * x.shape[1]))
        for few, places in zip(torch.split(part, rows), torch.split(near, rows), strict=True):
            exact = (few.unsqueeze(1) - y[places]).norm(dim=2)
            order = exact.argsort(dim=1, stable=True)
            found.append(exact.gather(1, order))
            where.append(places.gather(1, order))
    return torch.cat(found), torch.cat(where)


SURE = 1.959964  # standard deviations to each side of a 95 % interval
ROUNDING = 1e-12  # by which two equal statistics may differ


def copying(
    generated: torch.Tensor,
    private: torch.Tensor,
    held_out: torch.Tensor,
    extractor: Extractor,
    *,
    seed: int,
    drawings: int = 999,
    closest: int = 10,
    groups: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Measure whether generated images copy private ones.

    Args:
        generated, private, held_out: images ``(N, C, H, W)``, as networks take them. Private images are all
            that generated ones may be copies of; held-out ones are from the same source, and nobody's.
        seed: of the drawings of who is private.
        closest: pairs to tell.
        groups: whose each private and each held-out image is, ``(N,)`` int64 each (patients). Then patients
            are drawn, not images, since slices of one patient are near each other without any copy.

    Returns:
        ``extractor``, and the numbers of ``generated``, ``private`` and ``held_out`` images and of
        ``drawings``. ``statistic``: the mean of ``(h - p) / (h + p)`` over generated images, where p and h
        are distances to the nearest private and held-out image: -1 (copies of held-out) .. 1 (copies of
        private images). ``expected``: its mean over drawings of who is private, which is 0 only for as many
        private as held-out. ``p_value``: how often, among drawings and the truth, it is as large as in truth.

        ``share``: of generated images that are nearer to a private than to a held-out image, the larger set
        cut to the size of the smaller, on average over all ways: about 0.5 for images that copy nothing.
        ``low``, ``high``: its 95 % interval, over more images of the same generator (Wilson; private and
        held-out images held as they are). ``z``, ``z_p_value``: of :func:`data_copying`, far below 0 where
        generated images lie nearer to private images than held-out ones do; one-sided.

        ``pairs``: the closest in proportion, each private image once: places of ``generated``, ``private``
        and ``held_out`` image, its ``distance`` to the private and to the ``other`` one, and their ``ratio``,
        0 for a copy and 1 where both are 0. ``fresh``: the smallest ratio that a held-out image has, were it
        generated: what a fresh image comes to by chance; None for fewer than two held-out images.

    Raises:
        ArgumentError: no images, or a group that has both kinds of images.
        DataError: as the extractor says.
    """
    generated, private, held_out = (extractor(images) for images in (generated, private, held_out))
    whose = _whose(groups)  # (P + H,), or None
    is_private = torch.arange(len(private) + len(held_out)) < len(private)
    # As many neighbours as seldom are all of one kind, once in about e^20.
    width = 20 * (1 + len(is_private) // min(len(private), len(held_out)))
    pool = Neighbours(generated, torch.cat([private, held_out]), width)
    truth = _statistic(pool, is_private)
    drawn = torch.tensor(
        [_statistic(pool, again) for again in _drawings(is_private, whose, seed, drawings)],
        dtype=torch.float64,
    )
    share = float(_nearer(pool, is_private).mean())
    low, high = wilson(share, len(generated))
    to_private = nearest(held_out, private)[0]
    z, z_p_value = data_copying(nearest(generated, private)[0], to_private)
    fresh = None
    if len(held_out) > 1:
        fresh = float(_ratio(to_private, nearest(held_out, held_out, other=True)[0]).min())
    return {
        "extractor": extractor.name,
        "generated": len(generated),
        "private": len(private),
        "held_out": len(held_out),
        "statistic": truth,
        "expected": float(drawn.mean()),
        "p_value": (1 + int((drawn >= truth - ROUNDING).sum())) / (1 + drawings),
        "drawings": drawings,
        "share": share,
        "low": low,
        "high": high,
        "z": z,
        "z_p_value": z_p_value,
        "pairs": _closest(pool, is_private, closest),
        "fresh": fresh,
    }


def data_copying(generated: torch.Tensor, held_out: torch.Tensor) -> tuple[float, float]:
    """The z-score of data-copying, Z_U of Meehan et al. 2020, and its one-sided p-value; 0 and 1/2 where all
    distances are equal.

    U counts pairs of a generated ``(m,)`` and a held-out image ``(n,)`` of which the generated one is farther
    from its nearest private image (Mann, Whitney 1947): ``(U - mn / 2) / sqrt(mn (m + n + 1) / 12)``, with
    ties as half a pair, and the variance that they leave.

    >>> z, p = data_copying(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]))
    >>> round(z, 4), round(p, 4)  # (0 - 3) / sqrt(2 * 3 * 6 / 12)
    (-1.7321, 0.0416)
    """
    from scipy.special import ndtr
    from scipy.stats import rankdata, tiecorrect

    m, n = len(generated), len(held_out)
    ranks = rankdata(torch.cat([generated, held_out]).double().numpy())
    u = float(ranks[:m].sum()) - m * (m + 1) / 2
    variance = tiecorrect(ranks) * m * n * (m + n + 1) / 12
    z = (u - m * n / 2) / math.sqrt(variance) if variance > 1e-9 else 0.0
    return z, float(ndtr(z))


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of n (Wilson 1927); for means of numbers in 0..1 it is the wider for it.

    >>> low, high = wilson(0.5, 100)
    >>> round(low, 4), round(high, 4)
    (0.4038, 0.5962)
    """
    weight = SURE**2 / n
    middle = (share + weight / 2) / (1 + weight)
    half = SURE / (1 + weight) * math.sqrt(share * (1 - share) / n + weight / (4 * n))
    return middle - half, middle + half


def _whose(groups: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor | None:
    """A number from 0 up for each image's group, ``(P + H,)``: those of private images first."""
    if groups is None:
        return None
    both = sorted(set(groups[0].tolist()) & set(groups[1].tolist()))
    if both:
        raise ArgumentError("groups", both[0], "of private images or of held-out ones, and not of both")
    first, second = (np.unique(part.cpu().numpy(), return_inverse=True)[1] for part in groups)
    return torch.from_numpy(np.concatenate([first, second + first.max() + 1]))


def _drawings(
    is_private: torch.Tensor, whose: torch.Tensor | None, seed: int, count: int
) -> Iterator[torch.Tensor]:
    """Who is private, drawn anew: as many images, or groups, as in truth; ``(P + H,)`` bool each."""
    of_groups = is_private
    if whose is not None:
        of_groups = torch.zeros(int(whose.max()) + 1, dtype=torch.bool)
        of_groups[whose[is_private]] = True
    for number in range(count):
        order = torch.randperm(len(of_groups), generator=torch_generator(seed, "copying", number))
        again = of_groups[order]
        yield again if whose is None else again[whose]


def _statistic(pool: Neighbours, is_private: torch.Tensor) -> float:
    """The mean of (h - p) / (h + p); 0 where an image is a copy of both."""
    (p, _), (h, _) = pool.first(is_private), pool.first(~is_private)
    return float(((h - p) / (h + p).clamp_min(torch.finfo(p.dtype).tiny)).mean())


def _nearer(pool: Neighbours, is_private: torch.Tensor) -> torch.Tensor:
    """Of each generated image, how likely its nearest is private if the larger set is cut to the smaller.

    Of N images of the larger set, j are nearer than the nearest of the smaller one, which has n. That one of
    the j is among n drawn of the N has probability ``1 - C(N - j, n) / C(N, n)``. Where distances are equal:
    the mean of both answers, nearer and farther.
    """
    from scipy.stats import hypergeom

    flip = int(is_private.sum()) < int((~is_private).sum())
    larger = ~is_private if flip else is_private
    limit, _ = pool.first(~larger)
    total, n = int(larger.sum()), int((~larger).sum())
    nearer = torch.stack([pool.count(larger, limit, ties=ties) for ties in (False, True)])
    won = torch.from_numpy(hypergeom.sf(0, total, nearer.numpy(), n)).mean(0)
    return 1 - won if flip else won


def _ratio(p: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return torch.where((p == 0) & (h == 0), 1.0, p / h)


def _closest(pool: Neighbours, is_private: torch.Tensor, count: int) -> list[dict[str, Any]]:
    """The pairs of the smallest ratio of distances, and of these of the smallest distance; each private image
    once, with the generated image that is nearest to it in proportion."""
    (p, private), (h, held_out) = pool.first(is_private), pool.first(~is_private)
    columns = {
        "generated": torch.arange(len(p)),
        "private": private,
        "held_out": held_out - is_private.sum(),  # private images come first in the pool
        "distance": p,
        "other": h,
        "ratio": _ratio(p, h),
    }
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    found: dict[int, dict[str, Any]] = {}
    for pair in sorted(rows, key=lambda row: (row["ratio"], row["distance"])):
        found.setdefault(pair["private"], pair)
    return list(found.values())[:count]
