"""Gradient inversion against a run's own protocol: what a node with a few images would have released.

Nobody inverts the update of thousands of images. So the case that is easiest for the attack is tried: nodes
that hold one image, or a few, take part in the run as it is configured, and what their gates let out in one
round is attacked by the server, who knows what it sent and how nodes train. A node that holds more loses
less to this attack; how much less, larger ``images`` tell.

For a later round the victims take part from the first one on, beside the run's own nodes, some of which hold
the same images; all nodes take part in every round. Parameters that a method keeps at its nodes are unknown
to the server, but for the first round, which all nodes begin with the weights that it sent. For later rounds
it takes these first weights in their place.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from fedstill import models
from fedstill.attacks.heard import Replay
from fedstill.attacks.inversion import ATTACKS, invert
from fedstill.attacks.layers import invert_layers
from fedstill.attacks.recovered import Pixels, Recovered, psnr
from fedstill.attacks.tap import Enough, Overheard, Release
from fedstill.attacks.updates import Gradient, Part, Schedule, Update, as_gradient, shared
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, MethodRefused
from fedstill.core.seeds import derive, torch_generator
from fedstill.models.split import EXTRACTOR, HEAD, split
from fedstill.models.vector import load_vector
from fedstill.protocol.kinds import EXTRACTOR_PARAMETERS, HEAD_PARAMETERS, PARAMETERS
from fedstill.protocol.schedule import Span

TITLES = {
    "dlg": "DLG",
    "idlg": "iDLG",
    "inverting": "inverting gradients",
    "layers": "layer by layer",
}
PARTS: Mapping[str, Part] = {
    PARAMETERS: "all",
    EXTRACTOR_PARAMETERS: "extractor",
    HEAD_PARAMETERS: "head",
}
SHARED = {"all": "all parameters", EXTRACTOR: "the extractor", HEAD: "the head"}
REAL = 500  # images that the guess is the mean of


@dataclass(frozen=True)
class InversionsConfig:
    """Which nodes are attacked by gradient inversion, and how."""

    victims: int = 4
    """Nodes that are attacked, each with images of its own."""
    images: int = 1
    """Images that each of them holds."""
    round: int = 0
    """The round whose release is attacked; 0 is the first. Before a later one, the run's own nodes take part,
    so that parameters are what they would be then."""
    attacks: tuple[str, ...] = ("dlg", "idlg", "inverting", "layers")
    """dlg, idlg, inverting (gradients) and layers (layer by layer, for LeNet-5 with ReLU and max pooling)."""

    def __post_init__(self) -> None:
        for name, least in (("victims", 1), ("images", 1), ("round", 0)):
            if getattr(self, name) < least:
                raise ArgumentError(f"inversion.{name}", getattr(self, name), f"{least} or more")
        if not self.attacks or not set(self.attacks) <= set(TITLES):
            raise ArgumentError("inversion.attacks", list(self.attacks), f"some of {', '.join(TITLES)}")


@dataclass(frozen=True, eq=False)
class Inverted:
    """What gradient inversion got of a run's protocol.

    Args:
        told: the part of ``leakage.json``.
        pictures: originals and recovered images ``(V B, C, H, W)`` uint8, by name.
        refused: attacks that could not be tried, with the reason.
    """

    told: dict[str, Any]
    pictures: dict[str, torch.Tensor]
    refused: list[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class Victim:
    """One node's release, and what it was made from.

    Args:
        release: as attacks take it.
        data: what the node holds: the truth, for comparison alone.
        part: of the parameters, that was shared.
        schedule: how the node trained.
        beside: what its training descended beside the task's own loss; "" where that was all.
    """

    release: Update | Gradient
    data: TensorData
    part: Part
    schedule: Schedule
    beside: str


def section(again: Replay, config: InversionsConfig, seed: int) -> Inverted:
    """Attack victims of a run.

    Args:
        again: what the run was made of.
        config: whom to attack, and how.
        seed: of victims and searches.

    Raises:
        FedstillError: the method shares no parameters, or not in this round; or its task has other than one
            label an image; one line says why.
    """
    found = victims(again, config, seed)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (again.data.mean, again.data.std))
    pixels = Pixels((0 - mean) / std, (1 - mean) / std)
    originals = torch.cat([victim.data.inputs for victim in found])
    pictures = {"inversion.original": _bytes(originals, pixels)}
    told: list[dict[str, Any]] = []
    means: dict[str, float] = {}
    refused: list[tuple[str, str]] = []
    for name in config.attacks:
        start = time.monotonic()
        try:
            got = [
                attacked(victim, name, pixels, derive(seed, "victim", at)) for at, victim in enumerate(found)
            ]
        except ArgumentError as error:
            refused.append((f"inversion: {TITLES[name]}", str(error)))
            continue
        values = torch.tensor([value for each in got for value in each.psnr], dtype=torch.float64)
        means[name] = float(values.mean())
        labels = torch.cat([victim.data.targets for victim in found])
        right = int((torch.cat([each.labels for each in got]) == labels).sum())
        told.append(
            {
                "name": name,
                "title": TITLES[name],
                "psnr": {
                    "mean": means[name],
                    "std": float(values.std(correction=0)),
                    "per_image": values.tolist(),
                },
                "labels": {"right": right, "of": len(labels)},
                "seconds": time.monotonic() - start,
            }
        )
        pictures[f"inversion.{name}"] = _bytes(torch.cat([each.images for each in got]), pixels)
    if not told:
        raise MethodRefused(again.config.method.title, "every victim", refused[0][1])
    schedule = found[0].schedule
    return Inverted(
        {
            "shared": SHARED[found[0].part],
            "known": _known(found[0], config.round),
            "images": config.images,
            "round": config.round,
            "steps": len(schedule.rates),
            "optimiser": schedule.optimiser,
            "victims": config.victims,
            "smallest": min(map(len, again.parts)),
            "guess": float(psnr(_mean_image(again.parts).expand_as(originals), originals, pixels).mean()),
            "attacks": told,
            "best": max(means, key=means.__getitem__),
        },
        pictures,
        refused,
    )


def victims(again: Replay, config: InversionsConfig, seed: int) -> list[Victim]:
    """Nodes with a few images each, and what left them in the round that is attacked.

    Raises:
        FedstillError: see :func:`section`.
    """
    run, method = again.config, again.config.method
    setting = again.setting
    if setting.task.kind != "class" or setting.task.tokens:
        raise ArgumentError("task", setting.task.name, "one label an image, for gradient inversion")
    parts = _drawn(again.parts, config, seed)
    before = list(again.parts) if config.round else []
    names = [f"victim-{at}" for at in range(len(parts))]
    shape, classes = tuple(again.data.test.inputs.shape[1:]), len(again.data.classes)
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
    if not set(PARTS) & set(experiment.side.leaves()):
        raise MethodRefused(method.title, "every node", "gradient inversion needs parameters, and none leave")
    if config.round >= run.method.turns:
        raise ArgumentError("inversion.round", config.round, f"0 .. {run.method.turns - 1}, as in the run")
    heard, schedule = _heard(experiment, names, config.round), _schedule(again, config)
    first = models.build(run.student.model, shape, classes, run.seed, "student")
    one = config.round == 0 and len(schedule.rates) == 1  # nothing stands beside the task's loss yet
    return [
        _victim(
            copy.deepcopy(first),
            heard[name],
            schedule,
            part,
            "" if one else experiment.side.questions[heard[name].question].beside,
        )
        for name, part in zip(names, parts, strict=True)
    ]


def attacked(victim: Victim, attack: str, pixels: Pixels, seed: int) -> Recovered:
    """What one attack gets of one node, in the order of what the node holds.

    Raises:
        ArgumentError: the attack does not apply to what was released.
    """
    shape, count = cast(tuple[int, int, int], tuple(victim.data.inputs.shape[1:])), len(victim.data)
    one = isinstance(victim.release, Gradient)
    if one and victim.schedule.optimiser == "adam" and attack != "inverting":
        raise ArgumentError("nodes.local.optimiser", "adam", "sgd, as Adam's first step tells signs alone")
    if attack == "layers":
        if not isinstance(victim.release, Gradient):
            raise ArgumentError(
                "steps of SGD in a round", len(victim.schedule.rates), "1, for layer by layer"
            )
        got = invert_layers(victim.release, shape, count, pixels=pixels, seed=seed)
    else:
        config = ATTACKS[attack]
        if attack == "inverting" and victim.part == EXTRACTOR:  # there is no last layer to read labels from
            config = replace(config, labels="sought")
        got = invert(victim.release, shape, count, config, pixels=pixels, seed=seed)
    return got.against(victim.data.inputs, pixels)


def _drawn(parts: Sequence[TensorData], config: InversionsConfig, seed: int) -> list[TensorData]:
    """Images of the run's own nodes, each once: the first victim has those of the first node, and so on."""
    orders = [
        torch.split(torch.randperm(len(part), generator=torch_generator(seed, "victims", at)), config.images)
        for at, part in enumerate(parts)
    ]
    pieces = [[rows for rows in order if len(rows) == config.images] for order in orders]
    turns = max(map(len, pieces))
    drawn = [
        parts[at].subset(rows[turn])
        for turn in range(min(turns, config.victims))
        for at, rows in enumerate(pieces)
        if turn < len(rows)
    ]
    if len(drawn) < config.victims:
        most = sum(map(len, pieces))
        raise ArgumentError("inversion.victims", config.victims, f"at most {most} of {config.images} images")
    return [replace(part, cases=None, groups=None) for part in drawn[: config.victims]]


