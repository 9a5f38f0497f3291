"""What label counts reveal: the class histogram that a node gave away, against the one that it has.

Methods that weigh answers by who knows what ask nodes how many examples they hold of each class; the ledger
has it as "label counts". That is an answer, not an attack: who reads it knows which diseases a hospital
treats, and how often, up to the noise that the node's owner asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedstill.core.errors import ArgumentError

NONE = 0.5  # told counts below this say that a class is not there


@dataclass(frozen=True)
class Histogram:
    """How near to the truth a node's told histogram is.

    Args:
        exact: whether each count is told as it is. With noise that happens by chance, if seldom.
        total_variation: half the summed differences of class shares, 0 (the same) .. 1 (nothing in common).
        largest_error: the largest difference of a class share, 0 .. 1; and the class that it is of.
        size_error: examples told in all, less those that there are.
        absent: classes of which the node holds nothing.
        told_absent: classes that are told as 0.
    """

    node: str
    exact: bool
    total_variation: float
    largest_error: float
    largest_class: str
    size_error: float
    absent: tuple[str, ...]
    told_absent: tuple[str, ...]

    @property
    def found_absent(self) -> tuple[str, ...]:
        """Classes that the node lacks, and that are told as 0: known to whoever reads the counts."""
        return tuple(name for name in self.absent if name in self.told_absent)

    @property
    def wrongly_absent(self) -> tuple[str, ...]:
        """Classes that the node holds, though they are told as 0."""
        return tuple(name for name in self.told_absent if name not in self.absent)

    @property
    def line(self) -> str:
        """The same in words, one line."""
        if self.exact:
            known = "told exactly how many examples of each class it holds"
        else:
            known = (
                f"told its class shares up to {100 * self.largest_error:.1f} points "
                f"(class {self.largest_class}; total variation {self.total_variation:.3f}) "
                f"and its size up to {abs(self.size_error):g}"
            )
        if self.absent:
            lacks = f"{len(self.found_absent)} of {len(self.absent)} classes that it lacks are told as 0"
        else:
            lacks = "it lacks no class"
        wrong = f", and {len(self.wrongly_absent)} that it holds" if self.wrongly_absent else ""
        return f"{self.node} {known}; {lacks}{wrong}"


def histogram(
    node: str, told: torch.Tensor, true: torch.Tensor, classes: Sequence[str] | None = None
) -> Histogram:
    """What somebody knows of a node's classes who was told counts.

    A class share is a class's part of all that is told: told counts below 0 count as 0, and where nothing is
    left, every class is as likely as another. (Findings may be several for one example; shares are then of
    findings.)

    Args:
        told: by class ``(C,)``, as it left the node's gate, perhaps with noise.
        true: by class ``(C,)``, 0 or more and not all of them 0.
        classes: names; without them their numbers.

    Raises:
        ArgumentError: counts of other forms, or that are none.

    >>> found = histogram("clinic", torch.tensor([6.0, 0.0, 4.0]), torch.tensor([5.0, 0.0, 5.0]))
    >>> print(found.line)
    clinic told its class shares up to 10.0 points (class 0; total variation 0.100) and its size up to 0;
    1 of 1 classes that it lacks are told as 0
    """
    told, true = told.detach().double().cpu(), true.detach().double().cpu()
    if true.ndim != 1 or not (true.isfinite().all() and (true >= 0).all() and true.sum() > 0):
        raise ArgumentError("true counts", true.tolist(), "numbers from 0 up, one a class, and not only 0")
    if told.shape != true.shape or not told.isfinite().all():
        raise ArgumentError("told counts", told.tolist(), f"{len(true)} numbers, one a class")
    names = [str(place) for place in range(len(true))] if classes is None else list(classes)
    if len(names) != len(true):
        raise ArgumentError("classes", names, f"{len(true)} names")
    errors = (_shares(told) - _shares(true)).abs()
    worst = int(errors.argmax())
    return Histogram(
        node=node,
        exact=torch.equal(told, true),
        total_variation=float(errors.sum() / 2),
        largest_error=float(errors[worst]),
        largest_class=names[worst],
        size_error=float(told.sum() - true.sum()),
        absent=tuple(name for name, count in zip(names, true.tolist(), strict=True) if count == 0),
        told_absent=tuple(name for name, count in zip(names, told.tolist(), strict=True) if count < NONE),
    )


def _shares(counts: torch.Tensor) -> torch.Tensor:
    """Each class's part, ``(C,)`` float64, summing to 1.

    >>> _shares(torch.tensor([3.0, -1.0, 1.0])).tolist(), _shares(torch.zeros(2)).tolist()
    ([0.75, 0.0, 0.25], [0.5, 0.5])
    """
    positive = counts.clamp_min(0)
    whole = positive.sum()
    return positive / whole if whole > 0 else torch.full_like(counts, 1 / len(counts))
