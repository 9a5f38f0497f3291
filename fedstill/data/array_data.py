"""Data that are arrays: whoever writes a reader gives what it holds, and the preparation is done here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy.typing as npt

from fedstill.core.dataset import Column, DataSet
from fedstill.core.errors import DataError, FedstillError
from fedstill.core.user_functions import OWN, first_line
from fedstill.data.config import DataConfig
from fedstill.data.pil_images import arrays_of
from fedstill.data.preparation import of_images
from fedstill.data.raw import from_arrays
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
            divides, or a list of images of PIL (of ``masks``, too). What they teach: ``labels`` (N,), names
            or numbers from 0, or (N, C) findings of -1 (unknown), 0 and 1; or ``masks`` (N, H, W), classes
            from 0. If there are such: ``classes``, names in the order of their numbers; ``split`` (N,), 0 for
            training, 1 for testing and 2 for validation; and any columns (N,), of which ``patient`` (whose
            each is: those of a patient are not divided) and ``site`` are heeded.
        """

    def read(self, task: TaskConfig) -> DataSet:
        """These arrays, checked, divided into training and test parts, and normalised."""
        raw = from_arrays(Path(self.called), self._given(), task.targets)
        return of_images(raw, self, task, self.title or self.called, self.note)

    def _given(self) -> dict[str, Column]:
        try:
            return arrays_of(self.arrays(), f"data {self.called!r}")
        except FedstillError:
            raise
        except OWN as error:
            told = f"its arrays cannot be had: {type(error).__name__}: {first_line(error)}"
            raise DataError(f"data {self.called!r}: {told}") from error