def _heard(experiment: Overheard, names: Sequence[str], round: int) -> dict[str, Release]:
    """Each victim's parameters as they left it in a round, with what it had been sent."""
    heard: dict[str, list[Release]] = {name: [] for name in names}

    def hear(release: Release) -> None:
        if release.node in heard and set(PARTS) & set(release.kinds.values()):
            heard[release.node].append(release)
        if all(len(releases) > round for releases in heard.values()):
            raise Enough

    if experiment.listen(hear):
        raise ArgumentError("inversion.round", round, "a round in which all nodes take part")
    return {name: releases[round] for name, releases in heard.items()}


def _schedule(again: Replay, config: InversionsConfig) -> Schedule:
    """How a node with so many images trains in the round that is attacked."""
    span = Span(config.round, config.round + 1, again.config.method.turns)
    return Schedule.of(again.config.nodes.local, config.images, span)


def _victim(model: nn.Module, release: Release, schedule: Schedule, data: TensorData, beside: str) -> Victim:
    """A release as attacks take it: what changed, from the weights that the server sent.

    One step of SGD tells the gradient itself. Adam's first step tells little more than its signs: these then
    stand for it, for an attack that goes by direction alone.
    """
    (name,) = (name for name, kind in release.kinds.items() if kind in PARTS)
    kind = release.kinds[name]
    (down,) = (sent for sent, of in release.asked.items() if of == kind)
    part = PARTS[kind]
    after = copy.deepcopy(model)
    for network, vector in ((model, release.sent[down]), (after, release.tensors[name])):
        whole = network if part == "all" else split(network, "the victim's model").get_submodule(part)
        load_vector(whole, vector.cpu())
    learned, before = dict(after.named_parameters()), dict(model.named_parameters())
    changed = {name: (before[name] - learned[name]).detach() for name in shared(model, part)}
    update = Update(model, changed, schedule)
    if len(schedule.rates) > 1:
        return Victim(update, data, part, schedule, beside)
    slopes = {name: moved / schedule.rates[0] for name, moved in changed.items()}
    exact = as_gradient(update) or Gradient(model, slopes, schedule.smoothing, schedule.training)
    return Victim(exact, data, part, schedule, beside)


def _known(victim: Victim, round: int) -> str:
    """What the adversary has beside the release, in words."""
    schedule, part = victim.schedule, victim.part
    steps = f"{len(schedule.rates)} step{'' if len(schedule.rates) == 1 else 's'}"
    knows = f"the server knows what it sent and how nodes train ({steps} of {schedule.optimiser.upper()})"
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


def _mean_image(parts: Sequence[TensorData]) -> torch.Tensor:
    """What real images are on the mean, ``(C, H, W)``: who knows that needs no attack to guess so much."""
    some = torch.cat([part.inputs[: max(1, REAL // len(parts))] for part in parts])
    return some.mean(0)


def _bytes(images: torch.Tensor, pixels: Pixels) -> torch.Tensor:
    return pixels.unit(images.detach().cpu()).clamp(0, 1).mul(255).round().to(torch.uint8).contiguous()
