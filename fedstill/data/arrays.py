"""Data that are arrays: whoever writes a reader gives what it holds, and the preparation is done here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import Column, DataSet, TensorData, normalised
from fedstill.core.errors import DataError, FedstillError
from fedstill.core.imports import OWN, first_line
from fedstill.data import own, packs
from fedstill.data.assembled import Source, data_set
from fedstill.data.config import MEAN, STD, DataConfig, targets_of
from fedstill.data.packs import Raw
from fedstill.data.parts import parted
from fedstill.data.units import Ints
from fedstill.tasks import TaskConfig


@dataclass(frozen=True, kw_only=True)
class ArrayData(DataConfig):
    """Images whose targets are classes, findings, maps, or the images themselves: what one's own mostly are.

    A subclass says in ``targets`` what it can teach, and gives its arrays.
    """

    @abstractmethod
    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """All examples, by name as an ``.npz`` has them.

        Returns:
            ``images`` (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or floats in [0, 1], with H and W that 4
            divides. What they teach: ``labels`` (N,), names or numbers from 0, or (N, C) findings of -1
            (unknown), 0 and 1; or ``masks`` (N, H, W), classes from 0. If there are such: ``classes``, names
            in the order of their numbers; ``split`` (N,), 0 for training and 1 for testing; and any columns
            (N,), of which ``patient`` (whose each is: nobody's are parted) and ``site`` are heeded.
        """

    def read(self, task: TaskConfig) -> DataSet:
        """These arrays, checked, divided into training and test parts, and normalised."""
        arrays, name = self._given(), self.called
        if targets_of(task) == "class":
            raw = packs.from_arrays(Path(name), packs.with_numbers(arrays))
            return classified(raw, self, name, self.note)
        return data_set(Source(own.from_arrays(Path(name), arrays, task.like), name, self.note), self, task)

    def _given(self) -> dict[str, Column]:
        try:
            return {key: np.asarray(array) for key, array in self.arrays().items()}
        except FedstillError:
            raise
        except OWN as error:
            told = f"its arrays cannot be had: {type(error).__name__}: {first_line(error)}"
            raise DataError(f"data {self.called!r}: {told}") from error


def classified(raw: Raw, config: DataConfig, name: str, note: str) -> DataSet:
    """The data set that images of classes and a configuration make.

    Args:
        raw: as they were read; labels ``(N,)``.
        config: how much for testing, validation, training.
        name: of the data set, in results.
        note: what is to be said of it.

    Raises:
        DataError: as :func:`fedstill.data.parts.parted`.
    """
    parts = parted(raw.labels, raw.test, raw.columns, config, name)
    channels = raw.images.shape[1]
    mean, std = (MEAN,) * channels, (STD,) * channels
    return DataSet(
        name=name,
        train=replace(_tensors(raw, parts.train, mean, std), groups=parts.groups),
        test=_tensors(raw, parts.test, mean, std),
        classes=raw.classes,
        mean=mean,
        std=std,
        note="; ".join((note, *parts.notes) if note else parts.notes),
        columns={key: column[parts.train] for key, column in raw.columns.items()},
        unit=parts.unit,
    )


def _tensors(raw: Raw, rows: Ints, mean: tuple[float, ...], std: tuple[float, ...]) -> TensorData:
    return TensorData(normalised(raw.images[rows], mean, std), torch.from_numpy(raw.labels[rows]))
