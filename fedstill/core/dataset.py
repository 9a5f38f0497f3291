"""Data sets as tensors: decoded and normalized once.

:class:`TensorData` is one part, :class:`DataSet` training and test part with their metadata.
:func:`as_tensor` accepts arrays of any library, and ``check_...`` functions refuse data that no network or
task can use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.errors import DataError, by_caller
from fedstill.core.name_normalization import normalize_columns
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.core.text_format import brief_repr

_EXPECTED = "expected real numbers in one array or tensor"


def as_tensor(values: Any, source: str) -> torch.Tensor:
    """Return real numbers as a tensor.

    A tensor is returned as it is. Numpy arrays may have any memory order and byte order.

    Args:
        values: a tensor, an array, or nested lists of numbers, tensors or arrays of one shape.
        source: description of the values, for errors.

    Raises:
        DataError: complex numbers, texts, objects, or parts of different shapes.

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
        raise DataError(f"{source}: values are {str(tensor.dtype).removeprefix('torch.')} ({_EXPECTED})")
    return tensor


def _numbers(values: Any, source: str) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # nested lists of several lengths
        raise _mixed_shapes_error(values, source) from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{source}: values are {array.dtype} ({_EXPECTED})")
    native = array.dtype.newbyteorder("=")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # torch has no longer float types
        native = np.dtype(np.float64)
    return np.require(array, dtype=native, requirements=["C", "W"])


def _mixed_shapes_error(parts: Iterable[Any], source: str) -> DataError:
    shapes = dict.fromkeys(str(tuple(part.shape)) for part in parts if hasattr(part, "shape"))
    some = f" ({', '.join(list(shapes)[:3])})" if shapes else ""
    return DataError(f"{source}: values have several shapes{some} (expected one shape)")


Column = npt.NDArray[Any]  # (N,), one value per training example: its site, an age, ...
Form = Literal["images", "texts", "rows"]  # of inputs; rows of a table
AXES: Mapping[Form, tuple[str, ...]] = {
    "images": ("N", "C", "H", "W"),
    "texts": ("N", "L"),
    "rows": ("N", "F"),
}


@dataclass(frozen=True, eq=False)
class CaseIndex:
    """The case that each example belongs to: a patient of slices, a slide of patches.

    Case ids index ``names``, which holds all cases of the data set. A subset of the data set keeps all names.

    Args:
        case_ids: case of each example, ``(N,)`` int64 on the CPU.
        names: names of all cases.
        sites: the site that each case comes from, such as a hospital or an organ; an empty text if unknown.
        corners: upper left corner of each example in its case, ``(N, 2)`` int64 rows and columns; None:
            examples are not assembled into images.
        sizes: height and width of each case, with ``corners``.
        instances: true objects of each case, ``(height, width)`` int32 with 0 for background, for tasks that
            separate objects.
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
        """Build the index from columns.

        Args:
            owners: case of each example, ``(N,)``.
            sites: site of each example, ``(N,)``; a case gets the site of its first example. None: unknown.
        """
        names, first, case_ids = np.unique(owners, return_index=True, return_inverse=True)
        case_sites = [""] * len(names) if sites is None else map(str, sites[first])
        return cls(torch.from_numpy(case_ids.astype(np.int64)), tuple(map(str, names)), tuple(case_sites))

    def subset(self, indices: torch.Tensor) -> CaseIndex:
        """Return the index of the examples at ``indices``, in that order."""
        indices = indices.cpu()
        corners = None if self.corners is None else self.corners[indices]
        return replace(self, case_ids=self.case_ids[indices], corners=corners)

    def present_ids(self) -> list[int]:
        """Return the ids of the cases that have examples, ascending."""
        return sorted(set(self.case_ids.tolist()))

    def indices_from_site(self, site: str) -> torch.Tensor:
        """Return the indices of the examples from a site, ascending."""
        is_from_site = torch.tensor([name == site for name in self.sites])
        return torch.nonzero(is_from_site[self.case_ids]).flatten()


@dataclass(frozen=True, eq=False)
class TensorData:
    """Inputs and targets of a part of a data set.

    >>> data = TensorData(torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 1]))
    >>> len(data), data.subset(torch.tensor([2, 0])).targets.tolist()
    (3, [1, 0])
    """

    inputs: torch.Tensor
    """Images ``(N, C, H, W)`` float32, ``(pixel / 255 - mean) / std``: from -1 to 1 if both are 0.5. Texts
    ``(N, L)`` int64 token ids, 0 for padding. Rows of tables ``(N, F)`` float32."""
    targets: torch.Tensor
    """Class indices ``(N,)`` int64; multi-label targets ``(N, labels)`` int64 of 1, 0 and -1 (unknown); the
    class of each pixel ``(N, H, W)`` int64; float32 images ``(N, C, H, W)``, numbers ``(N, 1)``, or times and
    events ``(N, 2)``."""
    groups: torch.Tensor | None = None
    """Group of each example (a patient), ``(N,)`` int64; None: each example is a group."""
    cases: CaseIndex | None = None
    """Cases that examples are parts of, for evaluation; None: each example is a case."""

    __repr__ = brief_repr

    def __len__(self) -> int:
        return len(self.inputs)

    @classmethod
    def concat(cls, parts: Sequence[TensorData]) -> TensorData:
        """Concatenate parts. Groups and cases are dropped: each example stands by itself."""
        return cls(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))

    def subset(self, indices: torch.Tensor) -> TensorData:
        """Return a copy of the examples at ``indices`` (int64), in that order."""
        groups = None if self.groups is None else self.groups[indices]
        cases = None if self.cases is None else self.cases.subset(indices)
        return TensorData(self.inputs[indices], self.targets[indices], groups, cases)

    def to(self, device: torch.device | str) -> TensorData:
        """Return the examples on ``device``, without copying tensors that are already there."""
        groups = None if self.groups is None else self.groups.to(device)
        return TensorData(self.inputs.to(device), self.targets.to(device), groups, self.cases)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training examples to be divided over the nodes, and test examples that no node receives.

    ``mean`` and ``std`` are declared constants. They are never measured on the data, as each statistic that
    is measured on private examples and then shared would be a release of its own.
    """

    name: str
    train: TensorData
    test: TensorData
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # one per channel
    std: tuple[float, ...]  # one per channel
    note: str = ""  # shown in reports, such as a lossy copy or an unofficial split
    columns: Mapping[str, Column] = field(default_factory=dict)  # by name, in the order of train
    test_columns: Mapping[str, Column] = field(default_factory=dict)  # the same, in the order of test
    test_names: tuple[str, ...] = ()  # name of each test example: a file, or a number from 0
    # The column with the group of each example (a patient). A group is never divided between training, test,
    # public data and nodes. Empty: each example is a group.
    group_column: str = ""
    vocabulary: int = 0  # texts: number of token ids including padding; 0: inputs are not texts
    schema: TableSchema = NO_SCHEMA  # tables: ranges and categories of the columns

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", normalize_columns(self.columns))
        object.__setattr__(self, "test_columns", normalize_columns(self.test_columns))


