"""Members and statistics of a node's sums over all runs, and the number of sums that it corrupted, in a file.

Two sums of different members, or of different statistics of the same responses, reveal more than either: see
:class:`Cohort`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedstill.core import private_files
from fedstill.core.errors import RunFolderError
from fedstill.protocol.queries import NodeSide

SUM_HISTORY_FILE = "summed.json"
UNLESS_ALLOWED = "unless its owner sets sums_may_differ = true"


class SumHistory:
    """The nodes that this one adds with, the same in all runs, kept in a file.

    Two sums of other members would tell more than either: one less the other is what those answered who are
    in one of them only. Nor is it enough that these are many: a sum of seven nodes, less two of three of them
    each, is one node's answer, and six of the seven know of two sums only. So no node adds with other members
    than it has added with. Where its owner lets it, all sets are kept, so that it adds with none of them any
    more once that is taken back.

    Sums of the same members are not harmless in any number either. The sum over three nodes of their logits,
    with equal weights, by size and by counts, are three equations for three unknowns; so are the sums of
    log-probabilities and of entropies, which are functions of the same logits. So a node adds one statistic
    of its networks' outputs, with one weighting, in all runs and queries (:meth:`NodeSide.weightings`). Then all
    that a server reads are values and derivatives of one function, the weighted sum of the nodes' functions,
    and any other nodes with the same sum would have sent the same. All forms are kept, as all sets are.

    Attributes:
        corrupted: sums in which this node's answer could not be added, and random numbers stood for it. A server
            sees that a sum is spoilt; one that chooses what is asked learns a bit of an answer by it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        sets, self.corrupted, forms, self.weight_digests = (
            _read_history(path) if path.exists() else ([], 0, {}, {})
        )
        self.member_sets = [frozenset(names) for names in sets]
        self.weightings = {subject: frozenset(names) for subject, names in forms.items()}

    def member_conflict(self, members: Sequence[str]) -> str | None:
        """Why a sum of these members, with earlier ones, could tell what few of them answered.

        >>> cohort = Cohort(Path("none.json"))
        >>> cohort.sets = [frozenset("abcd")]
        >>> cohort.objection("abc")
        'it would add with and without d, and the difference would tell what they answered'
        """
        changed = {name for earlier in self.member_sets for name in earlier ^ set(members)}
        if not changed:
            return None
        changed_names = " and ".join(sorted(changed))
        return (
            f"it would add with and without {changed_names}, and the difference would tell what they answered"
        )

    def weighting_conflict(self, weightings: Mapping[str, str]) -> str | None:
        """Return why sums of these forms, with earlier ones, could reveal the responses of single members.

        >>> cohort = Cohort(Path("none.json"))
        >>> cohort.forms = {"outputs": frozenset({"logits by size"})}
        >>> cohort.clash({"outputs": "logits by mean"})
        'it has added logits by size, and would add logits by mean: both could reveal single responses'
        >>> cohort.clash({"parameters": "parameters by size"})
        """
        for subject, weighting in weightings.items():
            if others := self.weightings.get(subject, frozenset()) - {weighting}:
                earlier = ", ".join(sorted(others))
                return (
                    f"it has added {earlier}, and would add {weighting}: both could reveal single responses"
                )
        return None

    def conflicts(self, side: NodeSide, run: str = "") -> dict[str, str]:
        """Queries of a method that :meth:`clash`, by name, and why; ``run`` as for :meth:`NodeSide.weightings`."""
        reasons = {name: self.weighting_conflict(side.weightings(name, run)) for name in side.queries}
        return {
            name: f"sums: {reason}, {UNLESS_ALLOWED}"
            for name, reason in reasons.items()
            if reason is not None
        }

    def record_sum(self, members: Sequence[str], weightings: Mapping[str, str] | None = None) -> None:
        """Record a sum of these members and forms: on disk before anything leaves."""
        sets = [frozenset(members)] if frozenset(members) not in self.member_sets else []
        updated = {
            name: self.weightings.get(name, frozenset()) | {weighting}
            for name, weighting in (weightings or {}).items()
        }
        if sets or any(self.weightings.get(subject) != recorded for subject, recorded in updated.items()):
            self.member_sets, self.weightings = self.member_sets + sets, {**self.weightings, **updated}
            self._save()

    def record_weights(self, weighting: str, digest: str, may_differ: bool = False) -> str | None:
        """Return why a node's counts or size may not leave, or record them: on disk before they leave.

        With other weights a sum of the same responses is another equation, and the difference of two sums of
        counts is what one node's data gained. A digest of the weights is kept by the way of weighing.

        Args:
            may_differ: whether they may differ from earlier ones.

        >>> cohort = Cohort(Path("none.json"))
        >>> cohort.weights = {"counts": "8a31"}
        >>> cohort.settle("counts", "07f2")
        'its counts differ from those of its earlier sums, and both could reveal its responses'
        """
        if self.weight_digests.get(weighting) == digest:
            return None
        if weighting in self.weight_digests and not may_differ:
            return (
                f"its {weighting} differ from those of its earlier sums, and both could reveal its responses"
            )
        self.weight_digests = {**self.weight_digests, weighting: digest}
        self._save()
        return None

    def record_corrupted(self) -> None:
        """One more sum is spoilt: on disk before it leaves, too."""
        self.corrupted += 1
        self._save()

    def _save(self) -> None:
        table = {
            "sets": [sorted(names) for names in self.member_sets],
            "corrupted": self.corrupted,
            "weightings": {subject: sorted(names) for subject, names in self.weightings.items()},
            "weights": self.weight_digests,
        }
        private_files.replace_file(self._path, json.dumps(table).encode(), sync=True)


def _read_history(path: Path) -> tuple[list[list[str]], int, dict[str, list[str]], dict[str, str]]:
    """Read the file.

    Raises:
        RunFolderError: it holds something else, so that earlier sums are not known.
    """
    fault = RunFolderError(f"{path} does not tell which nodes were summed")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        sets, corrupted, weightings = table["sets"], table["corrupted"], table["weightings"]
        weights, lists = dict(table["weights"]), [*sets, *weightings.values()]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise fault from error
    if not isinstance(sets, list) or not all(isinstance(names, list) for names in lists):
        raise fault
    if not all(isinstance(name, str) for names in (*lists, weights.values()) for name in names):
        raise fault
    if type(corrupted) is not int or corrupted < 0:
        raise fault
    return sets, corrupted, weightings, weights
