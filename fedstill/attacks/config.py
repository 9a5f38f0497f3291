"""Configuration of the attacks on a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstill.attacks.attack import ATTACKS, Attack
from fedstill.attacks.attack_results import ComparisonColumn
from fedstill.core.config_tables import read_value, to_table
from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.core.options import CheckedOptions, NonNegativeInt

RESERVED_KEYS = ("attacks", "seed")  # keys that are not attacks


@dataclass(frozen=True)
class LeakageConfig(CheckedOptions):
    """Attacks of ``fedstill attack``.

    Args:
        attacks: attacks with their options, in order; each attack once.
        seed: seed of every random number of the attacks.

    >>> [attack.registered_name for attack in LeakageConfig().attacks]
    ['inversion', 'membership', 'memorization', 'counts']
    """

    attacks: tuple[Attack, ...] = field(
        default_factory=lambda: tuple(ATTACKS[name]() for name in ATTACKS.builtin)
    )
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [attack.registered_name for attack in self.attacks]
        if not names or len(set(names)) < len(names):
            raise ArgumentError("attacks", names, f"some of {', '.join(ATTACKS)}, each once")

    @classmethod
    def quick(cls) -> LeakageConfig:
        """Return all attacks with few models, victims and permutations, for a first look.

        The results are weaker than with the defaults: 4 shadow models detect fewer members than 16.
        """
        options: Mapping[str, Mapping[str, Any]] = {
            "membership": {"shadows": 4, "records": 500, "responses": 500},
            "inversion": {"victims": 1, "attacks": ("idlg",)},
            "memorization": {"images": 300, "permutations": 199, "pairs": 4},
        }
        return cls(tuple(ATTACKS[name](**options.get(name, {})) for name in ATTACKS.builtin))

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> LeakageConfig:
        """Read attacks from a TOML table: their names, and one table of options for each.

        Raises:
            FedstillError: an unknown key, options of an attack that is not chosen, or an invalid value.

        >>> chosen = LeakageConfig.from_table({"attacks": ["membership"], "membership": {"shadows": 4}})
        >>> chosen.to_table()["membership"]["shadows"]
        4
        """
        table = {ATTACKS.canonical_name(key): value for key, value in table.items()}
        named = read_value(tuple[str, ...], table.get("attacks", list(ATTACKS.builtin)), "leakage.attacks")
        names = [ATTACKS.canonical_name(name) for name in named]
        kinds = {name: ATTACKS[name] for name in names}
        for key, value in table.items():
            if key in RESERVED_KEYS or key in kinds:
                continue
            if key in ATTACKS:
                raise ArgumentError(f"leakage.{key}", value, "none, as it is not among leakage.attacks")
            raise UnknownName(
                "key", f"leakage.{key}", [f"leakage.{name}" for name in (*RESERVED_KEYS, *kinds)]
            )
        attacks = tuple(read_value(kinds[name], table.get(name, {}), f"leakage.{name}") for name in names)
        return cls(attacks, read_value(int, table.get("seed", 0), "leakage.seed"))

    def to_table(self) -> dict[str, Any]:
        """Return a table that :meth:`from_table` reads."""
        named = {attack.registered_name: to_table(attack) for attack in self.attacks}
        return {"attacks": list(named), "seed": self.seed, **named}

    @property
    def comparison_columns(self) -> tuple[ComparisonColumn, ...]:
        """Columns of a comparison of attacked runs, first those with an axis for a figure."""
        ordered = sorted(self.attacks, key=lambda attack: not any(column.axis for column in attack.columns))
        return tuple(column for attack in ordered for column in attack.columns)
