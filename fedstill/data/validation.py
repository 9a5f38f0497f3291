"""A part of the training examples to choose options by, so that the test part stays unseen till then."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import Column
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import numpy_generator
from fedstill.data.config import DataConfig
from fedstill.data.units import Ints, drawn_units

Flags = npt.NDArray[np.bool_]


def set_aside(
    test: Flags, labels: Ints, unit: Column, sites: Column | None, config: DataConfig, called: str
) -> tuple[Flags, Flags, str]:
    """Which examples are for training, and which figures are measured on.

    Without ``data.validation`` these are the two parts as they are. With it, that share of each site's
    training units takes the place of the test part, which is in neither; a site with one training unit keeps
    it.

    Args:
        test: which examples are for testing, ``(N,)``.
        labels: of each example, whose shares are kept.
        unit: whose each example is, never parted.
        sites: where each example is from; None: all from one place.
        config: share and seed.
        called: what units are, for the note ("patients").

    Returns:
        Two of ``(N,)``, and what is to be said of it.

    Raises:
        ArgumentError: no site has two training units.

    >>> from fedstill.data.config import named
    >>> test = np.array([True, False, False, False, False])
    >>> kinds, config = np.zeros(5, dtype=np.int64), named("digits", validation=0.25)
    >>> train, measured, note = set_aside(test, kinds, np.arange(5), None, config, "images")
    >>> int(train.sum()), int(measured.sum()), bool((train & measured | test & measured).any()), note
    (3, 1, False, 'measured on 1 of 4 training images, set aside with seed 0; the test part is not used')
    """
    train: Flags = ~test
    if not config.validation:
        return train, test, ""
    where = np.zeros(len(test), dtype=np.int64) if sites is None else sites
    large = [site for site in np.unique(where[train]) if len(np.unique(unit[train & (where == site)])) > 1]
    rows = np.flatnonzero(train & np.isin(where, large))
    if not len(rows):
        raise ArgumentError("data.validation", config.validation, f"0, as no site has two training {called}")
    generator = numpy_generator(config.seed, "data", "validation")
    chosen = drawn_units(labels[rows], unit[rows], where[rows], config.validation, generator)
    measured: Flags = train & np.isin(unit, unit[rows[chosen]])  # whole units, at whichever sites
    count, of = len(np.unique(unit[measured])), len(np.unique(unit[train]))
    note = f"measured on {count} of {of} training {called}, set aside with seed {config.seed}"
    return train & ~measured, measured, f"{note}; the test part is not used"


def check_measured_on_test(config: DataConfig) -> None:
    """Refuse validation data where nodes bring data of their own, which no server can set aside.

    Raises:
        ArgumentError: ``data.validation`` is not 0.
    """
    if config.validation:
        allowed = "0, as nodes that hold data of their own set nothing aside for a server"
        raise ArgumentError("data.validation", config.validation, allowed)
