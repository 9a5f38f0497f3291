"""A run's student as a torch module that takes inputs as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.core.config_tables import as_table
from fedstill.core.torch_defaults import torch_defaults
from fedstill.data.input_spec import InputSpec
from fedstill.runs.predictions import unit_of
from fedstill.runs.student_file import StudentFile, read
from fedstill.student.raw_inputs import RawInputs, raw_inputs

BLOCK = 256  # inputs at once


class CentralModel(nn.Module):
    """A student with its preprocessing: inputs as they are, to logits.

    Images are ``(N, C, H, W)``, or ``(N, H, W)`` of one channel, uint8 from 0 to 255 or floats from 0 to 1:
    what was normalised already is refused. Rows of a table are a DataFrame, a mapping of columns to cells, or
    numbers ``(N, columns)`` (:class:`fedstill.student.raw_inputs.RawRows`); texts are strings or token ids.
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
        self._raw: RawInputs | None = None
        self.offset, self.scale = unit_of(about.known.schema)
        if about.known.task.makes.kind != "image":
            self._raw = raw_inputs(about.known, about.words)
        self.eval()

    @property
    def raw(self) -> RawInputs:
        """What brings inputs into the network's form."""
        return raw_inputs(self.about.known, self.about.words) if self._raw is None else self._raw

    @property
    def spec(self) -> InputSpec:
        """Task, classes, shape and normalisation."""
        return self.about.known

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of its outputs."""
        return self.about.known.classes

    def forward(self, x: Any) -> torch.Tensor:
        """Logits, or numbers in their unit."""
        return self.answers(self._checked(x))

    def answers(self, x: torch.Tensor) -> torch.Tensor:
        """The same of inputs that have been checked."""
        outputs: torch.Tensor = self.network(self.raw(x))
        return self.offset + self.scale * outputs if self.spec.task.makes.kind == "number" else outputs

    def probabilities(self, x: Any) -> torch.Tensor:
        """Of each class ``(N, classes, ...)``; of labels that exclude none, each by itself; that an event has
        not come by the end of each interval; numbers as they are."""
        kind, blocks = self.spec.task.makes.kind, torch.split(self._checked(x), BLOCK)
        with torch.no_grad():
            outputs = torch.cat([self.answers(some) for some in blocks])
        if kind == "number":
            return outputs
        if kind == "time":  # outputs are log-odds of the intervals' hazards
            return (1 - outputs.sigmoid()).cumprod(1)
        return outputs.sigmoid() if kind == "labels" else outputs.softmax(1)

    def _checked(self, x: Any) -> torch.Tensor:
        checked = self.raw.checked(x)
        first = next(self.network.parameters(), checked)
        return checked.to(first.device)


class Portable(nn.Module):
    """A student as other tools run it, which can raise no error: what is no input gets NaN for an answer."""

    def __init__(self, student: CentralModel) -> None:
        super().__init__()
        self.student = student

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of the student."""
        outputs = self.student.answers(x)
        sound = self.student.raw.sound(x).view(-1, *(1,) * (outputs.ndim - 1))
        return torch.where(sound, outputs, torch.nan)


@torch_defaults()
def load(place: str | Path, model: nn.Module | str | None = None) -> CentralModel:
    """A run's student, with its preprocessing, in evaluation mode.

    Args:
        place: a run's folder, or its ``student.safetensors``, which says all that is needed.
        model: a network of its architecture, or the name of one, where the file may not import its own
            (:func:`fedstill.runs.student_file.read`).

    Raises:
        FedstillError: there is no student, or it cannot be made.
    """
    return CentralModel(*read(place, model))


def described(student: CentralModel) -> dict[str, Any]:
    """What an export says of itself: what goes in, what comes out."""
    about = student.about
    outs = "numbers in the unit of the target" if student.spec.task.makes.kind == "number" else "logits"
    return {
        "model": about.model,
        "input": student.raw.says,
        "output": outs,
        "otherwise": "NaN for inputs that are none",
        **as_table(about.known),
    }
