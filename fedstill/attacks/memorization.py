"""Memorization: test whether inputs that a server generated are copies of private images, and measure their
distances.

In some methods the server learns from the nodes' responses to generate inputs. The adversary is anyone who
sees the inputs that it sends. The attack tests whether some are copies of private images, measures their
distance to each node's images (:mod:`fedstill.attacks.generative_metrics`), and scores them with the nodes'
models.

There are two tests of copies, based on each generated image's nearest private and nearest held-out
neighbor, as each misses what the other detects:

- **Nearer to private than to held-out images**: a permutation test of which images are private. For images
  generated without the private ones, the truth does not differ from random permutations. A small p-value
  shows that images depend on these very private ones, as even the mean and covariance of a few would.
- **Nearer to private images than held-out images are** (Meehan, Chaudhuri, Dasgupta: "A Non-Parametric Test
  to Detect Data-Copying in Generative Models", AISTATS 2020; here with one cell for the whole space). Poor
  images, far from all others, pass it even if some are copies; images of low diversity fail it without a
  copy.

Both are about the set of generated images; one copy in a thousand shows among the closest pairs only. Both
assume that private and held-out images were split at random: images from another hospital may differ for
that reason. Features of a network that was trained on the private images may separate them from others
without any copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge

from fedstill.attacks.attack import (
    Attack,
    AttackResult,
    ComparisonColumn,
    ImageStrip,
    ImageTable,
    LeakageMetric,
    Target,
    percent_fields,
)
from fedstill.attacks.generative_metrics import (
    Extractor,
    frechet_distance,
    inception_scores,
    kernel_distance,
    penultimate_extractor,
    pixel_extractor,
)
from fedstill.attacks.gradient_matching import PixelRange
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError, MethodRefused, ModelError
from fedstill.core.options import PositiveInt
from fedstill.core.seeds import torch_generator
from fedstill.runs.build import normalization
from fedstill.runs.simulation import Simulation

MAX_NUMBERS = 1 << 23  # float64 in memory at once in the search of neighbors (64 MiB)
NORMAL_95 = 1.959964  # standard deviations to each side of a 95 % interval
STATISTIC_TOLERANCE = 1e-12  # rounding difference of equal statistics
MAX_IMAGES = 4000  # private images, and held-out ones, in the search of neighbors
MAX_NODE_IMAGES = 1000  # of one node, for FID and KID
MAX_FID_DIMENSIONS = 1100  # for FID, whose cost grows with their cube: 28 x 28 pixels, not 32 x 32 x 3
IMAGES_TEXT = "inputs that the server sent to nodes"


@dataclass(frozen=True)
class Memorization(Attack):
    """Tests of generated inputs for copies of private images, distances and inception scores."""

    title: ClassVar[str] = "Memorization: generated images compared with private ones"
    columns: ClassVar[tuple[ComparisonColumn, ...]] = (
        ComparisonColumn(
            name="memorization_p",
            head="memorization p",
            title="Memorization p",
            description="Memorization p: how often generated images without copies would lie as close to "
            "private ones; if it is small, they depend on these very images, and the closest pairs in the "
            "run's report show whether one is copied.",
            digits=3,
            lower_is_stronger=True,
        ),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "Of images generated without the private ones, about 50% are nearer to private images, and p is "
        "uniform; z far below 0: nearer to private images than held-out ones are. A small p shows that "
        "generated images depend on these very images, not that one is copied. Closest pair: the distance to "
        "the nearest private image divided by that to the nearest held-out one; 0 is a copy, and the next "
        "value is that of held-out images by chance.",
        "FID and KID: lower means more similar; values of different extractors are not comparable. Held-out: "
        "the values of unused real images, as many or all there are: those of perfect images from the same "
        "source.",
        "Inception scores: from 1, all similar or unclear, to the number of classes, each clear and equally "
        "frequent.",
    )

    images: Annotated[int, Ge(2)] = 1000
    """Number of last generated inputs that are tested; an image that was queried more than once, or moved
    by next to nothing, counts once.
    """
    permutations: PositiveInt = 999
    """Number of random permutations for the p-value, which is at least 1 / (permutations + 1)."""
    pairs: PositiveInt = 10
    """Number of closest pairs of a generated and a private image that are kept."""

    @property
    def transcript_rows(self) -> int:
        return self.images

    def run(self, target: Target) -> AttackResult:
        inputs = target.transcript.inputs
        form = target.experiment.task.form
        if inputs is None or not target.transcript.has_generated_inputs or form != "images":
            reason = "the server sent no generated images: it queried none, or public ones"
            if form == "rows":
                reason = "it compares images, and the inputs of this task are rows of a table"
            raise MethodRefused(target.experiment.method.title, "", reason)
        return measure_memorization(inputs, target.experiment, self, target.seed)

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
        for space in part["spaces"]:
            yield from _memorization_rows(space, part["images"])
        for space in part["distances"]:
            yield from _distance_rows(space)
        if part["scores"]:
            yield from _score_rows(part["scores"])

    def sentence(self, part: Mapping[str, Any]) -> str:
        if not part["spaces"]:
            return ""
        space = part["spaces"][0]
        pair = space["pairs"][0]["ratio"] if space["pairs"] else None
        held_out_text = closest_text = ""
        if space["held_out_ratio"] is not None:
            held_out_text = f", compared with {space['held_out_ratio']:.2f} of held-out images"
        if pair is not None:
            closest_text = (
                f"; the closest lies at {pair:.2f} of its distance to a held-out one{held_out_text}"
            )
        verb = "depend on" if space["p_value"] < 0.01 else "do not measurably depend on"
        return (
            f"The generated images {verb} the nodes' own ones, by {space['extractor']} "
            f"(p = {space['p_value']:.2g}){closest_text}."
        )

    def describe_strength(self, part: Mapping[str, Any]) -> str:
        return f"memorization in {', '.join(space['extractor'] for space in part['spaces']) or 'no space'}"

    def explanations(self, part: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        return [(f"{part['images']:,} images", f"{part['of']}; the adversary is anyone who sees them")]

    def pictures(self, part: Mapping[str, Any]) -> Sequence[ImageTable]:
        if not part["spaces"]:
            return ()
        space = part["spaces"][0]
        heads = []
        for pair in space["pairs"]:
            ratio, held_out_ratio = pair["ratio"], space["held_out_ratio"]
            is_closer = ratio is not None and held_out_ratio is not None and ratio < held_out_ratio
            head = f"ratio {_format_value(ratio, '.2f')}, {pair['node']}"
            heads.append(head + (", closer than any held-out image" if is_closer else ""))
        labels = {"generated": "generated", "private": "nearest private", "held_out": "nearest held-out"}
        strips = [ImageStrip(head=head, stack=stack) for stack, head in labels.items()]
        title = f"The {len(heads)} closest pairs, by {space['extractor']}"
        note = "The private images are records of nodes."
        return (ImageTable(title=title, heads=tuple(heads), strips=tuple(strips), note=note),)


def measure_memorization(
    inputs: torch.Tensor, experiment: Simulation, attack: Memorization, seed: int
) -> AttackResult:
    """Attack generated inputs ``(Q, C, H, W)``, normalized as for the networks, the last ones last.

    The private images are those of all nodes, the held-out ones those of the test part; large sets are
    sampled, see :data:`MAX_IMAGES`.

    Args:
        inputs: generated inputs.
        experiment: run at its end.
        attack: options.
        seed: of all random numbers.

    Raises:
        ArgumentError: fewer than two inputs, or inputs that are no images of the private ones' shape.
    """
    shape = tuple(experiment.task.real_images(experiment.test).shape[1:])
    if len(inputs) < 2 or len(shape) != 3 or tuple(inputs.shape[1:]) != shape:
        raise ArgumentError("shape of generated inputs", tuple(inputs.shape), f"(2 or more, {shape})")
    images = distinct_images(inputs[-attack.images :].detach().cpu().float())
    if len(images) < 2:
        raise ArgumentError("generated inputs", "all one image", "2 or more different ones")
    skipped: list[tuple[str, str]] = []
    extractors = feature_spaces(images, experiment, skipped)
    reference = ReferenceImages(experiment, seed)

    def measure_all(
        attack: str, measure: Callable[[Extractor], dict[str, Any] | None]
    ) -> list[dict[str, Any]]:
        record = []
        for space in extractors:
            try:
                measured = measure(space)
            except DataError as error:  # features of a diverged network may be NaN
                skipped.append((attack, str(error)))
                continue
            if measured is not None:
                record.append(measured)
        return record

    pictures: dict[str, torch.Tensor] = {}

    def measure_memorization(space: Extractor) -> dict[str, Any]:
        record = memorization_test(
            images,
            reference.private,
            reference.held_out,
            space,
            seed=seed,
            permutations=attack.permutations,
            pair_count=attack.pairs,
            groups=reference.groups,
        )
        if not pictures:
            pictures.update(closest_pair_images(record, images, reference, experiment))
        return reference.to_node_indices(record)

    record_ = {
        "images": len(images),
        "of": IMAGES_TEXT,
        "spaces": measure_all("memorization", measure_memorization),
        "distances": measure_all(
            "distances", lambda space: node_distances(images, experiment, space, seed, skipped)
        ),
        "scores": inception_record(images, experiment, skipped),
    }
    return AttackResult(record_, pictures, skipped)


def feature_spaces(
    images: torch.Tensor, experiment: Simulation, skipped: list[tuple[str, str]]
) -> list[Extractor]:
    """Return the spaces in which distances are measured: pixels, and the student's features."""
    extractors = [pixel_extractor(*(part.flatten().tolist() for part in normalization(experiment.setting)))]
    if experiment.has_student and experiment.task.kind in ("class", "labels"):
        try:
            extractors.append(penultimate_extractor(experiment.student, images[:2], "the student"))
        except ModelError as error:
            skipped += [(attack, str(error)) for attack in ("memorization", "distances")]
    return extractors


