"""Built-in data sets: scikit-learn's digits and tables, MNIST and CIFAR.

The ranges of the tables come from published statistics, rounded outwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import DataSet
from fedstill.core.errors import DataError
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data.config import DataConfig
from fedstill.data.loading import ImageArrayData, prepare_images
from fedstill.data.raw_images import RawImages
from fedstill.data.table_data import TableData
from fedstill.data.user_data import data_folders, format_paths, read_raw_images
from fedstill.tasks import Targets, TaskConfig

# --- images -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Digits(ImageArrayData):
    """The 8 x 8 handwritten digits of scikit-learn (1797 images, 10 classes).

    >>> from fedstill.data import load
    >>> len(load(Digits()).train), len(load(Digits()).test)
    (1438, 359)
    """

    targets: ClassVar[tuple[Targets, ...]] = ("class",)
    note: ClassVar[str] = "the 8 x 8 handwritten digits of scikit-learn"

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """Return all 1797 images and labels."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        return {"images": (digits.images / 16).astype(np.float32), "labels": digits.target}  # from 0..16


@dataclass(frozen=True, kw_only=True)
class TorchvisionData(DataConfig):
    """A data set in torchvision's format, or from an ``.npz``.

    Attributes:
        torchvision_class: name of the class in ``torchvision.datasets``.
        torchvision_folder: folder in which torchvision stores the data.
        file: an ``.npz``, which is preferred; empty: none.
        note: remark on that file.
    """

    targets: ClassVar[tuple[Targets, ...]] = ("class",)
    torchvision_class: ClassVar[str]
    torchvision_folder: ClassVar[str]
    file: ClassVar[str] = ""

    download: bool = False
    """Let torchvision (the extra "vision") download missing data."""

    def read(self, task: TaskConfig) -> DataSet:
        """Return the data set, from the first data folder with the file, else from torchvision's folder."""
        roots = data_folders(self)
        files = [root / self.file for root in roots if self.file and (root / self.file).is_file()]
        if files:
            return prepare_images(
                read_raw_images(files[0], "npz", "class"), self, task, self.registered_name, self.note
            )
        existing = [root for root in roots if (root / self.torchvision_folder).is_dir()]
        if existing or self.download:
            raw = self._torchvision((existing or roots)[0])
            return prepare_images(raw, self, task, self.registered_name, "official split")
        expected = f"torchvision's {self.torchvision_folder}" + (f" or {self.file}" if self.file else "")
        raise DataError(
            f"data {self.registered_name!r}: {expected} not found in {format_paths(roots)}; put it "
            "there, or set data.root or data.download (docs/tasks.md has the sources of such files)"
        )

    def _torchvision(self, root: Path) -> RawImages:
        """Read both official parts of a data set with torchvision.

        The CIFAR files are pickles: torchvision opens them only if their MD5 sums are the published ones.
        """
        try:
            datasets = importlib.import_module("torchvision.datasets")
        except ImportError as error:
            raise DataError(
                f"{root / self.torchvision_folder}: reading or downloading this needs torchvision: "
                "pip install 'fedstill[vision]'"
            ) from error
        try:
            train, test = (
                getattr(datasets, self.torchvision_class)(str(root), train=is_train, download=self.download)
                for is_train in (True, False)
            )
        except (RuntimeError, OSError, ValueError, AssertionError, EOFError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{self.torchvision_class} in {root}: torchvision failed ({reason})") from error
        images = np.concatenate([np.asarray(train.data), np.asarray(test.data)])  # (N, H, W) or (N, H, W, 3)
        labels = np.concatenate([np.asarray(train.targets), np.asarray(test.targets)]).astype(np.int64)
        return RawImages(
            images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2),
            labels,
            tuple(str(name) for name in train.classes),
            np.arange(len(labels)) >= len(train.targets),
        )


@dataclass(frozen=True, kw_only=True)
class MNIST(TorchvisionData):
    """MNIST: 28 x 28 handwritten digits."""

    file = "mnist.npz"
    note = "official split"
    torchvision_class = torchvision_folder = "MNIST"


@dataclass(frozen=True, kw_only=True)
class FashionMNIST(TorchvisionData):
    """Fashion-MNIST: 28 x 28 pieces of clothing."""

    file = "fashion_mnist.npz"
    note = "a stratified split, not the official one"
    torchvision_class = torchvision_folder = "FashionMNIST"


@dataclass(frozen=True, kw_only=True)
class CIFAR10(TorchvisionData):
    """CIFAR-10: 32 x 32 color images of 10 classes."""

    torchvision_class, torchvision_folder = "CIFAR10", "cifar-10-batches-py"


@dataclass(frozen=True, kw_only=True)
class CIFAR100(TorchvisionData):
    """CIFAR-100: 32 x 32 color images of 100 classes."""

    torchvision_class, torchvision_folder = "CIFAR100", "cifar-100-python"


# --- tables -------------------------------------------------------------------------------------------------

