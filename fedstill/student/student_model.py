"""A student with its preprocessing, as a torch module that takes raw inputs: pixels, cells or token ids.

Subclasses of :class:`RawInputConverter` are the preprocessing. They convert raw inputs to inputs of the
network, and check which are valid. :class:`PortableStudent` is the form for exports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import use_torch_defaults
from fedstill.core.config_tables import to_table
from fedstill.core.dataset import as_tensor
from fedstill.core.errors import DataError, MethodRefused
from fedstill.core.text_format import format_shape
from fedstill.data.data_spec import DataSpec
from fedstill.data.images import has_pil_images, to_array
from fedstill.data.raw_images import as_image_array
from fedstill.data.table_data import RowFeatures, encode_cells, is_data_frame
from fedstill.data.text_data import HASH, encode_texts_for_model
from fedstill.runs.results import target_offset_and_scale
from fedstill.runs.student_file import StudentFile, read

ROUNDING = 1e-3  # tolerance for pixels outside of 0..1, as averages have rounding errors


class RawInputConverter(nn.Module, ABC):
    """Preprocessing of inputs of one kind.

    Attributes:
        input_name: name of the inputs in exports.
        description: shape and range of valid inputs, in words.
    """

    input_name: str
    description: str

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convert raw inputs to inputs of the network."""

    @abstractmethod
    def is_valid(self, x: torch.Tensor) -> torch.Tensor:
        """Return which inputs of a batch are valid, ``(B,)`` bool."""

    @abstractmethod
    def prepare(self, inputs: Any) -> torch.Tensor:
        """Convert inputs in any supported form to the raw tensor that :meth:`forward` takes.

        Raises:
            DataError: wrong shape, or invalid values.
        """

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Sample random inputs, to compare two forms of one model."""


class RawPixels(RawInputConverter):
    """Preprocessing of images: uint8 from 0 to 255, or floats from 0 to 1, ``(N, C, H, W)``.

    In Python ``(N, H, W)`` is accepted for one channel.
    """

    input_name = "images"
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        self.shape = spec.shape
        self.description = f"images (N, {', '.join(map(str, spec.shape))}), float32 from 0 to 1"
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(spec, name)).view(-1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize: ``(pixel - mean) / std``, as in the run."""
        return (x - self.mean) / self.std

    def is_valid(self, x: torch.Tensor) -> torch.Tensor:
        """Return which images have pixels from 0 to 1 and no NaN."""
        pixels = x.flatten(1)
        return (pixels.amin(1) >= -ROUNDING) & (pixels.amax(1) <= 1 + ROUNDING)

    def prepare(self, inputs: Any) -> torch.Tensor:
        """See :meth:`RawInputConverter.prepare`."""
        if has_pil_images(inputs):
            inputs = as_image_array(Path("images"), {"images": to_array(inputs, self.input_name)})
        x = as_tensor(inputs, self.input_name)
        if x.ndim == 3 and self.shape[0] == 1:
            x = x.unsqueeze(1)
        if tuple(x.shape[1:]) != self.shape:
            input_shape, expected_shape = format_shape(tuple(x.shape)), format_shape(self.shape)
            raise DataError(
                f"images are {input_shape} (expected N x {expected_shape} (images, channels, height, width))"
            )
        if x.dtype == torch.uint8:
            return x.float() / 255
        if not x.is_floating_point():
            raise DataError(f"images are {x.dtype} (expected torch.uint8, or floats from 0 to 1)")
        x = x.float()
        invalid = torch.nonzero(~self.is_valid(x)).flatten()
        if len(invalid):
            image = x[invalid[0]]
            values = f"image {int(invalid[0])} has values from {image.min():.4g} to {image.max():.4g}"
            advice = "the student normalizes" if image.min() < 0 else "divide by 255, or give uint8"
            raise DataError(f"{values} (expected floats from 0 to 1, or uint8 from 0 to 255: {advice})")
        return x

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Sample uniform pixels."""
        return torch.rand(count, *self.shape, generator=generator)


class RawRows(RawInputConverter):
    """Preprocessing of table rows ``(N, columns)``, with columns in the order of the schema.

    A number is in its own unit, a category is its index in the schema, and NaN is a missing cell.
    """

    input_name = "rows"
    may_be_empty: torch.Tensor
    min_values: torch.Tensor
    max_values: torch.Tensor
    is_integer: torch.Tensor

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        self.schema = spec.schema
        columns = spec.schema.input_columns
        names = ", ".join(column.name for column in columns)
        self.description = (
            f"rows (N, {len(columns)}), float32: {names}; numbers in their own unit, categories by their "
            "index in the schema from 0, NaN for missing cells"
        )
        self.features = RowFeatures(columns)
        tensors: dict[str, Any] = {  # valid cells of each column
            "may_be_empty": [column.missing for column in columns],
            "min_values": [column.range[0] if column.range else 0.0 for column in columns],
            "max_values": [
                column.range[1] if column.range else len(column.categories) - 1.0 for column in columns
            ],
            "is_integer": [column.type == "category" for column in columns],
        }
        for name, values in tensors.items():
            self.register_buffer(name, torch.tensor(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features ``(N, F)``, as in the run."""
        features: torch.Tensor = self.features(x)
        return features

    def is_valid(self, x: torch.Tensor) -> torch.Tensor:
        """Return which rows have only valid cells."""
        return self._valid_cells(x).all(1)

    def _valid_cells(self, x: torch.Tensor) -> torch.Tensor:
        inside = (x >= self.min_values) & (x <= self.max_values) & (~self.is_integer | (x == x.round()))
        return inside | (x.isnan() & self.may_be_empty)  # NaN is in no range

    def prepare(self, inputs: Any) -> torch.Tensor:
        """See :meth:`RawInputConverter.prepare`. DataFrames and mappings need the schema's column names."""
        if is_data_frame(inputs):
            inputs = {str(name): list(inputs[name]) for name in inputs.columns}
        if isinstance(inputs, Mapping):
            return torch.from_numpy(encode_cells(inputs, self.schema, "rows", lambda row: f"row {row}"))
        x = as_tensor(inputs, self.input_name).float()
        columns = self.schema.input_columns
        if x.ndim != 2 or x.shape[1] != len(columns):
            names = ", ".join(column.name for column in columns)
            raise DataError(f"rows are {format_shape(tuple(x.shape))} (expected N x {len(columns)}: {names})")
        invalid = torch.nonzero(~self._valid_cells(x))
        if len(invalid):
            row, index = invalid[0].tolist()
            column, value = columns[index], x[row, index].item()
            expected = column.allowed_values
            if column.type == "category":
                expected = f"0 to {len(column.categories) - 1} ({expected})"
            raise DataError(f"row {row}: column {column.name!r} is {value:g} (expected {expected})")
        return x

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Sample uniform cells. One in five is missing, where the schema allows it."""
        shares = torch.rand(2, count, len(self.min_values), generator=generator)
        cells = self.min_values + (self.max_values - self.min_values) * shares[0]
        cells = torch.where(self.is_integer, cells.round(), cells)
        is_missing = shares[1] < 0.2
        return torch.where(is_missing & self.may_be_empty, torch.nan, cells)


class RawTexts(RawInputConverter):
    """Preprocessing of texts: token ids ``(N, L)`` int64, 0 for padding. In Python also strings.

    Args:
        spec: length and vocabulary.
        words: how words become ids, as in :class:`fedstill.data.text_data.TextData`.
    """

    input_name = "ids"

    def __init__(self, spec: DataSpec, words: str) -> None:
        super().__init__()
        (self.length,), self.vocabulary, self.words = spec.shape, spec.vocabulary, words or HASH
        self.description = f"token ids (N, {self.length}), int64 from 0 (padding) to {self.vocabulary - 1}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ids unchanged."""
        return x

    def is_valid(self, x: torch.Tensor) -> torch.Tensor:
        """Return which texts have only valid ids."""
        return ((x >= 0) & (x < self.vocabulary)).all(1)

    def prepare(self, inputs: Any) -> torch.Tensor:
        """See :meth:`RawInputConverter.prepare`. Strings become ids as in the run."""
        if not isinstance(inputs, torch.Tensor):
            return encode_texts_for_model(list(inputs), self.length, self.vocabulary, self.words, "texts")
        if inputs.dtype != torch.int64 or tuple(inputs.shape[1:]) != (self.length,):
            raise DataError(
                f"ids are {inputs.dtype} of {format_shape(tuple(inputs.shape))} (expected {self.description})"
            )
        if not bool(self.is_valid(inputs).all()):
            raise DataError(f"ids are from {inputs.min()} to {inputs.max()} (expected {self.description})")
        return inputs

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Sample uniform ids."""
        return torch.randint(self.vocabulary, (count, self.length), generator=generator)


def raw_inputs(spec: DataSpec, words: str) -> RawInputConverter:
    """Return the preprocessing for an data spec.

    Raises:
        MethodRefused: inputs are measurements of images, for which there are no raw inputs.
    """
    if spec.task.task_class.kind == "image":
        raise MethodRefused("prediction for new images", "the student", MEASUREMENT_INPUTS)
    kind = spec.task.task_class.form
    return RawPixels(spec) if kind == "images" else RawRows(spec) if kind == "rows" else RawTexts(spec, words)


MEASUREMENT_INPUTS = (
    "its inputs are measurements that the task simulates from images; `fedstill evaluate` does so for test "
    "images, and the attribute `network` takes measurements"
)


BATCH_SIZE = 256  # inputs per forward pass


class StudentModel(nn.Module):
    """A student with its preprocessing: raw inputs to logits.

    Images are ``(N, C, H, W)``, or ``(N, H, W)`` with one channel, as uint8 from 0 to 255 or floats from 0 to
    1. Normalized images are refused. Rows of a table are a DataFrame, a mapping of columns to cells, or
    numbers ``(N, columns)`` (:class:`RawRows`). Texts are strings or token ids. Outputs are those of the
    task: logits ``(N, classes)`` or ``(N, classes, H, W)``, or numbers ``(N, 1)`` in the unit of the target.

    Attributes:
        network: the network, which takes the inputs of the run's models.
        about: metadata of the student: its architecture and data spec.

    Raises:
        DataError: on a call with invalid inputs.
        MethodRefused: on a call, if there are no raw inputs for the task.

    Example::

        student = fedstill.load("runs/digits")
        p = student.probabilities(images)  # (N, classes)
    """

    def __init__(self, network: nn.Module, about: StudentFile) -> None:
        super().__init__()
        self.network, self.about = network, about
        self._preprocessing: RawInputConverter | None = None
        self.offset, self.scale = target_offset_and_scale(about.spec_or_error.schema)
        if about.spec_or_error.task.task_class.kind != "image":
            self._preprocessing = raw_inputs(about.spec_or_error, about.words)
        self.eval()

    @property
    def preprocessing(self) -> RawInputConverter:
        """Preprocessing of raw inputs."""
        return (
            raw_inputs(self.about.spec_or_error, self.about.words)
            if self._preprocessing is None
            else self._preprocessing
        )

    @property
    def spec(self) -> DataSpec:
        """Task, classes, input shape and normalization."""
        return self.about.spec_or_error

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.about.spec_or_error.classes

    def forward(self, x: Any) -> torch.Tensor:
        """Return logits, or numbers in the unit of the target."""
        return self.responses(self._prepare(x))

    def responses(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for inputs that have been checked."""
        outputs: torch.Tensor = self.network(self.preprocessing(x))
        return self.offset + self.scale * outputs if self.spec.task.task_class.kind == "number" else outputs

    def probabilities(self, x: Any) -> torch.Tensor:
        """Return probabilities ``(N, classes, ...)``.

        For multi-label tasks each label has its own probability. For survival tasks the values are survival
        probabilities at the end of each interval. For regression the values are the outputs.
        """
        kind, blocks = self.spec.task.task_class.kind, torch.split(self._prepare(x), BATCH_SIZE)
        with torch.no_grad():
            outputs = torch.cat([self.responses(block) for block in blocks])
        if kind == "number":
            return outputs
        if kind == "time":  # outputs are logits of hazards
            return (1 - outputs.sigmoid()).cumprod(1)
        return outputs.sigmoid() if kind == "labels" else outputs.softmax(1)

    def _prepare(self, x: Any) -> torch.Tensor:
        inputs = self.preprocessing.prepare(x)
        parameter = next(self.network.parameters(), inputs)
        return inputs.to(parameter.device)