def distinct_images(images: torch.Tensor) -> torch.Tensor:
    """Return the images ``(N, C, H, W)`` without those that were queried again later, also with small
    changes.

    Methods with finite differences query each image and its surroundings, others query one batch several
    times. Counting all of them would count one image often, and take chance for evidence. An image nearer
    to a later one than a tenth of the median distance counts as the same image.

    >>> x = torch.tensor([0.0, 5.0, 9.0, 0.01]).view(4, 1, 1, 1)
    >>> distinct_images(x).flatten()
    tensor([5.0000, 9.0000, 0.0100])
    """
    flat = images.flatten(1)
    distances = torch.cdist(
        flat, flat, compute_mode="donot_use_mm_for_euclid_dist"
    )  # (N, N), 0 of equal ones
    is_near = distances <= distances[torch.ones_like(distances, dtype=torch.bool).triu(1)].median() / 10
    keep = torch.zeros(len(images), dtype=torch.bool)
    for index in reversed(range(len(images))):
        keep[index] = not bool((is_near[index] & keep).any())
    return images[keep]


class ReferenceImages:
    """Private and held-out images for the search of neighbors, with their origin.

    Args:
        experiment: run at its end.
        seed: of the sampling, if there are more than :data:`MAX_IMAGES`.
    """

    def __init__(self, experiment: Simulation, seed: int) -> None:
        task, test = experiment.task, experiment.test
        self.names = [node.name for node in experiment.nodes]
        sizes = torch.tensor([len(node.data) for node in experiment.nodes])
        ends = sizes.cumsum(0)
        selected = _choose_indices(int(ends[-1]), MAX_IMAGES, seed, "private")
        self.owner = torch.searchsorted(ends, selected, right=True)  # (P,) places of nodes
        self.place = selected - (ends - sizes)[self.owner]  # (P,) in its node's data
        self.test_place = _choose_indices(len(test), MAX_IMAGES, seed, "held-out")  # (H,)
        self.of = (int(ends[-1]), len(test))  # from how many
        self.private = torch.cat(
            [
                task.real_images(_subset(node.data, self.place[self.owner == index])).cpu()
                for index, node in enumerate(experiment.nodes)
            ]
        ).float()
        self.held_out = task.real_images(_subset(test, self.test_place)).cpu().float()
        self.groups = self._group_of_each_image([node.data for node in experiment.nodes], test)
        self.known = all(node.data.groups is not None for node in experiment.nodes)

    def _group_of_each_image(
        self, parts: Sequence[TensorData], test: TensorData
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the group of each image, if all groups are known. No partition splits a patient, so that
        equal group numbers at two nodes mean two patients.
        """
        test_groups = (
            test.groups if test.groups is not None else None if test.cases is None else test.cases.case_ids
        )
        numbers = [part.groups for part in parts if part.groups is not None]
        if test_groups is None or len(numbers) < len(parts):
            return None
        numbered, offset = [], 0
        for groups in [*numbers, test_groups]:
            unique = torch.unique(groups.cpu(), return_inverse=True)[1]
            numbered.append(unique + offset)
            offset += int(unique.max()) + 1
        *node_groups, held_out_groups = numbered
        private_groups = torch.cat(
            [groups[self.place[self.owner == index]] for index, groups in enumerate(node_groups)]
        )
        return private_groups, held_out_groups[self.test_place]

    def to_node_indices(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return a result with indices in the node's data and in the test part, and with caveats."""
        pairs = [
            {
                **pair,
                "private": int(self.place[pair["private"]]),
                "held_out": int(self.test_place[pair["held_out"]]),
                "node": self.names[int(self.owner[pair["private"]])],
            }
            for pair in result["pairs"]
        ]
        caveats, (private, held_out) = [], (result["private"], result["held_out"])
        if (private, held_out) != self.of:
            sampled = f"{private} of {self.of[0]} private and {held_out} of {self.of[1]} held-out"
            caveats.append(f"{sampled} images were drawn to compare with")
        if self.known and self.groups is None:
            caveat = "images of one patient go together, but which held-out ones do is not known"
            caveats.append(f"{caveat}, so that p is too small")
        return {**result, "pairs": pairs, "caveats": caveats}


def node_distances(
    images: torch.Tensor, experiment: Simulation, space: Extractor, seed: int, skipped: list[tuple[str, str]]
) -> dict[str, Any] | None:
    """FID and KID from each node's images in one space; None with an entry in ``skipped`` if they are
    undefined.
    """
    task, test = experiment.task, experiment.test
    dimensions = space(images[:1]).shape[1]
    if dimensions > MAX_FID_DIMENSIONS:
        reason = (
            f"{space.name}: {dimensions} dimensions, more than {MAX_FID_DIMENSIONS}, are too many for FID"
        )
        skipped.append(("distances", reason))
        return None
    node_images: dict[str, torch.Tensor] = {}
    for node in experiment.nodes:
        if len(node.data) < 2:
            reason = f"{space.name}: {node.name} holds one image, which has no covariance"
            skipped.append(("distances", reason))
            continue
        selected = _choose_indices(len(node.data), MAX_NODE_IMAGES, seed, "distances", node.name)
        node_images[node.name] = task.real_images(_subset(node.data, selected)).float()
    if not node_images:
        return None
    # Held-out images, evenly spaced in case they are sorted, and as many generated ones, as FID falls with
    # their number.
    has_test = len(test) > 1
    count = min(len(test), len(images)) if has_test else len(images)
    generated = space(_evenly_spaced(images, count))
    test_vectors = space(_evenly_spaced(task.real_images(test).float(), count)) if has_test else None
    real = {name: space(images_) for name, images_ in node_images.items()}

    def distances_from(from_: torch.Tensor) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "fid": frechet_distance(from_, vectors),
                "kid": kernel_distance(from_, vectors),
                "real": len(vectors),
            }
            for name, vectors in real.items()
        }

    nodes, held_out = distances_from(generated), {} if test_vectors is None else distances_from(test_vectors)
    return {
        "extractor": space.name,
        "dimensions": dimensions,
        "generated": len(generated),
        "average": fmean(distances["fid"] for distances in nodes.values()),
        "average_held_out": fmean(distances["fid"] for distances in held_out.values()) if held_out else None,
        # Vectors enough for all covariances to be known in every direction.
        "full_rank": min(len(generated), *map(len, real.values())) > dimensions,
        "nodes": nodes,
        "held_out": held_out,
    }


