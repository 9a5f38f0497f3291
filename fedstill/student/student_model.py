"""Inputs as they are, pixels, cells or token ids, on their way to a network, as modules that exports hold.

Each module gives what the network takes (``forward``), and which of a batch it may be asked about at all
(``sound``). ``checked`` is for callers in Python, who get an error that names the fault.

A run's student as a torch module that takes inputs as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import torch_defaults
from fedstill.core.config_tables import to_table
from fedstill.core.dataset import as_tensor
from fedstill.core.errors import DataError, MethodRefused
from fedstill.core.text_format import format_shape
from fedstill.data.images import has_pil_images, to_array
from fedstill.data.input_spec import InputSpec
from fedstill.data.raw import as_image_array
from fedstill.data.tables import RowFeatures, encode_cells, is_data_frame
from fedstill.data.text import HASH, encode_for_vocabulary
from fedstill.runs.predictions import unit_of
from fedstill.runs.student_file import StudentFile, read

ROUNDING = 1e-3  # how far outside of 0..1 a pixel may be, as averaged ones are


class RawInputs(nn.Module, ABC):
    """Inputs of one form.

    Attributes:
        input_name: what they are, as exports name them.
        description: what they must be, in words.
    """

    input_name: str
    description: str

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the network takes."""

    @abstractmethod
    def is_valid(self, x: torch.Tensor) -> torch.Tensor:
        """Which of a batch are inputs, ``(B,)`` bool."""

    @abstractmethod
    def prepare(self, given: Any) -> torch.Tensor:
        """Inputs in whatever form a caller has them, as :meth:`forward` takes them.

        Raises:
            DataError: another shape, or values that are no such inputs.
        """

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Inputs drawn at random, to compare two forms of one model."""


class RawPixels(RawInputs):
    """Images: uint8 from 0 to 255, or floats from 0 to 1, ``(N, C, H, W)``, in Python of one channel also
    ``(N, H, W)``."""

    input_name = "images"
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        self.shape = spec.shape
        self.description = f"images (N, {', '.join(map(str, spec.shape))}), float32 from 0 to 1"
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(spec, name)).view(-1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(pixel - mean) / std``, as the nodes' images were normalized."""
        return (x - self.mean) / self.std

    def is_valid(self, x: torch.Tensor) -> torch.Tensor:
        """Those whose pixels are from 0 to 1; not those with NaN."""
        pixels = x.flatten(1)
        return (pixels.amin(1) >= -ROUNDING) & (pixels.amax(1) <= 1 + ROUNDING)

    def prepare(self, given: Any) -> torch.Tensor:
        """See :class:`RawInputs`."""
        if has_pil_images(given):
            given = as_image_array(Path("images"), {"images": to_array(given, self.input_name)})
        x = as_tensor(given, self.input_name)
        if x.ndim == 3 and self.shape[0] == 1:
            x = x.unsqueeze(1)
        if tuple(x.shape[1:]) != self.shape:
            found, shape = format_shape(tuple(x.shape)), format_shape(self.shape)
            raise DataError(f"images are {found} (expected N x {shape} (images, channels, height, width))")
        if x.dtype == torch.uint8:
            return x.float() / 255
        if not x.is_floating_point():
            raise DataError(f"images are {x.dtype} (expected torch.uint8, or floats from 0 to 1)")
        x = x.float()
        wrong = torch.nonzero(~self.is_valid(x)).flatten()
        if len(wrong):
            some = x[wrong[0]]
            told = f"image {int(wrong[0])} has values from {some.min():.4g} to {some.max():.4g}"
            way = "the normalization is done here" if some.min() < 0 else "divide by 255, or give uint8"
            raise DataError(f"{told} (expected floats from 0 to 1, or uint8 from 0 to 255: {way})")
        return x

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Pixels drawn evenly."""
        return torch.rand(count, *self.shape, generator=generator)


class RawRows(RawInputs):
    """Rows of a table: a column a cell, in the order of the schema, ``(N, columns)``.

    A number is in its own unit, a category the number of its place in the schema, from 0; NaN is nothing.
    """

    input_name = "rows"
    may_be_empty: torch.Tensor
    min_values: torch.Tensor
    max_values: torch.Tensor
    is_integer: torch.Tensor

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        self.schema = spec.schema
        columns = spec.schema.input_columns
        names = ", ".join(column.name for column in columns)
        self.description = (
            f"rows (N, {len(columns)}), float32: {names}; numbers in their own unit, categories by their "
            "place in the schema from 0, NaN for nothing"
        )
        self.features = RowFeatures(columns)
        tensors: dict[str, Any] = {  # of each column: what its cells may be
            "empty": [column.missing for column in columns],
            "least": [column.range[0] if column.range else 0.0 for column in columns],
            "most": [column.range[1] if column.range else len(column.categories) - 1.0 for column in columns],
            "whole": [column.type == "category" for column in columns],
        }
        for name, values in tensors.items():
            self.register_buffer(name, torch.tensor(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features ``(N, F)``, as the nodes' rows have them."""
        features: torch.Tensor = self.features(x)
        return features

    def is_valid(self, x: torch.Tensor) -> torch.Tensor:
        """Those whose cells the schema allows."""
        return self._valid_cells(x).all(1)

    def _valid_cells(self, x: torch.Tensor) -> torch.Tensor:
        inside = (x >= self.min_values) & (x <= self.max_values) & (~self.is_integer | (x == x.round()))
        return inside | (x.isnan() & self.may_be_empty)  # nothing is inside of no range

    def prepare(self, given: Any) -> torch.Tensor:
        """See :class:`RawInputs`; DataFrames, and mappings of columns to cells, have the schema's names."""
        if is_data_frame(given):
            given = {str(name): list(given[name]) for name in given.columns}
        if isinstance(given, Mapping):
            return torch.from_numpy(encode_cells(given, self.schema, "rows", lambda row: f"row {row}"))
        x = as_tensor(given, self.input_name).float()
        columns = self.schema.input_columns
        if x.ndim != 2 or x.shape[1] != len(columns):
            names = ", ".join(column.name for column in columns)
            raise DataError(f"rows are {format_shape(tuple(x.shape))} (expected N x {len(columns)}: {names})")
        wrong = torch.nonzero(~self._valid_cells(x))
        if len(wrong):
            row, place = wrong[0].tolist()
            column, value = columns[place], x[row, place].item()
            own = column.allowed_values
            if column.type == "category":
                own = f"0 to {len(column.categories) - 1} ({own})"
            raise DataError(f"row {row}: column {column.name!r} is {value:g} (expected {own})")
        return x

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Cells drawn evenly; of those that may be empty, one in five is."""
        shares = torch.rand(2, count, len(self.min_values), generator=generator)
        drawn = self.min_values + (self.max_values - self.min_values) * shares[0]
        drawn = torch.where(self.is_integer, drawn.round(), drawn)
        none = shares[1] < 0.2
        return torch.where(none & self.may_be_empty, torch.nan, drawn)


class RawTexts(RawInputs):
    """Texts as token ids ``(N, L)`` int64, 0 for padding; in Python also as they are.

    Args:
        spec: length and vocabulary.
        words: how words become ids, as :class:`fedstill.data.text.TextData` says it.
    """

    input_name = "ids"

    def __init__(self, spec: InputSpec, words: str) -> None:
        super().__init__()
        (self.length,), self.vocabulary, self.words = spec.shape, spec.vocabulary, words or HASH
        self.description = f"token ids (N, {self.length}), int64 from 0 (padding) to {self.vocabulary - 1}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same ids."""
        return x

    def is_valid(self, x: torch.Tensor) -> torch.Tensor:
        """Those whose ids there are."""
        return ((x >= 0) & (x < self.vocabulary)).all(1)

    def prepare(self, given: Any) -> torch.Tensor:
        """See :class:`RawInputs`; texts become ids as those of the run did."""
        if not isinstance(given, torch.Tensor):
            return encode_for_vocabulary(list(given), self.length, self.vocabulary, self.words, "texts")
        if given.dtype != torch.int64 or tuple(given.shape[1:]) != (self.length,):
            raise DataError(
                f"ids are {given.dtype} of {format_shape(tuple(given.shape))} (expected {self.description})"
            )
        if not bool(self.is_valid(given).all()):
            raise DataError(f"ids are from {given.min()} to {given.max()} (expected {self.description})")
        return given

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Ids drawn evenly."""
        return torch.randint(self.vocabulary, (count, self.length), generator=generator)


def raw_inputs(spec: InputSpec, words: str) -> RawInputs:
    """What brings inputs as they are into a spec.

    Raises:
        MethodRefused: inputs are measurements of images, which no camera or table gives.
    """
    if spec.task.task_class.kind == "image":
        raise MethodRefused("asking a student about new images", "the student", MEASUREMENT_INPUTS)
    kind = spec.task.task_class.form
    return RawPixels(spec) if kind == "images" else RawRows(spec) if kind == "rows" else RawTexts(spec, words)


MEASUREMENT_INPUTS = (
    "its inputs are measurements that its task makes of whole images; `fedstill evaluate` makes them of test "
    "images, and the network itself (its attribute `network`) takes them"
)


BATCH_SIZE = 256  # inputs at once


class StudentModel(nn.Module):
    """A student with its preprocessing: inputs as they are, to logits.

    Images are ``(N, C, H, W)``, or ``(N, H, W)`` of one channel, uint8 from 0 to 255 or floats from 0 to 1:
    what was normalized already is refused. Rows of a table are a DataFrame, a mapping of columns to cells, or
    numbers ``(N, columns)`` (:class:`fedstill.student.student_model.RawRows`); texts are strings or token ids.
    Outputs are those of the run's task: logits of classes, ``(N, classes)`` or ``(N, classes, H, W)``, or
    numbers ``(N, 1)`` in the target's own unit.

    Attributes:
        network: the network itself, which takes what the run's models took.
        about: its name and what its inputs are.

    Raises:
        DataError: on a call, inputs that it cannot take; the line says which are allowed.
        MethodRefused: inputs of a kind that nobody has as they are.
    """

    def __init__(self, network: nn.Module, about: StudentFile) -> None:
        super().__init__()
        self.network, self.about = network, about
        self._preprocessing: RawInputs | None = None
        self.offset, self.scale = unit_of(about.known.schema)
        if about.known.task.task_class.kind != "image":
            self._preprocessing = raw_inputs(about.known, about.words)
        self.eval()

    @property
    def preprocessing(self) -> RawInputs:
        """What brings inputs into the network's form."""
        return (
            raw_inputs(self.about.known, self.about.words)
            if self._preprocessing is None
            else self._preprocessing
        )

    @property
    def spec(self) -> InputSpec:
        """Task, classes, shape and normalization."""
        return self.about.known

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of its outputs."""
        return self.about.known.classes

    def forward(self, x: Any) -> torch.Tensor:
        """Logits, or numbers in their unit."""
        return self.responses(self._prepare(x))

    def responses(self, x: torch.Tensor) -> torch.Tensor:
        """The same of inputs that have been checked."""
        outputs: torch.Tensor = self.network(self.preprocessing(x))
        return self.offset + self.scale * outputs if self.spec.task.task_class.kind == "number" else outputs

    def probabilities(self, x: Any) -> torch.Tensor:
        """Of each class ``(N, classes, ...)``; of labels that exclude none, each by itself; that an event has
        not come by the end of each interval; numbers as they are."""
        kind, blocks = self.spec.task.task_class.kind, torch.split(self._prepare(x), BATCH_SIZE)
        with torch.no_grad():
            outputs = torch.cat([self.responses(some) for some in blocks])
        if kind == "number":
            return outputs
        if kind == "time":  # outputs are log-odds of the intervals' hazards
            return (1 - outputs.sigmoid()).cumprod(1)
        return outputs.sigmoid() if kind == "labels" else outputs.softmax(1)

    def _prepare(self, x: Any) -> torch.Tensor:
        checked = self.preprocessing.prepare(x)
        first = next(self.network.parameters(), checked)
        return checked.to(first.device)


class PortableStudent(nn.Module):
    """A student as other tools run it, which can raise no error: what is no input gets NaN for an answer."""

    def __init__(self, student: StudentModel) -> None:
        super().__init__()
        self.student = student

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of the student."""
        outputs = self.student.responses(x)
        sound = self.student.preprocessing.is_valid(x).view(-1, *(1,) * (outputs.ndim - 1))
        return torch.where(sound, outputs, torch.nan)


@torch_defaults()
def load(path: str | Path, model: nn.Module | str | None = None) -> StudentModel:
    """A run's student, with its preprocessing, in evaluation mode.

    Args:
        path: a run's folder, or its ``student.safetensors``, which says all that is needed.
        model: a network of its architecture, or the name of one, where the file may not import its own
            (:func:`fedstill.runs.student_file.read`).

    Raises:
        FedstillError: there is no student, or it cannot be made.
    """
    return StudentModel(*read(path, model))


def describe_export(student: StudentModel) -> dict[str, Any]:
    """What an export says of itself: what goes in, what comes out."""
    about = student.about
    outs = "numbers in the unit of the target" if student.spec.task.task_class.kind == "number" else "logits"
    return {
        "model": about.model,
        "input": student.preprocessing.description,
        "output": outs,
        "otherwise": "NaN for inputs that are none",
        **to_table(about.known),
    }