class PortableStudent(nn.Module):
    """A student for export. It raises no errors: outputs for invalid inputs are NaN."""

    def __init__(self, student: StudentModel) -> None:
        super().__init__()
        self.student = student

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the student, NaN for invalid inputs."""
        outputs = self.student.responses(x)
        is_valid = self.student.preprocessing.is_valid(x).view(-1, *(1,) * (outputs.ndim - 1))
        return torch.where(is_valid, outputs, torch.nan)


@use_torch_defaults()
def load(
    path: str | Path,
    model: nn.Module | str | None = None,
    backbone: str | Path = "",
    backbone_weights: str | Path = "",
) -> StudentModel:
    """Load the student of a run, with its preprocessing, in evaluation mode.

    Args:
        path: folder of a run, or its ``student.safetensors``, which is sufficient.
        model: a network of its architecture, or the name of one, if the file names custom code, which is
            never imported by itself (:func:`fedstill.runs.student_file.read`).
        backbone: ``hf:FOLDER`` or ``FILE.onnx``, as in ``features.backbone``, if it has moved since the run.
            It must be the same backbone: its digest is compared.
        backbone_weights: file of the backbone's weights, as in ``features.weights``, if it has moved.

    Returns:
        The student, which takes raw inputs.

    Raises:
        FedstillError: there is no student, or its network cannot be built.

    Example::

        student = fedstill.load("runs/digits")
        logits = student(images)  # uint8 (N, 1, 28, 28)
    """
    return StudentModel(*read(path, model, str(backbone), str(backbone_weights)))


def export_metadata(student: StudentModel) -> dict[str, Any]:
    """Return metadata of an export: its inputs and outputs."""
    about = student.about
    output = (
        "numbers in the unit of the target" if student.spec.task.task_class.kind == "number" else "logits"
    )
    return {
        "model": about.model,
        "input": student.preprocessing.description,
        "output": output,
        "otherwise": "NaN for invalid inputs",
        **to_table(about.spec_or_error),
    }
