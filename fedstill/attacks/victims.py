"""Nodes with a few images in a run's own protocol, what they release in one round, and attacks on that.

For a later round the victims take part from the first one on, beside the run's own nodes, some of which hold
the same images; all nodes take part in every round. Parameters that a method keeps at its nodes are unknown
to the server, but for the first round, which all nodes begin with the weights that it sent. For later rounds
it takes these first weights in their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import nn

from fedstill import models
from fedstill.attacks.gradient_matching import DLG, SEARCHES, invert
from fedstill.attacks.heard import HeardRelease
from fedstill.attacks.layerwise_inversion import invert_layers
from fedstill.attacks.recovered_images import Pixels, Recovered
from fedstill.attacks.rerun import Enough, Overheard, RepeatedRun
from fedstill.attacks.updates import Observed, Part, Schedule, shared
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.core.text_format import counted
from fedstill.models.copies import copied
from fedstill.models.extractor_head import EXTRACTOR, HEAD, split
from fedstill.models.parameter_vector import load_vector
from fedstill.protocol.kinds import EXTRACTOR_PARAMETERS, HEAD_PARAMETERS, PARAMETERS
from fedstill.protocol.local_config import Span

PARTS: Mapping[str, Part] = {
    PARAMETERS: "all",
    EXTRACTOR_PARAMETERS: "extractor",
    HEAD_PARAMETERS: "head",
}


@dataclass(frozen=True, eq=False)
class Victim:
    """One node's release, and what it was made from.

    Args:
        data: what the node holds: the truth, for comparison alone.
        part: of the parameters, that was shared.
        beside: what its training descended beside the task's own loss; "" where that was all.
    """

    release: Observed
    data: TensorData
    part: Part
    schedule: Schedule
    beside: str


def victims(again: RepeatedRun, seed: int, *, count: int, images: int, round: int) -> list[Victim]:
    """``count`` nodes with a few images each, and what left them in the round that is attacked.

    Raises:
        FedstillError: the method shares no parameters, or not in this round; or its task has other than one
            label an image; one line says why.
    """
    run, setting = again.config, again.setting
    if setting.task.kind != "class" or setting.task.form != "images":
        raise ArgumentError("task", setting.task.name, "one label an image, for gradient inversion")
    if round >= run.method.turns:
        raise ArgumentError("inversion.round", round, f"0 .. {run.method.turns - 1}, as in the run")
    parts = _drawn(again.parts, count, images, seed)
    before = list(again.parts) if round else []
    names = [f"victim-{at}" for at in range(len(parts))]
    shape, classes = again.shape, len(again.data.classes)
    own = [models.build(run.nodes.models[0], shape, classes, run.seed, name) for name in names]
    nodes = len(before) + len(parts)
    asked: Any = run.method
    everybody = {"participation": 1.0} if hasattr(asked, "participation") else {}
    experiment = again.experiment(
        parts=[*before, *parts],
        models=[*setting.models[: len(before)], *own],
        names=[*(f"node-{at}" for at in range(len(before))), *names],
        policies=[run.nodes.policy] * nodes,
        privacies=[run.nodes.privacy] * nodes,
        method=replace(asked, **everybody),
    )
    heard = _heard(experiment, names, round)
    schedule = Schedule.of(run.nodes.local, images, Span(round, round + 1, run.method.turns))
    first = models.build(run.student.model, shape, classes, run.seed, "student")
    one = round == 0 and len(schedule.rates) == 1  # nothing stands beside the task's loss yet
    found = []
    for name, part in zip(names, parts, strict=True):
        beside = "" if one else experiment.side.questions[heard[name].question].beside
        found.append(_victim(copied(first), heard[name], schedule, part, beside))
    return found


def attacked(victim: Victim, attack: str, pixels: Pixels, seed: int, steps: int = DLG.steps) -> Recovered:
    """What one attack gets of one node, in the order of what the node holds.

    Args:
        steps: of L-BFGS, for the attacks that take them.

    Raises:
        ArgumentError: the attack does not apply to what was released.
    """
    shape, count = cast(tuple[int, int, int], tuple(victim.data.inputs.shape[1:])), len(victim.data)
    local, one = len(victim.schedule.rates), victim.release.is_gradient
    if one and victim.schedule.optimiser == "adam" and attack != "inverting":
        raise ArgumentError("nodes.local.optimiser", "adam", "sgd, as Adam's first step tells signs alone")
    if attack == "layers":
        if not one:
            raise ArgumentError("steps of SGD in a round", local, "1, for layer by layer")
        got = invert_layers(victim.release, shape, count, pixels=pixels, seed=seed)
    else:
        config = SEARCHES[attack]
        if attack != "inverting":
            config = replace(config, steps=steps)
        elif victim.part == EXTRACTOR:  # there is no last layer to read labels from
            config = replace(config, labels="sought")
        got = invert(victim.release, shape, count, config, pixels=pixels, seed=seed)
    return got.against(victim.data.inputs, pixels)


def _drawn(parts: Sequence[TensorData], count: int, images: int, seed: int) -> list[TensorData]:
    """Images of the run's own nodes, each once: the first victim has those of the first node, and so on."""
    orders = (
        torch.randperm(len(part), generator=torch_generator(seed, "victims", at))
        for at, part in enumerate(parts)
    )
    pieces = [
        [(part, rows) for rows in torch.split(order, images) if len(rows) == images]
        for part, order in zip(parts, orders, strict=True)
    ]
    drawn = [piece for turn in zip_longest(*pieces) for piece in turn if piece is not None]
    if len(drawn) < count:
        raise ArgumentError("inversion.victims", count, f"at most {len(drawn)} of {images} images")
    return [replace(part.subset(rows), cases=None, groups=None) for part, rows in drawn[:count]]


