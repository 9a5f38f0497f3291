"""The head of an audit log: a small file beside it that says how far the log had come, and at which totals.

Hashes show that nothing in a log was changed, and cannot show that its end is gone: an older copy is a sound
log. The head is written after the entry that it tells of is durable, by renaming a finished file over the old
one: a kill at any moment leaves a whole head, at worst an older one. So it need not be synced to the disk: a
power failure can undo no more than how new it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedstill.core.hashing import write_head
from fedstill.node.audit_entries import BYTES, NO_GUARANTEE, QUERIES, UNIT_PREFIX, is_count, is_event, is_text

MAX_ENTRY_NUMBER = 2**62  # no entry has a higher number

Totals = Mapping[tuple[str, str], Counter[str]]  # by payer and run


@dataclass(frozen=True)
class Head:
    """How far a log had come: its last entry (0 before the first), that one's hash, and what was spent by
    then."""

    number: int = 0
    hash: str = ""
    totals: Totals = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Head | None:
        """The head in a file, or None if there is no file; OSError or ValueError where it cannot be read."""
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            rows = [(payer, run, dict(counts)) for payer, run, counts in table["totals"]]
            head = cls(table["entry"], table["hash"], {(payer, run): Counter(c) for payer, run, c in rows})
        except FileNotFoundError:
            return None
        except (AttributeError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"it is none: {error!r}") from error
        if type(head.number) is not int or not 0 <= head.number <= MAX_ENTRY_NUMBER or not is_text(head.hash):
            raise ValueError("its entry has no number or no hash that an entry could have")
        if len(head.totals) != len(rows) or not all(map(_is_total, rows)):
            raise ValueError("its totals are none that entries could have")
        return head


def write_audit_head(path: Path, number: int, hash_: str, rows: Iterable[str]) -> None:
    """Put a new head in the place of the one in a file, which stays where that fails (OSError); its totals as
    :func:`row` makes them."""
    write_head(path, number, hash_, f',"totals":[{",".join(rows)}]')


def head_row(payer: str, run: str, counts: Mapping[str, int]) -> str:
    """One total as a head has it."""
    return json.dumps([payer, run, counts], separators=(",", ":"))


def _is_total(row: tuple[object, object, Mapping[object, object]]) -> bool:
    payer, run, counts = row
    has_known_names = all(
        isinstance(name, str)
        and (name in (NO_GUARANTEE, QUERIES, BYTES) or name.startswith(UNIT_PREFIX) or is_event(name))
        for name in counts
    )
    return (
        is_text(payer)
        and bool(run)
        and is_text(run)
        and has_known_names
        and all(map(is_count, counts.values()))
    )
