"""Answers about generated inputs, corrected for how often each class is met among the nodes' own.

A student learns from inputs that a generator made. If these show some classes more often than real ones do,
as images with tumors that their label maps have not, the student finds them too often. Where p(x | class)
stays and only the classes' shares differ, the answer for the other shares is known: Saerens, Latinne,
Decaestecker, "Adjusting the Outputs of a Classifier to New a Priori Probabilities: A Simple Procedure",
Neural Computation 2002, Eq. 2.4.
"""

from __future__ import annotations

import torch

LEAST = 1e-4  # the smallest share: of a class that is next to never met nothing can be said, and it stays


class LabelShift:
    """The log of each class's share among what nodes hold, less that of its share among what was decided.

    Args:
        classes: C.

    >>> shift = LabelShift(2, torch.device("cpu"))
    >>> shift.expect(torch.tensor([9.0, 1.0]))
    >>> shift.count(torch.tensor([[5.0, 0.0], [0.0, 5.0]]))  # one of two decided for the second class
    >>> shift.corrected(torch.zeros(1, 2)).softmax(1)  # of which nobody knows more than the shares
    tensor([[0.9000, 0.1000]])
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self.decided = torch.zeros(classes, device=device)  # inputs or pixels
        self._expected = torch.ones(classes, device=device)

    def expect(self, counts: torch.Tensor) -> None:
        """How many there are of each class among real ones, ``(C,)``; noise may have made some negative."""
        self._expected = counts.clamp(min=0)

    def count(self, z: torch.Tensor) -> None:
        """Count for which class each ensembled answer ``(B, C, ...)`` decides."""
        decided = z.argmax(1)
        self.decided += torch.stack([decided.eq(c).sum() for c in range(z.shape[1])])

    def corrected(self, z: torch.Tensor) -> torch.Tensor:
        """Logits ``(B, C, ...)`` as they would be, had generated inputs the classes' expected shares."""
        expected, decided = (n / n.sum().clamp(min=LEAST) for n in (self._expected, self.decided))
        known = (expected >= LEAST) & (decided >= LEAST)
        shift = torch.where(known, (expected / decided.clamp(min=LEAST)).clamp(min=LEAST).log(), 0.0)
        return z + shift.view(-1, *(1,) * (z.ndim - 2))
