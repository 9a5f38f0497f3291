"""Draws of the node of each example or unit, for :mod:`fedstill.data.splits`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import ArgumentError
from fedstill.data.units import Ints

if TYPE_CHECKING:
    from fedstill.data.config import SplitConfig

DRAWS = 20  # how often a Dirichlet split is drawn before small nodes are topped up instead


def dirichlet(labels: Ints, classes: int, config: SplitConfig, generator: np.random.Generator) -> Ints:
    nodes = config.nodes
    owner = np.empty(len(labels), dtype=np.int64)
    for _ in range(DRAWS):
        for label in range(classes):
            examples = generator.permutation(np.flatnonzero(labels == label))
            shares = dirichlet_shares(config.alpha, nodes, generator)
            ends = np.floor(np.cumsum(shares)[:-1] * len(examples))  # (K-1,): the last node has the rest
            owner[examples] = np.searchsorted(ends, np.arange(len(examples)), side="right")
        if np.bincount(owner, minlength=nodes).min() >= config.minimum:
            return owner
    return topped_up(owner, nodes, config.minimum, generator)


def dirichlet_shares(alpha: float, nodes: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """One draw from Dirichlet(alpha, ..., alpha), (K,) and summing to 1, for any alpha.

    The usual way divides Gamma(alpha) draws by their sum, and for small alpha they are all 0.
    In logarithms nothing is lost: Gamma(a) is Gamma(a + 1) times U^(1/a), and -log U is
    exponential.
    """
    logs = np.log(generator.standard_gamma(alpha + 1, nodes)) - generator.standard_exponential(nodes) / alpha
    shares: npt.NDArray[np.float64] = np.exp(logs - logs.max())
    shares /= shares.sum()
    return shares


def shards(labels: Ints, classes: int, config: SplitConfig, generator: np.random.Generator) -> Ints:
    nodes, per_node = config.nodes, config.classes_per_node
    sizes = np.bincount(labels, minlength=classes)  # (classes,)
    present = np.flatnonzero(sizes)
    if per_node > len(present):
        raise ArgumentError(
            "split.classes_per_node", per_node, f"at most {len(present)}, the classes that occur in the data"
        )

    holds = np.zeros((nodes, classes), dtype=bool)
    for node in range(nodes):
        # The classes at the fewest nodes so far; one with no example left for a further node comes last.
        used = holds.sum(axis=0)[present]
        ranking = np.lexsort((generator.random(len(present)), used, used >= sizes[present]))
        holds[node, present[ranking[:per_node]]] = True
    for label in present[~holds[:, present].any(axis=0)]:  # too few nodes for all classes
        ranking = np.lexsort((generator.random(nodes), holds.sum(axis=1)))
        holds[ranking[0], label] = True

    owner = np.empty(len(labels), dtype=np.int64)
    for label in present:
        holders = generator.permutation(np.flatnonzero(holds[:, label]))
        owner[generator.permutation(np.flatnonzero(labels == label))] = np.resize(holders, sizes[label])
    return topped_up(owner, nodes, config.minimum, generator, labels)


def topped_up(
    owner: Ints, nodes: int, minimum: int, generator: np.random.Generator, labels: Ints | None = None
) -> Ints:
    """Move random examples from the largest nodes until each node holds the minimum.

    With ``labels``, examples of classes that the small node holds already are moved first.
    There must be ``nodes * minimum`` examples: then some node can spare one while another
    lacks one, and each step ends the need of the small node or the surplus of a large one.
    """
    owner = owner.copy()
    sizes = np.bincount(owner, minlength=nodes)
    for small in range(nodes):
        while (need := minimum - sizes[small]) > 0:
            spare = np.flatnonzero(sizes[owner] > minimum)  # examples at nodes that can give some
            if labels is not None:
                known = spare[np.isin(labels[spare], labels[owner == small])]
                spare = known if len(known) else spare
            large = owner[spare][np.argmax(sizes[owner[spare]])]
            moved = generator.permutation(spare[owner[spare] == large])[: min(need, sizes[large] - minimum)]
            owner[moved] = small
            sizes[large] -= len(moved)
            sizes[small] += len(moved)
    return owner


def level(owner: Ints, order: Ints, sizes: Ints, held: npt.NDArray[np.float64]) -> None:
    """Give units one after another to the node that holds least; changes ``owner`` and ``held``."""
    for index in order:
        owner[index] = held.argmin()
        held[owner[index]] += sizes[index]


def positives(
    positive: npt.NDArray[np.bool_], sizes: Ints, config: SplitConfig, generator: np.random.Generator
) -> Ints:
    """Positive units in drawn shares, then negative ones until all nodes are as large: ``(U,)``."""
    nodes, most = config.nodes, sizes.sum() / config.nodes
    wanted = dirichlet_shares(config.alpha, nodes, generator) * sizes[positive].sum()
    excess, wanted = (wanted - most).clip(0).sum(), wanted.clip(max=most)
    room = most - wanted
    wanted += excess * room / max(room.sum(), 1e-9)  # what is too much for one goes to those with room
    owner = np.empty(len(sizes), dtype=np.int64)
    held = -wanted
    level(owner, generator.permutation(np.flatnonzero(positive)), sizes, held)
    held += wanted
    level(owner, generator.permutation(np.flatnonzero(~positive)), sizes, held)
    return owner


def whole_topped_up(owner: Ints, sizes: Ints, config: SplitConfig, generator: np.random.Generator) -> Ints:
    """Move random units from the largest nodes until each node holds the minimum of examples."""
    held = np.bincount(owner, weights=sizes, minlength=config.nodes)
    while held.min() < config.minimum:
        small, spare = held.argmin(), held[owner] - sizes >= config.minimum
        if not spare.any():
            least = f"{config.minimum} examples in whole units, and this draw has none to spare"
            raise ArgumentError("split.minimum", config.minimum, f"less: some node cannot have {least}")
        large = owner[spare][held[owner[spare]].argmax()]
        moved = generator.choice(np.flatnonzero(spare & (owner == large)))
        held[large] -= sizes[moved]
        held[small] += sizes[moved]
        owner[moved] = small
    return owner