# Ranges of the mean, the standard error and the worst value of ten measurements of nuclei.
NUCLEUS_RANGES = {
    "radius": ((6, 30), (0, 3), (7, 40)),
    "texture": ((9, 40), (0, 5), (12, 50)),
    "perimeter": ((40, 190), (0, 22), (50, 260)),
    "area": ((140, 2600), (0, 550), (180, 4300)),
    "smoothness": ((0.05, 0.17), (0, 0.035), (0.07, 0.23)),
    "compactness": ((0, 0.35), (0, 0.14), (0, 1.1)),
    "concavity": ((0, 0.43), (0, 0.4), (0, 1.3)),
    "concave points": ((0, 0.21), (0, 0.055), (0, 0.3)),
    "symmetry": ((0.1, 0.31), (0, 0.08), (0.15, 0.67)),
    "fractal dimension": ((0.04, 0.1), (0, 0.03), (0.05, 0.21)),
}
WINE_RANGES = {
    "alcohol": (11, 15),
    "malic acid": (0.7, 6),
    "ash": (1.3, 3.3),
    "alcalinity of ash": (10, 30),
    "magnesium": (70, 170),
    "total phenols": (0.9, 4),
    "flavanoids": (0.3, 5.2),
    "nonflavanoid phenols": (0.1, 0.7),
    "proanthocyanins": (0.4, 3.6),
    "color intensity": (1, 13),
    "hue": (0.4, 1.8),
    "OD280/OD315": (1.2, 4),
    "proline": (270, 1700),
}
DIABETES_RANGES = {
    "age": (18, 80),
    "bmi": (15, 45),
    "blood pressure": (60, 140),
    "tc": (90, 310),
    "ldl": (40, 250),
    "hdl": (20, 100),
    "tch": (1, 10),
    "ltg": (3, 6.5),
    "glu": (50, 130),
}


@dataclass(frozen=True, kw_only=True)
class BreastCancer(TableData):
    """30 measurements of cell nuclei, malignant or benign (569 rows); part of scikit-learn."""

    note: ClassVar[str] = "the Breast Cancer Wisconsin (Diagnostic) data of scikit-learn"

    def schema(self) -> TableSchema:
        """Return means, standard errors and worst values, in scikit-learn's order."""
        ranges = {
            f"{statistic} {name}": range_of[index]
            for index, statistic in enumerate(("mean", "error of", "worst"))
            for name, range_of in NUCLEUS_RANGES.items()
        }
        return _make_schema(ranges, "diagnosis", ("malignant", "benign"))

    def cells(self) -> Mapping[str, Sequence[Any]]:
        """Return all 569 rows."""
        from sklearn.datasets import load_breast_cancer

        return _named_cells(load_breast_cancer(), self.schema())


@dataclass(frozen=True, kw_only=True)
class Wine(TableData):
    """13 chemical measurements of wines of three cultivators (178 rows); part of scikit-learn."""

    note: ClassVar[str] = "the wine recognition data of scikit-learn"

    def schema(self) -> TableSchema:
        """Return the columns in scikit-learn's order."""
        return _make_schema(WINE_RANGES, "cultivator", ("0", "1", "2"))

    def cells(self) -> Mapping[str, Sequence[Any]]:
        """Return all 178 rows."""
        from sklearn.datasets import load_wine

        return _named_cells(load_wine(), self.schema())


@dataclass(frozen=True, kw_only=True)
class Diabetes(TableData):
    """Ten baseline measurements and the diabetes progression of 442 patients; part of scikit-learn."""

    targets: ClassVar[tuple[Targets, ...]] = ("values",)
    note: ClassVar[str] = "the diabetes data of scikit-learn, unscaled"

    def schema(self) -> TableSchema:
        """Return nine numbers and the category sex; the target is the progression."""
        age, *others = (_number_column(name, bounds) for name, bounds in DIABETES_RANGES.items())
        sex = SchemaColumn(name="sex", type="category", categories=("1", "2"))
        return TableSchema("progression", (age, sex, *others, _number_column("progression", (0, 350))))

    def cells(self) -> Mapping[str, Sequence[Any]]:
        """Return all 442 rows."""
        from sklearn.datasets import load_diabetes

        bunch, schema = load_diabetes(scaled=False), self.schema()
        names = [column.name for column in schema.input_columns]
        return {**dict(zip(names, bunch.data.T.tolist(), strict=True)), schema.target: bunch.target.tolist()}


def _number_column(name: str, bounds: tuple[float, float]) -> SchemaColumn:
    return SchemaColumn(name=name, range=(float(bounds[0]), float(bounds[1])))


def _make_schema(
    ranges: Mapping[str, tuple[float, float]], target: str, classes: tuple[str, ...]
) -> TableSchema:
    target_column = SchemaColumn(name=target, type="category", categories=classes)
    numbers = (_number_column(name, bounds) for name, bounds in ranges.items())
    return TableSchema(target, (*numbers, target_column))


def _named_cells(bunch: Any, schema: TableSchema) -> dict[str, Sequence[Any]]:
    """Return scikit-learn's columns by the names of the schema, and the target as categories."""
    names = [column.name for column in schema.input_columns]
    columns: dict[str, Sequence[Any]] = dict(zip(names, bunch.data.T.tolist(), strict=True))
    return {**columns, schema.target: [schema.classes[number] for number in bunch.target]}
