"""Queries that several methods ask, each by itself."""

from __future__ import annotations

from fedstill.core.compute import Compute
from fedstill.methods._label_histogram import LabelCountQuery, SampleCountQuery
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.queries import NodeSetting, Query, declared_queries
from fedstill.tasks import Task
from fedstill.tasks.classification import Classification


def count_labels(task: Task) -> Query:
    (query,) = declared_queries(LabelCountQuery(), NodeSetting(task, LocalConfig(), Compute()))
    return query


def count_samples() -> Query:
    (query,) = declared_queries(SampleCountQuery(), NodeSetting(Classification(2), LocalConfig(), Compute()))
    return query
