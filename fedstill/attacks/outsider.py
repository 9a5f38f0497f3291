"""What an outsider sees of a run: outputs of its central model, or of what stands for it.

Some methods have no central model: then the average of the nodes' models is attacked, or all of them, of
which the one speaks that is surest of the record's label. Nobody in the run is given these; it is what they
would tell if they were used.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedstill.attacks.candidates import Candidates
from fedstill.attacks.heard import Heard
from fedstill.attacks.membership_scores import confidence
from fedstill.attacks.rerun import Overheard, RepeatedRun
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.seeds import numpy_generator
from fedstill.data import split_base
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.protocol.kinds import INPUTS
from fedstill.protocol.summing import SUM

OF = {
    "student": ("student", "the central model's outputs about any input"),
    "virtual": (
        "average of the nodes' models",
        "the outputs of the nodes' average about any input, which nobody in this run is given",
    ),
    "ensemble": ("ensemble", "what the ensemble answers about any input, through the nodes' gates"),
    "nodes": (
        "nodes' models",
        "the outputs of every node's own model about any input, which nobody in this run is given",
    ),
}
TESTED = 100  # test records that a shadow federation is measured on; nobody looks at it


def outsider(experiment: Overheard, records: TensorData) -> torch.Tensor:
    """What the central model, or what stands for it, says about records: logits ``(N, classes)``."""
    inputs = records.inputs.to(experiment.compute.device)
    if experiment.method.central == "ensemble":
        experiment.reopen()
        server, parts = experiment.server, torch.split(inputs, local_training.at_once(inputs))
        question, name = _scored(experiment)
        asked = [server.ensemble(server.ask(question, **{name: part})) for part in parts]  # type: ignore[arg-type]
        return torch.cat([each for each in asked if each is not None]).float().cpu()
    told = experiment.answers(inputs)
    if told is not None:
        return told.float().cpu()
    each = torch.stack(
        [local_training.predict(node.model, inputs, experiment.compute) for node in experiment.nodes]
    )
    each = each.cpu()  # (K, N, classes)
    sure = torch.stack([confidence(told, records.targets) for told in each])  # (K, N)
    return each[sure.argmax(0), torch.arange(len(records))]


def _scored(experiment: Overheard) -> tuple[str, str]:
    """The question that is answered with scores of any inputs, and what its inputs are called."""
    return next(
        (question.name, name)
        for question in experiment.side.questions.values()
        for name, kind in question.sends.items()
        if kind == INPUTS and any(released.of == "scores" for released in question.releases.values())
    )


def taught(experiment: Overheard, nodes: set[str]) -> list[Node]:
    """The nodes whose records may have come to what is attacked, given those that were heard to teach."""
    by_themselves = experiment.method.central in ("nodes", "ensemble")
    all_of_them = by_themselves or SUM in nodes
    return [node for node in experiment.nodes if all_of_them or node.name in nodes]


def federation(
    again: RepeatedRun, asked: Candidates, row: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A run with the same method, on other records and with other draws.

    Returns:
        What it says about the candidates ``(N + Z, classes)``, and which of them it learned from ``(N,)``: of
        those that it was to learn from, ``row``, without those of nodes that were not drawn.
    """
    rows = row.nonzero().flatten()
    part, run = asked.records.subset(rows), again.config
    generator = numpy_generator(seed, "split")
    try:
        indices = split_base.split(part.targets, len(again.data.classes), run.split, generator)
    except FedstillError as error:
        if isinstance(error, ArgumentError) and error.name == "split.column":
            told = "alone, where data are split by a column"
            raise ArgumentError("membership.trained", "federations", told) from error
        allowed = f"more, or membership.trained = alone ({error})"
        raise ArgumentError("membership.records", len(asked.records), allowed) from error
    test = again.data.test.subset(torch.arange(min(TESTED, len(again.data.test))))
    shadow = replace(
        again,
        config=replace(run, seed=seed),
        data=replace(again.data, test=test),
        parts=[part.subset(own) for own in indices],
    ).experiment()
    heard = Heard(0)
    shadow.listen(lambda release: heard.take(release, shadow.public))
    names = {node.name for node in taught(shadow, heard.taught)}
    learned = torch.zeros_like(row)
    for node, own in zip(shadow.nodes, indices, strict=True):
        if node.name in names:
            learned[rows[own]] = True
    return outsider(shadow, asked.all), learned
