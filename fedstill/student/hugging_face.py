"""A student as a model of Hugging Face's library: ``AutoModel.from_pretrained(FOLDER)``.

Whoever loads it imports this module first, which registers the kind; so no code travels with the weights, and
``trust_remote_code`` is not needed. ``import_transformers`` comes with the extra "text".
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
    library: Any = import_transformers("--format huggingface")
except ArgumentError as error:
    raise FedstillError("--format huggingface needs transformers: pip install 'fedstill[text]'") from error


class FedstillConfig(library.PretrainedConfig):  # type: ignore[misc]
    """What ``config.json`` holds: the header of the student's file, and the names of its classes.

    Args:
        header: of the file, a JSON text a key.
    """

    model_type = "fedstill"

    def __init__(self, header: dict[str, str] | None = None, **more: Any) -> None:
        self.header = header or {}
        super().__init__(**more)


class FedstillModel(library.PreTrainedModel):  # type: ignore[misc]
    """A student with its preprocessing: inputs as they are, as ``pixel_values``, to ``logits``."""

    config_class = FedstillConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        about = StudentFile.of(config.header, "config.json")
        self.student = PortableStudent(StudentModel(about.network(), about))
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """None are drawn: all of them are in the file."""

    def forward(self, pixel_values: torch.Tensor) -> Any:
        """Logits, or numbers in their unit; NaN for what is no input."""
        return library.modeling_outputs.ImageClassifierOutput(logits=self.student(pixel_values))


library.utils.logging.disable_progress_bar()  # of files that take a moment
library.AutoConfig.register(FedstillConfig.model_type, FedstillConfig)
library.AutoModel.register(FedstillConfig, FedstillModel)
library.AutoModelForImageClassification.register(FedstillConfig, FedstillModel)


def save(student: StudentModel, out: Path) -> None:
    """Write a student as a folder that the library reads.

    Raises:
        ArgumentError: its network is none of the package's own, which is all that such a folder can name.
    """
    try:
        student.about.network()
    except ArgumentError as error:
        allowed = "one of the package's own, as such a folder names no other: take onnx or torchscript"
        raise ArgumentError("the student's model", student.about.model, allowed) from error
    names = dict(enumerate(student.classes))
    config = FedstillConfig(
        student.about.header(), id2label=names, label2id={name: number for number, name in names.items()}
    )
    made = FedstillModel(config)
    made.student.student.load_state_dict(student.state_dict())
    made.eval().save_pretrained(str(out))


def run_export(out: Path, x: torch.Tensor) -> torch.Tensor:
    """What a model in a folder answers about inputs as they are."""
    logits: torch.Tensor = library.AutoModel.from_pretrained(str(out), local_files_only=True)(x).logits
    return logits
