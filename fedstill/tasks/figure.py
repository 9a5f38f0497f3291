"""What one of a task's metrics is called, in which unit, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """One of a task's metrics, as tables show it.

    Args:
        unit: "%", "dB", "px" or nothing.
        better: whether a higher or a lower one is better.
        brief: whether a terminal and a comparison's tables have it, too, and not only pages and files.
    """

    key: str
    title: str
    unit: str = "%"
    digits: int = 1
    better: Literal["higher", "lower"] = "higher"
    brief: bool = True
