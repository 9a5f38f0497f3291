"""Arrays of any library as tensors.

A data set as the rest of fedstill sees it: decoded once, normalized once, kept as tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.errors import DataError
from fedstill.core.names import normalize_columns
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.core.text_format import brief_repr

_EXPECTED = "allowed are real numbers, in one array or tensor"


def as_tensor(values: Any, source: str) -> torch.Tensor:
    """Real numbers as a tensor: of a numpy array in any memory order and byte order, or of nested lists.

    A tensor is returned as it is.

    Args:
        values: numbers; lists may hold tensors or arrays of one shape.
        source: they are, the first words of an error.

    Raises:
        DataError: complex numbers, texts, objects, or parts of several shapes.

    >>> as_tensor(np.arange(3, dtype=">i2")[::-1], "labels").tolist()
    [2, 1, 0]
    """
    if isinstance(values, torch.Tensor):
        tensor = values
    elif isinstance(values, list | tuple) and any(isinstance(part, torch.Tensor) for part in values):
        parts = [as_tensor(part, source) for part in values]
        if len({part.shape for part in parts}) > 1:
            raise _mixed_shapes_error(parts, source)
        tensor = torch.stack(parts)
    else:
        tensor = torch.from_numpy(_numbers(values, source))
    if tensor.is_complex():
        raise DataError(f"{source}: values are {str(tensor.dtype).removeprefix('torch.')}: {_EXPECTED}")
    return tensor


def _numbers(values: Any, source: str) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # nested lists of several lengths
        raise _mixed_shapes_error(values, source) from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{source}: values are {array.dtype}: {_EXPECTED}")
    native = array.dtype.newbyteorder("=")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # torch has no longer floats
        native = np.dtype(np.float64)
    return np.require(array, dtype=native, requirements=["C", "W"])


def _mixed_shapes_error(parts: Iterable[Any], source: str) -> DataError:
    shapes = dict.fromkeys(str(tuple(part.shape)) for part in parts if hasattr(part, "shape"))
    some = f" ({', '.join(list(shapes)[:3])})" if shapes else ""
    return DataError(f"{source}: values have several shapes{some} (expected one shape)")


Column = npt.NDArray[Any]  # (N,), one value per training example: its site, its hospital, an age, ...
Form = Literal["images", "texts", "rows"]  # of inputs; rows are a table's
AXES: Mapping[Form, tuple[str, ...]] = {
    "images": ("N", "C", "H", "W"),
    "texts": ("N", "L"),
    "rows": ("N", "F"),
}


@dataclass(frozen=True, eq=False)
class CaseIndex:
    """Of which cases examples are parts: slices of a patient, patches of a slide.

    Case numbers are into ``names``, which holds all cases of the data set; a part of the data set keeps them.

    Args:
        of: each example's case, ``(N,)`` int64 on the CPU.
        sites: where each case comes from: a hospital, an organ; empty texts where that is not known.
        places: where in its case each example's upper left corner is, ``(N, 2)`` int64 rows and columns;
            None: examples are not put together to pictures.
        sizes: height and width of each case, with places.
        instances: the true objects of each case, ``(height, width)`` int32 each, 0 where there is none; for
            tasks that tell objects apart.
    """

    case_ids: torch.Tensor
    names: tuple[str, ...]
    sites: tuple[str, ...]
    corners: torch.Tensor | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    instances: tuple[npt.NDArray[np.int32], ...] = ()

    __repr__ = brief_repr

    @classmethod
    def from_columns(cls, owners: Column, sites: Column | None) -> CaseIndex:
        """Whose each example is, by columns ``(N,)``; a case comes from the site of its first example."""
        names, first, of = np.unique(owners, return_index=True, return_inverse=True)
        told = [""] * len(names) if sites is None else map(str, sites[first])
        return cls(torch.from_numpy(of.astype(np.int64)), tuple(map(str, names)), tuple(told))

    def subset(self, indices: torch.Tensor) -> CaseIndex:
        """Of the examples at ``indices``, in that order."""
        indices = indices.cpu()
        corners = None if self.corners is None else self.corners[indices]
        return replace(self, case_ids=self.case_ids[indices], corners=corners)

    def present_ids(self) -> list[int]:
        """The numbers of the cases that examples are parts of, ascending."""
        return sorted(set(self.case_ids.tolist()))

    def examples_from_site(self, site: str) -> torch.Tensor:
        """Which examples come from a site: indices, ascending."""
        here = torch.tensor([name == site for name in self.sites])
        return torch.nonzero(here[self.case_ids]).flatten()


@dataclass(frozen=True, eq=False)
class TensorData:
    """One part of a data set.

    >>> data = TensorData(torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 1]))
    >>> len(data), data.subset(torch.tensor([2, 0])).targets.tolist()
    (3, [1, 0])
    """

    inputs: torch.Tensor
    """Images ``(N, C, H, W)`` float32, ``(pixel / 255 - mean) / std``: from -1 to 1 where both are 0.5; texts
    ``(N, L)`` int64 token ids, 0 for padding; rows of tables ``(N, F)`` float32."""
    targets: torch.Tensor
    """Class indices ``(N,)`` int64; findings ``(N, labels)`` int64 of 1, 0 and -1 (unknown); a class of each
    pixel ``(N, H, W)`` int64; float32 images ``(N, C, H, W)``, numbers ``(N, 1)``, or times and events
    ``(N, 2)``."""
    groups: torch.Tensor | None = None
    """Whose each example is (a patient), by a number: ``(N,)`` int64; None: each is by itself."""
    cases: CaseIndex | None = None
    """Of which cases examples are parts, for evaluation; None: each is one."""

    __repr__ = brief_repr

    def __len__(self) -> int:
        return len(self.inputs)

    @classmethod
    def concat(cls, parts: Sequence[TensorData]) -> TensorData:
        """The examples of all parts, one part after the other, each example by itself."""
        return cls(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))

    def subset(self, indices: torch.Tensor) -> TensorData:
        """The examples at ``indices`` (int64, in that order), copied."""
        groups = None if self.groups is None else self.groups[indices]
        cases = None if self.cases is None else self.cases.subset(indices)
        return TensorData(self.inputs[indices], self.targets[indices], groups, cases)

    def to(self, device: torch.device | str) -> TensorData:
        """The same examples on ``device``; no copy where they are there already."""
        groups = None if self.groups is None else self.groups.to(device)
        return TensorData(self.inputs.to(device), self.targets.to(device), groups, self.cases)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training examples to be divided over the nodes, and test examples that no node meets.

    ``mean`` and ``std`` are declared constants. They are never measured on the data: each
    figure measured on private examples and then shared would be a release of its own.
    """

    name: str
    train: TensorData
    test: TensorData
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # one per channel
    std: tuple[float, ...]  # one per channel
    note: str = ""  # what a reader of a figure must know: a lossy copy, a split that is not the official one
    columns: Mapping[str, Column] = field(default_factory=dict)  # by name, in the order of train
    test_columns: Mapping[str, Column] = field(default_factory=dict)  # the same, in the order of test
    test_names: tuple[str, ...] = ()  # of each test example in its source: a file, or a number from 0
    # The column that says whose each example is (a patient): those of one value are never parted between
    # training, testing, public data and nodes. Empty: each example is by itself.
    group_column: str = ""
    vocabulary: int = 0  # texts: how many token ids there are, padding among them; 0: inputs are no texts
    schema: Schema = NO_SCHEMA  # tables: what their columns may be

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", normalize_columns(self.columns))
        object.__setattr__(self, "test_columns", normalize_columns(self.test_columns))


