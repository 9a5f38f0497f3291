"""One label a text: classification of token ids."""

from __future__ import annotations

from dataclasses import dataclass

from fedstill.tasks.classification import Classification
from fedstill.tasks.config import TaskConfig


class TextClassification(Classification):
    """Single-label classification of texts ``(B, L)`` int64, 0 for padding; outputs are logits ``(B, C)``.

    What is learned of a text is what is learned of an image; only what an input is differs.
    """

    name = "text"
    tokens = True


@dataclass(frozen=True, kw_only=True)
class TextConfig(TaskConfig):
    """One label a text."""

    makes = TextClassification