def check_labels(
    targets: torch.Tensor, classes: int, source: str, shape: tuple[int, ...] = (), min_label: int = 0
) -> None:
    """Check that targets are class indices from ``min_label`` to ``classes - 1``.

    Args:
        targets: int64 labels ``(N, *shape)``.
        classes: number of classes.
        source: description of the data, for errors.
        shape: shape of one target; empty: one label per example.
        min_label: the lowest valid label, -1 if labels may be unknown.

    Raises:
        DataError: wrong type or shape, or a label outside the range. The error names the first such label,
            its example and the number of such labels.

    >>> check_labels(torch.tensor([0, 7, 1, 9]), 3, "train")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: train: label 7 of example 1 is outside 0..2 (2 such labels in all)
    """
    if targets.dtype != torch.int64 or tuple(targets.shape[1:]) != shape or not targets.ndim:
        expected = (
            f"int64 of shape {(len(targets), *shape)}" if shape else "one int64 class index per example"
        )
        raise DataError(f"{source}: targets are {_describe_tensor(targets)} (expected {expected})")
    outside = torch.nonzero((targets < min_label) | (targets >= classes))
    if len(outside):
        first = tuple(outside[0].tolist())
        counts_from_one = min_label == 0 and int(targets.min()) == 1 and int(targets.max()) == classes
        label, advice = int(targets[first]), ": they count from 1, so subtract 1" if counts_from_one else ""
        raise DataError(
            f"{source}: label {label} of example {first[0]} is outside {min_label}..{classes - 1} "
            f"({len(outside)} such labels in all){advice}"
        )


def check_numbers(targets: torch.Tensor, width: int, source: str) -> None:
    """Check that targets are ``(N, width)`` float32.

    Raises:
        DataError: wrong type or shape.
    """
    expected = (len(targets), width)
    if targets.dtype != torch.float32 or targets.shape != expected:
        raise DataError(
            f"{source}: targets are {_describe_tensor(targets)} (expected float32 of shape {expected})"
        )