def check_labels(
    targets: torch.Tensor, classes: int, source: str, shape: tuple[int, ...] = (), min_label: int = 0
) -> None:
    """Refuse anything but numbers of classes, least..classes-1, ``(N, *shape)`` int64.

    Raises:
        DataError: another type or shape, or a label outside the classes; the line names the
            first such label, its example and how many there are.

    >>> check_labels(torch.tensor([0, 7, 1, 9]), 3, "train")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: train: label 7 of example 1 is outside 0..2 (2 such labels in all)
    """
    if targets.dtype != torch.int64 or tuple(targets.shape[1:]) != shape or not targets.ndim:
        wanted = f"int64 of shape {(len(targets), *shape)}" if shape else "one int64 class index per example"
        raise DataError(f"{source}: targets are {_describe_tensor(targets)} (expected {wanted})")
    outside = torch.nonzero((targets < min_label) | (targets >= classes))
    if len(outside):
        place = tuple(outside[0].tolist())
        from_one = min_label == 0 and int(targets.min()) == 1 and int(targets.max()) == classes
        raise DataError(
            f"{source}: label {int(targets[place])} of example {place[0]} is outside {min_label}..{classes - 1} "
            f"({len(outside)} such labels in all){': they count from 1, so subtract 1' if from_one else ''}"
        )


def check_numbers(targets: torch.Tensor, width: int, source: str) -> None:
    """Refuse anything but so many numbers for each example, ``(N, width)`` float32.

    Raises:
        DataError: another type or shape.
    """
    wanted = (len(targets), width)
    if targets.dtype != torch.float32 or targets.shape != wanted:
        raise DataError(
            f"{source}: targets are {_describe_tensor(targets)} (expected float32 of shape {wanted})"
        )


