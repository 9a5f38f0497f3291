"""The file ``predictions.csv``: truth and prediction for each test case.

The predictions are those of the evaluated model, or of all nodes' own models if there is no global one, so
that the run's metrics can be recomputed from the file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.table_schema import Schema
from fedstill.core.text_format import csv_cell
from fedstill.tasks import Task

FILE = "predictions.csv"
MAX_CLASSES = 30  # largest number of classes with a column per probability
MAX_PROBABILITIES = 1_000_000  # in a file
DIGITS = 9  # significant digits of float32; more if rounding would change the largest probability

Floats = npt.NDArray[np.float64]
Judged = Mapping[str, tuple[torch.Tensor, TensorData]]


@dataclass(frozen=True)
class TestNames:
    """Names of the examples and classes of a test set.

    Args:
        examples: name of each example in its source; default: numbers from 0.
        classes: names of classes or labels; default: their numbers.
        schema: of a table, whose unit is used for numbers.
    """

    examples: Sequence[str] = ()
    classes: Sequence[str] = ()
    schema: Schema | None = None


def predictions_csv(task: Task, outputs_by_model: Judged, test_names: TestNames) -> str | None:
    """Return the text of ``predictions.csv``; None for tasks without a metric per case.

    Args:
        outputs_by_model: outputs ``(N, C, ...)`` by model, with the test set and the targets that the model
            was trained for.
        test_names: names of examples and classes.
    """
    if not outputs_by_model:
        return None
    lines = io.StringIO()
    write = csv.writer(lines, lineterminator="\n").writerow
    numbers = sum(outputs.shape[0] * outputs.shape[1] for outputs, _ in outputs_by_model.values())
    all_probabilities = task.classes <= MAX_CLASSES and numbers <= MAX_PROBABILITIES
    for index, (model, (outputs, test)) in enumerate(outputs_by_model.items()):
        found = _case_lines(task, outputs, test, test_names) or _example_lines(
            task, outputs, test, test_names, all_probabilities
        )
        if found is None:
            return None
        head, rows = found
        if index == 0:
            write(["model", *head])
        for row in rows:
            write([csv_cell(model), *row])
    return lines.getvalue()


Lines = tuple[list[str], Iterable[list[str]]]


def _case_lines(task: Task, outputs: torch.Tensor, test: TensorData, test_names: TestNames) -> Lines | None:
    """Return a line for each case of label maps, with the metric of all its examples together."""
    if task.kind != "map" or test.cases is None:
        return None
    scores = task.case_scores(outputs, test.targets, test.cases)
    if scores is None:
        return None
    cases = test.cases
    rows = [
        [csv_cell(cases.names[number]), csv_cell(cases.sites[number]), _format_number(score)]
        for number, score in zip(cases.present_ids(), scores.tolist(), strict=True)
    ]
    return ["case", "site", task.metric], rows


def _example_lines(
    task: Task, outputs: torch.Tensor, test: TensorData, test_names: TestNames, all_probabilities: bool
) -> Lines | None:
    """Return a line for each example.

    Args:
        all_probabilities: with the probability of every class.
    """
    table = _prediction_rows(task, outputs.detach().cpu(), test, test_names, all_probabilities)
    if table is None:
        return None
    head, rows = table
    names = [*map(csv_cell, test_names.examples or map(str, range(len(test))))]
    columns: dict[str, list[str]] = {"example": names}
    if (cases := test.cases) is not None:
        of = cases.case_ids.tolist()
        columns["case"] = [csv_cell(cases.names[number]) for number in of]
        columns["site"] = [csv_cell(cases.sites[number]) for number in of]
    columns = {name: each for name, each in columns.items() if name == "example" or any(each)}
    if columns.get("case") == names:  # each example is a case, of the same name
        del columns["case"]
    leading_cells = zip(*columns.values(), strict=True)
    return [*columns, *head], ([*first, *rest] for first, rest in zip(leading_cells, rows, strict=True))


def _prediction_rows(
    task: Task, outputs: torch.Tensor, test: TensorData, test_names: TestNames, all_probabilities: bool
) -> Lines | None:
    """Return truth and predictions: the names of columns, and a row for each example."""
    names = [*(test_names.classes or map(str, range(task.classes)))]
    targets = test.targets.cpu()
    if task.kind == "class":
        return _class_columns(outputs, targets, names, all_probabilities)
    if task.kind == "labels":
        shares = outputs.double().sigmoid().numpy()
        head = [f"{what}_{name}" for what in ("truth", "p") for name in names]
        known = [["" if each < 0 else str(each) for each in row] for row in targets.tolist()]
        return head, ([*row, *map(_format_number, p)] for row, p in zip(known, shares.tolist(), strict=True))
    if task.kind == "number":
        offset, scale = target_offset_and_scale(test_names.schema)
        pairs = torch.stack([targets.flatten(), outputs.flatten()], 1).double() * scale + offset
        return ["truth", "predicted"], ([*map(_format_number, pair)] for pair in pairs.tolist())
    if task.kind == "time":
        survived = (1 - outputs.double().sigmoid()).cumprod(1).tolist()
        head = ["intervals", "event", *(f"p_{survival_label(name)}" for name in names)]
        followed = [[_format_number(time), str(int(event))] for time, event in targets.tolist()]
        return head, ([*row, *map(_format_number, p)] for row, p in zip(followed, survived, strict=True))
    scores = task.case_scores(outputs, targets, None)
    return None if scores is None else ([task.metric], ([_format_number(score)] for score in scores.tolist()))


def _class_columns(
    outputs: torch.Tensor, targets: torch.Tensor, names: list[str], all_probabilities: bool
) -> Lines:
    shares: Floats = outputs.double().clamp(-1e300, 1e300).softmax(1).numpy()
    best, true = shares.argmax(1).tolist(), targets.tolist()
    head = [f"p_{name}" for name in names] if all_probabilities else ["p_predicted", "p_truth"]

    def rows() -> Iterable[list[str]]:
        for row, predicted, truth in zip(shares, best, true, strict=True):
            p = (
                _format_probabilities(row.tolist(), predicted)
                if all_probabilities
                else [_format_number(row[predicted]), _format_number(row[truth])]
            )
            yield [csv_cell(names[truth]), csv_cell(names[predicted]), *p]

    return ["truth", "predicted", *head], rows()


def _format_probabilities(p: Sequence[float], best: int) -> list[str]:
    """Format probabilities so that the largest stays the largest."""
    texts = [*map(_format_number, p)]
    rounded = [*map(float, texts)]
    return texts if rounded.index(max(rounded)) == best else [*map(repr, p)]


def _format_number(value: float) -> str:
    return f"{value:.{DIGITS}g}"


def target_offset_and_scale(schema: Schema | None) -> tuple[float, float]:
    """Return offset and scale that convert a model's numbers, from -1 to 1, to the unit of a schema's target.

    >>> target_offset_and_scale(None)
    (0.0, 1.0)
    """
    response = schema.target_column if schema else None
    low, high = response.range if response is not None and response.range else (-1.0, 1.0)
    return (low + high) / 2, (high - low) / 2


def survival_label(interval: str) -> str:
    """Return the label of the probability that no event occurs by the end of an interval.

    >>> survival_label("10 to 20")
    'beyond 20'
    """
    return f"beyond {interval.rpartition(' to ')[2]}"
