"""Who is nearest to whom among vectors: exactly, and in little memory."""

from __future__ import annotations

import torch

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
