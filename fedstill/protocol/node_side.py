"""Part of a method that runs at the nodes: its queries, and the environment of their functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.data.public import PublicData
from fedstill.protocol.local_config import FULL_TRAINING, LocalConfig, Span
from fedstill.protocol.payload_kinds import PayloadKind
from fedstill.protocol.queries import Query
from fedstill.protocol.recalibration import Recalibration
from fedstill.tasks import Task

T = TypeVar("T")
_CACHE_LOCK = RLock()  # reentrant: making one cached object may need another


@dataclass(frozen=True)
class NodeSetting:
    """Environment of a method at every node.

    Args:
        task: losses and metrics.
        local: optimizer, learning rate and length of the nodes' local training.
        compute: device and precision.
        public: public data, or None.
        schema: the columns of a table; empty if unknown, or for other inputs.
        perceptual: frozen pretrained features for perceptual losses; None: the node has none.
        secure_aggregation: the server sees sums of the nodes' responses only.
        recalibration: recalibration of the student's batch norm; None: none.
        student: a network of the student's architecture for it; None: its query is declared only.
        shape: of an input, for descriptions of a run (:func:`fedstill.protocol.run_plan.describe`); empty
            elsewhere.
    """

    task: Task
    local: LocalConfig
    compute: Compute
    public: PublicData | None = None
    perceptual: nn.Module | None = None
    schema: TableSchema = NO_SCHEMA
    secure_aggregation: bool = False
    recalibration: Recalibration | None = None
    student: nn.Module | None = None
    shape: tuple[int, ...] = ()
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached(self, name: str, create: Callable[[], T]) -> T:
        """Return the object of a name, and create it at the first call.

        The object is shared by all queries of a run and by nodes that run in parallel.
        """
        with _CACHE_LOCK:
            if name not in self._cache:
                self._cache[name] = create()
        value: T = self._cache[name]
        return value


def placeholder_public(task: Task, shape: tuple[int, ...] = ()) -> PublicData:
    """Return two blank public examples, for declarations that depend on options only."""
    shape = shape or ((1, 8, 8) if task.form == "images" else (8,))
    inputs = torch.zeros(2, *shape, dtype=torch.int64 if task.form == "texts" else torch.float32)
    return PublicData("none", inputs, task.empty_targets(2, shape))


def _prepare_nothing(_: object) -> None:
    """Do nothing, for methods without preparation."""


@dataclass(frozen=True)
class NodeSide:
    """Part of a method that runs at the nodes.

    Args:
        queries: its queries, by name.
        setting: environment of the method.
        prepare: called once with each node before anything else.
        preview_response: function of a node, inputs ``(B, ...)`` and its model's outputs ``(B, C, ...)`` that
            returns the tensors of a response, without training, release or charge. Used for evaluation in a
            simulation only. None: the method has no ensemble.
        initial_training: part of the local training before the first query; None: none.
        trains_models: the nodes' models are trained at all, in or before the queries.
        plugin: name of the method, if it is a plug-in; empty for built-in methods.
        sum_source: method and options that choose the summed statistic, for plug-ins, in which any option may
            choose it.
        notes: messages for the user about parts that are switched off.

    Raises:
        ArgumentError: queries that sum one statistic with different weightings.
    """

    queries: Mapping[str, Query]
    setting: NodeSetting
    prepare: Callable[[Any], None] = _prepare_nothing
    preview_response: Callable[[Any, torch.Tensor, torch.Tensor], Mapping[str, torch.Tensor]] | None = None
    initial_training: Span | None = FULL_TRAINING
    trains_models: bool = True
    plugin: str = ""
    sum_source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.trains_models:  # no training is done, and none is charged
            object.__setattr__(self, "initial_training", None)
        weightings: dict[str, str] = {}
        for name in self.queries:
            for subject, weighting in self.weightings(name).items():
                if weightings.setdefault(subject, weighting) != weighting:
                    expected = (
                        f"{weightings[subject]}, as in the other queries: one statistic with one weighting"
                    )
                    raise ArgumentError(f"sums of query {name}", weighting, expected)

    @property
    def sums(self) -> bool:
        """True if the server sees sums of responses only."""
        return any(query.sums for query in self.queries.values())

    def weightings(self, query: str, run: str = "") -> dict[str, str]:
        """Return the summed statistic and its weighting, by the subject of the statistic.

        A node never adds one subject with two weightings. All outputs of its networks are one subject, as
        they are functions of each other (:mod:`fedstill.node.secure_aggregation`).

        Args:
            query: name of the query.
            run: name of the run, where counts carry noise: noisy counts differ between runs, and so do sums
                that are weighted by them.
        """
        declaration = self.queries[query]
        if declaration.weighting is None:
            return {}
        kind, weighting = declaration.weighting
        statistic = f"{kind} of {self.sum_source}" if self.sum_source else str(kind)
        noised = f" of run {run!r}" if run and weighting in ("size", "counts") else ""
        # A plug-in's statistic may be a function of the outputs whatever its declared kind.
        subject = "outputs" if kind.is_output or self.sum_source else str(kind)
        return {subject: f"{statistic} by {weighting}{noised}"}

    def transmitted_kinds(self) -> tuple[PayloadKind, ...]:
        """Return all payload kinds that are sent or released, sorted and unique."""
        sent = {kind for query in self.queries.values() for kind in query.sends.values()}
        return tuple(sorted(sent.union(self.released_kinds())))

    def released_kinds(self) -> tuple[PayloadKind, ...]:
        """Return all payload kinds that a node releases, sorted and unique."""
        kinds = [kind for query in self.queries.values() for kind in query.released_kinds().values()]
        return tuple(sorted(set(kinds)))
