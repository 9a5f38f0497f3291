"""``help()`` of a configuration tells what each option means, from the one place where that is written."""

from __future__ import annotations

import pydoc
from dataclasses import dataclass

import fedstill
from fedstill.core.checked import Checked


@dataclass(frozen=True)
class Training(Checked):
    """How a node trains."""

    epochs: int = 3
    """Passes over
    its data."""
    secret: int = 0
    lr: float = 0.1
    """Of the optimiser: any."""


@dataclass(frozen=True)
class Longer(Training):
    """The same, for longer.

    A second paragraph.
    """

    lr: float = 0.01
    """Smaller."""


def test_a_docstring_ends_in_the_options_with_their_meanings() -> None:
    assert Training.__doc__ == (
        "How a node trains.\n\nArgs:\n    epochs: Passes over its data.\n    lr: Of the optimiser: any."
    )
    told = "A second paragraph.\n\nArgs:\n    epochs: Passes over its data.\n    lr: Smaller."
    assert Longer.__doc__ == Longer().__doc__ == f"The same, for longer.\n\n{told}"


def test_help_of_a_method_tells_its_options_and_those_of_its_bases() -> None:
    text = " ".join(pydoc.plain(pydoc.render_doc(fedstill.FedKD)).replace(" | ", " ").split())
    assert "levels: S, the quantiser's levels (Eq. 4)" in text
    assert "batch: Public examples a step of the student." in text