def check_inputs(data: TensorData, source: str, form: Form = "images") -> None:
    """Check inputs that a network is to take, whatever the targets mean.

    Args:
        data: images ``(N, C, H, W)`` float32 without NaN or infinity, H and W multiples of 4; token ids ``(N,
            L)`` int64 from 0 up (a text may be all padding); or rows of a table ``(N, F)`` float32 without
            NaN or infinity. One target per input.
        source: description of the data, the first words of an error: ``"train of digits"``.
        form: the kind of inputs.

    Raises:
        DataError: naming the first violation.

    >>> check_inputs(TensorData(torch.zeros(2, 1, 6, 8), torch.tensor([0, 1])), "train")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: train: images are 6 x 8 (expected a height and a width
    that are multiples of 4: --data.size resizes them)
    """
    inputs, target_count = data.inputs, len(data.targets)
    if inputs.dtype != (torch.int64 if form == "texts" else torch.float32) or inputs.ndim != len(AXES[form]):
        expected = f"{'int64 ids' if form == 'texts' else 'float32 of shape'} ({', '.join(AXES[form])})"
        rows = form == "images" and inputs.ndim == 2
        hint = '; rows of a table are learned by task "tabular", "regression" or "survival"' if rows else ""
        raise DataError(f"{source}: inputs are {_describe_tensor(inputs)} (expected {expected}{hint})")
    if len(inputs) != target_count:
        raise DataError(f"{source}: {len(inputs)} inputs but {target_count} targets (expected one each)")
    if len(inputs) == 0:
        raise DataError(f"{source}: there are no examples (expected one or more)")
    if 0 in inputs.shape:
        raise DataError(f"{source}: inputs are {_describe_tensor(inputs)} (expected one or more of each)")
    height, width = inputs.shape[-2:]
    if form == "images" and width <= 4 < inputs.shape[1]:
        advice = "channels seem to be last: use x.permute(0, 3, 1, 2), or numpy's x.transpose(0, 3, 1, 2)"
        raise DataError(f"{source}: inputs are {_describe_tensor(inputs)} (expected (N, C, H, W): {advice})")
    if form == "images" and (height % 4 or width % 4):
        # Generators start at a quarter of the image's size and critics end there.
        advice = by_caller(
            "--data.size resizes them",
            "option data.size resizes them",
            "pad or resize them first, such as with torch.nn.functional.interpolate",
        )
        expected = f"expected a height and a width that are multiples of 4: {advice}"
        raise DataError(f"{source}: images are {height} x {width} ({expected})")
    is_valid = inputs >= 0 if form == "texts" else torch.isfinite(inputs)
    invalid = torch.nonzero(~is_valid.flatten(1).all(dim=1)).flatten()
    if len(invalid):
        content = "ids below 0" if form == "texts" else "NaN or infinity"
        raise DataError(
            f"{source}: {len(invalid)} examples hold {content}, the first is example {int(invalid[0])}"
        )


def check_pixels(images: torch.Tensor, mean: Sequence[float], std: Sequence[float], source: str) -> None:
    """Check that normalized images were pixels from 0 to 1.

    Args:
        images: ``(N, C, H, W)``, normalized by ``mean`` and ``std``.
        mean: mean of each channel.
        std: standard deviation of each channel.
        source: description of the images, for errors.

    Raises:
        DataError: with the range of the first channel that is outside, and the valid range.
    """
    low, high = ((end - torch.tensor(mean)) / torch.tensor(std) for end in (0, 1))  # (C,)
    lowest, highest = images.amin((0, 2, 3)).cpu(), images.amax((0, 2, 3)).cpu()
    outside = torch.nonzero((lowest < low - 1e-3) | (highest > high + 1e-3))
    if len(outside):
        c = int(outside[0])
        raise DataError(
            f"{source} has values from {lowest[c]:.4g} to {highest[c]:.4g} in channel {c} (expected "
            f"{low[c]:.4g} to {high[c]:.4g} with mean {mean[c]:.4g} and std {std[c]:.4g})"
        )


def normalize(pixels: Column, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Normalize pixels: ``(pixel - mean) / std``, with pixels scaled to [0, 1].

    Args:
        pixels: ``(N, C, H, W)``, uint8 in 0..255 or floats in [0, 1].
        mean, std: one per channel.

    Returns:
        ``(N, C, H, W)`` float32, a copy.

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


def shuffled_batches(count: int, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return one shuffled pass over ``count`` rows, in batches of nearly equal size up to ``batch``.

    Batch norm cannot train on one row: if ``batch`` is 2 and ``count`` odd, one batch has 3.

    >>> sorted(len(rows) for rows in shuffled_batches(10, 4, torch.Generator()))
    [3, 3, 4]
    >>> sorted(len(rows) for rows in shuffled_batches(5, 2, torch.Generator()))
    [2, 3]
    """
    order = torch.randperm(count, generator=generator)
    pieces = -(-count // batch)
    return torch.tensor_split(order, min(pieces, max(count // 2, 1)) if batch > 1 else pieces)
