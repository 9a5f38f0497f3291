"""A line for each case of a run's test part: what is true of it, and what a model predicted.

They are those of the model that the run is judged by, or of all nodes' own models where there is no other, so
that the run's figures can be computed again from the file alone.
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
MOST_CLASSES = 30  # of which each probability has a column of its own
MOST_NUMBERS = 1_000_000  # probabilities in a file
DIGITS = 9  # as many as float32 has; more where two probabilities would look equal

Floats = npt.NDArray[np.float64]
Judged = Mapping[str, tuple[torch.Tensor, TensorData]]


@dataclass(frozen=True)
class TestNames:
    """Names of the examples and classes of a test part.

    Args:
        examples: each example's name, or its number, in its source; none: numbers from 0.
        classes: names of classes or labels; none: their numbers.
        schema: of a table, whose unit numbers are given in.
    """

    examples: Sequence[str] = ()
    classes: Sequence[str] = ()
    schema: Schema | None = None


def predictions(task: Task, judged: Judged, about: TestNames) -> str | None:
    """The text of the file; None for a task whose cases have no figure each.

    Args:
        judged: outputs ``(N, C, ...)`` by model, with the test part as far as the model was taught what it
            asks.
    """
    if not judged:
        return None
    lines = io.StringIO()
    write = csv.writer(lines, lineterminator="\n").writerow
    numbers = sum(outputs.shape[0] * outputs.shape[1] for outputs, _ in judged.values())
    whole = task.classes <= MOST_CLASSES and numbers <= MOST_NUMBERS
    for place, (model, (outputs, test)) in enumerate(judged.items()):
        found = _cases(task, outputs, test, about) or _examples(task, outputs, test, about, whole)
        if found is None:
            return None
        head, rows = found
        if place == 0:
            write(["model", *head])
        for row in rows:
            write([csv_cell(model), *row])
    return lines.getvalue()


Lines = tuple[list[str], Iterable[list[str]]]


def _cases(task: Task, outputs: torch.Tensor, test: TensorData, about: TestNames) -> Lines | None:
    """Return a line for each case of label maps, with the metric of all its examples together."""
    if task.kind != "map" or test.cases is None:
        return None
    scores = task.case_scores(outputs, test.targets, test.cases)
    if scores is None:
        return None
    cases = test.cases
    rows = [
        [csv_cell(cases.names[number]), csv_cell(cases.sites[number]), _number(score)]
        for number, score in zip(cases.present_ids(), scores.tolist(), strict=True)
    ]
    return ["case", "site", task.metric], rows


def _examples(
    task: Task, outputs: torch.Tensor, test: TensorData, about: TestNames, whole: bool
) -> Lines | None:
    """A line for each example; ``whole``: with the probability of every class."""
    told = _told(task, outputs.detach().cpu(), test, about, whole)
    if told is None:
        return None
    head, rows = told
    names = [*map(csv_cell, about.examples or map(str, range(len(test))))]
    columns: dict[str, list[str]] = {"example": names}
    if (cases := test.cases) is not None:
        of = cases.case_ids.tolist()
        columns["case"] = [csv_cell(cases.names[number]) for number in of]
        columns["site"] = [csv_cell(cases.sites[number]) for number in of]
    columns = {name: each for name, each in columns.items() if name == "example" or any(each)}
    if columns.get("case") == names:  # each example is a case, of the same name
        del columns["case"]
    beside = zip(*columns.values(), strict=True)
    return [*columns, *head], ([*first, *rest] for first, rest in zip(beside, rows, strict=True))


def _told(task: Task, outputs: torch.Tensor, test: TensorData, about: TestNames, whole: bool) -> Lines | None:
    """Return truth and predictions: the names of columns, and a row for each example."""
    names = [*(about.classes or map(str, range(task.classes)))]
    targets = test.targets.cpu()
    if task.kind == "class":
        return _classes(outputs, targets, names, whole)
    if task.kind == "labels":
        shares = outputs.double().sigmoid().numpy()
        head = [f"{what}_{name}" for what in ("truth", "p") for name in names]
        known = [["" if each < 0 else str(each) for each in row] for row in targets.tolist()]
        return head, ([*row, *map(_number, p)] for row, p in zip(known, shares.tolist(), strict=True))
    if task.kind == "number":
        offset, scale = unit_of(about.schema)
        pairs = torch.stack([targets.flatten(), outputs.flatten()], 1).double() * scale + offset
        return ["truth", "predicted"], ([*map(_number, pair)] for pair in pairs.tolist())
    if task.kind == "time":
        survived = (1 - outputs.double().sigmoid()).cumprod(1).tolist()
        head = ["intervals", "event", *(f"p_{beyond(name)}" for name in names)]
        followed = [[_number(time), str(int(event))] for time, event in targets.tolist()]
        return head, ([*row, *map(_number, p)] for row, p in zip(followed, survived, strict=True))
    scores = task.case_scores(outputs, targets, None)
    return None if scores is None else ([task.metric], ([_number(score)] for score in scores.tolist()))


def _classes(outputs: torch.Tensor, targets: torch.Tensor, names: list[str], whole: bool) -> Lines:
    shares: Floats = outputs.double().clamp(-1e300, 1e300).softmax(1).numpy()
    best, true = shares.argmax(1).tolist(), targets.tolist()
    head = [f"p_{name}" for name in names] if whole else ["p_predicted", "p_truth"]

    def rows() -> Iterable[list[str]]:
        for row, own, truth in zip(shares, best, true, strict=True):
            p = _shares(row.tolist(), own) if whole else [_number(row[own]), _number(row[truth])]
            yield [csv_cell(names[truth]), csv_cell(names[own]), *p]

    return ["truth", "predicted", *head], rows()


def _shares(p: Sequence[float], best: int) -> list[str]:
    """Probabilities as texts, of which the largest stays the largest."""
    texts = [*map(_number, p)]
    rounded = [*map(float, texts)]
    return texts if rounded.index(max(rounded)) == best else [*map(repr, p)]


def _number(value: float) -> str:
    return f"{value:.{DIGITS}g}"


def unit_of(schema: Schema | None) -> tuple[float, float]:
    """Offset and scale that bring a model's numbers, from -1 to 1, into the unit of a schema's target.

    >>> unit_of(None)
    (0.0, 1.0)
    """
    response = schema.target_column if schema else None
    low, high = response.range if response is not None and response.range else (-1.0, 1.0)
    return (low + high) / 2, (high - low) / 2


def beyond(interval: str) -> str:
    """Return the label of the probability that no event occurs by the end of an interval.

    >>> beyond("10 to 20")
    'beyond 20'
    """
    return f"beyond {interval.rpartition(' to ')[2]}"
