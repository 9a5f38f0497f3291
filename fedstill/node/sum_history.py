"""Record of a node's sums under secure aggregation over all runs, in a file: members, statistics, corrupted
sums.

Two sums of different members, or of different statistics of the same responses, reveal more than either:
see :class:`SumHistory`.
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
    """Members and weightings of all sums to which this node has added, kept in a file over all runs.

    The difference of two sums with different members is the sum of the responses of the nodes that were in
    only one of them. Large differences are not enough either: a sum of seven nodes minus two sums of three
    of them is one node's response, and six of the seven see only two of the sums. So a node adds only with
    the members with which it has added before. If the owner allows other members, all sets are recorded, so
    that none of them is accepted once the permission is withdrawn.

    Sums of the same members are not harmless in any number either. The sums over three nodes of their
    logits with equal weights, by size and by counts are three equations with three unknowns; so are sums of
    log-probabilities and of entropies, which are functions of the same logits. So a node adds one statistic
    of its networks' outputs with one weighting, in all runs and queries (:meth:`NodeSide.weightings`). All
    that a server reads are then values and derivatives of one function, the weighted sum of the nodes'
    functions, and any other nodes with the same sum would have sent the same.

    Attributes:
        member_sets: sets of members of earlier sums.
        corrupted: number of sums in which random numbers replaced this node's response, because it could
            not be added. A server sees that a sum is corrupted; if it chooses the inputs, each such sum
            reveals one bit of a response.
        weightings: weightings of earlier sums, by subject.
        weight_digests: digest of the weights, by weighting.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        sets, self.corrupted, forms, self.weight_digests = (
            _read_history(path) if path.exists() else ([], 0, {}, {})
        )
        self.member_sets = [frozenset(names) for names in sets]
        self.weightings = {subject: frozenset(names) for subject, names in forms.items()}

    def member_conflict(self, members: Sequence[str]) -> str | None:
        """Return the reason why a sum of these members, together with earlier ones, could reveal responses;
        or None.

        >>> history = SumHistory(Path("none.json"))
        >>> history.member_sets = [frozenset("abcd")]
        >>> history.member_conflict("abc")
        'it would add with and without d, and the difference would reveal their responses'
        """
        changed = {name for earlier in self.member_sets for name in earlier ^ set(members)}
        if not changed:
            return None
        changed_names = " and ".join(sorted(changed))
        return (
            f"it would add with and without {changed_names}, and the difference would reveal their responses"
        )

    def weighting_conflict(self, weightings: Mapping[str, str]) -> str | None:
        """Return the reason why sums of these weightings, together with earlier ones, could reveal
        responses; or None.

        >>> history = SumHistory(Path("none.json"))
        >>> history.weightings = {"outputs": frozenset({"logits by size"})}
        >>> history.weighting_conflict({"outputs": "logits by mean"})
        'it has added logits by size, and would add logits by mean: both could reveal single responses'
        >>> history.weighting_conflict({"parameters": "parameters by size"})
        """
        for subject, weighting in weightings.items():
            if others := self.weightings.get(subject, frozenset()) - {weighting}:
                earlier = ", ".join(sorted(others))
                return (
                    f"it has added {earlier}, and would add {weighting}: both could reveal single responses"
                )
        return None

    def weighting_conflicts(self, side: NodeSide, run: str = "") -> dict[str, str]:
        """Return the queries of a method with a :meth:`weighting_conflict`, and the reason for each.

        ``run`` as in :meth:`NodeSide.weightings`.
        """
        reasons = {name: self.weighting_conflict(side.weightings(name, run)) for name in side.queries}
        return {
            name: f"sums: {reason}, {UNLESS_ALLOWED}"
            for name, reason in reasons.items()
            if reason is not None
        }

    def record_sum(self, members: Sequence[str], weightings: Mapping[str, str] | None = None) -> None:
        """Record a sum of these members and weightings, on disk before the release."""
        sets = [frozenset(members)] if frozenset(members) not in self.member_sets else []
        updated = {
            name: self.weightings.get(name, frozenset()) | {weighting}
            for name, weighting in (weightings or {}).items()
        }
        if sets or any(self.weightings.get(subject) != recorded for subject, recorded in updated.items()):
            self.member_sets, self.weightings = self.member_sets + sets, {**self.weightings, **updated}
            self._save()

    def record_weights(self, weighting: str, digest: str, may_differ: bool = False) -> str | None:
        """Record a node's counts or size, on disk before their release, or return the reason why they may
        not be released.

        With other weights a sum of the same responses is another equation, and the difference of two sums
        of counts is what one node's data gained. The file holds a digest of the weights for each weighting.

        Args:
            weighting: ``"counts"`` or ``"size"``.
            digest: digest of the weights.
            may_differ: accept weights that differ from earlier ones.

        >>> history = SumHistory(Path("none.json"))
        >>> history.weight_digests = {"counts": "8a31"}
        >>> history.record_weights("counts", "07f2")
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

    def count_corrupted_sum(self) -> None:
        """Count one more corrupted sum, on disk before the release."""
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
        RunFolderError: the file has another content, so that earlier sums are not known.
    """
    fault = RunFolderError(f"{path} is not a record of earlier sums")
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
