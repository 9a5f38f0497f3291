"""Gradient inversion: recover images from the parameters that a node with few images would release.

The update of thousands of images cannot be inverted. Victims with one image, or a few, therefore take part
in the run as it is configured, and the server attacks their release in one round, knowing what it sent and
how nodes train. A node with more images leaks less to this attack; larger ``images`` show how much less.

To attack a later round, the victims take part from the first round on, next to the run's own nodes, some of
which hold the same images; all nodes take part in every round. Parameters that a method keeps at its nodes
are unknown to the server except in the first round, which all nodes start with the weights that it sent. In
later rounds the attack uses these initial weights instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar, cast

import torch
from torch import nn

from fedstill import models
from fedstill.attacks.attack import (
    Attack,
    AttackResult,
    ComparisonColumn,
    ImageStrip,
    ImageTable,
    LeakageMetric,
    Target,
)
from fedstill.attacks.gradient_matching import DLG, SEARCHES, PixelRange, RecoveredImages, invert, psnr
from fedstill.attacks.layerwise_inversion import invert_layers
from fedstill.attacks.simulated_updates import ModelPart, ObservedUpdate, Schedule, shared_parameter_names
from fedstill.attacks.transcript import ObservedRelease, ObservedSimulation, ReplayedRun, StopListening
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, MethodRefused
from fedstill.core.options import NonNegativeInt, PositiveInt
from fedstill.core.seeds import derive, torch_generator
from fedstill.core.text_format import format_count, format_seconds
from fedstill.models.extractor_head import EXTRACTOR, HEAD, split_model
from fedstill.models.module_utils import deep_copy, load_vector
from fedstill.protocol.local_config import Span
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import EXTRACTOR_PARAMETERS, HEAD_PARAMETERS, PARAMETERS
from fedstill.runs.build import SimulatedNode

PART_OF_KIND: Mapping[str, ModelPart] = {
    PARAMETERS: "all",
    EXTRACTOR_PARAMETERS: "extractor",
    HEAD_PARAMETERS: "head",
}
TITLES = {
    "dlg": "DLG",
    "idlg": "iDLG",
    "inverting": "inverting gradients",
    "layers": "layer by layer",
}
SHARED_TEXTS = {"all": "all parameters", EXTRACTOR: "the extractor", HEAD: "the head"}
GUESS_IMAGES = 500  # whose mean is the guess
GRAY_LEVEL_PSNR = 48.2  # dB, for an error of one of 256 gray levels
MIN_PSNR_GAIN = 1.0  # dB above the guess from which an attack counts as better


@dataclass(frozen=True)
class GradientInversion(Attack):
    """Gradient inversion of the releases of nodes with few images."""

    title: ClassVar[str] = "Gradient inversion: images recovered from the release of a node with few images"
    columns: ClassVar[tuple[ComparisonColumn, ...]] = (
        ComparisonColumn(
            name="psnr_db",
            head="PSNR",
            title="PSNR dB",
            description="PSNR: similarity of recovered and private images in dB; the run's own report shows "
            "the PSNR of a guess.",
        ),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "Nodes of this run hold more images: this is the easiest case for an attacker, in the run's own "
        "protocol, and the updates of the run itself were not attacked. PSNR: higher means more similar, 100 "
        "at most; mean over images \u00b1 one standard deviation. A guess is the mean of many real images; "
        "results near it show little more than the typical look of such images. A failed attack does not "
        "prove that the images cannot be recovered from the release.",
    )
    user_errors: ClassVar[tuple[str, ...]] = ("inversion.round", "inversion.victims")

    victims: PositiveInt = 4
    """Number of attacked nodes, each with different images."""
    images: PositiveInt = 1
    """Number of images of each victim."""
    round: NonNegativeInt = 0
    """Round whose release is attacked; 0 is the first. Before a later one, the run's own nodes take part,
    so that parameters are as trained by then.
    """
    attacks: tuple[str, ...] = ("dlg", "idlg", "inverting", "layers")
    """dlg, idlg, inverting (gradients) and layers (layer by layer, for LeNet-5 with ReLU and max pooling)."""
    steps: PositiveInt = DLG.steps
    """Largest number of L-BFGS steps of dlg and idlg, of 20 iterations each (published: 300). Gray images
    are recovered earlier; color images need 200.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attacks or not set(self.attacks) <= set(TITLES):
            raise ArgumentError("inversion.attacks", list(self.attacks), f"some of {', '.join(TITLES)}")

    def refusal(self, side: NodeSide) -> str | None:
        shared_kinds = set(PART_OF_KIND) & set(side.released_kinds())
        if side.sums:
            return "gradient inversion needs one node's parameters, and the server sees their sum"
        if not shared_kinds:
            return "gradient inversion needs parameters, and none are released"
        if not any(
            shared_kinds & {*q.releases.values()} & {*q.sends.values()} for q in side.queries.values()
        ):
            return "gradient inversion needs the nodes' initial weights, and none are sent"
        return None

    def run(self, target: Target) -> AttackResult:
        return run_inversion(target.replay, self, target.seed)

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
        for attack in part["attacks"]:
            fields, psnr = {"attack": attack["title"], "target": part["shared"]}, attack["psnr"]["mean"]
            yield LeakageMetric(
                **fields,
                metric="PSNR",
                value=psnr,
                text=f"{psnr:.1f} \u00b1 {attack['psnr']['std']:.1f} dB",
                baseline=f"{part['guess']:.1f} dB, guessed",
                column="psnr_db",
            )
            yield LeakageMetric(
                **fields,
                metric="labels right",
                text=f"{attack['labels']['right']} of {attack['labels']['of']}",
            )
            yield LeakageMetric(**fields, metric="time", text=format_seconds(attack["seconds"]), detail=True)

    def sentence(self, part: Mapping[str, Any]) -> str:
        best = next(attack for attack in part["attacks"] if attack["name"] == part["best"])
        db, guess = best["psnr"]["mean"], part["guess"]
        image = "one image" if part["images"] == 1 else f"{part['images']} images"
        comparison = "more than" if db > guess + MIN_PSNR_GAIN else "no better than"
        precision = " (an error of less than one of 256 gray levels)" if db > GRAY_LEVEL_PSNR else ""
        return (
            f"From a node with {image}, the easiest case for an attacker (the smallest node here holds "
            f"{part['smallest']}, and its own updates were not attacked), {best['title']} recovers images "
            f"from {part['shared']} at a mean of {db:.1f} dB{precision}, {comparison} a guess without any "
            f"attack ({guess:.1f})."
        )

    def describe_strength(self, part: Mapping[str, Any]) -> str:
        victims, images = (format_count(part[key], key[:-1]) for key in ("victims", "images"))
        return f"{super().describe_strength(part)} ({victims}, {images} each)"

    def explanations(self, part: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        steps = f"{format_count(part['steps'], 'local step')} of {part['optimizer']}"
        victims = (
            f"{format_count(part['victims'], 'victim')} with {format_count(part['images'], 'image')} each"
        )
        return (
            ("Sent by a node", part["shared"]),
            ("The adversary also knows", part["known"]),
            ("Attacked", f"round {part['round']}, {steps}; {victims}"),
        )

    def pictures(self, part: Mapping[str, Any]) -> Sequence[ImageTable]:
        images, strips = part["images"], [ImageStrip(head="original", stack="original")]
        for attack in part["attacks"]:
            below = tuple(f"{value:.1f} dB" for value in attack["psnr"]["per_image"])
            strips.append(ImageStrip(head=attack["title"], stack=attack["name"], below=below))
        heads = tuple(
            f"victim {victim + 1}" + (f", image {image + 1}" if images > 1 else "")
            for victim in range(part["victims"])
            for image in range(images)
        )
        title = "Original images and those that each attack recovered, with their PSNR"
        return (
            ImageTable(
                title=title, heads=heads, strips=tuple(strips), note="They show records of the nodes."
            ),
        )


def run_inversion(replayed: ReplayedRun, attack: GradientInversion, seed: int) -> AttackResult:
    """Invert the releases of all victims by each attack.

    Raises:
        MethodRefused: no attack applies.
        FedstillError: see :func:`make_victims`.
    """
    victims = make_victims(replayed, seed, count=attack.victims, images=attack.images, round=attack.round)
    pixels = PixelRange.from_normalization(
        *(torch.tensor(result).view(-1, 1, 1) for result in (replayed.data.mean, replayed.data.std))
    )
    originals = torch.cat([victim.data.inputs for victim in victims])
    pictures = {"original": pixels.to_bytes(originals)}
    records: list[dict[str, Any]] = []
    mean_psnr: dict[str, float] = {}
    skipped: list[tuple[str, str]] = []
    for name in attack.attacks:
        start = time.monotonic()
        try:
            recovered = [
                invert_victim(victim, name, pixels, derive(seed, "victim", index), attack.steps)
                for index, victim in enumerate(victims)
            ]
        except ArgumentError as error:
            skipped.append((f"inversion: {TITLES[name]}", str(error)))
            continue
        values = torch.tensor([value for result in recovered for value in result.psnr], dtype=torch.float64)
        mean_psnr[name] = float(values.mean())
        labels = torch.cat([victim.data.targets for victim in victims])
        correct_labels = int((torch.cat([result.labels for result in recovered]) == labels).sum())
        records.append(
            {
                "name": name,
                "title": TITLES[name],
                "psnr": {
                    "mean": mean_psnr[name],
                    "std": float(values.std(correction=0)),
                    "per_image": values.tolist(),
                },
                "labels": {"right": correct_labels, "of": len(labels)},
                "seconds": time.monotonic() - start,
            }
        )
        pictures[name] = pixels.to_bytes(torch.cat([result.images for result in recovered]))
    if not records:
        raise MethodRefused(replayed.config.method.title, "every victim", skipped[0][1])
    schedule = victims[0].schedule
    # The mean of real images is a guess that needs no attack.
    guess = torch.cat(
        [part.inputs[: max(1, GUESS_IMAGES // len(replayed.parts))] for part in replayed.parts]
    ).mean(0)
    return AttackResult(
        {
            "shared": SHARED_TEXTS[victims[0].part],
            "known": describe_knowledge(victims[0], attack.round),
            "images": attack.images,
            "round": attack.round,
            "steps": len(schedule.rates),
            "optimizer": schedule.optimizer,
            "victims": attack.victims,
            "smallest": min(map(len, replayed.parts)),
            "guess": float(psnr(guess.expand_as(originals), originals, pixels).mean()),
            "attacks": records,
            "best": max(mean_psnr, key=mean_psnr.__getitem__),
        },
        pictures,
        skipped,
    )


@dataclass(frozen=True, eq=False)
class Victim:
    """A victim's release, and the data behind it.

    Args:
        release: update as attacks take it.
        data: the victim's images, the truth for comparison.
        part: of the parameters that was shared.
        schedule: local training steps.
        extra_loss: loss in addition to the task's own in the training; "" if there is none.
    """

    release: ObservedUpdate
    data: TensorData
    part: ModelPart
    schedule: Schedule
    extra_loss: str


def make_victims(replayed: ReplayedRun, seed: int, *, count: int, images: int, round: int) -> list[Victim]:
    """Run the method with ``count`` victims of a few images each, and collect their releases in the
    attacked round.

    Raises:
        FedstillError: the method shares no parameters, or none in this round, or its task does not have one
            label per image.
    """
    run, setting = replayed.config, replayed.new_setting
    if setting.task.kind != "class" or setting.task.form != "images":
        raise ArgumentError("task", setting.task.name, "one label an image, for gradient inversion")
    if round >= run.method.total_steps:
        raise ArgumentError("inversion.round", round, f"0 .. {run.method.total_steps - 1}, as in the run")
    victim_data = _sample_victim_data(replayed.parts, count, images, seed)
    names = [f"victim-{index}" for index in range(len(victim_data))]
    shape, classes = replayed.input_shape, len(replayed.data.classes)
    victim_models = [models.build(run.nodes.models[0], shape, classes, run.seed, name) for name in names]
    method: Any = run.method
    full_participation = {"participation": 1.0} if hasattr(method, "participation") else {}
    victim_nodes = [
        SimulatedNode(name=name, data=part, model=model, policy=run.nodes.policy, privacy=run.nodes.privacy)
        for name, part, model in zip(names, victim_data, victim_models, strict=True)
    ]
    experiment = replayed.experiment(
        nodes=[*(setting.nodes if round else ()), *victim_nodes],
        spec=replace(run, method=replace(method, **full_participation)),
    )
    releases = _collect_releases(experiment, names, round)
    schedule = Schedule.from_config(run.nodes.local, images, Span(round, round + 1, run.method.total_steps))
    initial_model = models.build(run.student.model, shape, classes, run.seed, "student")
    single_gradient = round == 0 and len(schedule.rates) == 1  # nothing stands extra_loss the task's loss yet
    victims = []
    for name, part in zip(names, victim_data, strict=True):
        extra_loss = (
            "" if single_gradient else experiment.side.queries[releases[name].query].details.extra_loss
        )
        victims.append(_make_victim(deep_copy(initial_model), releases[name], schedule, part, extra_loss))
    return victims


def invert_victim(
    victim: Victim, attack: str, pixels: PixelRange, seed: int, steps: int = DLG.steps
) -> RecoveredImages:
    """Recover one victim's images by one attack, in the order of the true images.

    Args:
        victim: its release.
        attack: name of the attack.
        pixels: range of the images.
        seed: seed of the search.
        steps: of L-BFGS, for the attacks that use them.

    Raises:
        ArgumentError: the attack does not apply to the release.
    """
    shape, count = cast(tuple[int, int, int], tuple(victim.data.inputs.shape[1:])), len(victim.data)
    steps_taken, is_gradient = len(victim.schedule.rates), victim.release.is_gradient
    if is_gradient and victim.schedule.optimizer == "adam" and attack != "inverting":
        raise ArgumentError("nodes.local.optimizer", "adam", "sgd, as Adam's first step reveals signs only")
    if attack == "layers":
        if not is_gradient:
            raise ArgumentError("steps of SGD in a round", steps_taken, "1, for layer by layer")
        recovered = invert_layers(victim.release, shape, count, pixels=pixels, seed=seed)
    else:
        config = SEARCHES[attack]
        if attack != "inverting":
            config = replace(config, steps=steps)
        elif victim.part == EXTRACTOR:  # there is no last layer to read labels from
            config = replace(config, labels="sought")
        recovered = invert(victim.release, shape, count, config, pixels=pixels, seed=seed)
    return recovered.against(victim.data.inputs, pixels)


def describe_knowledge(victim: Victim, round: int) -> str:
    """Describe the adversary's knowledge in addition to the release."""
    schedule, part = victim.schedule, victim.part
    steps = f"{format_count(len(schedule.rates), 'step')} of {schedule.optimizer.upper()}"
    text = f"the server knows what it sent and how nodes train ({steps})"
    if part != "all":
        kept_part = {EXTRACTOR: "head", HEAD: "extractor"}[part]
        text += (
            f"; in the first round also the {kept_part}, as all nodes begin with weights that it sent"
            if round == 0
            else f"; of the {kept_part}, which stays at the node, it has only the first weights"
        )
    if victim.extra_loss:
        text += (
            f"; the attack, which is weaker for it, leaves out that nodes also descend {victim.extra_loss}"
        )
    return text


def _sample_victim_data(parts: Sequence[TensorData], count: int, images: int, seed: int) -> list[TensorData]:
    """Sample images of the run's own nodes without replacement; victims take them from the nodes in turn."""
    orders = (
        torch.randperm(len(part), generator=torch_generator(seed, "victims", index))
        for index, part in enumerate(parts)
    )
    pieces = [
        [(part, rows) for rows in torch.split(order, images) if len(rows) == images]
        for part, order in zip(parts, orders, strict=True)
    ]
    sampled = [piece for row in zip_longest(*pieces) for piece in row if piece is not None]
    if len(sampled) < count:
        raise ArgumentError("inversion.victims", count, f"at most {len(sampled)} of {images} images")
    return [replace(part.subset(rows), cases=None, groups=None) for part, rows in sampled[:count]]


def _collect_releases(
    experiment: ObservedSimulation, names: Sequence[str], round: int
) -> dict[str, ObservedRelease]:
    """Return each victim's parameter release in a round, with the tensors it had received."""
    by_node: dict[str, list[ObservedRelease]] = {name: [] for name in names}

    def collect(release: ObservedRelease) -> None:
        if release.node in by_node and set(PART_OF_KIND) & set(release.kinds.values()):
            by_node[release.node].append(release)
        if all(len(releases) > round for releases in by_node.values()):
            raise StopListening

    if experiment.run_with_listener(collect):
        raise ArgumentError("inversion.round", round, "a round in which all nodes take part")
    return {name: releases[round] for name, releases in by_node.items()}


def _make_victim(
    model: nn.Module, release: ObservedRelease, schedule: Schedule, data: TensorData, extra_loss: str
) -> Victim:
    """Return the change from the weights that the server sent, as attacks take it."""
    (name,) = (name for name, kind in release.kinds.items() if kind in PART_OF_KIND)
    kind = release.kinds[name]
    (sent_name,) = (sent for sent, sent_kind in release.query_kinds.items() if sent_kind == kind)
    part = PART_OF_KIND[kind]
    trained_model = deep_copy(model)
    for network, vector in ((model, release.sent[sent_name]), (trained_model, release.tensors[name])):
        module = network if part == "all" else split_model(network, "the victim's model").get_submodule(part)
        load_vector(module, vector.cpu())
    after_parameters, before_parameters = (
        dict(trained_model.named_parameters()),
        dict(model.named_parameters()),
    )
    changes = {
        name: (before_parameters[name] - after_parameters[name]).detach()
        for name in shared_parameter_names(model, part)
    }
    update = ObservedUpdate(model, changes, schedule)
    observed = update.as_gradient() if len(schedule.rates) == 1 else update
    return Victim(observed, data, part, schedule, extra_loss)
