"""Label counts: the class histogram that each node gave away, beside the one that it has.

Methods that weigh answers by who knows what ask nodes how many examples they hold of each class; the
audit log has it as "label counts". That is an answer, not an attack: who reads it knows which diseases a
hospital treats, and how often, up to the noise that the node's owner asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.attacks.attack import Attack, AttackResult, Target
from fedstill.attacks.leakage import LeakageMetric, format_percent
from fedstill.core.errors import MethodRefused
from fedstill.protocol.queries import NodeSide
from fedstill.runs.simulation import Simulation

ABSENT_BELOW = 0.5  # told counts below this say that a class is not there


@dataclass(frozen=True)
class LabelCounts(Attack):
    """Label counts beside the true ones."""

    title: ClassVar[str] = "What label counts told"
    notes: ClassVar[tuple[str, ...]] = (
        "Whoever reads exact counts knows how many records of each class the node has, and which classes "
        "it has none of.",
    )

    def refusal(self, side: NodeSide) -> str | None:
        if side.sums:
            return "the server sees the sum of all nodes' label counts"
        if any(kind.by_class for kind in side.leaves()):
            return None
        return "no node was asked for its label counts"

    def run(self, target: Target) -> AttackResult:
        found = compare_counts(target.heard.counts, target.experiment)
        if not found:
            raise MethodRefused(target.experiment.method.title, "every node", "no node told label counts")
        return AttackResult({"nodes": found})

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
        nodes = part["nodes"]
        who = f"{len(nodes)} nodes"
        yield LeakageMetric(
            who=who, metric="exact", text=f"of {sum(node['exact'] for node in nodes)} of {len(nodes)}"
        )
        off = [node["total_variation"] for node in nodes]
        if max(off, default=0) > 0:
            yield LeakageMetric(
                who=who, metric="off by", text=f"{format_percent(min(off))} to {format_percent(max(off))}"
            )
        for node in nodes:
            yield from _detail_rows(node)

    def sentence(self, part: Mapping[str, Any]) -> str:
        if all(node["exact"] for node in part["nodes"]):
            return "Each node told exactly how many examples of each class it holds."
        worst = max(node["total_variation"] for node in part["nodes"])
        return f"Nodes told their class counts with noise: up to {100 * worst:.0f} % are in a wrong class."


def _detail_rows(node: Mapping[str, Any]) -> Iterator[LeakageMetric]:
    who, exact, lacks, told = node["node"], node["exact"], node["absent"], node["told_absent"]
    yield LeakageMetric(who=who, metric="counts", text="exact" if exact else "noised", detail=True)
    of = "" if exact else f"class {node['largest_class']}"
    off = f"{100 * node['largest_error']:.1f}"
    yield LeakageMetric(who=who, metric="shares off by, points at most", text=off, says=of, detail=True)
    size = node["size_error"]
    yield LeakageMetric(who=who, metric="size off by", text=f"{size:+,.1f}" if size else "0", detail=True)
    both, wrong = ([name for name in told if (name in lacks) == there] for there in (True, False))
    absent = f"{len(both)} of {len(lacks)} classes" if lacks else "it lacks no class"
    named = f": {', '.join(both)}" if both else ""
    says = f"told as absent, but there: {', '.join(wrong)}" if wrong else ""
    yield LeakageMetric(who=who, metric="known to be absent", text=absent + named, says=says, detail=True)


def compare_counts(told: Mapping[str, torch.Tensor], experiment: Simulation) -> list[dict[str, Any]]:
    """How near to the truth the label counts ``(C,)`` are that left each node, in the order of the nodes.

    Those that told nothing, or hold nothing that is counted (findings, of which all are absent), have no
    entry.
    """
    names, found = list(experiment.setting.classes), []
    for node in experiment.nodes:
        true = experiment.task.counts(node.data)
        if node.name in told and true.sum() > 0:
            classes = names if len(names) == len(true) else None  # images, say, are of no class
            found.append({"node": node.name, **compare_histograms(told[node.name], true, classes)})
    return found


def compare_histograms(
    told: torch.Tensor, true: torch.Tensor, classes: Sequence[str] | None = None
) -> dict[str, Any]:
    """What somebody knows of a node's classes who was told counts.

    A class share is a class's part of all that is told: told counts below 0 count as 0, and where nothing is
    left, every class is as likely as another.

    Args:
        told, true: by class ``(C,)``; as they left the node's gate, and 0 or more, not all of them 0.
        classes: names; without them their numbers.

    Returns:
        ``exact``: whether each count is told as it is (with noise that happens by chance, if seldom).
        ``total_variation``: half the summed differences of class shares, 0 (the same) .. 1 (nothing in
        common). ``largest_error`` and ``largest_class``: the largest difference of a share, and whose.
        ``size_error``: examples told in all, less those that there are. ``absent`` and ``told_absent``:
        classes of which the node holds nothing, and those that are told as 0.

    >>> found = compare_histograms(torch.tensor([6.0, 0.0, 4.0]), torch.tensor([5.0, 0.0, 5.0]))
    >>> round(found["total_variation"], 3), found["largest_class"], found["told_absent"]
    (0.1, '0', ['1'])
    """
    told, true = told.detach().double().cpu(), true.detach().double().cpu()
    names = [str(place) for place in range(len(true))] if classes is None else list(classes)
    errors = (_class_shares(told) - _class_shares(true)).abs()
    worst = int(errors.argmax())
    return {
        "exact": torch.equal(told, true),
        "total_variation": float(errors.sum() / 2),
        "largest_error": float(errors[worst]),
        "largest_class": names[worst],
        "size_error": float(told.sum() - true.sum()),
        "absent": [name for name, count in zip(names, true.tolist(), strict=True) if count == 0],
        "told_absent": [
            name for name, count in zip(names, told.tolist(), strict=True) if count < ABSENT_BELOW
        ],
    }


def _class_shares(counts: torch.Tensor) -> torch.Tensor:
    """Each class's part, ``(C,)`` float64, summing to 1; of nothing, all alike."""
    positive = counts.clamp_min(0)
    whole = positive.sum()
    return positive / whole if whole > 0 else torch.full_like(counts, 1 / len(counts))
