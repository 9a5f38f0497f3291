"""Label counts: the class histogram that each node released, compared with the true one.

Methods that weight responses by the nodes' knowledge query the number of examples of each class; the audit
log calls them "label counts". Reading them needs no attack: they show which diseases a hospital treats, and
how often, up to the noise that the node's owner chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.attacks.attack import Attack, AttackResult, LeakageMetric, Target, format_percent
from fedstill.core.errors import MethodRefused
from fedstill.protocol.node_side import NodeSide
from fedstill.runs.simulation import Simulation

ABSENT_BELOW = 0.5  # smaller counts report a class as absent


@dataclass(frozen=True)
class LabelCounts(Attack):
    """Comparison of released label counts with the true ones."""

    title: ClassVar[str] = "Released label counts"
    notes: ClassVar[tuple[str, ...]] = (
        "Exact counts reveal how many records of each class the node has, and which classes are absent.",
    )

    def refusal(self, side: NodeSide) -> str | None:
        if side.sums:
            return "the server sees the sum of all nodes' label counts"
        if any(kind.by_class for kind in side.released_kinds()):
            return None
        return "no query for label counts was sent"

    def run(self, target: Target) -> AttackResult:
        nodes = compare_counts(target.transcript.counts, target.experiment)
        if not nodes:
            raise MethodRefused(target.experiment.method.title, "", "no node released label counts")
        return AttackResult({"nodes": nodes})

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
        nodes = part["nodes"]
        target = f"{len(nodes)} nodes"
        yield LeakageMetric(
            target=target,
            metric="label counts recovered exactly",
            text=f"at {sum(node['exact'] for node in nodes)} of {len(nodes)} nodes",
        )
        errors = [node["total_variation"] for node in nodes]
        if max(errors, default=0) > 0:
            yield LeakageMetric(
                target=target,
                metric="off by",
                text=f"{format_percent(min(errors))} to {format_percent(max(errors))}",
            )
        for node in nodes:
            yield from _detail_rows(node)

    def sentence(self, part: Mapping[str, Any]) -> str:
        if all(node["exact"] for node in part["nodes"]):
            return "Each node released the exact number of its examples of each class."
        max_error = max(node["total_variation"] for node in part["nodes"])
        return f"Nodes released noisy class counts: up to {100 * max_error:.0f} % are in a wrong class."


def _detail_rows(node: Mapping[str, Any]) -> Iterator[LeakageMetric]:
    target, exact, absent, reported_absent = (
        node["node"],
        node["exact"],
        node["absent"],
        node["reported_absent"],
    )
    yield LeakageMetric(target=target, metric="counts", text="exact" if exact else "noised", detail=True)
    largest = "" if exact else f"class {node['largest_class']}"
    error = f"{100 * node['largest_error']:.1f}"
    yield LeakageMetric(
        target=target, metric="shares off by, points at most", text=error, note=largest, detail=True
    )
    size = node["size_error"]
    yield LeakageMetric(
        target=target, metric="size off by", text=f"{size:+,.1f}" if size else "0", detail=True
    )
    correct, incorrect = (
        [name for name in reported_absent if (name in absent) == is_absent] for is_absent in (True, False)
    )
    text = f"{len(correct)} of {len(absent)} classes" if absent else "no class is absent"
    named = f": {', '.join(correct)}" if correct else ""
    note = f"reported as absent, but present: {', '.join(incorrect)}" if incorrect else ""
    yield LeakageMetric(target=target, metric="known to be absent", text=text + named, note=note, detail=True)


def compare_counts(released: Mapping[str, torch.Tensor], experiment: Simulation) -> list[dict[str, Any]]:
    """Compare the label counts ``(C,)`` that each node released with the true ones, in the order of the
    nodes.

    Nodes that released none, or hold nothing that is counted (all findings absent), have no entry.
    """
    names, records = list(experiment.setting.classes), []
    for node in experiment.nodes:
        true_counts = experiment.task.counts(node.data)
        if node.name in released and true_counts.sum() > 0:
            classes = names if len(names) == len(true_counts) else None  # images, say, are of no class
            records.append(
                {"node": node.name, **compare_histograms(released[node.name], true_counts, classes)}
            )
    return records


def compare_histograms(
    released: torch.Tensor, true: torch.Tensor, classes: Sequence[str] | None = None
) -> dict[str, Any]:
    """Compare one node's released counts with the true ones.

    A class share is the class's part of all counts. Negative counts count as 0; without any positive count
    all classes have equal shares.

    Args:
        released: by class ``(C,)``, as they left the node's gate.
        true: by class ``(C,)``, 0 or more, not all of them 0.
        classes: names; default: the indices.

    Returns:
        ``exact``: whether all counts are equal (noise may lead to this by chance, but rarely).
            ``total_variation``: half the summed differences of class shares, from 0 (equal) to 1
            (disjoint). ``largest_error`` and ``largest_class``:
        the largest difference of a share, and its class. ``size_error``: total of the released counts minus
            that of the
        true ones. ``absent`` and ``reported_absent``: classes without records at the node, and those
            released as 0.

    >>> record = compare_histograms(torch.tensor([6.0, 0.0, 4.0]), torch.tensor([5.0, 0.0, 5.0]))
    >>> round(record["total_variation"], 3), record["largest_class"], record["reported_absent"]
    (0.1, '0', ['1'])
    """
    released, true = released.detach().double().cpu(), true.detach().double().cpu()
    names = [str(index) for index in range(len(true))] if classes is None else list(classes)
    errors = (_class_shares(released) - _class_shares(true)).abs()
    worst = int(errors.argmax())
    return {
        "exact": torch.equal(released, true),
        "total_variation": float(errors.sum() / 2),
        "largest_error": float(errors[worst]),
        "largest_class": names[worst],
        "size_error": float(released.sum() - true.sum()),
        "absent": [name for name, count in zip(names, true.tolist(), strict=True) if count == 0],
        "reported_absent": [
            name for name, count in zip(names, released.tolist(), strict=True) if count < ABSENT_BELOW
        ],
    }


def _class_shares(counts: torch.Tensor) -> torch.Tensor:
    """Share of each class, ``(C,)`` float64, summing to 1; equal shares without any records."""
    positive = counts.clamp_min(0)
    total = positive.sum()
    return positive / total if total > 0 else torch.full_like(counts, 1 / len(counts))
