"""Write the predictions of a student for unlabeled data to a CSV file, one line per example."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from fedstill.core.errors import MethodRefused
from fedstill.core.text_format import csv_cell
from fedstill.data.new_data import EvaluationDataOptions, load_unlabeled
from fedstill.runs.results import survival_label
from fedstill.student.student_model import StudentModel

DECISION_THRESHOLD = 0.5  # labels of this probability or more are predicted


def predict(student: StudentModel, data: str, reading: EvaluationDataOptions, out: Path) -> int:
    """Write the predictions of a student for new data, and return the number of examples.

    A line has the name of the example (its file, or its number from 0), the prediction, and the probability
    of each class. For multi-label tasks the prediction lists labels of probability 0.5 or more, separated by
    ``|``. For regression there is a number in the unit of the target. For survival there are the survival
    probabilities at the end of each interval, in columns ``beyond ...``, and no prediction.

    Args:
        student: the student.
        data: path of the data.
        reading: options for reading the data.
        out: the CSV file.

    Raises:
        MethodRefused: predictions are label maps or images.
        FedstillError: the data do not fit the student.
    """
    kind = student.spec.task.task_class.kind
    if kind in ("map", "image"):
        reason = (
            f"task {student.spec.task.registered_name} predicts {kind}s, and a CSV has one line per example"
        )
        raise MethodRefused("predict", "the student", f"{reason}; fedstill.load(RUN) returns them as tensors")
    names, inputs = load_unlabeled(data, student.spec, reading)
    probabilities = student.probabilities(inputs)
    with out.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        if kind == "number":
            lines.writerow(["example", csv_cell(student.classes[0])])
            lines.writerows(
                [csv_cell(name), f"{value:.6g}"]
                for name, value in zip(names, probabilities.flatten().tolist(), strict=True)
            )
            return len(names)
        prediction_column = [] if kind == "time" else ["prediction"]
        columns = [survival_label(name) if kind == "time" else name for name in student.classes]
        lines.writerow(["example", *prediction_column, *map(csv_cell, columns)])
        for name, values in zip(names, probabilities.tolist(), strict=True):
            prediction = [csv_cell(_prediction(kind, student.classes, values)) for _ in prediction_column]
            lines.writerow([csv_cell(name), *prediction, *(f"{probability:.6f}" for probability in values)])
    return len(names)


def _prediction(kind: str, classes: Sequence[str], probabilities: Sequence[float]) -> str:
    if kind == "labels":
        return "|".join(
            name
            for name, probability in zip(classes, probabilities, strict=True)
            if probability >= DECISION_THRESHOLD
        )
    return classes[max(range(len(probabilities)), key=probabilities.__getitem__)]
