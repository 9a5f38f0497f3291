"""What each node of a run told of its classes, beside what it holds: the report's part on label counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from fedstill.attacks.attack import Attack, Found, Target
from fedstill.attacks.histograms import histogram
from fedstill.attacks.rows import Row, share
from fedstill.core.errors import MethodRefused, UnknownName
from fedstill.protocol.questions import NodeSide
from fedstill.runs.simulation import Simulation


@dataclass(frozen=True)
class LabelCounts(Attack):
    """Label counts beside the true ones."""

    title: ClassVar[str] = "What label counts told"
    notes: ClassVar[tuple[str, ...]] = (
        "Whoever reads exact counts knows how many records of each class the node has, and which classes "
        "it has none of.",
    )

    def refusal(self, side: NodeSide) -> str | None:
        if any(kind.by_class for kind in side.leaves()):
            return None
        return "no node was asked for its label counts"

    def run(self, target: Target) -> Found:
        found = counts(target.heard.counts, target.experiment)
        if not found:
            raise MethodRefused(target.experiment.method.title, "every node", "no node told label counts")
        return Found({"nodes": found})

    def rows(self, part: Mapping[str, Any]) -> Iterator[Row]:
        nodes = part["nodes"]
        who = f"{len(nodes)} nodes"
        yield Row(who=who, figure="exact", text=f"of {sum(node['exact'] for node in nodes)} of {len(nodes)}")
        off = [node["total_variation"] for node in nodes]
        if max(off, default=0) > 0:
            yield Row(who=who, figure="off by", text=f"{share(min(off))} to {share(max(off))}")
        for node in nodes:
            yield from _details(node)

    def sentence(self, part: Mapping[str, Any]) -> str:
        if all(node["exact"] for node in part["nodes"]):
            return "Each node told exactly how many examples of each class it holds."
        worst = max(node["total_variation"] for node in part["nodes"])
        return f"Nodes told their class counts with noise: up to {100 * worst:.0f} % are in a wrong class."


def _details(node: Mapping[str, Any]) -> Iterator[Row]:
    """One node's line of the page."""
    who, exact, lacks, told = node["node"], node["exact"], node["absent"], node["told_absent"]
    yield Row(who=who, figure="counts", text="exact" if exact else "noised", detail=True)
    of = "" if exact else f"class {node['largest_class']}"
    off = f"{100 * node['largest_error']:.1f}"
    yield Row(who=who, figure="shares off by, points at most", text=off, says=of, detail=True)
    size = node["size_error"]
    yield Row(who=who, figure="size off by", text=f"{size:+,.1f}" if size else "0", detail=True)
    absent = f"{len(_both(lacks, told))} of {len(lacks)} classes" if lacks else "it lacks no class"
    named = f": {', '.join(_both(lacks, told))}" if _both(lacks, told) else ""
    wrong = [name for name in told if name not in lacks]
    says = f"told as absent, but there: {', '.join(wrong)}" if wrong else ""
    yield Row(who=who, figure="known to be absent", text=absent + named, says=says, detail=True)


def _both(lacks: Sequence[str], told: Sequence[str]) -> list[str]:
    return [name for name in lacks if name in told]


def counts(told: Mapping[str, torch.Tensor], experiment: Simulation) -> list[dict[str, Any]]:
    """How near to the truth the label counts are that left each node, ready for JSON.

    Args:
        told: counts by class ``(C,)``, as they left the gate, by the node's name.
        experiment: the run, whose nodes hold the truth.

    Returns:
        One entry a node, in the order of the run's nodes; those that told nothing, or hold nothing that is
        counted (findings, of which all are absent), have none.

    Raises:
        UnknownName: counts of a node that the run has not.
        ArgumentError: as :func:`fedstill.attacks.histograms.histogram` says.
    """
    known = [node.name for node in experiment.nodes]
    for name in told:
        if name not in known:
            raise UnknownName("node", name, known)
    names, found = list(experiment.setting.classes), []
    for node in experiment.nodes:
        true = experiment.task.counts(node.data)
        if node.name in told and true.sum() > 0:
            classes = names if len(names) == len(true) else None  # images, say, are of no class
            one = histogram(node.name, told[node.name], true, classes)
            absent = {"absent": list(one.absent), "told_absent": list(one.told_absent)}
            found.append({**asdict(one), **absent, "line": one.line})
    return found