def _heard(experiment: Overheard, names: Sequence[str], round: int) -> dict[str, HeardRelease]:
    """Each victim's parameters as they left it in a round, with what it had been sent."""
    heard: dict[str, list[HeardRelease]] = {name: [] for name in names}

    def hear(release: HeardRelease) -> None:
        if release.node in heard and set(PARTS) & set(release.kinds.values()):
            heard[release.node].append(release)
        if all(len(releases) > round for releases in heard.values()):
            raise Enough

    if experiment.listen(hear):
        raise ArgumentError("inversion.round", round, "a round in which all nodes take part")
    return {name: releases[round] for name, releases in heard.items()}


def _victim(
    model: nn.Module, release: HeardRelease, schedule: Schedule, data: TensorData, beside: str
) -> Victim:
    """A release as attacks take it: what changed, from the weights that the server sent."""
    (name,) = (name for name, kind in release.kinds.items() if kind in PARTS)
    kind = release.kinds[name]
    (down,) = (sent for sent, of in release.asked.items() if of == kind)
    part = PARTS[kind]
    after = copied(model)
    for network, vector in ((model, release.sent[down]), (after, release.tensors[name])):
        whole = network if part == "all" else split(network, "the victim's model").get_submodule(part)
        load_vector(whole, vector.cpu())
    learned, before = dict(after.named_parameters()), dict(model.named_parameters())
    changed = {name: (before[name] - learned[name]).detach() for name in shared(model, part)}
    update = Observed(model, changed, schedule)
    told = update.as_gradient() if len(schedule.rates) == 1 else update
    return Victim(told, data, part, schedule, beside)


def known(victim: Victim, round: int) -> str:
    """What the adversary has beside the release, in words."""
    schedule, part = victim.schedule, victim.part
    steps = f"{counted(len(schedule.rates), 'step')} of {schedule.optimiser.upper()}"
    knows = f"the server knows what it sent and how nodes train ({steps})"
    if part != "all":
        kept = {EXTRACTOR: "head", HEAD: "extractor"}[part]
        knows += (
            f"; in the first round also the {kept}, as all nodes begin with weights that it sent"
            if round == 0
            else f"; of the {kept}, which stays at the node, it has only the first weights"
        )
    if victim.beside:
        knows += f"; the attack, which is weaker for it, leaves out that nodes also descend {victim.beside}"
    return knows
