"""Training and test parts of labelled examples, for classification of images and of texts.

Where a column says whose each example is, nobody is in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.core.seeds import numpy_generator
from fedstill.data.assembled import PATIENT, SITE
from fedstill.data.config import DataConfig
from fedstill.data.groups import numbered
from fedstill.data.units import Ints, drawn_units, strata, stratified, whole
from fedstill.data.validation import set_aside


@dataclass(frozen=True, eq=False)
class Parts:
    """Rows of the two parts, and what is to be said of them.

    Args:
        train, test: ascending rows.
        notes: sentences for a data set's note.
        unit: the column whose values are not parted ("patient"), or nothing.
        groups: whose each row of train is, ``(N,)`` int64; None where that is not told.
    """

    train: Ints
    test: Ints
    notes: tuple[str, ...]
    unit: str = ""
    groups: torch.Tensor | None = None


def parted(
    labels: Ints,
    test: npt.NDArray[np.bool_] | None,
    columns: Mapping[str, Column],
    config: DataConfig,
    name: str,
) -> Parts:
    """Part examples as their source says, or else by a draw with the classes' shares kept.

    Of examples with a column ``patient`` whole patients are drawn, and sites keep their shares too.

    Args:
        labels: class of each example, ``(N,)``.
        test: which are for testing, ``(N,)``; None where the source does not say.
        columns: ``(N,)`` each.
        config: seed, share of the test part, limit of the training part.
        name: of the data, for errors.

    Raises:
        DataError: a patient in both of the source's parts, or one patient alone and nothing told.
    """
    rows, patient = np.arange(len(labels)), columns.get(PATIENT)
    notes = []
    if test is not None:
        chosen = np.flatnonzero(test)
        if patient is not None and len(both := np.intersect1d(patient[test], patient[~test])):
            raise DataError(f"{name}: patient {str(both[0])!r} is in both parts: allowed is one of them")
    else:
        generator = numpy_generator(config.seed, "data", "test")
        if patient is None:
            # At least one example on each side, however small the source.
            count = min(max(round(len(rows) * config.test_fraction), 1), len(rows) - 1)
            chosen = stratified(labels, count, generator)
            told = f"{count} of {len(rows)}"
        else:
            of = len(np.unique(patient))
            if of < 2:
                raise DataError(f"{name}: has one patient: allowed are two, of which one is for testing")
            drawn = drawn_units(strata(labels, columns), patient, None, config.test_fraction, generator)
            chosen = np.flatnonzero(drawn)
            told = f"{len(np.unique(patient[chosen]))} of {of} patients"
        notes.append(f"no official split: tested on {told}, drawn with seed {config.seed}")
    units = rows if patient is None else patient
    kinds, called = strata(labels, columns), "examples" if patient is None else "patients"
    kept, measured, told = set_aside(np.isin(rows, chosen), kinds, units, columns.get(SITE), config, called)
    train, chosen = rows[kept], rows[measured]
    notes.extend([told] if told else [])
    if 0 < config.train_limit < len(train):
        generator, there = numpy_generator(config.seed, "data", "limit"), len(train)
        if patient is None:
            train = train[stratified(labels[train], config.train_limit, generator)]
        else:
            kinds = strata(labels[train], {key: column[train] for key, column in columns.items()})
            train = train[whole(kinds, patient[train], config.train_limit, generator)]
        notes.append(f"trained on {len(train)} of {there}, drawn with seed {config.seed}")
    if patient is None:
        return Parts(train, chosen, tuple(notes))
    return Parts(train, chosen, tuple(notes), PATIENT, numbered(patient[train].tolist()))
