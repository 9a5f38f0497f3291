"""A student as a model of Hugging Face's transformers: ``AutoModel.from_pretrained(FOLDER)``.

Importing this module registers the model type. No code is stored with the weights, and ``trust_remote_code``
is not needed. ``transformers`` comes with the extra "text".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.models.hugging_face import import_transformers
from fedstill.runs.student_file import StudentFile
from fedstill.student.student_model import PortableStudent, StudentModel

try:
    library: Any = import_transformers("--format", "huggingface")
except ArgumentError as error:
    raise FedstillError("--format huggingface needs transformers: pip install 'fedstill[text]'") from error


class FedstillConfig(library.PretrainedConfig):  # type: ignore[misc]
    """Content of ``config.json``: metadata of the student and the names of its classes.

    Args:
        header: metadata of the student's file, one JSON text per key.
    """

    model_type = "fedstill"

    def __init__(self, header: dict[str, str] | None = None, **more: Any) -> None:
        self.header = header or {}
        super().__init__(**more)


class FedstillModel(library.PreTrainedModel):  # type: ignore[misc]
    """A student with its preprocessing: raw inputs (``pixel_values``) to ``logits``."""

    config_class = FedstillConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        about = StudentFile.parse(config.header, "config.json")
        self.student = PortableStudent(StudentModel(about.network(), about))
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """Do nothing: the file contains all weights."""

    def forward(self, pixel_values: torch.Tensor) -> Any:
        """Return logits, or numbers in the unit of the target; NaN for invalid inputs."""
        return library.modeling_outputs.ImageClassifierOutput(logits=self.student(pixel_values))


library.utils.logging.disable_progress_bar()  # loading takes a moment only
library.AutoConfig.register(FedstillConfig.model_type, FedstillConfig)
library.AutoModel.register(FedstillConfig, FedstillModel)
library.AutoModelForImageClassification.register(FedstillConfig, FedstillModel)


def save(student: StudentModel, out: Path) -> None:
    """Write a student as a folder for transformers.

    Raises:
        ArgumentError: the network is not a built-in one, or has a backbone. The folder can name built-in
            networks only.
    """
    if student.about.features:
        expected = "onnx or torchscript, as a folder for transformers would not contain the backbone"
        raise ArgumentError("--format", "huggingface", expected)
    try:
        student.about.network()
    except ArgumentError as error:
        expected = "a built-in model; export custom models as onnx or torchscript"
        raise ArgumentError("student.model", student.about.model, expected) from error
    names = dict(enumerate(student.classes))
    config = FedstillConfig(
        student.about.header(), id2label=names, label2id={name: number for number, name in names.items()}
    )
    model = FedstillModel(config)
    model.student.student.load_state_dict(student.state_dict())
    model.eval().save_pretrained(str(out))


def run_export(out: Path, x: torch.Tensor) -> torch.Tensor:
    """Load a model from a folder and return its outputs for raw inputs."""
    logits: torch.Tensor = library.AutoModel.from_pretrained(str(out), local_files_only=True)(x).logits
    return logits