def inception_record(
    images: torch.Tensor, experiment: Simulation, skipped: list[tuple[str, str]]
) -> dict[str, Any] | None:
    """Inception scores by each node's model (FedIOD, Table 7), and by the student."""
    if experiment.task.kind != "class":
        reason = f"an inception score is of one label an image, and this task is {experiment.task.name}"
        skipped.append(("scores", reason))
        return None
    try:
        nodes = inception_scores(images, {node.name: node.model for node in experiment.nodes})
        students = {"student": experiment.student} if experiment.has_student else {}
        student = inception_scores(images, students)["student"] if students else None
    except DataError as error:
        skipped.append(("scores", str(error)))
        return None
    return {"images": len(images), "adapted": fmean(nodes.values()), "nodes": nodes, "student": student}


def closest_pair_images(
    result: dict[str, Any], images: torch.Tensor, reference: ReferenceImages, experiment: Simulation
) -> dict[str, torch.Tensor]:
    """Return the closest pairs as bytes, with the held-out image nearest to each generated one."""
    to_bytes = PixelRange.from_normalization(
        *(part.cpu() for part in normalization(experiment.setting))
    ).to_bytes
    sets = {"generated": images, "private": reference.private, "held_out": reference.held_out}
    return {
        name: to_bytes(images_[[pair[name] for pair in result["pairs"]]]) for name, images_ in sets.items()
    }


