"""Records of a run: one list of measured values, from which tables, pages and files are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstill.core.text_format import (
    finite_number_at_keys,
)
from fedstill.report.result import MAIN_MODELS, IntervalsRecord, MetricOverNodes, Result

if TYPE_CHECKING:
    pass


STANDALONE, LOCAL_MODELS, ENSEMBLE = "standalone mean", "local models (mean)", "teachers' ensemble"
CENTRALIZED, MAJORITY = "centralized", "majority class"


@dataclass(frozen=True)
class ModelScores:
    """Metrics of one model, or of the nodes' local models.

    Args:
        name: name of the row.
        description: the model in a few words.
        stats: one entry per metric of the task; the main metric, in percent, is first.
        is_main: whether the method is evaluated by this model.
        interval: ends of the main metric's 95% interval over test cases.
    """

    name: str
    description: str
    stats: tuple[MetricOverNodes, ...]
    is_main: bool = False
    interval: tuple[float, ...] | None = None

    @property
    def value(self) -> float | None:
        """Mean of the main metric."""
        return self.stats[0].mean


def list_model_scores(result: Result) -> list[ModelScores]:
    """Return the main model with baselines and upper bounds, in the order of the papers' tables.

    A model that the method does not have (for example no ensemble) is null in the result and has no row. A
    model that the result does not mention was not measured, and its row has no values.
    """
    main_name = f"{result.main_model_name} ({result.method_title})"
    description = MAIN_MODELS[result.evaluated_model][1]
    main = ModelScores(
        main_name, description, _single_model_stats(result, result.metric_values), is_main=True
    )
    scores = []
    if "standalone" not in result.absent_keys:
        standalone = "baseline: each node trains alone on its own data"
        scores.append(_scores_over_nodes(result, STANDALONE, standalone, result.standalone))
    if result.evaluated_model == "nodes":  # the main model is the local models
        local = _scores_over_nodes(result, main_name, description, result.local)
        stats = tuple(
            dataclasses.replace(over_nodes, mean=single.mean)
            for over_nodes, single in zip(local.stats, main.stats, strict=True)
        )
        scores, main = [], dataclasses.replace(local, stats=stats, is_main=True)
    elif "standalone" in result.absent_keys and result.metric.key in result.local:
        scores.append(
            _scores_over_nodes(result, LOCAL_MODELS, "each node's local model at the end", result.local)
        )
    scores.append(main)
    if "ensemble" not in result.absent_keys and result.evaluated_model != "ensemble":
        ensemble = _append_node_names(
            result, "upper bound: ensemble of the nodes' models", result.ensemble.get("nodes")
        )
        scores.append(ModelScores(ENSEMBLE, ensemble, _single_model_stats(result, result.ensemble)))
    centralized = "upper bound: one model trained on the pooled data"
    scores.append(ModelScores(CENTRALIZED, centralized, _single_model_stats(result, result.centralized)))
    if result.majority:
        majority = "baseline: always the most frequent class of the test data"
        scores.append(ModelScores(MAJORITY, majority, _single_model_stats(result, result.majority)))
    intervals = result.intervals or IntervalsRecord()
    by_name = {STANDALONE: intervals.nodes, LOCAL_MODELS: intervals.nodes, ENSEMBLE: intervals.ensemble,
               CENTRALIZED: intervals.centralized}  # fmt: skip
    main_interval = intervals.nodes if result.evaluated_model == "nodes" else intervals.global_model
    return [
        dataclasses.replace(model, interval=main_interval if model.is_main else by_name.get(model.name))
        for model in scores
    ]


def _single_model_stats(result: Result, record: Mapping[str, Any]) -> tuple[MetricOverNodes, ...]:
    return tuple(MetricOverNodes(mean=finite_number_at_keys(record, metric.key)) for metric in result.metrics)


def _scores_over_nodes(
    result: Result, name: str, description: str, record: Mapping[str, MetricOverNodes]
) -> ModelScores:
    stats = tuple(record.get(metric.key, MetricOverNodes()) for metric in result.metrics)
    return ModelScores(name, _append_node_names(result, description, stats[0].nodes), stats)


def _append_node_names(result: Result, description: str, nodes: tuple[str, ...] | None) -> str:
    if nodes is None:
        return description
    return f"{description} (only {', '.join(map(result.node_display_name, nodes))})"


def run_guarantee(result: Result) -> tuple[float, float] | None:
    """Return the epsilon and delta that hold at every node of a run; None if a node has no guarantee."""
    return weakest_guarantee([node.bound for node in result.node_privacy])


def weakest_guarantee(bounds: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Return the largest epsilon and delta; None without any, or if one has no guarantee."""
    known = [bound for bound in bounds if bound is not None]
    if not known or len(known) < len(bounds):
        return None
    return max(epsilon for epsilon, _ in known), max(delta for _, delta in known)