def check_inputs(data: TensorData, source: str, form: Form = "images") -> None:
    """Refuse inputs that no network can take, whatever the targets mean.

    Args:
        data: images (N, C, H, W) float32 without NaN or infinity, H and W multiples of 4; token ids (N, L)
            int64 from 0 up, of which a text may be all padding; or rows of a table (N, F) float32 without NaN
            or infinity; one target each.
        source: what the data is, the first words of an error: ``"train of digits"``.

    Raises:
        DataError: naming the first of these that does not hold.

    >>> check_inputs(TensorData(torch.zeros(2, 1, 6, 8), torch.tensor([0, 1])), "train")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: train: images are 6 x 8 (height, width): allowed are heights and widths
    that 4 divides; a run's data.size makes them so
    """
    inputs, count = data.inputs, len(data.targets)
    if inputs.dtype != (torch.int64 if form == "texts" else torch.float32) or inputs.ndim != len(AXES[form]):
        wanted = f"{'int64 ids' if form == 'texts' else 'float32 of shape'} ({', '.join(AXES[form])})"
        rows = form == "images" and inputs.ndim == 2
        hint = '; rows of a table are learned by task "tabular", "regression" or "survival"' if rows else ""
        raise DataError(f"{source}: inputs are {_describe_tensor(inputs)} (expected {wanted}{hint})")
    if len(inputs) != count:
        raise DataError(f"{source}: {len(inputs)} inputs but {count} targets (expected one each)")
    if len(inputs) == 0:
        raise DataError(f"{source}: there are no examples (expected one or more)")
    if 0 in inputs.shape:
        raise DataError(f"{source}: inputs are {_describe_tensor(inputs)} (expected one or more of each)")
    height, width = inputs.shape[-2:]
    if form == "images" and width <= 4 < inputs.shape[1]:
        last = "channels seem to be the last axis, as in (N, H, W, C)"
        way = "x.permute(0, 3, 1, 2), or numpy's x.transpose(0, 3, 1, 2)"
        raise DataError(
            f"{source}: inputs are {_describe_tensor(inputs)}: {last}; allowed is (N, C, H, W): {way}"
        )
    if form == "images" and (height % 4 or width % 4):
        # Generators start at a quarter of the image's size and critics end there.
        allowed = "allowed are heights and widths that 4 divides; a run's data.size makes them so"
        raise DataError(f"{source}: images are {height} x {width} (height, width): {allowed}")
    sound = inputs >= 0 if form == "texts" else torch.isfinite(inputs)
    broken = torch.nonzero(~sound.flatten(1).all(dim=1)).flatten()
    if len(broken):
        held = "ids below 0" if form == "texts" else "NaN or infinity"
        raise DataError(
            f"{source}: {len(broken)} examples hold {held}, the first is example {int(broken[0])}"
        )


def check_pixels(images: torch.Tensor, mean: Sequence[float], std: Sequence[float], source: str) -> None:
    """Refuse images ``(N, C, H, W)`` that are no pixels from 0 to 1 under a normalization, by channel.

    Raises:
        DataError: saying what the first channel that is outside has, and what is allowed.
    """
    low, high = ((end - torch.tensor(mean)) / torch.tensor(std) for end in (0, 1))  # (C,)
    least, most = images.amin((0, 2, 3)).cpu(), images.amax((0, 2, 3)).cpu()
    outside = torch.nonzero((least < low - 1e-3) | (most > high + 1e-3))
    if len(outside):
        c = int(outside[0])
        raise DataError(
            f"{source} has values from {least[c]:.4g} to {most[c]:.4g} in channel {c}: allowed by mean "
            f"{mean[c]:.4g} and std {std[c]:.4g} are {low[c]:.4g} to {high[c]:.4g}"
        )


def normalize(pixels: Column, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Pixels as the networks take them: ``(pixel - mean) / std``, with pixel scaled to [0, 1].

    Args:
        pixels: (N, C, H, W), uint8 in 0..255 or floats in [0, 1].
        mean, std: one per channel.

    Returns:
        (N, C, H, W) float32 in memory of its own.

    >>> import numpy
    >>> normalize(numpy.array([[[[0, 255]]]], dtype=numpy.uint8), (0.5,), (0.5,)).flatten().tolist()
    [-1.0, 1.0]
    """
    scale = 255.0 if pixels.dtype == np.uint8 else 1.0
    x = torch.from_numpy(pixels.astype(np.float32, order="C"))  # (N, C, H, W), a copy
    x.div_(scale)
    return x.sub_(torch.tensor(mean).view(-1, 1, 1)).div_(torch.tensor(std).view(-1, 1, 1))


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
