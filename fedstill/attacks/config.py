"""Which attacks a run meets, and how strong they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstill.attacks.attack import ATTACKS, Attack
from fedstill.attacks.leakage import LeakageColumn
from fedstill.core.config_tables import read_value, to_table
from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.core.options import CheckedOptions, NonNegativeInt

RESERVED_KEYS = ("attacks", "seed")  # keys that no attack's options stand under


@dataclass(frozen=True)
class LeakageConfig(CheckedOptions):
    """The attacks of ``fedstill attack``.

    Args:
        attacks: with their options, in the order in which they are tried; each once.
        seed: every random draw of the attacks follows from this number.
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
        """All attacks with as few models, victims and permutations as show anything: a first look.

        What it gets is less than what there is: 4 shadow models tell members from others worse than 16 do.
        """
        options: Mapping[str, Mapping[str, Any]] = {
            "membership": {"shadows": 4, "records": 500, "responses": 500},
            "inversion": {"victims": 1, "attacks": ("idlg",)},
            "memorization": {"images": 300, "permutations": 199, "pairs": 4},
        }
        return cls(tuple(ATTACKS[name](**options.get(name, {})) for name in ATTACKS.builtin))

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> LeakageConfig:
        """Attacks from a table, as TOML has it: their names, and their options in tables below.

        Raises:
            FedstillError: a key that is none, options of an attack that is not chosen, or a value that is not
                allowed.

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
        """The same as a table, which :meth:`from_table` reads back."""
        named = {attack.registered_name: to_table(attack) for attack in self.attacks}
        return {"attacks": list(named), "seed": self.seed, **named}

    @property
    def columns(self) -> tuple[LeakageColumn, ...]:
        """Of a comparison whose runs are attacked so; first come those of attacks that methods are drawn
        against."""
        ordered = sorted(self.attacks, key=lambda attack: not any(column.axis for column in attack.columns))
        return tuple(column for attack in ordered for column in attack.columns)
