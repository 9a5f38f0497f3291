"""One label a text: classification of token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedstill.core.dataset import TensorData, check_labels
from fedstill.core.errors import DataError
from fedstill.tasks.classification import Classification
from fedstill.tasks.config import TaskConfig


class TextClassification(Classification):
    """Single-label classification of texts ``(B, L)`` int64, 0 for padding; outputs are logits ``(B, C)``.

    What is learned of a text is what is learned of an image; only what an input is differs.
    """

    name = "text"
    tokens = True

    def check(self, data: TensorData, what: str) -> None:
        """Refuse texts that are no token ids, and labels outside the classes.

        A text of padding alone (an empty one) is allowed: it has a label like any other.

        >>> TextClassification(2).check(TensorData(torch.zeros(3, 8), torch.tensor([0, 1, 1])), "train")
        Traceback (most recent call last):
        ...
        fedstill.core.errors.DataError: train: inputs are float32 of shape (3, 8): allowed are ...
        """
        inputs, targets = data.inputs, data.targets
        if inputs.dtype != torch.int64 or inputs.ndim != 2:
            kind = str(inputs.dtype).removeprefix("torch.")
            raise DataError(
                f"{what}: inputs are {kind} of shape {tuple(inputs.shape)}: allowed are int64 ids (N, L)"
            )
        if len(inputs) != len(targets):
            raise DataError(f"{what}: {len(inputs)} texts but {len(targets)} targets: allowed is one each")
        if len(inputs) == 0:
            raise DataError(f"{what}: there are no examples: allowed is one or more")
        if inputs.shape[1] == 0:
            raise DataError(f"{what}: texts have no tokens: allowed is room for one or more")
        negative = torch.nonzero((inputs < 0).any(1)).flatten()
        if len(negative):
            raise DataError(
                f"{what}: {len(negative)} texts hold ids below 0, the first is example {int(negative[0])}"
            )
        check_labels(targets, self.classes, what)


@dataclass(frozen=True, kw_only=True)
class TextConfig(TaskConfig):
    """One label a text."""

    makes = TextClassification
