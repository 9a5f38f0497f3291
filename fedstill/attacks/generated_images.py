"""What the inputs that a server made give away: copies of private images, distances from them, their quality.

The server learns to make inputs from what nodes tell it about others. Whoever sees the inputs that it sends
around may ask whether some are private images come back (:mod:`fedstill.attacks.copy_tests`), how near they
come to each node's own (:mod:`fedstill.attacks.generative_metrics`), and what the nodes' models recognise in
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from fedstill.attacks.generative_metrics import (
    Extractor,
    frechet,
    inception_scores,
    kernel_distance,
    penultimate,
    pixels,
)
from fedstill.attacks.recovered_images import Pixels
from fedstill.core.dataset import TensorData
from fedstill.core.errors import DataError, ModelError
from fedstill.core.seeds import torch_generator
from fedstill.runs.setting import normalisation
from fedstill.runs.simulation import Simulation

MOST = 4000  # private images, and held-out ones, that neighbours are sought among in one space
MOST_OF_A_NODE = 1000  # images of one node that generated ones are measured from
MOST_DIMENSIONS = 1100  # of a space for FID, whose cost goes as their cube: 28 x 28 pixels, not 32 x 32 x 3


class Sample:
    """Private and held-out images that neighbours are sought among, and which ones they are.

    Args:
        seed: of the draws, where there are more than :data:`MOST`.
    """

    def __init__(self, experiment: Simulation, seed: int) -> None:
        task, test = experiment.task, experiment.test
        self.names = [node.name for node in experiment.nodes]
        sizes = torch.tensor([len(node.data) for node in experiment.nodes])
        ends = sizes.cumsum(0)
        chosen = _some(int(ends[-1]), MOST, seed, "private")
        self.owner = torch.searchsorted(ends, chosen, right=True)  # (P,) places of nodes
        self.place = chosen - (ends - sizes)[self.owner]  # (P,) in its node's data
        self.test_place = _some(len(test), MOST, seed, "held-out")  # (H,)
        self.of = (int(ends[-1]), len(test))  # from how many
        self.private = torch.cat(
            [
                task.pictured(_subset(node.data, self.place[self.owner == index])).cpu()
                for index, node in enumerate(experiment.nodes)
            ]
        ).float()
        self.held_out = task.pictured(_subset(test, self.test_place)).cpu().float()
        self.groups = self._groups([node.data for node in experiment.nodes], test)
        self.known = all(node.data.groups is not None for node in experiment.nodes)

    def _groups(
        self, parts: Sequence[TensorData], test: TensorData
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Whose each image is, where that is known of all: no split parts a patient, so that numbers that
        happen to be alike in two places are of two patients."""
        told = test.groups if test.groups is not None else None if test.cases is None else test.cases.of
        numbers = [part.groups for part in parts if part.groups is not None]
        if told is None or len(numbers) < len(parts):
            return None
        firsts, offset = [], 0
        for each in [*numbers, told]:
            found = torch.unique(each.cpu(), return_inverse=True)[1]
            firsts.append(found + offset)
            offset += int(found.max()) + 1
        *own, other = firsts
        mine = torch.cat([each[self.place[self.owner == index]] for index, each in enumerate(own)])
        return mine, other[self.test_place]

    def told(self, found: dict[str, Any]) -> dict[str, Any]:
        """A result with places in the node's data and in the test part, and what to mind."""
        pairs = [
            {
                **pair,
                "private": int(self.place[pair["private"]]),
                "held_out": int(self.test_place[pair["held_out"]]),
                "node": self.names[int(self.owner[pair["private"]])],
            }
            for pair in found["pairs"]
        ]
        mind, (private, held_out) = [], (found["private"], found["held_out"])
        if (private, held_out) != self.of:
            drawn = f"{private} of {self.of[0]} private and {held_out} of {self.of[1]} held-out"
            mind.append(f"{drawn} images were drawn to compare with")
        if self.known and self.groups is None:
            unknown = "images of one patient go together, but which held-out ones do is not known"
            mind.append(f"{unknown}, so that p is too small")
        return {**found, "pairs": pairs, "mind": mind}


def spaces(images: torch.Tensor, experiment: Simulation, skipped: list[tuple[str, str]]) -> list[Extractor]:
    """What distances are measured in: pixels, and the student's features."""
    found = [pixels(*(part.flatten().tolist() for part in normalisation(experiment.setting)))]
    if experiment.has_student and experiment.task.kind in ("class", "labels"):
        try:
            found.append(penultimate(experiment.student, images[:2], "the student"))
        except ModelError as error:
            skipped += [(attack, str(error)) for attack in ("copying", "distances")]
    return found


