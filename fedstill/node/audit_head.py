"""The head of an audit log: a small file with its last entry and the totals by then."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedstill.core.hashing import write_head
from fedstill.node.audit_entries import BYTES, NO_GUARANTEE, QUERIES, UNIT_PREFIX, is_count, is_event, is_text

MAX_ENTRY_NUMBER = 2**62  # largest number of an entry

Totals = Mapping[tuple[str, str], Counter[str]]  # by payer and run


@dataclass(frozen=True)
class AuditLogHead:
    """State of a log: number (0 before the first) and hash of its last entry, and the totals by then."""

    number: int = 0
    hash: str = ""
    totals: Totals = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> AuditLogHead | None:
        """Return the head in a file, or None if there is no file.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            rows = [(payer, run, dict(counts)) for payer, run, counts in table["totals"]]
            head = cls(table["entry"], table["hash"], {(payer, run): Counter(c) for payer, run, c in rows})
        except FileNotFoundError:
            return None
        except (AttributeError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"it is none: {error!r}") from error
        if type(head.number) is not int or not 0 <= head.number <= MAX_ENTRY_NUMBER or not is_text(head.hash):
            raise ValueError("invalid number or hash of its entry")
        if len(head.totals) != len(rows) or not all(map(_is_total, rows)):
            raise ValueError("invalid totals")
        return head


def write_audit_head(path: Path, number: int, hash_: str, rows: Iterable[str]) -> None:
    """Replace the head in a file; the old one stays if that fails (OSError). ``rows`` as
    :func:`format_head_total` makes them.
    """
    write_head(path, number, hash_, f',"totals":[{",".join(rows)}]')


def format_head_total(payer: str, run: str, counts: Mapping[str, int]) -> str:
    """Return one total as the text of a head."""
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
