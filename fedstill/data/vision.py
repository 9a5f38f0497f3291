"""Images of classes with a name: scikit-learn's digits, MNIST and CIFAR."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import DataSet
from fedstill.core.errors import DataError
from fedstill.data.array_data import ArrayData
from fedstill.data.config import DataConfig
from fedstill.data.preparation import of_images
from fedstill.data.raw import Raw
from fedstill.data.user_data import folders, listed, read
from fedstill.tasks import Targets, TaskConfig


@dataclass(frozen=True, kw_only=True)
class Digits(ArrayData):
    """The 8 x 8 handwritten digits of scikit-learn, which come with the installation."""

    targets: ClassVar[tuple[Targets, ...]] = ("class",)
    note: ClassVar[str] = "the 8 x 8 handwritten digits of scikit-learn"

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """All 1797."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        return {"images": (digits.images / 16).astype(np.float32), "labels": digits.target}  # from 0..16


@dataclass(frozen=True, kw_only=True)
class Vision(DataConfig):
    """A data set as torchvision keeps it, or from an ``.npz``.

    Attributes:
        vision: torchvision's class.
        vision_folder: in which torchvision keeps the data.
        file: an ``.npz``, which comes first; empty: none.
        note: what is to be said of that file.
    """

    targets: ClassVar[tuple[Targets, ...]] = ("class",)
    vision: ClassVar[str]
    vision_folder: ClassVar[str]
    file: ClassVar[str] = ""

    download: bool = False
    """Let torchvision (the extra "vision") download what is not there."""

    def read(self, task: TaskConfig) -> DataSet:
        """From the first folder that has the file, else from torchvision's."""
        roots = folders(self)
        files = [root / self.file for root in roots if self.file and (root / self.file).is_file()]
        if files:
            return of_images(read(files[0], "npz", "class"), self, task, self.called, self.note)
        there = [root for root in roots if (root / self.vision_folder).is_dir()]
        if there or self.download:
            raw = self._torchvision((there or roots)[0])
            return of_images(raw, self, task, self.called, "official split")
        wanted = f"torchvision's {self.vision_folder}" + (f" or {self.file}" if self.file else "")
        raise DataError(
            f"data {self.called!r}: there is no {wanted} in {listed(roots)}: put it there, name its folder "
            "in data.root, or set data.download; docs/tasks.md says what such files are made of"
        )

    def _torchvision(self, root: Path) -> Raw:
        """Both official parts of a data set, through torchvision.

        The CIFAR files are pickles: torchvision opens them only if their MD5 sums are those of the published.
        """
        try:
            vision = importlib.import_module("torchvision.datasets")
        except ImportError as error:
            raise DataError(
                f"{root / self.vision_folder}: only torchvision can read this or download it: "
                "pip install 'fedstill[vision]'"
            ) from error
        try:
            train, test = (
                getattr(vision, self.vision)(str(root), train=part, download=self.download)
                for part in (True, False)
            )
        except (RuntimeError, OSError, ValueError, AssertionError, EOFError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{self.vision} in {root}: torchvision gives none ({reason})") from error
        images = np.concatenate([np.asarray(train.data), np.asarray(test.data)])  # (N, H, W) or (N, H, W, 3)
        labels = np.concatenate([np.asarray(train.targets), np.asarray(test.targets)]).astype(np.int64)
        return Raw(
            images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2),
            labels,
            tuple(str(name) for name in train.classes),
            np.arange(len(labels)) >= len(train.targets),
        )


@dataclass(frozen=True, kw_only=True)
class MNIST(Vision):
    """MNIST: 28 x 28 handwritten digits."""

    file = "mnist.npz"
    note = "official split"
    vision = vision_folder = "MNIST"


@dataclass(frozen=True, kw_only=True)
class FashionMNIST(Vision):
    """Fashion-MNIST: 28 x 28 pieces of clothing."""

    file = "fashion_mnist.npz"
    note = "a stratified split, not the official one"
    vision = vision_folder = "FashionMNIST"


@dataclass(frozen=True, kw_only=True)
class CIFAR10(Vision):
    """CIFAR-10: 32 x 32 colour images of 10 classes."""

    vision, vision_folder = "CIFAR10", "cifar-10-batches-py"


@dataclass(frozen=True, kw_only=True)
class CIFAR100(Vision):
    """CIFAR-100: 32 x 32 colour images of 100 classes."""

    vision, vision_folder = "CIFAR100", "cifar-100-python"