def apart(
    images: torch.Tensor, experiment: Simulation, space: Extractor, seed: int, skipped: list[tuple[str, str]]
) -> dict[str, Any] | None:
    """FID and KID from each node's own images in one space; None where there is none, which is told."""
    task, test = experiment.task, experiment.test
    dimensions = space(images[:1]).shape[1]
    if dimensions > MOST_DIMENSIONS:
        why = f"{space.name}: {dimensions} dimensions, more than {MOST_DIMENSIONS}, are too many for FID"
        skipped.append(("distances", why))
        return None
    own: dict[str, torch.Tensor] = {}
    for node in experiment.nodes:
        if len(node.data) < 2:
            why = f"{space.name}: {node.name} holds one image, which has no covariance"
            skipped.append(("distances", why))
            continue
        some = _some(len(node.data), MOST_OF_A_NODE, seed, "distances", node.name)
        own[node.name] = task.pictured(_subset(node.data, some)).float()
    if not own:
        return None
    # Real images that are nobody's, spread over all of them, lest they be sorted; and as many generated ones,
    # as FID falls with their number.
    many = len(test) > 1
    count = min(len(test), len(images)) if many else len(images)
    made = space(_spread(images, count))
    others = space(_spread(task.pictured(test).float(), count)) if many else None
    real = {name: space(those) for name, those in own.items()}

    def far(from_: torch.Tensor) -> dict[str, dict[str, Any]]:
        return {
            name: {"fid": frechet(from_, each), "kid": kernel_distance(from_, each), "real": len(each)}
            for name, each in real.items()
        }

    nodes, held_out = far(made), {} if others is None else far(others)
    return {
        "extractor": space.name,
        "dimensions": dimensions,
        "generated": len(made),
        "average": fmean(of["fid"] for of in nodes.values()),
        "average_held_out": fmean(of["fid"] for of in held_out.values()) if held_out else None,
        # Vectors enough for all covariances to be known in every direction.
        "full_rank": min(len(made), *map(len, real.values())) > dimensions,
        "nodes": nodes,
        "held_out": held_out,
    }


def _spread(images: torch.Tensor, count: int) -> torch.Tensor:
    """So many of images ``(N, C, H, W)``, evenly over all of them; all where these are no more."""
    return images[torch.linspace(0, len(images) - 1, count).long()]


def distinct(images: torch.Tensor) -> torch.Tensor:
    """Of images ``(N, C, H, W)`` those that are no later one asked about again, or moved a little.

    Methods that difference answers ask about each image and its surroundings, others about one batch several
    times; who counts all of them counts one image often, and takes chance for evidence. What lies nearer to a
    later image than a tenth of the median distance between two is that one again.

    >>> x = torch.tensor([0.0, 5.0, 9.0, 0.01]).view(4, 1, 1, 1)
    >>> distinct(x).flatten()
    tensor([5.0000, 9.0000, 0.0100])
    """
    flat = images.flatten(1)
    between = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")  # (N, N), 0 of equal ones
    near = between <= between[torch.ones_like(between, dtype=torch.bool).triu(1)].median() / 10
    kept = torch.zeros(len(images), dtype=torch.bool)
    for place in reversed(range(len(images))):
        kept[place] = not bool((near[place] & kept).any())
    return images[kept]


def scores(
    images: torch.Tensor, experiment: Simulation, skipped: list[tuple[str, str]]
) -> dict[str, Any] | None:
    """Inception scores by each node's model (FedIOD, Table 7), and by the student."""
    if experiment.task.kind != "class":
        reason = f"an inception score is of one label an image, and this task is {experiment.task.name}"
        skipped.append(("scores", reason))
        return None
    try:
        nodes = inception_scores(images, {node.name: node.model for node in experiment.nodes})
        central = {"student": experiment.student} if experiment.has_student else {}
        student = inception_scores(images, central)["student"] if central else None
    except DataError as error:
        skipped.append(("scores", str(error)))
        return None
    return {"images": len(images), "adapted": fmean(nodes.values()), "nodes": nodes, "student": student}


def closest(
    found: dict[str, Any], images: torch.Tensor, sample: Sample, experiment: Simulation
) -> dict[str, torch.Tensor]:
    """The closest pairs, and the held-out image that each generated one is nearest to, as bytes."""
    shown = Pixels.of(*(part.cpu() for part in normalisation(experiment.setting))).shown
    sets = {"generated": images, "private": sample.private, "held_out": sample.held_out}
    return {name: shown(those[[pair[name] for pair in found["pairs"]]]) for name, those in sets.items()}


def _some(count: int, most: int, seed: int, *purpose: str) -> torch.Tensor:
    if count <= most:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch_generator(seed, "generated", *purpose))
    return order[:most].sort().values


def _subset(data: TensorData, places: torch.Tensor) -> TensorData:
    return data.subset(places.to(data.inputs.device))
