"""Asks a student about data that nobody has labeled, and writes its answers as a csv, a line an example."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from fedstill.core.errors import MethodRefused
from fedstill.core.text_format import csv_cell
from fedstill.data.new_data import NewDataOptions, load_unlabeled
from fedstill.runs.predictions import beyond
from fedstill.student.student_model import StudentModel

DECISION_THRESHOLD = 0.5  # a finding that is as likely or more is answered


def predict(student: StudentModel, data: str, reading: NewDataOptions, out: Path) -> int:
    """Write what a student answers about new data; how many examples there are.

    A line has the example's name (its file, or its number from 0), the answer, and the probability of each
    class: of findings the answers are those that are likelier than not, divided by ``|``. A number is in the
    target's own unit; of a time until an event there is, in place of an answer, the probability that it has
    not come by the end of each interval, under ``beyond`` that end.

    Raises:
        MethodRefused: its answers are maps or images, which no line holds.
        FedstillError: the data cannot be read as its inputs.
    """
    kind = student.spec.task.task_class.kind
    if kind in ("map", "image"):
        told = (
            f"task {student.spec.task.registered_name} answers with {kind}s, and a csv has a line an example"
        )
        raise MethodRefused("predict", "the student", f"{told}; fedstill.load(RUN) gives them as tensors")
    names, inputs = load_unlabeled(data, student.spec, reading)
    found = student.probabilities(inputs)
    with out.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        if kind == "number":
            lines.writerow(["example", csv_cell(student.classes[0])])
            lines.writerows(
                [csv_cell(name), f"{value:.6g}"]
                for name, value in zip(names, found.flatten().tolist(), strict=True)
            )
            return len(names)
        responses = [] if kind == "time" else ["answer"]
        columns = [beyond(name) if kind == "time" else name for name in student.classes]
        lines.writerow(["example", *responses, *map(csv_cell, columns)])
        for name, each in zip(names, found.tolist(), strict=True):
            response = [csv_cell(_prediction(kind, student.classes, each)) for _ in responses]
            lines.writerow([csv_cell(name), *response, *(f"{share:.6f}" for share in each)])
    return len(names)


def _prediction(kind: str, classes: Sequence[str], shares: Sequence[float]) -> str:
    if kind == "labels":
        return "|".join(
            name for name, share in zip(classes, shares, strict=True) if share >= DECISION_THRESHOLD
        )
    return classes[max(range(len(shares)), key=shares.__getitem__)]
