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
from fedstill.protocol.questions import NodeSide, Question

COHORT = "summed.json"
UNLESS = "unless its owner sets sums_may_differ = true"


class Cohort:
    """The nodes that this one adds with, the same in all runs, kept in a file.

    Two sums of other members would tell more than either: one less the other is what those answered who are
    in one of them only. Nor is it enough that these are many: a sum of seven nodes, less two of three of them
    each, is one node's answer, and six of the seven know of two sums only. So no node adds with other members
    than it has added with. Where its owner lets it, all sets are kept, so that it adds with none of them any
    more once that is taken back.

    Nor are sums of the same members harmless in any number: three of three nodes' logits, weighed equally, by
    size and by counts, are three equations for three answers. So a node adds outputs of its model in no other
    form than before (:func:`forms_of`). A question that needs some of the forms of an earlier one, or all of
    them and more, tells no more than the larger of the two does by itself. Here, too, all sets are kept.

    Attributes:
        spoilt: sums in which this node's answer could not be added, and random numbers stood for it. A server
            sees that a sum is spoilt; one that chooses what is asked learns a bit of an answer by it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        sets, self.spoilt, forms = _read(path) if path.exists() else ([], 0, [])
        self.sets, self.forms = [frozenset(each) for each in sets], [frozenset(each) for each in forms]

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

    def clash(self, forms: frozenset[str]) -> str | None:
        """Why sums of these forms, with earlier ones, could tell what single members answered.

        >>> cohort = Cohort(Path("none.json"))
        >>> cohort.forms = [frozenset({"logits by size"})]
        >>> cohort.clash(frozenset({"logits by mean"}))
        'it has added logits by size, and would add logits by mean: both together could tell single answers'
        """
        for earlier in self.forms:
            if not (forms <= earlier or earlier <= forms):
                before, now = (", ".join(sorted(each)) for each in (earlier - forms, forms - earlier))
                return f"it has added {before}, and would add {now}: both together could tell single answers"
        return None

    def clashes(self, side: NodeSide, run: str = "") -> dict[str, str]:
        """Questions of a method that :meth:`clash`, by name, and why; ``run`` as for :func:`forms_of`."""
        rules = {name: self.clash(forms_of(each, side.adds, run)) for name, each in side.questions.items()}
        return {name: f"sums: {rule}, {UNLESS}" for name, rule in rules.items() if rule is not None}

    def add(self, members: Sequence[str], forms: frozenset[str] = frozenset()) -> None:
        """These have a sum now, of these forms: it is on disk before anything leaves."""
        sets = [frozenset(members)] if frozenset(members) not in self.sets else []
        new = [forms] if forms and forms not in self.forms else []
        if sets or new:
            self.sets, self.forms = self.sets + sets, self.forms + new
            self._write()

    def spoil(self) -> None:
        """One more sum is spoilt: on disk before it leaves, too."""
        self.spoilt += 1
        self._write()

    def _write(self) -> None:
        sets, forms = ([sorted(each) for each in all_] for all_ in (self.sets, self.forms))
        text = json.dumps({"sets": sets, "spoilt": self.spoilt, "forms": forms})
        file_permissions.replace(self._path, text.encode(), sync=True)


def forms_of(question: Question, adds: str = "", run: str = "") -> frozenset[str]:
    """What of a network's outputs a question adds, and how each part is weighed.

    Args:
        adds: what of the outputs it is, if an option chooses that (:attr:`NodeSide.adds`).
        run: where counts have noise, which is another in each run, and so are sums that are weighed by them.
    """
    kinds, of = question.kinds(), f" of {adds}" if adds else ""
    return frozenset(
        f"{part}{of} by {how}" + (f" of run {run!r}" if run and how in ("counts", "size") else "")
        for part, how in question.sums.items()
        if kinds[part].of in ("scores", "rows", "answers", "critic")
    )


def _read(path: Path) -> tuple[list[list[str]], int, list[list[str]]]:
    """What a file holds; one of before forms were kept, and one that has the sets alone, too.

    Raises:
        RunFolderError: it holds something else: then it is not known what was summed before.
    """
    wrong = RunFolderError(f"{path} does not tell which nodes were summed")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found = {"sets": found, "spoilt": 0} if isinstance(found, list) else found
        sets, spoilt, forms = found["sets"], found["spoilt"], found.get("forms", [])
    except (ValueError, TypeError, LookupError) as error:
        raise wrong from error
    for lists in (sets, forms):
        sound = isinstance(lists, list) and all(isinstance(each, list) for each in lists)
        if not sound or not all(isinstance(name, str) for each in lists for name in each):
            raise wrong
    if type(spoilt) is not int or spoilt < 0:
        raise wrong
    return sets, spoilt, forms
