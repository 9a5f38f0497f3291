"""Which attacks a run meets, and how strong they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstill.attacks.generated import CopyingConfig
from fedstill.attacks.members import MembersConfig
from fedstill.attacks.victims import InversionsConfig
from fedstill.core.errors import ArgumentError
from fedstill.core.tables import as_table, read_table

ATTACKS = ("inversion", "membership", "copying", "counts")


@dataclass(frozen=True)
class LeakageConfig:
    """The attacks of ``fedstill attack``."""

    attacks: tuple[str, ...] = ATTACKS
    """inversion: images from parameters. membership: who was in the training data. copying: generated images
    beside private ones, their distances and scores. counts: label counts beside the true ones."""

    seed: int = 0
    """Every random draw of the attacks follows from this number."""

    inversion: InversionsConfig = field(default_factory=InversionsConfig)
    """Gradient inversion."""

    membership: MembersConfig = field(default_factory=MembersConfig)
    """Membership inference."""

    copying: CopyingConfig = field(default_factory=CopyingConfig)
    """Copying, distances and scores of generated images."""

    def __post_init__(self) -> None:
        if not self.attacks or not set(self.attacks) <= set(ATTACKS):
            raise ArgumentError("attacks", list(self.attacks), f"some of {', '.join(ATTACKS)}")
        if self.seed < 0:
            raise ArgumentError("seed", self.seed, "0 or more")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> LeakageConfig:
        """Attacks from a table, as TOML has it.

        Raises:
            FedstillError: a key that is none, or a value that is not allowed.

        >>> LeakageConfig.from_table({"membership": {"shadows": 4}}).membership.shadows
        4
        """
        return read_table(cls, table, "leakage.")

    def to_table(self) -> dict[str, Any]:
        """The same as a table, which :meth:`from_table` reads back."""
        table: dict[str, Any] = as_table(self)
        return table
