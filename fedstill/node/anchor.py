"""The anchor of a ledger: a small file beside it that says how far the ledger had come.

A chain of hashes shows that nothing in a ledger was changed, and cannot show that its end is gone: an older
copy is a sound chain. The anchor remembers the last row and what had been spent by then.

It is written after the row that it tells of is durable, by renaming a finished file over the old one, so a
kill at any moment leaves a whole anchor, at worst an older one, and a ledger may always be ahead of its
anchor. That is why it is not synced to the disk: all that a power failure can undo is how new it is. (On file
systems that may lose the contents of a file renamed shortly before a power failure, it can come back empty;
that is found like any other damage, and the owner settles it.)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fedstill.core import owner_only

Totals = Counter[tuple[str, str, str]]
"""How often each event was paid, by node, run and event."""


def make_key(secret: int) -> bytes:
    """The key of all seals, from a node's secret."""
    return hashlib.blake2b(f"fedstill account\x1f{secret}".encode(), digest_size=32).digest()


def seal(key: bytes, text: str) -> str:
    """What only who has the key can write under a text: keyed BLAKE2b, 128 bits, in hexadecimal."""
    return hashlib.blake2b(text.encode(), key=key, digest_size=16).hexdigest()


class Tally:
    """Totals, and how an anchor writes them: text is made anew only for nodes and runs that spent since.

    A ledger that has seen many runs has thousands of totals, and each charge writes all of them.
    """

    def __init__(self, spent: Totals) -> None:
        self._spent: dict[tuple[str, str], Counter[str]] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self.add(spent)

    def add(self, spent: Totals) -> None:
        """Count more."""
        for (node, run, event), times in spent.items():
            self._spent.setdefault((node, run), Counter())[event] += times
            self._texts.pop((node, run), None)

    def text(self) -> str:
        """All of it, as JSON."""
        for names in self._spent.keys() - self._texts.keys():
            self._texts[names] = json.dumps([*names, self._spent[names]], separators=(",", ":"))
        return f"[{','.join(self._texts.values())}]"


@dataclass(frozen=True)
class Anchor:
    """How far a ledger had come.

    Args:
        row: number of its last row; 0 if it had none.
        hash: of that row, over all rows up to it.
        spent: by then.
    """

    row: int
    hash: str
    spent: Totals

    @classmethod
    def read(cls, path: Path, key: bytes | None) -> Anchor | None:
        """The anchor in a file; None if there is no file.

        Args:
            path: of the file.
            key: of its seal; None does not check it.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not what :func:`write` has written with this key.
        """
        try:
            body, sealed, rest = path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError("it is not whole") from error
        if rest or (key is not None and sealed != seal(key, body)):
            raise ValueError("its seal does not fit")
        try:
            said = json.loads(body)
            spent = Totals()
            for node, run, events in said["spent"]:
                spent.update({(node, run, event): times for event, times in events.items()})
            return cls(said["row"], said["hash"], spent)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"it is none: {error}") from error


def write(path: Path, key: bytes, row: int, hashed: str, spent: Tally) -> None:
    """Put a new anchor in the place of the one in a file. Callers take turns.

    Raises:
        OSError: it cannot be written; the old one is as it was.
    """
    body = f'{{"row":{row},"hash":"{hashed}","spent":{spent.text()}}}'
    new = path.with_name(f"{path.name}.new")
    with owner_only.fresh(new) as file:
        file.write(f"{body}\n{seal(key, body)}\n".encode())
    os.replace(new, path)
