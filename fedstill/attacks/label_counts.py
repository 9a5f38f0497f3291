"""What each node of a run told of its classes, beside what it holds: the report's part on label counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from fedstill.attacks.histograms import histogram
from fedstill.core.errors import UnknownName
from fedstill.runs.experiment import Experiment


def counts(told: Mapping[str, torch.Tensor], experiment: Experiment) -> list[dict[str, Any]]:
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
