"""With whom a node adds its answers, in all runs, and how many sums it has spoilt: a file in its folder.

Two sums of other members tell more than either: see :class:`Cohort`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedstill.core import file_permissions
from fedstill.core.errors import RunFolderError

COHORT = "summed.json"


class Cohort:
    """The nodes that this one adds with, the same in all runs, kept in a file.

    Two sums of other members would tell more than either: one less the other is what those answered who are
    in one of them only. Nor is it enough that these are many: a sum of seven nodes, less two of three of them
    each, is one node's answer, and six of the seven know of two sums only. So no node adds with other members
    than it has added with. Where its owner lets it, all sets are kept, so that it adds with none of them any
    more once that is taken back.

    Attributes:
        spoilt: sums in which this node's answer could not be added, and random numbers stood for it. A server
            sees that a sum is spoilt; one that chooses what is asked learns a bit of an answer by it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        sets, self.spoilt = _read(path) if path.exists() else ([], 0)
        self.sets = [frozenset(each) for each in sets]

    def objection(self, members: Sequence[str]) -> str | None:
        """Why a sum of these members, with earlier ones, could tell what few of them answered.

        >>> cohort = Cohort(Path("none.json"))
        >>> cohort.sets = [frozenset("abcd")]
        >>> cohort.objection("abc")
        'it would add with and without d, and the difference would tell what they answered'
        """
        odd = {name for earlier in self.sets for name in earlier ^ set(members)}
        if not odd:
            return None
        named = " and ".join(sorted(odd))
        return f"it would add with and without {named}, and the difference would tell what they answered"

    def add(self, members: Sequence[str]) -> None:
        """These have a sum now: it is on disk before anything leaves."""
        if frozenset(members) not in self.sets:
            self.sets.append(frozenset(members))
            self._write()

    def spoil(self) -> None:
        """One more sum is spoilt: on disk before it leaves, too."""
        self.spoilt += 1
        self._write()

    def _write(self) -> None:
        text = json.dumps({"sets": [sorted(each) for each in self.sets], "spoilt": self.spoilt})
        file_permissions.replace(self._path, text.encode(), sync=True)


def _read(path: Path) -> tuple[list[list[str]], int]:
    """What a file holds.

    Raises:
        RunFolderError: it holds something else: then it is not known what was summed before.
    """
    wrong = RunFolderError(f"{path} does not tell which nodes were summed")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sets, spoilt = (found, 0) if isinstance(found, list) else (found["sets"], found["spoilt"])
    except (ValueError, TypeError, LookupError) as error:
        raise wrong from error
    lists = isinstance(sets, list) and all(isinstance(each, list) for each in sets)
    if not lists or not all(isinstance(name, str) for each in sets for name in each):
        raise wrong
    if type(spoilt) is not int or spoilt < 0:
        raise wrong
    return sets, spoilt
