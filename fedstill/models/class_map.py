"""Mapping of a model's classes to the classes of the federation, by name or number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.core.name_normalization import normalize_name

MIN_PROBABILITY = 1e-6  # smaller probabilities count as this: a forest's 0 is not infinite certainty


class ClassMap(nn.Module):
    """Map logits ``(B, inputs)`` in a model's class order to ``(B, classes)`` in the federation's.

    A class that the model does not know has probability 1e-6. Outputs without a class in the federation are
    dropped. Probabilities of several outputs for one class are added. Gradients pass through.

    Args:
        labels: class of each of the model's outputs: a name, or ``""`` for none. If no entry is a known name,
            all are numbers from 0, as in scikit-learn's ``classes_``.
        classes: names of the federation's classes, in order.

    Raises:
        ModelError: an entry is not a class of the federation, or none is.

    >>> z = torch.tensor([[1.0, 3.0]])
    >>> ClassMap(("ill", "well"), ("well", "ill"))(z)
    tensor([[3., 1.]])
    >>> ClassMap(("ill", ""), ("well", "ill"))(z)
    tensor([[-13.8155,   0.0000]])
    """

    def __init__(self, labels: Sequence[Any], classes: Sequence[str]) -> None:
        super().__init__()
        labels = [normalize_name(label) if isinstance(label, str) else label for label in labels]
        self.input_count, self.outputs_of = (
            len(labels),
            _outputs_by_class(labels, list(map(normalize_name, classes))),
        )

    @property
    def is_nontrivial(self) -> bool:
        """True unless the map is the identity."""
        return self.outputs_of != [[index] for index in range(self.input_count)]

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Return logits in the federation's order.

        Raises:
            ModelError: the model has another number of outputs.
        """
        if z.ndim != 2 or z.shape[1] != self.input_count:
            shape = tuple(z.shape[1:])
            raise ModelError(
                f"the model returns outputs of shape {shape} (expected ({self.input_count},), its classes)"
            )
        if not all(self.outputs_of):  # known classes share the probability
            known = [output for outputs in self.outputs_of for output in outputs]
            z = z - z[:, known].logsumexp(1, keepdim=True)
        unknown = torch.full_like(z[:, 0], math.log(MIN_PROBABILITY))
        return torch.stack([z[:, part].logsumexp(1) if part else unknown for part in self.outputs_of], 1)


class ClassMappedModel(nn.Sequential):
    """A network followed by a map of its classes."""

    def __init__(self, model: nn.Module, classes: ClassMap) -> None:
        super().__init__(model, classes)


def _outputs_by_class(labels: Sequence[Any], classes: list[str]) -> list[list[int]]:
    """Return the indices of the model's outputs for each class of the federation."""
    numbers = not any(str(name) in classes for name in labels)
    outputs: list[list[int]] = [[] for _ in classes]
    for output, name in enumerate(labels):
        if name == "":
            continue
        index: Any = name if numbers else classes.index(str(name)) if str(name) in classes else None
        if index not in range(len(classes)):
            known = f"{', '.join(classes)}, or their numbers from 0"
            raise ModelError(f"unknown class {name!r} of the model (expected {known})")
        outputs[int(index)].append(output)
    if not any(outputs):
        raise ModelError(f"the model knows none of the classes {', '.join(classes)}")
    return outputs
