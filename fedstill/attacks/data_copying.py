"""Data copying: whether inputs that a server made are private images come back, and how near they come.

The server learns to make inputs from what nodes tell it about others. The adversary is whoever sees those
that it sends around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge

from fedstill.attacks.attack import Attack, AttackResult, Target
from fedstill.attacks.copy_tests import copying
from fedstill.attacks.generated_images import Sample, apart, closest, distinct, scores, spaces
from fedstill.attacks.generative_metrics import Extractor
from fedstill.attacks.leakage_rows import LeakageColumn, LeakageFigure, Pictures, Strip, in_percent
from fedstill.core.checked import PositiveInt
from fedstill.core.errors import ArgumentError, DataError, MethodRefused
from fedstill.runs.simulation import Simulation

OF = "inputs that the server sent to nodes"


@dataclass(frozen=True)
class DataCopying(Attack):
    """What is asked about the inputs that a server made: copies, distances, scores."""

    title: ClassVar[str] = "Whether generated images copy private ones, and how near they come"
    columns: ClassVar[tuple[LeakageColumn, ...]] = (
        LeakageColumn(
            name="copying_p",
            head="copying p",
            title="Copying p",
            says="Copying p: how often generated images that copy nothing would lie as close to private "
            "ones; where it is small they depend on these very images, and the closest pairs in the run's "
            "report say whether one is copied.",
            digits=3,
            lowest=True,
        ),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "Of images made without the private ones about 50% are nearer to private images, and p is as "
        "likely small as large; z far below 0: nearer to private images than held-out ones are. A small p "
        "says that generated images depend on these very images, not that one is copied. Closest pair: the "
        "distance to the nearest private image over that to the nearest held-out one; 0 is a copy, and "
        "held-out images themselves come to the figure behind it by chance.",
        "FID and KID: the lower, the more alike; figures of one extractor cannot be set beside those of "
        "another. Held-out: real images that nobody had, as many or all there are: what perfect images of "
        "the same source would come to.",
        "Inception scores: from 1, all alike or unclear, to the number of classes, each clear and all as "
        "frequent.",
    )

    images: Annotated[int, Ge(2)] = 1000
    """Of the inputs that the server made last, how many are looked at; an image that it asked about more than
    once, or moved by next to nothing, counts once."""
    drawings: PositiveInt = 999
    """Of who is private, for the p-value, which is at least 1 / (drawings + 1)."""
    pairs: PositiveInt = 10
    """Closest pairs of a generated and a private image that are kept."""

    @property
    def rows_heard(self) -> int:
        return self.images

    def run(self, target: Target) -> AttackResult:
        inputs = target.heard.inputs
        form = target.experiment.task.form
        if inputs is None or not target.heard.made or form != "images":
            reason = "the server made no images that left it: it asked about none, or about public ones"
            if form == "rows":
                reason = "it compares images, and the inputs of this task are rows of a table"
            raise MethodRefused(target.experiment.method.title, "every node", reason)
        return looked_at(inputs, target.experiment, self, target.seed)

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageFigure]:
        for space in part["spaces"]:
            yield from _copies(space, part["images"])
        for space in part["distances"]:
            yield from _distances(space)
        if part["scores"]:
            yield from _scores(part["scores"])

    def sentence(self, part: Mapping[str, Any]) -> str:
        if not part["spaces"]:
            return ""
        space = part["spaces"][0]
        pair = space["pairs"][0]["ratio"] if space["pairs"] else None
        fresh = nearest = ""
        if space["fresh"] is not None:
            fresh = f", where held-out images themselves come to {space['fresh']:.2f}"
        if pair is not None:
            nearest = f"; the closest lies at {pair:.2f} of its distance to a held-out one{fresh}"
        depends = "depend on" if space["p_value"] < 0.01 else "do not measurably depend on"
        return (
            f"The images that the server made {depends} the nodes' own ones, by {space['extractor']} "
            f"(p = {space['p_value']:.2g}){nearest}."
        )

    def strength(self, part: Mapping[str, Any]) -> str:
        return f"copying in {', '.join(space['extractor'] for space in part['spaces']) or 'no space'}"

    def about(self, part: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        return [(f"{part['images']:,} images", f"{part['of']}; the adversary is whoever sees them")]

    def pictures(self, part: Mapping[str, Any]) -> Sequence[Pictures]:
        if not part["spaces"]:
            return ()
        space = part["spaces"][0]
        heads = []
        for pair in space["pairs"]:
            ratio, fresh = pair["ratio"], space["fresh"]
            closer = ratio is not None and fresh is not None and ratio < fresh
            head = f"ratio {_text(ratio, '.2f')}, {pair['node']}"
            heads.append(head + (", closer than any held-out image" if closer else ""))
        shown = {"generated": "generated", "private": "nearest private", "held_out": "nearest held-out"}
        strips = [Strip(head=head, stack=stack) for stack, head in shown.items()]
        title = f"The {len(heads)} closest pairs, by {space['extractor']}"
        says = "The private ones are records of nodes."
        return (Pictures(title=title, heads=tuple(heads), strips=tuple(strips), says=says),)


def looked_at(inputs: torch.Tensor, experiment: Simulation, how: DataCopying, seed: int) -> AttackResult:
    """Attack the inputs that a server made, the last ones last: ``(Q, C, H, W)`` as the networks take them.

    Private are all nodes' images, held-out those of the test part; of more than ``generated.MOST`` some are
    drawn.

    Raises:
        ArgumentError: fewer than two inputs, or inputs that are no images like the private ones.
    """
    shape = tuple(experiment.task.pictured(experiment.test).shape[1:])
    if len(inputs) < 2 or len(shape) != 3 or tuple(inputs.shape[1:]) != shape:
        raise ArgumentError("shape of generated inputs", tuple(inputs.shape), f"(2 or more, {shape})")
    images = distinct(inputs[-how.images :].detach().cpu().float())
    if len(images) < 2:
        raise ArgumentError("generated inputs", "all one image", "2 or more different ones")
    skipped: list[tuple[str, str]] = []
    known = spaces(images, experiment, skipped)
    sample = Sample(experiment, seed)

    def of_each(attack: str, measure: Callable[[Extractor], dict[str, Any] | None]) -> list[dict[str, Any]]:
        found = []
        for space in known:
            try:
                told = measure(space)
            except DataError as error:  # a network that diverged has features that are no numbers
                skipped.append((attack, str(error)))
                continue
            if told is not None:
                found.append(told)
        return found

    pictures: dict[str, torch.Tensor] = {}

    def copied(space: Extractor) -> dict[str, Any]:
        found = copying(
            images,
            sample.private,
            sample.held_out,
            space,
            seed=seed,
            drawings=how.drawings,
            closest=how.pairs,
            groups=sample.groups,
        )
        if not pictures:
            pictures.update(closest(found, images, sample, experiment))
        return sample.told(found)

    part = {
        "images": len(images),
        "of": OF,
        "spaces": of_each("copying", copied),
        "distances": of_each("distances", lambda space: apart(images, experiment, space, seed, skipped)),
        "scores": scores(images, experiment, skipped),
    }
    return AttackResult(part, pictures, skipped)


def _copies(space: Mapping[str, Any], images: int) -> Iterator[LeakageFigure]:
    name, who = space["extractor"], f"{images:,} images"
    counts = (f"{space[key]:,} {of}" for key, of in (("private", "private"), ("held_out", "held-out")))
    row = partial(LeakageFigure, attack=name, who=who)
    yield row(
        figure="nearer to private than to held-out",
        **in_percent(space["share"], space["low"], space["high"]),
        without="50%",
        says=f"{space['generated']:,} generated, {', '.join(counts)}",
    )
    p, drawings = space["p_value"], "; ".join((f"{space['drawings']:,} drawings", *space["mind"]))
    yield row(figure="p", value=p, text=f"{p:.3g}", without="any p alike", says=drawings, column="copying_p")
    z = f"p {_text(space['z_p_value'], '.3g')}"
    yield row(figure="data-copying z", text=_text(space["z"], ".1f"), says=z, detail=True)
    ratios = [pair["ratio"] for pair in space["pairs"] if pair["ratio"] is not None]
    yield row(figure="closest pair", text=_text(min(ratios, default=None), ".2f"), detail=True)
    yield row(figure="held-out images come to", text=_text(space["fresh"], ".2f"), detail=True)


def _distances(space: Mapping[str, Any]) -> Iterator[LeakageFigure]:
    name = f"in {space['extractor']}"
    few = "too few images for this space: FID comes out too high" if not space["full_rank"] else ""
    for node, of in space["nodes"].items():
        held_out = space["held_out"].get(node, {})
        for figure, form in (("fid", "#.4g"), ("kid", "#.3g")):
            for whose, told in (("generated", of), ("held-out", held_out)):
                label = f"{figure.upper()}, {whose}"
                text = _text(told.get(figure), form)
                yield LeakageFigure(attack=name, who=node, figure=label, text=text, detail=True)
        yield LeakageFigure(attack=name, who=node, figure="its images", text=f"{of['real']:,}", detail=True)
    average, held = space["average"], space["average_held_out"]
    row, of = partial(LeakageFigure, attack=name, who="mean of nodes"), f"{space['generated']:,}"
    yield row(
        figure="FID, generated",
        value=average,
        text=_text(average, "#.4g"),
        without="" if held is None else f"{held:.1f} of held-out images",
        says=f"{of} in {space['dimensions']:,} dimensions" + (f", {few}" if few else ""),
    )
    yield row(figure="FID, held-out", text=_text(held, "#.4g"), detail=True)


def _scores(part: Mapping[str, Any]) -> Iterator[LeakageFigure]:
    figure, images = "inception score", f"of {part['images']:,} images"
    adapted, student = part["adapted"], part["student"]
    whole = {"the nodes' own models, on average": adapted, "the student": student}
    for who, value in whole.items():
        if who != "the student" or value is not None:
            text = _text(value, ".2f")
            yield LeakageFigure(
                who=who, figure=figure, value=value, text=text, without="1 at least", says=images
            )
    for node, value in part["nodes"].items():
        yield LeakageFigure(who=node, figure=figure, text=_text(value, ".2f"), detail=True)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
