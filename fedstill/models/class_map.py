"""Outputs of a model whose classes have another order, other names, or are others, as a federation's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.core.names import plain

MIN_PROBABILITY = 1e-6  # smaller probabilities count as this: a forest's zero is no infinite certainty


class ClassMap(nn.Module):
    """Logits ``(B, given)`` in a model's own order to ``(B, classes)`` in the federation's.

    A class that the model does not know has probability 1e-6. What the model knows and the federation does
    not is left out; where several of the model's classes are one of the federation's, their probabilities
    add up. Gradients go through.

    Args:
        own: of each of the model's outputs, in its order, which of the federation's classes it is: a name, or
            "" for none of them. If none is a name, all are numbers from 0, as estimators tell.
        classes: the federation's, in their order.

    Raises:
        ModelError: a name that no class has, or nothing of the federation's.

    >>> z = torch.tensor([[1.0, 3.0]])
    >>> ClassMap(("ill", "well"), ("well", "ill"))(z)
    tensor([[3., 1.]])
    >>> ClassMap(("ill", ""), ("well", "ill"))(z)
    tensor([[-13.8155,   0.0000]])
    """

    def __init__(self, own: Sequence[Any], classes: Sequence[str]) -> None:
        super().__init__()
        own = [plain(each) if isinstance(each, str) else each for each in own]
        self.given, self.parts = len(own), _outputs_by_class(own, list(map(plain, classes)))

    @property
    def changes(self) -> bool:
        """Whether it does anything."""
        return self.parts != [[place] for place in range(self.given)]

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Logits in the federation's order.

        Raises:
            ModelError: another number of outputs.
        """
        if z.ndim != 2 or z.shape[1] != self.given:
            shape = tuple(z.shape[1:])
            raise ModelError(f"the model gives outputs of shape {shape}: its classes allow ({self.given},)")
        if not all(self.parts):  # those that are known share what there is
            known = [place for part in self.parts for place in part]
            z = z - z[:, known].logsumexp(1, keepdim=True)
        nothing = torch.full_like(z[:, 0], math.log(MIN_PROBABILITY))
        return torch.stack([z[:, part].logsumexp(1) if part else nothing for part in self.parts], 1)


class ClassMappedModel(nn.Sequential):
    """A network and behind it the map of its classes."""

    def __init__(self, model: nn.Module, classes: ClassMap) -> None:
        super().__init__(model, classes)


def _outputs_by_class(own: Sequence[Any], classes: list[str]) -> list[list[int]]:
    """By class of the federation, the model's outputs that are it."""
    numbers = not any(str(name) in classes for name in own)
    parts: list[list[int]] = [[] for _ in classes]
    for place, name in enumerate(own):
        if name == "":
            continue
        of: Any = name if numbers else classes.index(str(name)) if str(name) in classes else None
        if of not in range(len(classes)):
            known = f"{', '.join(classes)}, or their numbers from 0"
            raise ModelError(f"the model has learned a class {name!r} (expected {known})")
        parts[int(of)].append(place)
    if not any(parts):
        raise ModelError(f"the model knows none of the classes {', '.join(classes)}")
    return parts
