"""Correction of responses to generated inputs for the class shares of the nodes' own data.

A student trains on generated inputs. If these show some classes more often than real ones do, such as images
with tumors that their label maps do not have, the student predicts them too often. If p(x | class) stays and
only the class shares differ, the response for the other shares is known: Saerens, Latinne, Decaestecker,
"Adjusting the Outputs of a Classifier to New a Priori Probabilities: A Simple Procedure", Neural Computation
2002, Eq. 2.4.
"""

from __future__ import annotations

import torch

MIN_SHARE = 1e-4  # classes with a smaller share are not corrected


class LabelShift:
    """Log ratio of each class's share in the nodes' data to its share in the ensemble's decisions.

    Args:
        classes: C.
        device: device of the counts.

    >>> shift = LabelShift(2, torch.device("cpu"))
    >>> shift.set_real_counts(torch.tensor([9.0, 1.0]))
    >>> shift.count_decisions(torch.tensor([[5.0, 0.0], [0.0, 5.0]]))  # 1 of 2 decided for class 1
    >>> shift.correct_logits(torch.zeros(1, 2)).softmax(1)  # for an input without evidence
    tensor([[0.9000, 0.1000]])
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self.decided = torch.zeros(classes, device=device)  # inputs or pixels
        self._expected = torch.ones(classes, device=device)

    def set_real_counts(self, counts: torch.Tensor) -> None:
        """Set the number of real examples of each class, ``(C,)``; noise may have made some negative."""
        self._expected = counts.clamp(min=0)

    def count_decisions(self, z: torch.Tensor) -> None:
        """Count the decisions of ensembled logits ``(B, C, ...)`` by class."""
        decided = z.argmax(1)
        self.decided += torch.stack([decided.eq(c).sum() for c in range(z.shape[1])])

    def correct_logits(self, z: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B, C, ...)`` for generated inputs with the expected class shares."""
        expected, decided = (n / n.sum().clamp(min=MIN_SHARE) for n in (self._expected, self.decided))
        known = (expected >= MIN_SHARE) & (decided >= MIN_SHARE)
        shift = torch.where(known, (expected / decided.clamp(min=MIN_SHARE)).clamp(min=MIN_SHARE).log(), 0.0)
        return z + shift.view(-1, *(1,) * (z.ndim - 2))
