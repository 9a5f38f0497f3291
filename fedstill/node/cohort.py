"""With whom a node adds its answers, in all runs, in which form, and how many sums it has spoilt: a file in
its folder.

Two sums of other members, or of other forms of the same answers, tell more than either: see :class:`Cohort`.
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

    Nor are sums of the same members harmless in any number: three of three nodes' logits, weighed equally, by
    size and by counts, are three equations for three answers. So a node adds outputs of its model in no other
    form than before: the parts of an answer, each with how it is weighed, and what of the scores it is. A
    question that needs some of these forms, or adds others to all of them, tells no more than the larger of
    the two does by itself.

    Attributes:
        spoilt: sums in which this node's answer could not be added, and random numbers stood for it. A server
            sees that a sum is spoilt; one that chooses what is asked learns a bit of an answer by it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        sets, self.spoilt, forms = _read(path) if path.exists() else ([], 0, [])
        self.sets, self.forms = [frozenset(each) for each in sets], frozenset(forms)

    def objection(self, members: Sequence[str], forms: frozenset[str] = frozenset()) -> str | None:
        """Why a sum of these members, or of these forms, with earlier ones could tell what few answered.

        >>> cohort = Cohort(Path("none.json"))
        >>> cohort.sets = [frozenset("abcd")]
        >>> cohort.objection("abc")
        'it would add with and without d, and the difference would tell what they answered'
        >>> cohort.forms = frozenset({"logits by size"})
        >>> cohort.objection("abcd", frozenset({"logits by mean"}))
        'it has added logits by size, and would add logits by mean: both together could tell single answers'
        """
        if odd := {name for earlier in self.sets for name in earlier ^ set(members)}:
            named = " and ".join(sorted(odd))
            return f"it would add with and without {named}, and the difference would tell what they answered"
        if forms <= self.forms or self.forms <= forms:
            return None
        before, now = (", ".join(sorted(each)) for each in (self.forms - forms, forms - self.forms))
        return f"it has added {before}, and would add {now}: both together could tell single answers"

    def add(self, members: Sequence[str], forms: frozenset[str] = frozenset()) -> None:
        """These have a sum now, of these forms: it is on disk before anything leaves."""
        if frozenset(members) in self.sets and forms <= self.forms:
            return
        self.sets += [] if frozenset(members) in self.sets else [frozenset(members)]
        self.forms |= forms
        self._write()

    def spoil(self) -> None:
        """One more sum is spoilt: on disk before it leaves, too."""
        self.spoilt += 1
        self._write()

    def _write(self) -> None:
        sets = [sorted(each) for each in self.sets]
        text = json.dumps({"sets": sets, "spoilt": self.spoilt, "forms": sorted(self.forms)})
        file_permissions.replace(self._path, text.encode(), sync=True)


def _read(path: Path) -> tuple[list[list[str]], int, list[str]]:
    """What a file holds.

    Raises:
        RunFolderError: it holds something else: then it is not known what was summed before.
    """
    wrong = RunFolderError(f"{path} does not tell which nodes were summed")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sets, spoilt, forms = found["sets"], found["spoilt"], found["forms"]
    except (ValueError, TypeError, LookupError) as error:
        raise wrong from error
    lists = isinstance(sets, list) and all(isinstance(each, list) for each in [*sets, forms])
    if not lists or not all(isinstance(name, str) for each in [*sets, forms] for name in each):
        raise wrong
    if type(spoilt) is not int or spoilt < 0:
        raise wrong
    return sets, spoilt, forms