def _evenly_spaced(images: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` of the images ``(N, C, H, W)``, evenly spaced."""
    return images[torch.linspace(0, len(images) - 1, count).long()]


def _choose_indices(count: int, limit: int, seed: int, *purpose: str) -> torch.Tensor:
    if count <= limit:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch_generator(seed, "generated", *purpose))
    return order[:limit].sort().values


def _subset(data: TensorData, indices: torch.Tensor) -> TensorData:
    return data.subset(indices.to(data.inputs.device))


# --- the tests -------------------------------------------------------------------------------------


def memorization_test(
    generated: torch.Tensor,
    private: torch.Tensor,
    held_out: torch.Tensor,
    extractor: Extractor,
    *,
    seed: int,
    permutations: int = 999,
    pair_count: int = 10,
    groups: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Test whether generated images are copies of private ones.

    Args:
        generated, private, held_out: normalized images ``(N, C, H, W)``. Private images are all possible
            originals; held-out ones are from the same source, and unused.
        extractor: feature space.
        seed: of the permutations.
        permutations: number of permutations.
        pair_count: number of closest pairs.
        groups: group of each private and each held-out image, ``(N,)`` int64 each (patients). Patients are
            then permuted instead of images, as slices of one patient are near each other without any copy.

    Returns:
        ``extractor``, and the numbers of ``generated``, ``private`` and ``held_out`` images and of
            ``permutations``.
        ``statistic``: mean of ``(h - p) / (h + p)`` over generated images, where p and h are the distances
            to the nearest private and held-out image: -1 (copies of held-out) .. 1 (copies of private
            images). ``expected``: its mean over permutations, which is 0 only for as many private as
            held-out images. ``p_value``: share of the permutations, including the truth, whose statistic is
            at least as large.

        ``share``: share of generated images nearer to a private than to a held-out image, with the larger
            set reduced to the size of the smaller, on average over all ways; about 0.5 without copies.
            ``low``, ``high``: its 95 % interval over generated images (Wilson; private and held-out images
            are fixed). ``z``, ``z_p_value``: of :func:`data_copying_test`, one-sided, far below 0 if
            generated images lie nearer to private images than held-out ones.

        ``pairs``: the closest pairs by ratio, each private image once: indices of ``generated``,
            ``private`` and ``held_out`` image, ``distance`` to the private and to the ``other`` one, and
            their ``ratio``, 0 for a copy and 1 if both are 0.
        ``held_out_ratio``: smallest ratio of a held-out image, were it generated; None for fewer than two
            of them.

    Raises:
        ArgumentError: no images, or a group with both kinds of images.
        DataError: see :class:`Extractor`.
    """
    generated, private, held_out = (extractor(images) for images in (generated, private, held_out))
    group_of = _number_groups(groups)  # (P + H,), or None
    is_private = torch.arange(len(private) + len(held_out)) < len(private)
    # So many neighbors are all of one kind only once in about e^20.
    width = 20 * (1 + len(is_private) // min(len(private), len(held_out)))
    pool = SortedNeighbors(generated, torch.cat([private, held_out]), width)
    observed = _mean_nearness_to_private(pool, is_private)
    permuted = torch.tensor(
        [
            _mean_nearness_to_private(pool, permuted_mask)
            for permuted_mask in _permutations(is_private, group_of, seed, permutations)
        ],
        dtype=torch.float64,
    )
    nearer_share = float(_nearer_probability(pool, is_private).mean())
    low, high = wilson_interval(nearer_share, len(generated))
    to_private = nearest_neighbors(held_out, private)[0]
    z, z_p_value = data_copying_test(nearest_neighbors(generated, private)[0], to_private)
    held_out_ratio = None
    if len(held_out) > 1:
        held_out_ratio = float(
            _distance_ratio(to_private, nearest_neighbors(held_out, held_out, skip_nearest=True)[0]).min()
        )
    return {
        "extractor": extractor.name,
        "generated": len(generated),
        "private": len(private),
        "held_out": len(held_out),
        "statistic": observed,
        "expected": float(permuted.mean()),
        "p_value": (1 + int((permuted >= observed - STATISTIC_TOLERANCE).sum())) / (1 + permutations),
        "permutations": permutations,
        "share": nearer_share,
        "low": low,
        "high": high,
        "z": z,
        "z_p_value": z_p_value,
        "pairs": _closest_pairs(pool, is_private, pair_count),
        "held_out_ratio": held_out_ratio,
    }


def data_copying_test(generated: torch.Tensor, held_out: torch.Tensor) -> tuple[float, float]:
    """Return the z-score of data-copying, Z_U of Meehan et al. 2020, and its one-sided p-value; 0 and 1/2
    for equal distances.

    U counts pairs of a generated ``(m,)`` and a held-out image ``(n,)`` in which the generated one is
    farther from its nearest private image (Mann, Whitney 1947): ``(U - mn / 2) / sqrt(mn (m + n + 1) /
    12)``, with ties as half a pair, and their smaller variance.

    >>> z, p = data_copying_test(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]))
    >>> round(z, 4), round(p, 4)  # (0 - 3) / sqrt(2 * 3 * 6 / 12)
    (-1.7321, 0.0416)
    """
    from scipy.special import ndtr
    from scipy.stats import rankdata, tiecorrect

    m, n = len(generated), len(held_out)
    ranks = rankdata(torch.cat([generated, held_out]).double().numpy())
    u = float(ranks[:m].sum()) - m * (m + 1) / 2
    variance = tiecorrect(ranks) * m * n * (m + n + 1) / 12
    z = (u - m * n / 2) / math.sqrt(variance) if variance > 1e-9 else 0.0
    return z, float(ndtr(z))


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of n (Wilson 1927); it is conservative for means of numbers in 0..1.

    >>> low, high = wilson_interval(0.5, 100)
    >>> round(low, 4), round(high, 4)
    (0.4038, 0.5962)
    """
    weight = NORMAL_95**2 / n
    middle = (share + weight / 2) / (1 + weight)
    half = NORMAL_95 / (1 + weight) * math.sqrt(share * (1 - share) / n + weight / (4 * n))
    return middle - half, middle + half


def _number_groups(groups: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor | None:
    """Number the groups from 0, ``(P + H,)``: those of private images first."""
    if groups is None:
        return None
    shared = sorted(set(groups[0].tolist()) & set(groups[1].tolist()))
    if shared:
        raise ArgumentError("groups", shared[0], "of private images or of held-out ones, and not of both")
    private_groups, held_out_groups = (
        np.unique(part.cpu().numpy(), return_inverse=True)[1] for part in groups
    )
    return torch.from_numpy(np.concatenate([private_groups, held_out_groups + private_groups.max() + 1]))


def _permutations(
    is_private: torch.Tensor, group_of: torch.Tensor | None, seed: int, count: int
) -> Iterator[torch.Tensor]:
    """Yield random masks of private images, or groups, of the true number: ``(P + H,)`` bool each."""
    group_mask = is_private
    if group_of is not None:
        group_mask = torch.zeros(int(group_of.max()) + 1, dtype=torch.bool)
        group_mask[group_of[is_private]] = True
    for number in range(count):
        order = torch.randperm(len(group_mask), generator=torch_generator(seed, "copying", number))
        permuted = group_mask[order]
        yield permuted if group_of is None else permuted[group_of]


def _mean_nearness_to_private(pool: SortedNeighbors, is_private: torch.Tensor) -> float:
    """Mean of (h - p) / (h + p); 0 for an image that is a copy of both."""
    (p, _), (h, _) = pool.nearest(is_private), pool.nearest(~is_private)
    return float(((h - p) / (h + p).clamp_min(torch.finfo(p.dtype).tiny)).mean())


def _nearer_probability(pool: SortedNeighbors, is_private: torch.Tensor) -> torch.Tensor:
    """Probability that each generated image's nearest one is private, if the larger set is reduced to the
    size of the smaller.

    Of N images of the larger set, j are nearer than the nearest of the smaller one, which has n. One of
    these j is among n sampled of the N with probability ``1 - C(N - j, n) / C(N, n)``. Equal distances
    count as the mean of nearer and farther.
    """
    from scipy.stats import hypergeom

    is_private_smaller = int(is_private.sum()) < int((~is_private).sum())
    larger = ~is_private if is_private_smaller else is_private
    limit, _ = pool.nearest(~larger)
    total, n = int(larger.sum()), int((~larger).sum())
    nearer = torch.stack([pool.count(larger, limit, include_ties=ties) for ties in (False, True)])
    probabilities = torch.from_numpy(hypergeom.sf(0, total, nearer.numpy(), n)).mean(0)
    return 1 - probabilities if is_private_smaller else probabilities


def _distance_ratio(p: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return torch.where((p == 0) & (h == 0), 1.0, p / h)


def _closest_pairs(pool: SortedNeighbors, is_private: torch.Tensor, count: int) -> list[dict[str, Any]]:
    """Return the pairs with the smallest ratio of distances, and of equal ones the smallest distance; each
    private image once, with the generated image of the smallest ratio.
    """
    (p, private), (h, held_out) = pool.nearest(is_private), pool.nearest(~is_private)
    columns = {
        "generated": torch.arange(len(p)),
        "private": private,
        "held_out": held_out - is_private.sum(),  # private images come first in the pool
        "distance": p,
        "other": h,
        "ratio": _distance_ratio(p, h),
    }
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    pairs: dict[int, dict[str, Any]] = {}
    for pair in sorted(rows, key=lambda row: (row["ratio"], row["distance"])):
        pairs.setdefault(pair["private"], pair)
    return list(pairs.values())[:count]


# --- nearest neighbors -----------------------------------------------------------------------------


def nearest_neighbors(
    x: torch.Tensor, y: torch.Tensor, *, skip_nearest: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest vector in y of each vector in x: Euclidean distances ``(N,)`` float64, and indices
    ``(N,)``.

    Args:
        x: ``(N, d)``.
        y: ``(M, d)``; the first of equally near ones is returned.
        skip_nearest: return the second nearest, which is the nearest other one where x is y, of two vectors
            or more.

    >>> nearest_neighbors(torch.tensor([[0.0], [5.0]]), torch.tensor([[4.0], [1.0]]))
    (tensor([1., 1.], dtype=torch.float64), tensor([1, 0]))
    """
    distances, indices = _nearest_sorted(x.double(), y.double(), 4)  # four, lest rounding part equals
    return distances[:, int(skip_nearest)], indices[:, int(skip_nearest)]


class SortedNeighbors:
    """Vectors with others sorted by distance, for a fast search of the nearest in any subset.

    Args:
        x: ``(N, d)``.
        y: the others ``(M, d)``.
        width: length of the lists; it grows if a subset has no member in them.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, width: int = 32) -> None:
        self.x, self.y, self.width = x.double(), y.double(), width
        self.distances, self.places = _nearest_sorted(self.x, self.y, width)  # (N, width), ascending

    def nearest(self, subset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the nearest of a non-empty ``subset`` (M,) bool of the others: distances ``(N,)``,
        indices.
        """
        while True:
            is_member, column = subset[self.places].byte().max(1, keepdim=True)  # of equal ones the first
            if is_member.all():
                return self.distances.gather(1, column).squeeze(1), self.places.gather(1, column).squeeze(1)
            self.width *= 2
            self.distances, self.places = _nearest_sorted(self.x, self.y, self.width)

    def count(self, subset: torch.Tensor, limit: torch.Tensor, *, include_ties: bool) -> torch.Tensor:
        """Return the number of vectors of a subset nearer than a limit ``(N,)`` of :meth:`nearest`: ``(N,)``.

        Args:
            subset: ``(M,)`` bool.
            limit: ``(N,)``.
            include_ties: count vectors at the distance of the limit.
        """
        bound = limit.unsqueeze(1)
        is_nearer = self.distances <= bound if include_ties else self.distances < bound
        return (is_nearer & subset[self.places]).sum(1)


def _nearest_sorted(x: torch.Tensor, y: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest ``width`` of y, or all: sorted distances and indices ``(N, width)``, stable for
    equal ones.

    Candidates are found by ``|x|^2 - 2 x y + |y|^2``, a matrix product. Their distances and order are
    computed from the differences, as the former loses digits for small distances.
    """
    width = min(width, len(y))
    center = y.mean(0)
    centered = y - center
    norms = centered.square().sum(1)
    distances, indices = [], []
    for part in torch.split(x, max(1, MAX_NUMBERS // len(y))):
        squares = torch.addmm(norms.unsqueeze(0), part - center, centered.T, alpha=-2)  # less |x|^2 (B, M)
        candidates = squares.topk(width, largest=False).indices.sort(1).values  # (B, width)
        rows = max(1, MAX_NUMBERS // (width * x.shape[1]))
        for vectors, columns in zip(torch.split(part, rows), torch.split(candidates, rows), strict=True):
            exact = (vectors.unsqueeze(1) - y[columns]).norm(dim=2)
            order = exact.argsort(dim=1, stable=True)
            distances.append(exact.gather(1, order))
            indices.append(columns.gather(1, order))
    return torch.cat(distances), torch.cat(indices)


# --- report ----------------------------------------------------------------------------------------


def _memorization_rows(space: Mapping[str, Any], images: int) -> Iterator[LeakageMetric]:
    name, target = space["extractor"], f"{images:,} images"
    counts = (f"{space[key]:,} {label}" for key, label in (("private", "private"), ("held_out", "held-out")))
    row = partial(LeakageMetric, attack=name, target=target)
    yield row(
        metric="nearer to private than to held-out",
        **percent_fields(space["share"], space["low"], space["high"]),
        baseline="50%",
        note=f"{space['generated']:,} generated, {', '.join(counts)}",
    )
    p, note = space["p_value"], "; ".join((f"{space['permutations']:,} permutations", *space["caveats"]))
    yield row(metric="p", value=p, text=f"{p:.3g}", baseline="p uniform", note=note, column="memorization_p")
    z = f"p {_format_value(space['z_p_value'], '.3g')}"
    yield row(metric="data-copying z", text=_format_value(space["z"], ".1f"), note=z, detail=True)
    ratios = [pair["ratio"] for pair in space["pairs"] if pair["ratio"] is not None]
    yield row(metric="closest pair", text=_format_value(min(ratios, default=None), ".2f"), detail=True)
    yield row(metric="closest held-out pair", text=_format_value(space["held_out_ratio"], ".2f"), detail=True)


def _distance_rows(space: Mapping[str, Any]) -> Iterator[LeakageMetric]:
    name = f"in {space['extractor']}"
    note = "too few images for this space: FID is too high" if not space["full_rank"] else ""
    for node, distances in space["nodes"].items():
        held_out = space["held_out"].get(node, {})
        for metric, format_spec in (("fid", "#.4g"), ("kid", "#.3g")):
            for source, values in (("generated", distances), ("held-out", held_out)):
                label = f"{metric.upper()}, {source}"
                text = _format_value(values.get(metric), format_spec)
                yield LeakageMetric(attack=name, target=node, metric=label, text=text, detail=True)
        yield LeakageMetric(
            attack=name, target=node, metric="its images", text=f"{distances['real']:,}", detail=True
        )
    average, held = space["average"], space["average_held_out"]
    row, distances = partial(LeakageMetric, attack=name, target="mean of nodes"), f"{space['generated']:,}"
    yield row(
        metric="FID, generated",
        value=average,
        text=_format_value(average, "#.4g"),
        baseline="" if held is None else f"FID {held:.1f} for held-out images",
        note=f"{distances} in {space['dimensions']:,} dimensions" + (f", {note}" if note else ""),
    )
    yield row(metric="FID, held-out", text=_format_value(held, "#.4g"), detail=True)


def _score_rows(part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
    metric, images = "inception score", f"of {part['images']:,} images"
    adapted, student = part["adapted"], part["student"]
    averages = {"the nodes' own models, on average": adapted, "the student": student}
    for target, value in averages.items():
        if target != "the student" or value is not None:
            text = _format_value(value, ".2f")
            yield LeakageMetric(
                target=target, metric=metric, value=value, text=text, baseline="1 at least", note=images
            )
    for node, value in part["nodes"].items():
        yield LeakageMetric(target=node, metric=metric, text=_format_value(value, ".2f"), detail=True)


def _format_value(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
