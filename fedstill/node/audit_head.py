"""The head of an audit log: a small file beside it that says how far the log had come, and at which totals.

Hashes show that nothing in a log was changed, and cannot show that its end is gone: an older copy is a sound
log. The head is written after the entry that it tells of is durable, by renaming a finished file over the old
one: a kill at any moment leaves a whole head, at worst an older one. So it need not be synced to the disk: a
power failure can undo no more than how new it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedstill.core import file_permissions
from fedstill.node.audit_entries import ALL

Totals = Mapping[tuple[str, str], Counter[str]]  # by payer and run


@dataclass(frozen=True)
class Head:
    """How far a log had come: its last entry (0 before the first), that one's hash, and what was spent by
    then."""

    number: int = 0
    hash: str = ""
    spent: Totals = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Head | None:
        """The head in a file, or None if there is no file; OSError or ValueError where it cannot be read."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            spent = {(payer, run): Counter(dict(counts)) for payer, run, counts in told["spent"]}
            if not all(
                type(n) is int for counts in spent.values() for n in (*counts.values(), told["entry"])
            ):
                raise ValueError("it counts other than whole numbers")
            return cls(told["entry"], told["hash"], spent)
        except FileNotFoundError:
            return None
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"it is none: {error!r}") from error

    def write(self, path: Path) -> None:
        """Put this head in the place of the one in a file, which stays where that fails (OSError)."""
        spent = [[*names, counts] for names, counts in self.spent.items() if names[1] != ALL]
        told = {"entry": self.number, "hash": self.hash, "spent": spent}
        file_permissions.replace(path, (json.dumps(told, separators=(",", ":")) + "\n").encode())
