"""Results of the Python API: of one run, and of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.compare.comparison import read_comparison_folder
from fedstill.models.backbones import BackboneWithHead, ScaledHead
from fedstill.report.comparison_records import summarize
from fedstill.report.comparison_tables import full_table
from fedstill.report.records import Result
from fedstill.report.run_tables import metrics_table
from fedstill.report.tables import table_html
from fedstill.report.terminal import comparison_summary, run_summary, run_totals
from fedstill.runs.simulation import Simulation


class Outcome:
    """Result of :func:`fedstill.distil`.

    Its ``repr`` is a summary of a few lines; a notebook shows a table.

    Args:
        simulation: the finished run.
        result: content of ``result.json``.
        folder: folder of the run, or None.

    Attributes:
        result: content of ``result.json``: metrics in their units (accuracy in percent), transmitted bytes,
            numbers of queries, seconds, and the privacy cost. The keys are listed in
            ``docs/reference/files.md``.
        folder: folder with the run's files and its report, or None if no files were written.

    Example:
        >>> outcome = fedstill.distil(data, models, student, test, 10)  # doctest: +SKIP
        >>> outcome.accuracy, outcome.result["bytes"]["up"]  # doctest: +SKIP
        (96.4, 1843200)
        >>> outcome.student(images).argmax(1)  # doctest: +SKIP
        tensor([3, 8, 1])
        >>> pandas.DataFrame(outcome.history).plot(x="step", y="accuracy")  # doctest: +SKIP
    """

    def __init__(self, simulation: Simulation, result: Mapping[str, Any], folder: Path | None = None) -> None:
        self._simulation, self.result, self.folder = simulation, result, folder

    @cached_property
    def student(self) -> nn.Module | None:
        """The trained student in evaluation mode: the module passed to :func:`fedstill.distil`, or with FENS
        an ensemble of the nodes' models; with ``features`` on top of the backbone. None if the method trains
        no whole global model, for example if nodes keep a part of their model.
        """
        simulation = self._simulation
        return self._on_inputs(simulation.setting.student).eval() if simulation.has_student else None

    @cached_property
    def models(self) -> tuple[nn.Module, ...]:
        """The nodes' models after the run, in the order of ``data``; with ``features`` on top of the
        backbone. In a real federation the server has none of them.
        """
        return tuple(self._on_inputs(node.model).eval() for node in self._simulation.setting.nodes)

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """All metrics of the evaluated model on ``test``, in their units; None where undefined."""
        return {metric.key: self.result[metric.key] for metric in self._simulation.task.metrics}

    @property
    def accuracy(self) -> float:
        """Accuracy of the evaluated model on ``test``, in percent.

        Raises:
            AttributeError: the task has no accuracy. ``metrics`` has those of all tasks.
        """
        if "accuracy" not in self.metrics:
            message = f"no accuracy for {self._simulation.task.name} (see metrics: {', '.join(self.metrics)})"
            raise AttributeError(message)
        value: float = self.result["accuracy"]
        return value

    @property
    def history(self) -> list[dict[str, Any]]:
        """Losses and metrics of the method's steps or rounds, one row each.

        Keys are ``step``, ``seconds``, ``loss.NAME``, and where the models were evaluated the key of the main
        metric. ``pandas.DataFrame(outcome.history)`` is one table.
        """
        lines = self._simulation.records.metrics
        return [_flatten_losses(line) for line in lines if line["phase"] == "distillation"]

    @cached_property
    def predictions(self) -> torch.Tensor | None:
        """Outputs of the evaluated model on ``test``, ``(N, classes, ...)`` float32: logits, as the student
        returns them. None if the method has no global model. They are computed at the first use: use them
        before you train the module further.
        """
        outputs = self._simulation.responses(self._simulation.test.inputs)
        return None if outputs is None else outputs.cpu()

    def ensemble(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return the nodes' responses to inputs, combined as the method combines them.

        It is what the student learns from. In a real federation the nodes' gates would charge for it.

        Args:
            inputs: ``(N, ...)``, as the models take them.

        Returns:
            ``(N, classes, ...)`` float32, in the method's form (logits, or log-probabilities). None if the
            method has no ensemble.
        """
        simulation = self._simulation
        space, inputs = simulation.setting.feature_space, inputs.to(simulation.compute.device)
        if space is not None:
            inputs = space.head_inputs(inputs, simulation.compute)
        outputs = simulation.ensemble_outputs(inputs)
        return None if outputs is None else outputs.cpu()

    def _on_inputs(self, model: nn.Module) -> nn.Module:
        """Return a model, or a head with the backbone below it."""
        space = self._simulation.setting.feature_space
        return model if space is None else BackboneWithHead(space.backbone, ScaledHead(space.scale, model))

    def __repr__(self) -> str:
        return f"Outcome of {run_summary(self.result, self.folder)}"

    def _repr_html_(self) -> str:
        result = Result.from_record(self.result)
        return table_html(replace(metrics_table(result), title=result.method_title), run_totals(result))


def _flatten_losses(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of ``metrics.jsonl`` as a row of ``history``.

    >>> _flatten_losses({"phase": "distillation", "step": 9, "losses": {"student": 1.5}, "accuracy": 70.0})
    {'step': 9, 'loss.student': 1.5, 'accuracy': 70.0}
    """
    rest = {name: value for name, value in line.items() if name not in ("phase", "step", "losses")}
    return {"step": line["step"], **{f"loss.{name}": value for name, value in line["losses"].items()}, **rest}


@dataclass(frozen=True, eq=False)
class Compared:
    """Results of :func:`fedstill.compare_methods`.

    Its ``repr`` has a line for each method; a notebook shows the comparison's tables.

    Args:
        folder: folder of the comparison, with ``compare.csv`` (one line per method, setting and seed) and
            ``compare.html``.
        results: content of each finished run's ``result.json``, by the name of the run's folder, such as
            ``"fedavg-seed0"``.
        not_run: reasons why other runs could not run, by the names of their folders.
    """

    folder: Path
    results: Mapping[str, Mapping[str, Any]]
    not_run: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Compared {comparison_summary(self.results, self.not_run, self.folder)}"

    def _repr_html_(self) -> str:
        summary = summarize(self.folder, read_comparison_folder(self.folder))
        tables = [full_table(summary, setting) for setting in summary.settings]
        return "\n".join(table_html(table) for table in tables)
